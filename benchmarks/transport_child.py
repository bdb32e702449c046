"""The trainer's end of the benchmark `transport`: `python -m benchmarks.transport_child --fd N`.

It receives a training call as a trainer does, lays out all micro-batches, and answers with what that took.
"""

from __future__ import annotations

import time

import torch  # as in a trainer: its memory counts

from art.config import TrainerConfig
from art.kernels.process import peak_rss_bytes
from art.protocol.calls import TRAINER_CALLS, Train, decode_call
from art.protocol.samples import StepResult, TrainingSample
from art.trainer.tree import SamplePath, build_tree, check_samples, pack
from art.worker.child import child_from_argv
from benchmarks.transport_workload import VOCAB_SIZE


def peak_rss_mb() -> float:
    return peak_rss_bytes() / 1e6


def check(samples: list[TrainingSample]) -> list[SamplePath]:
    return check_samples(samples, vocab_size=VOCAB_SIZE)


def main() -> None:
    assert torch.__version__
    child = child_from_argv("transport-child")
    before_mb = peak_rss_mb()
    cpu = [time.process_time()]
    frame = child.read()
    started = time.perf_counter()
    call = decode_call(TRAINER_CALLS, frame["method"], frame["params"])
    assert isinstance(call, Train)
    samples = list(call.read())
    cpu.append(time.process_time())
    paths = check(samples)
    cpu.append(time.process_time())
    parts = pack(paths, max_tokens=TrainerConfig().max_tokens)
    num_tokens = 0
    for part in parts:
        num_tokens += len(build_tree([paths[index] for index in part]))
    cpu.append(time.process_time())
    metrics = {
        "decode_cpu_s": cpu[1] - cpu[0],
        "check_cpu_s": cpu[2] - cpu[1],
        "tree_cpu_s": cpu[3] - cpu[2],
        "wall_s": time.perf_counter() - started,
        "peak_rss_mb": peak_rss_mb(),
        "before_rss_mb": before_mb,
        "num_micro_batches": float(len(parts)),
        "num_tree_tokens": float(num_tokens),
        "num_targets": float(sum(len(path.query_positions) for path in paths)),
    }
    child.socket.reply(frame["id"], StepResult(step=0, metrics=metrics))
    time.sleep(60)  # the parent ends this process


if __name__ == "__main__":
    main()
