"""Engine and trainer side by side on CPU cores: how much each slows the other down, and how many threads they use.

The processes are those of the server, with its shares of the cores. The engine samples without pause; the trainer
makes the same step again and again.

    alone      one of the two works, the other waits
    together   both work at the same time

A sum of shares near 2 means that they overlap fully, near 1 that they take turns on the same cores.

    python -m benchmarks overlap --json overlap.json
    python -m benchmarks overlap --quick
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from art.config import LoraConfig, ModelSettings, ServerConfig, TrainConfig
from art.engine import GenerateRequest
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.hosting.host import BaseModelHost
from art.storage.layout import DataDir
from art.worker.process import ChildProcess
from benchmarks import models
from benchmarks.report import Cell, Result

AT_ONCE, TOKENS = 16, 128
_BUSY = 0.1
"""A thread counts as working if it takes this share of the CPU time of its process."""


@dataclass(slots=True)
class Phase:
    """What was measured while one or both of the two worked."""

    tokens: int = 0
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    threads: dict[str, int] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)


def run(args: argparse.Namespace) -> Result:
    names = models.QUICK_MODELS if args.quick else ["1.2 M", "5 M"]
    rows = []
    for name in names:
        with models.model_files(name) as files, TemporaryDirectory() as folder:
            rows += asyncio.run(_measure(name, str(files.base), Path(folder), 3 if args.quick else 10))
    return Result(
        summary="Speed of engine and trainer together, as a share of their speed alone; threads that work; cores used.",
        rows=rows,
        notes=[
            f"{len(os.sched_getaffinity(0))} cores; engine: {AT_ONCE} requests of {TOKENS} tokens at a time; trainer: "
            "64 samples of 128 tokens",
            f"threads: those with at least {_BUSY:.0%} of the CPU time of their process, in engine + trainer + server; "
            "cores: CPU time per second",
        ],
    )


async def _measure(name: str, model: str, folder: Path, num_steps: int) -> list[dict[str, Cell]]:
    host = BaseModelHost(model, ModelSettings(), DataDir(folder), ServerConfig())
    host.start()
    try:
        await host.trainer.init_checkpoint(folder / "0", LoraConfig())
        vocab = (await host.engine_info()).vocab_size
        await _train(host, folder, vocab, 2)
        await _sample(host, vocab, asyncio.create_task(asyncio.sleep(0.1)))
        engine = await _phase(host, sampling=asyncio.sleep(num_steps / 2), vocab=vocab)
        trainer = Phase()
        with _watching(host, trainer):
            trainer.steps = await _train(host, folder, vocab, num_steps)
        both = Phase()
        with _watching(host, both):
            training = asyncio.create_task(_train(host, folder, vocab, num_steps))
            both.tokens, both.seconds = await _sample(host, vocab, training)
            both.steps = await training
    finally:
        await host.close()
    return [_row(name, engine, trainer, both)]


async def _phase(host: BaseModelHost, *, sampling: object, vocab: int) -> Phase:
    phase = Phase()
    with _watching(host, phase):
        task = asyncio.ensure_future(sampling)  # type: ignore[arg-type]
        phase.tokens, phase.seconds = await _sample(host, vocab, task)
    return phase


def _row(name: str, engine: Phase, trainer: Phase, both: Phase) -> dict[str, Cell]:
    rates = engine.tokens / engine.seconds, both.tokens / both.seconds
    steps = sorted(trainer.steps)[len(trainer.steps) // 2], sorted(both.steps)[len(both.steps) // 2]
    shares = rates[1] / rates[0], steps[0] / steps[1]
    return {
        "model": name,
        "tokens/s alone": round(rates[0]),
        "tokens/s together": round(rates[1]),
        "step alone, s": round(steps[0], 3),
        "step together, s": round(steps[1], 3),
        "share of engine": round(shares[0], 2),
        "share of trainer": round(shares[1], 2),
        "sum": round(sum(shares), 2),
        "threads together": " + ".join(str(count) for count in both.threads.values()),
        "cores together": " + ".join(f"{count:.2f}" for count in both.cores.values()),
    }


async def _sample(host: BaseModelHost, vocab: int, until: asyncio.Future[object]) -> tuple[int, float]:
    """Sample until a task has ended. Returns the number of tokens, and the seconds."""
    rng, counts, began = random.Random(0), [0] * AT_ONCE, time.perf_counter()

    async def ask(slot: int) -> None:
        while not until.done():
            request = GenerateRequest(
                request_id=f"{slot}-{counts[slot]}",
                adapter=None,
                prompt_token_ids=[rng.randrange(vocab) for _ in range(32)],
                max_tokens=TOKENS,
                stop_token_ids=(),
                seed=rng.getrandbits(60),
                chunk_every_s=0.2,
            )
            async for chunk in host.engine.generate(request, stream=True):
                counts[slot] += len(chunk.token_ids)
                if until.done():
                    break

    await asyncio.gather(*map(ask, range(AT_ONCE)))
    return sum(counts), time.perf_counter() - began


async def _train(host: BaseModelHost, folder: Path, vocab: int, num_steps: int) -> list[float]:
    """Make the same step several times. Returns the seconds of each."""
    rng = random.Random(1)
    samples = []
    for number in range(64):
        mask = [i >= 64 for i in range(128)]
        samples.append(
            TrainingSample(
                sample_id=str(number),
                rollout_id=str(number),
                token_ids=[rng.randrange(vocab) for _ in mask],
                loss_mask=mask,
                sampling_logprobs=[-5.0 if m else 0.0 for m in mask],
                advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
            )
        )
    seconds = []
    for number in range(num_steps):
        target, began = folder / "target", time.perf_counter()
        config = TrainConfig(mismatch=None)
        await host.trainer.train(
            Train(
                samples=samples, config=config, from_checkpoint=folder / "0", to_checkpoint=target, job_id=str(number)
            )
        )
        seconds.append(time.perf_counter() - began)
        shutil.rmtree(target)
    return seconds


@contextmanager
def _watching(host: BaseModelHost, phase: Phase) -> Iterator[None]:
    """Count the threads of each process that work during the body, and the cores that they take."""
    pids = {"engine": _pid(host.engine_process), "trainer": _pid(host.trainer_process), "server": os.getpid()}
    before, began = {name: _thread_seconds(pid) for name, pid in pids.items()}, time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    for name, pid in pids.items():
        used = {thread: cpu - before[name].get(thread, 0.0) for thread, cpu in _thread_seconds(pid).items()}
        phase.threads[name] = sum(cpu > _BUSY * sum(used.values()) for cpu in used.values())
        phase.cores[name] = sum(used.values()) / seconds


def _pid(process: ChildProcess) -> int:
    pid = process.status["pid"]
    assert isinstance(pid, int)
    return pid


def _thread_seconds(pid: int) -> dict[str, float]:
    """CPU time of each thread of a process so far."""
    ticks, seconds = os.sysconf("SC_CLK_TCK"), {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        seconds[path.name] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["overlap", *sys.argv[1:]])
