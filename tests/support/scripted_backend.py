"""A backend without server, whose training takes as long as a test says, and a clock that skips what nobody waits for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import art
from art.backend import Backend
from art.errors import ArtError, NotFoundError
from art.protocol.training import JobStatus

T = TypeVar("T")


@dataclass
class TrainCall:
    """One training job that the backend was given."""

    job_id: str
    step: int
    """Checkpoint that it started from."""
    groups: list[art.TrajectoryGroup]
    config: art.TrainConfig


@dataclass
class ScriptedJob:
    job_id: str
    result: asyncio.Task[Any]

    def __await__(self) -> Any:
        return asyncio.shield(self.result).__await__()

    async def status(self) -> JobStatus:
        state = "running" if not self.result.done() else "failed" if self.result.exception() else "succeeded"
        return JobStatus(job_id=self.job_id, kind="train", project="shop", name="agent", state=state)


@dataclass(eq=False)
class ScriptedBackend(Backend):
    """Trains whatever it gets in `train_s` seconds. Groups without spread make no checkpoint, as with a real server."""

    folder: Path
    train_s: float = 0.0
    step: int = 0
    steps_at_once: int | None = None
    calls: list[TrainCall] = field(default_factory=list)
    jobs: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    fail: Callable[[TrainCall], ArtError | None] = lambda call: None

    def __post_init__(self) -> None:
        super().__init__()

    def model(self, **fields: Any) -> art.TrainableModel:
        """Make a model that is registered here."""
        model: art.TrainableModel = art.TrainableModel(
            name="agent", project="shop", base_model="base", base_path=str(self.folder), report_metrics=[], **fields
        )
        model._backend = self
        return model

    async def train(self, model: Any, groups: Any, config: Any = None, **options: Any) -> Any:  # type: ignore[override]
        job_id = options["job_id"]
        if job_id not in self.jobs:
            call = TrainCall(job_id, self.step, list(groups), config)
            self.calls.append(call)
            self.jobs[job_id] = asyncio.create_task(self._train(call))
        return ScriptedJob(job_id, self.jobs[job_id])

    async def follow_train_job(self, model: Any, job_id: str) -> Any:
        if job_id not in self.jobs:
            raise NotFoundError(f"there is no job {job_id}")
        return ScriptedJob(job_id, self.jobs[job_id])

    async def _train(self, call: TrainCall) -> art.TrainResult:
        await asyncio.sleep(self.train_s)
        if (error := self.fail(call)) is not None:
            raise error
        trained = any(len({trajectory.reward for trajectory in group}) > 1 for group in call.groups)
        self.step += trained
        tokens = float(sum(map(len, call.groups)))
        metrics = {"ledger/sampled_tokens": tokens, "ledger/trained_tokens": tokens}
        return art.TrainResult(step=self.step, trained=trained, metrics=metrics)

    async def get_status(self, model: Any) -> Any:
        return SimpleNamespace(step=self.step, steps_at_once=self.steps_at_once)

    async def token_counts(self, model: Any) -> None:
        return None

    async def log_metrics(self, model: Any, step: int, row: dict[str, float], *, row_id: str | None = None) -> None:
        return None


class _Skipping(selectors.DefaultSelector):
    """Waits for threads that work for the loop, and for nothing else: it moves the clock to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        self.threads: set[asyncio.Future[Any]] = set()
        """What threads have still to answer."""

    def expect(self, answer: asyncio.Future[Any]) -> None:
        self.threads.add(answer)
        answer.add_done_callback(self.threads.discard)

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or self.threads:
            return super().select(0 if timeout == 0 else None)
        events = super().select(0)
        if not events:
            self.skipped_s += timeout
        return events


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while code runs, and jumps to the next timer when nothing is left to run."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        future = super().run_in_executor(executor, function, *args)
        self._skipping.expect(future)
        return future


def run_skipping(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop whose clock skips what nobody waits for."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(coroutine)
