"""The trainer of one base model, seen from the server.

It takes one call at a time, which is repeated if the process dies. The samples of a call go to it as a file, which is
written once, read again by each attempt, and deleted after the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from art.config import LoraConfig
from art.config.server import CALL_ATTEMPTS, JOB_TIMEOUT_S
from art.errors import JobCancelledError, TrainingError
from art.protocol.calls import Call, InitCheckpoint, Progress, SampleCall, Train, TrainSft, Trial, WriteLoudAdapters
from art.protocol.rpc import RpcClient, retry_on_process_death
from art.protocol.samples import StepResult, TrainingSample
from art.storage.atomic import storage_errors
from art.worker.process import ChildProcess, ChildSpec, MakeProcess
from art.worker.waits import BusyPeriod, acquired

C = TypeVar("C", bound=SampleCall[Any])
OnProgress = Callable[[int, int], Awaitable[None]]
"""Awaited with the number of micro-batches that are done, and of all."""

STOP_WITHIN_S = 60.0
"""Time from a cancellation until the trainer's process is killed, if it is still in the same micro-batch."""


class TrainerHandle:
    """Sends calls to one trainer process, and repeats a call if the process dies. Only `trial` is not repeated."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        engine_aside: Callable[[], AbstractAsyncContextManager[None]],
        samples: Path,
        make_process: MakeProcess = ChildProcess,
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        """`initialise` loads the base model into a new process, and `engine_aside` frees the device for a training call
        where engine and trainer share it. The samples of the calls under way are files in the folder `samples`."""
        self.process = make_process(spec, initialise, None)
        self._engine_aside = engine_aside
        self._samples = samples
        self._job_timeout_s = job_timeout_s
        self._lock = asyncio.Lock()
        self._work = BusyPeriod(f"the {spec.name} to end its call")
        self._training = BusyPeriod(f"the {spec.name} to end its step")

    @property
    def busy_s(self) -> float:
        """Seconds for which the trainer has worked so far."""
        return self._work.total_s

    @property
    def training_s(self) -> float:
        """Seconds for which the trainer has worked on training steps so far."""
        return self._training.total_s

    async def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> None:
        """Write the checkpoint of step 0; `lora=None` is full fine-tuning."""
        async with self._turn("`init_checkpoint`"):
            await self._run(InitCheckpoint(path=path, lora=lora))

    async def train(
        self, call: Train | TrainSft, *, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None
    ) -> StepResult:
        """Train one step. If the trainer dies, the step starts over from its checkpoint. Once `stop` is set, the call
        ends after the current micro-batch.

        Raises:
            JobCancelledError: `stop` ended the call. A call that was about to end returns instead.
            ProcessError: the trainer died during every attempt.
            TrainingError: the step took longer than `job_timeout_s` seconds.
            DiskFullError, StorageError: the samples cannot be written.
        """
        async with self._written(call) as written, self._turn(f"`{call.method}`"), self._engine_aside():
            with self._training.held():
                return await self._run(written, stop, on_progress)

    async def trial(self, samples: list[TrainingSample], lora: LoraConfig | None) -> dict[str, float]:
        """Measure time, memory and gradient of a step that is thrown away; see `Trainer.trial`. It is not repeated."""
        call = Trial(samples=samples, lora=lora)
        async with self._written(call) as written, self._turn("a trial step"), self._engine_aside():
            return await (await self.process.connect()).call(written)

    async def write_loud_adapters(self, folder: Path, lora: LoraConfig) -> None:
        """Write the test adapters of `lora` into `folder`, a new one; see `Trainer.write_loud_adapters`."""

        async def attempt(client: RpcClient) -> None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # of an attempt that died
            async with asyncio.timeout(self._job_timeout_s):
                await client.call(WriteLoudAdapters(folder=folder, lora=lora))

        async with self._turn("test adapters"):
            await retry_on_process_death(self.process.connect, attempt, "writing test adapters", CALL_ATTEMPTS)

    @asynccontextmanager
    async def _written(self, call: C) -> AsyncIterator[C]:
        """Within the body the samples of a call are a file. Writing it takes a thread, so that requests go on."""
        path = self._samples / f"{uuid.uuid4().hex}.safetensors"

        def write() -> C:
            with storage_errors(path, "writing"):
                path.parent.mkdir(parents=True, exist_ok=True)
                return call.written(path)

        try:
            yield await asyncio.to_thread(write)
        finally:
            with contextlib.suppress(OSError):  # the next server deletes what is left
                await asyncio.to_thread(path.unlink)

    def _turn(self, what: str) -> AbstractAsyncContextManager[None]:
        return acquired(self._lock, f"its turn for {what} in the {self.process.spec.name}", self._job_timeout_s)

    async def _run(
        self,
        call: Call[Progress | StepResult],
        stop: asyncio.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> StepResult:
        """Make a call until it has a result, `stop` ends it, or it takes too long."""

        async def connect() -> RpcClient:
            if stop is not None and stop.is_set():
                raise JobCancelledError(f"`{call.method}` was cancelled")
            return await self.process.connect()

        async def stop_call(client: RpcClient) -> None:
            # To kill the process is safe at any moment: checkpoints are written under a temporary name.
            if stop is not None:
                await stop.wait()
                client.ask_to_stop(call.method)
                await asyncio.sleep(STOP_WITHIN_S)
                await self.process.end(f"`{call.method}` was cancelled and had not stopped after {STOP_WITHIN_S:g} s")

        async def attempt(client: RpcClient) -> StepResult:
            step: StepResult | None = None
            stopping = asyncio.create_task(stop_call(client), name=f"stop-{call.method}")
            try:
                async with asyncio.timeout(self._job_timeout_s):
                    async for result in client.stream(call):
                        if isinstance(result, StepResult):
                            step = result
                        elif on_progress is not None:
                            await on_progress(result.done, result.total)
            except TimeoutError:
                problem = f"`{call.method}` took longer than {self._job_timeout_s:g} s"
                await self.process.end(problem)
                raise TrainingError(f"{problem}; the {self.process.spec.name} was ended") from None
            finally:
                stopping.cancel()
            assert step is not None, "a call that raises nothing ends with its result"
            return step

        with self._work.held():
            return await retry_on_process_death(connect, attempt, f"`{call.method}`", CALL_ATTEMPTS)
