"""Ids of answers in other dialects. Each holds the exchange's, so that nothing has to be stored to find it again.

ex_00063f1a2b3c4d5e6f708192a3b4       the exchange
resp_00063f1a2b3c4d5e6f708192a3b4     a response; `i` behind it: its first message came from `instructions`
msg_... rs_... fc_..._0 call_..._0    a message, reasoning, a function call, the call's own id
"""

from __future__ import annotations

import re

_ID = re.compile(r"(?:ex|msg|rs|fc|call)_([0-9a-f]{26})(?:_\d+)?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{26})(i?)")


def item_id(kind: str, exchange_id: str, index: int | None = None) -> str:
    """Example: item_id("fc", "ex_00..", 1) is "fc_00.._1"."""
    name = f"{kind}_{exchange_id.removeprefix('ex_')}"
    return name if index is None else f"{name}_{index}"


def exchange_of(item: object) -> str | None:
    """The exchange that an item's id names; `None` for an id that we did not make."""
    match = _ID.fullmatch(item) if isinstance(item, str) else None
    return f"ex_{match[1]}" if match else None


def response_id(exchange_id: str, *, has_instructions: bool) -> str:
    return item_id("resp", exchange_id) + ("i" if has_instructions else "")


def exchange_of_response(response: str) -> tuple[str, bool] | None:
    """The exchange of a response, and whether its first message came from `instructions`."""
    match = _RESPONSE.fullmatch(response)
    return (f"ex_{match[1]}", bool(match[2])) if match else None
