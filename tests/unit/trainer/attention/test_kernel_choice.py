"""The kernel of a layout is chosen by size and device, and on CUDA by times that are measured once per size class."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from art.config import TrainerConfig
from art.protocol.samples import TrainingSample, plain_sample
from art.trainer.attention import kernel_choice
from art.trainer.attention.kernel_choice import (
    HeadShape,
    check_kernel,
    choose_kernel,
    example_layout,
    fastest_kernel,
    size_class,
    time_kernel,
)
from art.trainer.attention.tree_attention import KernelName, attend_dense
from art.trainer.policy.base_model import BaseModel, load_base_model
from art.trainer.tree.tree import build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE

HEADS = HeadShape(num_heads=4, num_groups=2, size=8, value_size=8, dtype=torch.float32, device=torch.device("cpu"))
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def base(model_path: Callable[[str], str]) -> BaseModel:
    return load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


@pytest.fixture(autouse=True)
def _nothing_measured_yet() -> Iterator[None]:
    fastest_kernel.cache_clear()
    yield
    fastest_kernel.cache_clear()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelName, int]]:
    """What is measured, on a device where dense is slower than flex from 1,500 tokens on."""
    measured: list[tuple[KernelName, int]] = []

    def timed(kernel: KernelName, heads: HeadShape, num_tokens: int) -> float:
        measured.append((kernel, num_tokens))
        return {"dense": num_tokens**2 / 1500, "flex": num_tokens}[kernel]

    monkeypatch.setattr(kernel_choice, "time_kernel", timed)
    return measured


@pytest.mark.parametrize(
    ("device", "num_tokens", "expected"),
    [
        ("cpu", 256, "dense"),
        ("cpu", 257, "chains"),
        ("mps", 5000, "dense"),
        ("cuda", 256, "dense"),
        ("cuda", 1000, "dense"),
        ("cuda", 1500, "flex"),
        ("cuda", 100_000, "flex"),
    ],
)
def test_the_rule(device: str, num_tokens: int, expected: KernelName, base: BaseModel, times: Any) -> None:
    assert choose_kernel(replace(base, device=torch.device(device)), num_tokens) == expected
    assert bool(times) == (device == "cuda" and num_tokens > 256)


def test_a_size_class_is_measured_once_for_each_shape_of_heads(
    base: BaseModel, times: list[tuple[KernelName, int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=kernel_choice.__name__)
    on_cuda = replace(base, device=torch.device("cuda"))
    chosen = [choose_kernel(on_cuda, num_tokens) for num_tokens in (300, 400, 512, 3000)]
    assert chosen == ["dense", "dense", "dense", "flex"]
    assert times == [("dense", 512), ("flex", 512), ("dense", 4096), ("flex", 4096)]
    assert "about 4096 tokens: flex (dense 1.12e+07 ms, flex 4.1e+06 ms)" in caplog.text
    fastest_kernel(replace(HeadShape.of(on_cuda), dtype=torch.bfloat16), 512)
    assert len(times) == 6


def test_head_shape(base: BaseModel) -> None:
    assert HeadShape.of(base) == HEADS


def test_a_kernel_is_tried_with_what_the_model_has(model_path: Callable[[str], str]) -> None:
    base = load_base_model(model_path("GptOss"), TrainerConfig(device="cpu", num_threads=1))
    heads = HeadShape.of(base)
    assert heads == replace(HEADS, has_sinks=True)
    assert [tuple(x.shape) for x in heads.random_inputs(5)] == [(1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), (4,)]
    assert time_kernel("dense", heads, 64) > 0
    path = check_sample(plain_sample(list(range(40)), "probe"), vocab_size=VOCAB_SIZE)
    assert path is not None
    check_kernel(base, "chains", [path])


@pytest.mark.parametrize(("num_tokens", "expected"), [(257, 512), (512, 512), (513, 1024), (10**6, 16384)])
def test_size_class(num_tokens: int, expected: int) -> None:
    assert size_class(num_tokens) == expected


def test_a_kernel_that_cannot_run_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_compiler(*_: Any) -> Any:
        raise OSError("cannot find Triton")

    def without_memory(*_: Any) -> Any:
        raise OUT_OF_MEMORY

    monkeypatch.setitem(kernel_choice.KERNELS, "flex", without_compiler)
    assert fastest_kernel(HEADS, 64) == "dense"
    assert "the 'flex' attention kernel cannot run 64 tokens here: OSError: cannot find Triton" in caplog.text
    monkeypatch.setitem(kernel_choice.KERNELS, "dense", without_memory)
    assert fastest_kernel(HEADS, 80) == "dense"  # neither: smaller micro-batches may yet fit
    monkeypatch.setitem(kernel_choice.KERNELS, "flex", attend_dense)
    assert fastest_kernel(HEADS, 96) == "flex"


def test_errors_of_the_reference_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setitem(kernel_choice.KERNELS, "dense", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        time_kernel("dense", HEADS, 64)


def test_both_ways_are_timed_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever mode the caller is in; the reference stands in for flex, which has no backward pass on the CPU."""
    seen: list[int] = []

    def with_hook(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        out = attend_dense(query, key, value, *rest)
        out.register_hook(lambda _: seen.append(query.shape[2]))
        return out

    monkeypatch.setitem(kernel_choice.KERNELS, "flex", with_hook)
    with torch.no_grad():
        assert 0 < time_kernel("flex", HEADS, 128) < math.inf
    assert set(seen) == {64, 128}
    assert seen[-1] == 128


def test_what_is_timed_is_a_group_of_rollouts() -> None:
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
    tree = build_tree([path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE))])
    assert layout.positions.tolist() == tree.positions.tolist()
    assert layout.subtree_end.tolist() == tree.subtree_end.tolist()
