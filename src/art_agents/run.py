"""One rollout of a command-line agent in a container: its address, its run, and what was recorded."""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from art.errors import ConfigError, ToolServerError
from art.model import TrainableModel
from art.trajectory import Trajectory
from art_agents.address import Address, forwarder, open_address
from art_agents.harness import HOME, INSTRUCTION, PREFIX, Harness, Start
from art_tasks.containers import Container


@dataclass(slots=True, kw_only=True)
class Work:
    """What an agent has done."""

    trajectory: Trajectory
    ending: str
    """`finished`, `failed` (an exit code other than 0), `out_of_time` or `out_of_turns`."""
    output: str
    """The end of what it printed."""
    code: int


@dataclass(slots=True, kw_only=True)
class AgentRun:
    """A rollout of an agent, whose requests the server records under an id of their own."""

    harness: Harness
    model: TrainableModel[Any, Any]
    step: int | None
    sampling: Mapping[str, Any]
    max_turns: int
    rollout_id: str

    @classmethod
    def of(
        cls, harness: Harness, model: Any, *, step: int | None, sampling: Mapping[str, Any], max_turns: int
    ) -> AgentRun:
        """
        Raises:
            ConfigError: the model is not trained by a server, which records what other programs ask.
        """
        if not isinstance(model, TrainableModel):
            raise ConfigError(f"{harness.name} needs a model that an ART server answers for, to record its tokens")
        rollout_id = f"{harness.name}-{uuid.uuid4().hex}"
        return cls(
            harness=harness, model=model, step=step, sampling=sampling, max_turns=max_turns, rollout_id=rollout_id
        )  # fmt: skip

    def open_address(self) -> AbstractAsyncContextManager[Address]:
        """Open the address that the container mounts."""
        base_url = self.model.rollout_base_url(self.rollout_id)
        return open_address(base_url, self.model.inference_api_key or "", self.max_turns)

    async def work(
        self, container: Container, address: Address, instruction: str, *, cwd: str | None, env: Mapping[str, str],
        timeout_s: float,
    ) -> Work:  # fmt: skip
        """Let the agent work on an instruction until it ends, or its time or turns are over.

        Raises:
            ToolServerError: it ended without a request, which is a fault of its installation, not of the model.
        """
        await self.model.put_rollout(self.rollout_id, sampling=dict(self.sampling))
        launch = self.harness.launch(Start(address=address.url, model=self.model.get_inference_name(self.step)))
        await container.put(pack({INSTRUCTION: instruction, f"{HOME}/.art": "", **launch.files}))
        variables = {"HOME": HOME, **launch.env, **env}
        script = f"{forwarder(PREFIX)}\n{launch.script}"
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
        if address.num_requests == 0:
            raise ToolServerError(
                f"{self.harness.name} ended with exit code {finished.code} and asked the model nothing: "
                f"{finished.output.strip()[-1500:] or 'it printed nothing'}"
            )
        ending = "finished" if finished.code == 0 else "out_of_time" if finished.timed_out else "failed"
        trajectory = await self.model.get_rollout(self.rollout_id)
        return Work(
            trajectory=trajectory, ending="out_of_turns" if address.used_up.is_set() else ending,
            output=finished.output[-2000:], code=finished.code,
        )  # fmt: skip


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
