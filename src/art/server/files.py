"""A file as an answer: in pieces, from the byte that is asked for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from art.server.asgi import cancel_on_disconnect, send_bytes
from art.server.call import Call

PIECE_BYTES = 2**20
RANGE_NOT_SATISFIABLE = 416


async def send_file(call: Call, path: Path, size: int, tag: str) -> None:
    """200 with the whole file, or 206 with the rest from `Range: bytes=N-` on.

    Args:
        tag: names the content. Who comes back with `If-Range` and another one gets the whole file.
    """
    headers = {key: value.decode("latin-1") for key, value in call.scope["headers"]}
    etag = f'"{tag}"'
    start, end = 0, size
    if headers.get(b"if-range", etag) == etag and (wanted := _parse_range(headers.get(b"range"), size)) is not None:
        start, end = wanted
        if start >= size:
            error = (
                b'{"error":{"message":"the range begins behind the end of the file","code":"invalid_request_error"}}'
            )
            await send_bytes(call.send, RANGE_NOT_SATISFIABLE, error, headers={"content-range": f"bytes */{size}"})
            return
    fields = {"content-type": "application/octet-stream", "content-length": str(end - start), "etag": etag}
    fields |= {"accept-ranges": "bytes"}
    if (start, end) != (0, size):
        fields["content-range"] = f"bytes {start}-{end - 1}/{size}"
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    file = await asyncio.to_thread(path.open, "rb")
    try:
        async with cancel_on_disconnect(call.receive):
            await call.send(
                {"type": "http.response.start", "status": 206 if b"content-range" in dict(raw) else 200, "headers": raw}
            )
            file.seek(start)
            left = end - start
            while left > 0:
                piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, left))
                if not piece:
                    raise OSError(f"{path} is shorter than its manifest says")
                left -= len(piece)
                await call.send({"type": "http.response.body", "body": piece, "more_body": True})
            await call.send({"type": "http.response.body", "body": b""})
    finally:
        file.close()


def _parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Start and end of a single range; what is none of this form is answered with the whole file, as HTTP has it."""
    match = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", text or "")
    if match is None:
        return None
    start, last = int(match[1]), match[2]
    end = min(int(last) + 1, size) if last else size
    return (start, end) if start < end or start >= size else None
