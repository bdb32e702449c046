"""One run of a command-line agent in a container, from its instruction to its end."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from art.errors import ToolServerError
from art_agents.address import Address, forwarder
from art_agents.containers import Container
from art_agents.harness import HOME, INSTRUCTION, PREFIX, Harness, Start

Ending = Literal["finished", "failed", "out_of_time", "out_of_turns", "out_of_disk"]
"""How a run ended; `failed` is an exit code other than 0."""
_KEPT_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How an agent's work ended. What it asked the model is in the server's record."""

    ending: Ending
    code: int
    """Exit code."""
    output: str
    """The end of what it printed."""


async def run_agent(
    harness: Harness, container: Container, address: Address, instruction: str, *, model_name: str,
    max_context: int,
    cwd: str | None = None, env: Mapping[str, str] = {}, timeout_s: float,
) -> Run:  # fmt: skip
    """Let an agent work on an instruction until it ends, or its time or requests are used up.

    Args:
        container: of an image that has the agent, with `address.folder` mounted at `address.MOUNT`.
        model_name: name by which it asks for the model.
        max_context: most tokens of prompt and answer together.
        cwd: folder of the task; that of the image by default.
        env: variables of the task.

    Raises:
        ToolServerError: it ended without an answer of the model, because it does not run or the server refuses what it
            asks; or it failed after the server had.
    """
    start = Start(
        address=address.url, side_address=address.side_url, model=model_name, max_context=max_context
    )  # fmt: skip
    launch = harness.launch(start)
    makes_home = {f"{HOME}/.art": ""}
    await container.put(pack({INSTRUCTION: instruction, **makes_home, **launch.files}))
    script = f"{forwarder(PREFIX)}\n{launch.script}"
    variables = {"HOME": HOME, **launch.env, **env}
    running = asyncio.create_task(container.run(script, cwd=cwd, env=variables, timeout_s=timeout_s))
    used_up = asyncio.create_task(address.used_up.wait())
    try:
        await asyncio.wait((running, used_up), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await container.kill_all()
        finished = await running
    finally:
        used_up.cancel()
        running.cancel()
    failed = finished.code != 0 and not finished.timed_out and not address.used_up.is_set()
    if address.num_answers == 0 or (failed and address.is_broken):
        said = finished.output.strip()[-_KEPT_CHARS:] or "it printed nothing"
        why = f"the server's last answer: {address.last_error}" if address.last_error else "it asked the model nothing"
        how = "got no answer" if address.num_answers == 0 else "got no further answer"
        raise ToolServerError(f"{harness.name} {how}, and ended with exit code {finished.code}; {why}: {said}")
    ending: Ending = "finished" if finished.code == 0 else "out_of_time" if finished.timed_out else "failed"
    if address.used_up.is_set():
        ending = "out_of_turns"
    if container.is_full.is_set():
        ending = "out_of_disk"
    return Run(ending=ending, code=finished.code, output=finished.output[-_KEPT_CHARS:])


def pack(files: Mapping[str, str]) -> bytes:
    """A tar archive of texts by absolute path, owned by root."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()
