"""The verdict over several seeds, and the seeds themselves."""

from __future__ import annotations

import argparse
import io
from typing import Any

import pytest

from art.errors import ConfigError
from art.metrics.scores import Estimate
from art_recipes.screen import Screen
from art_recipes.seeds import add_seeds_option, judge_seeds, seeds_of, show_seeds
from art_recipes.training.progress import RunVerdict, VerdictKind
from art_recipes.training.task_training import TaskTrainingResult


def result(kind: VerdictKind, change: float | None) -> TaskTrainingResult:
    nothing: Any = None
    estimate = None if change is None else Estimate(mean=change, low=change - 0.1, high=change + 0.1, count=9)
    return TaskTrainingResult(
        model=nothing, step=1, reports=[], verdict=RunVerdict(kind=kind, what=""), is_over_budget=False, before=None,
        after=None, change=estimate,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "kind", "what"),
    [
        (
            "ggg",
            "good",
            "It learnt with 3 of 3 seeds: win on held-out rollouts changed by +0.20 (median; +0.10 to +0.30)",
        ),
        ("ggs", "soft", "It learnt with 2 of 3 seeds: "),
        ("ggb", "soft", "It learnt with 2 of 3 seeds and got worse with 1: "),
        ("bsb", "bad", "It learnt with 0 of 3 seeds and got worse with 2: "),
    ],
)
def test_no_claim_is_stronger_than_the_worst_seed(kinds: str, kind: str, what: str) -> None:
    names: dict[str, VerdictKind] = {"g": "good", "s": "soft", "b": "bad"}
    verdict = judge_seeds("win", {seed: result(names[one], 0.1 * (seed + 1)) for seed, one in enumerate(kinds)})
    assert verdict.kind == kind
    assert verdict.what.startswith(what)


def test_seeds_without_held_out_rollouts_have_a_table_too() -> None:
    shown = io.StringIO()
    show_seeds(Screen(file=shown, width=90), "win", {3: result("soft", None)})
    assert "not measured" in shown.getvalue()
    assert "1 seeds were trained; --held-out N measures what they have learnt." in shown.getvalue()


def test_seeds_count_from_the_first() -> None:
    parser = argparse.ArgumentParser()
    add_seeds_option(parser)
    assert list(seeds_of(parser.parse_args(["--seeds", "3"]), 5)) == [5, 6, 7]
    with pytest.raises(ConfigError, match="`--seeds` must be 1 or more, got 0"):
        seeds_of(parser.parse_args(["--seeds", "0"]), 5)
