"""The checkpoints that a step's stale rollouts are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from art.runtime.jobs import runner
from art.runtime.jobs.runner import stale_references
from art.storage.checkpoints import MODEL_WEIGHTS
from art.storage.layout import ModelPaths
from tests.support.trainer_samples import random_samples


def test_the_checkpoints_of_all_stale_tokens_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ModelPaths(tmp_path)
    for step in (0, 1, 3, 4):
        paths.checkpoint(step).mkdir(parents=True)
    first, second, third, fourth, *_ = random_samples(0)
    samples = [
        replace(first, policy_version=4),
        replace(second, policy_version=2, versions=[(0, 2), (1, 3), (3, 4)]),  # 2 has been deleted
        replace(third, policy_version=0),
        replace(fourth, policy_version=1, component="sft"),
    ]
    assert stale_references(samples, paths, 4) == {step: paths.checkpoint(step) for step in (0, 3)}
    for step, size in ((0, 100), (3, 10)):  # whole models
        (paths.checkpoint(step) / MODEL_WEIGHTS).write_bytes(b"w" * size)
    monkeypatch.setattr(runner, "_LARGEST_FULL", 50)
    assert stale_references(samples, paths, 4) == {3: paths.checkpoint(3)}
