"""The real vLLM as somebody starts it who has never heard of ART. Needs ART_VLLM_PYTHON, see `make test-vllm`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

from art.engines.vllm.command import find_installation, vllm_python
from tests.support.ports import free_port

ON_CPU = "--dtype float32 --enforce-eager"
"""What a CPU needs: float32, so that log-probs can be compared closely, and no compiler."""
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # the sampler's compilation takes 15 s at the first request
    "OMP_WAIT_POLICY": "PASSIVE",
}
STARTS_WITHIN_S = 500.0
"""Only a server that hangs takes this long."""


@contextmanager
def serve_stock(
    command: str, folder: Path, *, scratch: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a command line that begins with `vllm serve` in `folder`, and yield the server's URL once it answers.

    Args:
        command: the line as a shell takes it. The server's port, and what a CPU needs, are added to it.
        scratch: folder for the server's log, `vllm.log`.
    """
    installation = find_installation(vllm_python())
    assert command.startswith("vllm serve ")
    port = free_port()
    program = str(Path(installation.python).parent / "vllm")
    arguments = shlex.split(command)[1:] + ["--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **(environment or {})}
    if installation.device == "cpu":
        arguments += shlex.split(ON_CPU)
        variables |= CPU_ENVIRONMENT | {"PYTHONPATH": str(_with_metadata(scratch, installation.vllm))}
    url, log = f"http://127.0.0.1:{port}", scratch / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, *arguments], cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _with_metadata(scratch: Path, version: str) -> Path:
    """Make a folder for the path of modules that has metadata of a CPU build of the package `vllm`.

    The program `vllm` of the package `vllm-cpu` asks for them, and ends with an error without them.
    """
    build = f"{version.removesuffix('+cpu')}+cpu"
    metadata = scratch / "modules" / f"vllm-{build}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build}\n")
    return metadata.parents[1]


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        assert process.poll() is None, f"vLLM ended with status {process.returncode}:\n{tail}"
        assert time.monotonic() < deadline, f"vLLM has not started:\n{tail}"
        time.sleep(0.5)
