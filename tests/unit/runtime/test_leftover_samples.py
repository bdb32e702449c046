from __future__ import annotations

from pathlib import Path

from art.config import ServerConfig
from art.runtime.runtime import Runtime


async def test_a_server_deletes_the_samples_that_a_killed_one_left(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path, ServerConfig())
    left = runtime.data_dir.samples / "0123.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"x")
    await runtime.start()
    try:
        assert not left.exists()
    finally:
        await runtime.close()
