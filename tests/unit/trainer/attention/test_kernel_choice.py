"""The kernel of a layout is chosen by size and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from art.config import TrainerConfig
from art.errors import TrainingError
from art.protocol.samples import TrainingSample
from art.trainer.policy.base_model import FrozenModel, load_base_model
from art.trainer.step import micro_batch
from art.trainer.step.micro_batch import HeadShape, can_run_flex, choose_kernel, example_layout
from art.trainer.tree import build_tree
from art.trainer.tree_attention import AttentionFormula, KernelName, attend_blocks, attend_dense
from tests.support.trainer_samples import paths_of

HEADS = HeadShape(num_heads=4, num_groups=2, size=8, value_size=8, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def base(model_path: Callable[[str], str]) -> FrozenModel:
    return load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


@pytest.fixture(autouse=True)
def _nothing_tried_yet() -> Iterator[None]:
    can_run_flex.cache_clear()
    yield
    can_run_flex.cache_clear()


@pytest.mark.parametrize(
    ("device", "num_tokens", "expected"),
    [
        ("cpu", 256, "dense"),
        ("cpu", 257, "blocks"),
        ("mps", 5000, "dense"),
        ("cuda", 256, "dense"),
        ("cuda", 1024, "dense"),
        ("cuda", 1025, "flex"),
        ("cuda", 100_000, "flex"),
    ],
)
def test_the_rule(
    device: str, num_tokens: int, expected: KernelName, base: FrozenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "can_run_flex", lambda heads: True)
    assert choose_kernel(replace(base, device=torch.device(device)), num_tokens) == expected


def test_head_shape(base: FrozenModel) -> None:
    assert HeadShape.of(base) == HEADS


def test_a_kernel_is_tried_with_what_the_model_has(
    model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_base_model(model_path("GptOss"), TrainerConfig(device="cpu", num_threads=1))
    heads = HeadShape.of(base)
    assert heads == replace(HEADS, has_sinks=True)
    assert [tuple(x.shape) for x in heads.random_inputs(5)] == [(1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), (4,)]
    monkeypatch.setitem(micro_batch.KERNELS, "flex", attend_blocks)
    assert can_run_flex(heads)


def test_a_kernel_that_cannot_run_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_compiler(*_: Any) -> Any:
        raise OSError("cannot find Triton")

    monkeypatch.setitem(micro_batch.KERNELS, "flex", without_compiler)
    assert not can_run_flex(HEADS)
    assert "cannot find Triton" in caplog.text
    monkeypatch.setitem(micro_batch.KERNELS, "flex", attend_dense)
    assert can_run_flex(replace(HEADS, dtype=torch.bfloat16))


def test_a_kernel_that_computes_something_else_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_the_future(query: Any, key: Any, value: Any, layout: Any, formula: AttentionFormula) -> Any:
        return attend_dense(query, key, value.cumsum(2), layout, formula)

    monkeypatch.setitem(micro_batch.KERNELS, "flex", sees_the_future)
    with pytest.raises(TrainingError, match="FlexAttention is wrong on this machine: its output differs"):
        can_run_flex(HEADS)


def test_what_is_tried_is_a_group_of_rollouts() -> None:
    layout = example_layout(48, torch.device("cpu"))  # a prompt of 24, 8 completions of 3
    prompt = list(range(24))
    samples = [
        TrainingSample(
            sample_id=str(number),
            rollout_id=str(number),
            token_ids=[*prompt, *range(30 + 3 * number, 33 + 3 * number), 60],
            loss_mask=[False] * 24 + [True] * 4,
            sampling_logprobs=[0.0] * 28,
            advantages=[0.0] * 28,
        )
        for number in range(8)
    ]
    tree = build_tree(paths_of(samples))
    assert layout.positions.tolist() == tree.positions.tolist()
    assert layout.subtree_end.tolist() == tree.subtree_end.tolist()
