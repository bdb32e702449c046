"""Gradients of a whole step of ART against TRL's trainers, from the same tokens and rewards on.

A step has 16 groups of 4 answers of different lengths; in 16, 4 and 1 of them the rewards differ. TRL makes advantages,
masks and denominators by its own code (`_generate_and_score_completions`, with the given tokens in place of sampled
ones), and so does ART (`plan_step`, then a step of its trainer). The tests of the repository have both sides.

    python -m benchmarks from_rewards --json from_rewards.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.report import Cell, Result

NUM_GROUPS = 16
ALIVE = (16, 4, 1)


def add_options(group: argparse._ArgumentGroup) -> None:
    """There are none: sizes are those of the tiny model of the tests."""


def run(args: argparse.Namespace) -> Result:
    from tests.support.objective_bench import Bench
    from tests.support.trl_trainers import STEPS, Trl
    from tests.unit.trainer.conftest import make_model

    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, "model"))
        make_model("Qwen3").save_pretrained(model)
        bench = Bench(model, Path(folder, "steps"))
        trl = Trl(bench, model, Path(folder, "trl"))
        for name in STEPS:
            rows += [_compare(name, num_alive, bench, trl) for num_alive in (ALIVE[-1:] if args.quick else ALIVE)]
    return Result(
        summary=f"One step of {NUM_GROUPS} groups of 4 answers in float32 on the CPU, a tiny Qwen3, LoRA rank 4.",
        rows=rows,
        notes=[
            "alive: groups whose rewards differ",
            "error: norm of the difference of the gradients, divided by the norm of TRL's",
            "ratio: norm of ART's gradient by that of TRL's",
        ],
    )


def _compare(name: str, num_alive: int, bench: object, trl: object) -> dict[str, Cell]:
    from tests.support.objective_bench import Bench, relative_error
    from tests.support.trl_trainers import STEPS, Trl, finished_rollouts, trl_step

    assert isinstance(bench, Bench)
    assert isinstance(trl, Trl)
    rollouts = finished_rollouts(bench, num_groups=NUM_GROUPS, num_alive=num_alive)
    config = STEPS[name][1]
    patch = pytest.MonkeyPatch()
    _, (ours,) = bench.train(rollouts, config, patch)
    _, theirs = trl_step(trl, name, rollouts, ours.adapter)
    return {
        "objective": name,
        "alive": f"{num_alive} of {NUM_GROUPS}",
        "error": f"{relative_error(ours.gradient, theirs.double()):.1e}",
        "ratio": f"{float(ours.gradient.norm() / theirs.norm()):.4f}",
    }


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["from_rewards", *sys.argv[1:]])
