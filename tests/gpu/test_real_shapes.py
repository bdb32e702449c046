"""Steps at the shapes of a 4 B model fit the device, and the head's dtype does not change log-probs.

The CPU variants make the same claims of a tiny model with the same kinds of layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from art.trainer.step import micro_batch
from art.trainer.trainer import Trainer
from art.trainer.tree_attention import KernelName, compiled_function
from benchmarks.memory import extra_peak_bytes
from benchmarks.models import LORA, SHAPES
from benchmarks.real_shapes import make_workloads, open_trainer
from benchmarks.workloads import Samples

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]

WINDOWED = {"cpu": "0.1 M window", "cuda": "4 B 2 layers window"}
TREE = {"cpu": 4096, "cuda": 16_384}


@pytest.fixture
def trainer(device: str) -> Iterator[Trainer]:
    torch.set_num_threads(1)
    args = argparse.Namespace(device=device, dtype=None)
    with open_trainer(WINDOWED[device], args, max_tokens=TREE[device], recomputes=False) as trainer:
        yield trainer


@pytest.mark.parametrize("device", DEVICES)
def test_a_sliding_window_model_never_holds_all_scores(device: str, trainer: Trainer) -> None:
    """A kernel that ran uncompiled would hold the scores of a layer in float32: 34 GB at the real shape."""
    shape, num_tokens = SHAPES[WINDOWED[device]], TREE[device]
    samples = make_workloads(num_tokens, shape["vocab_size"])["group of 8"]
    trainer.trial(samples, LORA)  # compiles, and compares kernels
    results: list[dict[str, float]] = []
    peak = extra_peak_bytes(lambda: results.append(trainer.trial(samples, LORA)), device)
    assert results[0]["num_tree_tokens"] == num_tokens
    assert peak < 4 * shape["num_attention_heads"] * num_tokens**2


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_of_many_lengths_compile_few_graphs(
    device: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two for each kind of layer, and each layout gives the gradient that the dense kernel gives."""
    if device == "cpu":  # uncompiled, and FlexAttention refuses a backward pass there: it has no fused kernel for it
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    compiled_function.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    vocab_size = SHAPES[WINDOWED[device]]["vocab_size"]
    lengths = (600, 520) if device == "cpu" else (2048, 3000, 4100, 2600, 5000, 3600)
    for num_tokens in lengths:
        samples = make_workloads(num_tokens, vocab_size)["group of 8"]
        norms = [grad_norm(trainer, samples, name, monkeypatch) for name in ("flex", "dense")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4 if device == "cpu" else 0.02)
    if device == "cuda":
        num_kinds = compiled_function.cache_info().currsize
        assert num_kinds == 2  # with and without the window; a step without references needs gradients everywhere
        assert counters["stats"]["unique_graphs"] <= 2 * num_kinds


def grad_norm(trainer: Trainer, samples: Samples, name: KernelName, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(micro_batch, "choose_kernel", lambda base, num_tokens: name)
    return trainer.trial(samples, LORA)["grad_norm"]
