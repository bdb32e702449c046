"""Send a file as an answer, in pieces and from any byte on."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from art.server.asgi import cancel_on_disconnect, header, send_bytes
from art.server.call import Call

PIECE_BYTES = 2**20
RANGE_NOT_SATISFIABLE = 416


async def send_file(call: Call, path: Path, size: int, tag: str) -> None:
    """Answer 200 with the whole file, or 206 with the part that the header `Range: bytes=N-` asks for.

    Args:
        tag: identifies the content. A request with another tag in `If-Range` gets the whole file.
    """
    etag = f'"{tag}"'
    start, end = 0, size
    part = _parse_range(header(call.scope, b"range"), size)
    if part is not None and header(call.scope, b"if-range") in (None, etag):
        start, end = part
        if start >= size:
            error = b'{"error":{"message":"the range begins after the end of the file","code":"invalid_request_error"}}'
            await send_bytes(call.send, RANGE_NOT_SATISFIABLE, error, headers={"content-range": f"bytes */{size}"})
            return
    fields = {"content-type": "application/octet-stream", "content-length": str(end - start), "etag": etag}
    fields |= {"accept-ranges": "bytes"}
    status = 200
    if (start, end) != (0, size):
        status = 206
        fields["content-range"] = f"bytes {start}-{end - 1}/{size}"
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    with await asyncio.to_thread(path.open, "rb") as file:
        async with cancel_on_disconnect(call.scope, call.receive):
            await call.send({"type": "http.response.start", "status": status, "headers": raw})
            file.seek(start)
            left = end - start
            while left > 0:
                piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, left))
                if not piece:
                    raise OSError(f"{path} is shorter than its manifest says")
                left -= len(piece)
                await call.send({"type": "http.response.body", "body": piece, "more_body": True})
            await call.send({"type": "http.response.body", "body": b""})


def _parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Start and end of a single range; `None` for any other form, which HTTP answers with the whole file."""
    match = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", text or "")
    if match is None:
        return None
    start, last = int(match[1]), match[2]
    end = min(int(last) + 1, size) if last else size
    return (start, end) if start < end or start >= size else None
