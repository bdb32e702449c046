"""Calls that are not in `art.protocol.calls`, for tests of what children do with them."""

from __future__ import annotations

from typing import Any

from art.protocol.calls import Call


class Raw(Call[Any]):
    """Any method with any parameters."""

    name: str
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        return self.body


Raw.method = property(lambda self: self.name)  # type: ignore[assignment]


def raw(method: str, **params: Any) -> Raw:
    return Raw(name=method, body=params)
