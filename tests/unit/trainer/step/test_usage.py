"""The arithmetic of a step against torch's own counter and by hand, and what is known of devices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from art.config import LoraConfig, TrainerConfig
from art.trainer.head import Head
from art.trainer.policy.base_model import BaseModel, load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import step_metrics
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree.tree import build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples


@pytest.fixture
def base(model_path: Callable[[str], str]) -> BaseModel:
    return load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


@pytest.mark.parametrize("trains_base_weights", [False, True])
def test_a_sequence_needs_what_torch_counts(
    trains_base_weights: bool, base: BaseModel, model_path: Callable[[str], str]
) -> None:
    """Forward and backward of one sequence, whose queries all look at all keys in the counted kernel."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path("Qwen3"), attn_implementation="eager").requires_grad_(False)
    model.model.layers.requires_grad_(trains_base_weights)
    size = 24
    inputs = torch.randn(1, size, model.config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
    record = StepRecord(num_tree_tokens=size, num_visible_keys=size * size, num_rows=size)
    assert step_metrics.count_flops(base, record, trains_base_weights=trains_base_weights) == counter.get_total_flops()


def test_an_update_records_what_its_tree_needs(base: BaseModel) -> None:
    """By hand: Qwen3 with 2 layers, hidden size 32, 4 heads and 2 key-value heads of 8, inner size 48, vocabulary 61."""
    policy = LoraPolicy(base, LoraConfig(rank=4, alpha=8))
    samples = random_samples(3)
    paths = [path for s in samples if (path := check_sample(s, vocab_size=VOCAB_SIZE)) is not None]
    record = StepRecord()
    micro_batches = split_micro_batches(paths, policy.base, max_tokens=1000)
    update = Update(paths=paths, learning_rate=1e-3)
    compute_gradient(policy, update, micro_batches, record)
    tree = build_tree(paths)
    visible = sum(position + 1 for position in tree.positions)
    rows = {
        (query, temperature) for query, temperature in zip(tree.targets.queries, tree.targets.temperatures, strict=True)
    }
    weights = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    assert (
        step_metrics.count_flops(base, record)
        == 4 * len(tree) * weights + 12 * visible * 2 * 32 + 4 * len(rows) * 61 * 32
    )


def test_of_a_mixture_of_experts_a_token_meets_only_some() -> None:
    import transformers

    def count(**changes: Any) -> int:
        config = transformers.Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, decoder_sparse_step=1, mlp_only_layers=[],
            **changes,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        return step_metrics.count_active_weights(
            BaseModel("moe", model, model.model, Head(model.lm_head.weight, None), torch.device("cpu"))
        )

    of_expert = 2 * 3 * 32 * 16  # in two layers
    few, more = (count(num_experts=8, num_experts_per_tok=k) for k in (2, 4))
    assert more - few == 2 * of_expert
    assert few - 2 * of_expert == 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32), "attention"


def test_metrics_are_rates_of_the_updates(base: BaseModel) -> None:
    record = StepRecord(num_tree_tokens=100, num_visible_keys=500, num_rows=10)
    policy: Any = SimpleNamespace(base=base, trains_base_weights=False)
    flops = step_metrics.count_flops(base, record)
    metrics = step_metrics.measure_usage(policy, record, 0.5, peak_flops=8 * flops)
    assert metrics["throughput/train_tree_tokens_per_s"] == 200
    assert metrics["throughput/train_flops_per_s"] == 2 * flops
    assert metrics["throughput/train_utilization"] == 0.25
    assert metrics["time/step_updates_s"] == 0.5


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA A10", 1.25e14),
        ("NVIDIA GeForce RTX 4090", 1.65e14),
        ("NVIDIA L40", None),  # neither an L4 nor an L40S
        ("NVIDIA H20", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_gpu_is_known_by_whole_words(gpu: str, peak: float | None) -> None:
    assert step_metrics.known_peak(gpu) == peak


def test_the_peak_of_a_processor_is_measured_once() -> None:
    first = step_metrics.peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < first < 1e15
    assert step_metrics.peak_flops(torch.device("cpu"), torch.float32) == first
