"""Ray clusters on this machine for tests, and a training that is the same wherever it runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import art
from art.config import EngineConfig, TrainerConfig

MEMORY_BYTES = 100_000_000
"""Size of the object store of one node."""


class Node:
    """One raylet of a cluster, started by `ray start` as people start it; the first is the head."""

    def __init__(
        self, folder: Path, num_cpus: int, address: str | None, *, ip: str = "127.0.0.1",
        prefix: Sequence[str] = (), resources: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """`prefix` is a command that runs another one, e.g. in a network namespace."""
        self.port = free_port() if address is None else 0
        place = (
            ["--head", f"--port={self.port}", "--include-dashboard=false"]
            if address is None
            else [f"--address={address}"]
        )
        log_path = folder / f"ray-{secrets.token_hex(4)}.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *prefix, Path(sys.executable).with_name("ray"), "start", "--block", *place, f"--node-ip-address={ip}",
                    f"--num-cpus={num_cpus}", f"--object-store-memory={MEMORY_BYTES}",
                    f"--resources={json.dumps(resources or {})}",
                ],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        for _ in range(600):  # two that start at once would take the same names for their sockets
            if b"Ray runtime started" in log_path.read_bytes():
                return
            time.sleep(0.1)
        raise TimeoutError(log_path.read_text())

    @property
    def pids(self) -> list[int]:
        """Process ids of everything on the node, with the workers."""
        return [self._process.pid, *descendants(self._process.pid)]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL to everything on the node, as when its machine loses power."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def ray_in_this_process() -> Iterator[None]:
    """One raylet with two CPUs, which this process has joined. Pools join it and leave it running."""
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=MEMORY_BYTES,
            log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        yield
        ray.shutdown()


class RayNodes:
    def __init__(self, folder: Path, ip: str = "127.0.0.1") -> None:
        """`ip` is the address of the head."""
        self._folder, self._ip = folder, ip
        self.nodes: list[Node] = []

    @property
    def address(self) -> str | None:
        return f"{self._ip}:{self.nodes[0].port}" if self.nodes else None

    def add(self, num_cpus: int, *, ip: str | None = None, **options: Any) -> Node:
        self.nodes.append(Node(self._folder, num_cpus, self.address, ip=ip or self._ip, **options))
        return self.nodes[-1]


@contextlib.contextmanager
def ray_nodes(folder: Path, *num_cpus: int, into: RayNodes | None = None) -> Iterator[RayNodes]:
    """Start one raylet for each number of CPUs, with token authentication on; RAY_ADDRESS names the cluster. The nodes
    are put `into` an empty cluster, if one is given."""
    token = folder / "ray-token"
    token.write_text("a" * 64)
    cluster = into or RayNodes(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            for count in num_cpus:
                cluster.add(count)
            patch.setenv("RAY_ADDRESS", str(cluster.address))
            yield cluster
        finally:
            for node in reversed(cluster.nodes):
                node.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def settings(*, ranks: int = 1, **engine: Any) -> art.ModelSettings:
    return art.ModelSettings(
        trainer=TrainerConfig(num_processes=ranks, num_threads=1, device="cpu"),
        engine=EngineConfig(num_threads=1, device="cpu", **engine),
    )


async def registered(
    backend: art.Backend, base_model: Path, model_settings: art.ModelSettings, name: str = "agent"
) -> art.TrainableModel[Any, Any]:
    model = art.TrainableModel(name=name, project="cluster", base_model=str(base_model), settings=model_settings)
    await model.register(backend)
    return model


async def rollout(model: art.TrainableModel[Any, Any], step: int, index: int) -> art.Trajectory:
    """One answer with a seed of its own, rewarded by its length: the same tokens wherever the same policy samples."""
    question: Any = [{"role": "user", "content": f"count to {step % 3}"}]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=question, max_tokens=8, temperature=1.0, seed=1000 * step + index
    )
    (choice,) = answer.choices
    reward = float(len(choice.message.content or "") % 5) + 0.01 * index
    return art.Trajectory(messages_and_choices=[*question, choice], reward=reward)


async def train(backend: art.Backend, model: art.TrainableModel[Any, Any], num_steps: int) -> list[dict[str, float]]:
    """Train on groups of rollouts that follow from the step; return the metrics that must be the same everywhere."""
    seen = []
    for _ in range(num_steps):
        step = await model.get_step()
        groups = [art.TrajectoryGroup(rollout(model, step, 10 * g + i) for i in range(4)) for g in range(3)]
        done = await art.gather_trajectory_groups(groups, pbar_desc=None)
        result = await backend.train(model, done)
        assert result.trained
        seen.append({"reward": sum(t.reward for group in done for t in group), **same(result.metrics)})
    return seen


def same(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("loss/train", "loss/grad_norm", "loss/entropy", "publish/adapter_norm")}
