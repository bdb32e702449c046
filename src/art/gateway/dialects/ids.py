"""Ids of answers in the other dialects. Each contains the id of the exchange (the recorded request and answer).

ex_00063f1a2b3c4d5e6f708192a3b4       the exchange
resp_00063f1a2b3c4d5e6f708192a3b4     a response; it ends with `i` if its first message came from `instructions`
msg_... rs_... fc_..._0 call_..._0    a message, reasoning, a function call, the call's own id
"""

from __future__ import annotations

import re

_ID = re.compile(r"(?:ex|msg|rs|fc|call)_([0-9a-f]{26})(?:_\d+)?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{26})(i?)")


def item_id(kind: str, exchange_id: str, index: int | None = None) -> str:
    """Make the id of a part of an answer, e.g. item_id("fc", "ex_00..", 1) == "fc_00.._1"."""
    name = f"{kind}_{exchange_id.removeprefix('ex_')}"
    return name if index is None else f"{name}_{index}"


def exchange_of(item: object) -> str | None:
    """Return the exchange id inside the id of a part of an answer; `None` for an id that ART did not make."""
    match = _ID.fullmatch(item) if isinstance(item, str) else None
    return f"ex_{match[1]}" if match else None


def response_id(exchange_id: str, *, has_instructions: bool) -> str:
    return item_id("resp", exchange_id) + ("i" if has_instructions else "")


def exchange_of_response(response: str) -> tuple[str, bool] | None:
    """Return the exchange id inside a response id, and whether the first message came from `instructions`."""
    match = _RESPONSE.fullmatch(response)
    return (f"ex_{match[1]}", bool(match[2])) if match else None
