"""Messages between processes as bytes: a 4-byte big-endian length, then that many bytes of JSON.

    encode_frame({"cancel": 7})  -->  b"\\x00\\x00\\x00\\x0c" b'{"cancel":7}'

`art.protocol.rpc` says which messages there are.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from art.errors import ArtError, InvalidRequestError

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 2**31
HEARTBEAT_ID = 0
"""Number of the call that heartbeats answer, which nobody has made."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message between processes as JSON, after its length.

    Raises:
        InvalidRequestError: the frame would be longer than `MAX_FRAME_BYTES`.
    """
    body = orjson.dumps(message, default=_plain, option=_OPTIONS)
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequestError(f"a message between processes has {len(body):,} bytes, at most {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Convert what orjson does not encode, or for dataclasses with slots encodes slowly."""
    if (names := getattr(value, "__dataclass_fields__", None)) is not None:
        return {name: getattr(value, name) for name in names}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not cross processes")


def error_body(error: BaseException) -> dict[str, Any]:
    """Encode an error for another process or the network. For an error from outside ART the message names its type."""
    if isinstance(error, ArtError):
        return {"code": error.code, "message": error.message, "param": error.param}
    return {"code": ArtError.code, "message": f"{type(error).__name__}: {error}", "param": None}


class FrameBuffer:
    """Joins the pieces in which frames arrive, and decodes each frame that is complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a frame, whose end has not come yet."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next piece, and return the messages that it completes, in order.

        Raises:
            orjson.JSONDecodeError: a frame is not JSON.
        """
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < _LENGTH.size or len(rest) < _LENGTH.size + _LENGTH.unpack_from(rest)[0]:
                return []
            data = bytes(rest)
            rest.clear()
        messages, start, size = [], 0, len(data)
        while size - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            if end > size:
                break
            messages.append(orjson.loads(data[start + _LENGTH.size : end]))
            start = end
        rest += data[start:]
        return messages
