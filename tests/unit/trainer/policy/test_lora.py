from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from art.config import LoraConfig, OptimizerConfig, TrainerConfig
from art.errors import AdapterError, ConfigError, TrainingError
from art.trainer.policy.base_model import FrozenModel, load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.proof import fresh_probe_tokens, measure_probe
from art.trainer.step.update import Optimizer
from tests.support.trainer_files import save_content, whole
from tests.support.trainer_reference import sequence_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

CONFIG = LoraConfig(rank=8, alpha=16)


@pytest.fixture
def base(model_path: Callable[[str], str]) -> FrozenModel:
    return load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


def weights_of(policy: LoraPolicy) -> bytes:
    return whole(policy.files()[policy.weights_file])


def randomise(policy: LoraPolicy, seed: int = 3) -> None:
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)


def test_fresh_adapter_changes_nothing_and_follows_the_seed(base: FrozenModel) -> None:
    policy = LoraPolicy(base, CONFIG)
    probe = measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    assert probe.logprobs == probe.base_logprobs
    assert policy.norm() == 0
    first = weights_of(policy)
    randomise(policy)
    policy.reset()
    assert weights_of(policy) == first
    policy.remove()
    assert weights_of(LoraPolicy(base, LoraConfig(rank=8, alpha=16, seed=1))) != first


def test_every_linear_layer_but_the_head(base: FrozenModel) -> None:
    policy = LoraPolicy(base, CONFIG)
    modules = {name.split(".")[-3] for name in policy.tensors}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(policy.tensors) == 2 * 7 * 2
    assert all(not parameter.requires_grad for name, parameter in base.model.named_parameters() if "lora_" not in name)


def test_peft_loads_the_files(base: FrozenModel, tmp_path: Path, model_path: Callable[[str], str]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    policy = LoraPolicy(base, CONFIG)
    randomise(policy)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_of(policy))
    (tmp_path / "adapter_config.json").write_bytes(policy.adapter_config())
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path("Qwen3")), tmp_path)
    probe = measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = loaded(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert probe.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert probe.logprobs != pytest.approx(probe.base_logprobs, abs=0.1)


def test_a_plain_reader_can_apply_the_files(base: FrozenModel, tmp_path: Path) -> None:
    """W + alpha / r * B A by nothing but the names in the files gives what the policy computes."""
    policy = LoraPolicy(base, CONFIG)
    randomise(policy)
    (tmp_path / "adapter.safetensors").write_bytes(weights_of(policy))
    config = json.loads(policy.adapter_config())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 16, "LORA")
    assert config["base_model_name_or_path"] == base.name
    assert config["target_modules"] == sorted(config["target_modules"])
    total = 0.0
    with safe_open(tmp_path / "adapter.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            assert name.startswith("base_model.model.model.layers.")
            if name.endswith(".lora_A.weight"):
                a, b = file.get_tensor(name), file.get_tensor(name.replace("lora_A", "lora_B"))
                total += float(((config["lora_alpha"] / config["r"] * b @ a) ** 2).sum())
    assert policy.norm() == pytest.approx(total**0.5, rel=1e-5)
    sample = replace(random_samples(0)[0], temperature=1.0)
    expected = sequence_logprobs(policy, dict(policy.tensors), sample).tolist()
    assert measure_probe(policy, sample.token_ids).logprobs == pytest.approx(expected, abs=1e-4)


def test_dump_and_load(base: FrozenModel, tmp_path: Path) -> None:
    policy = LoraPolicy(base, CONFIG)
    randomise(policy)
    data, before = weights_of(policy), measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    policy.reset()
    policy.load(save_content(tmp_path / "weights", data))
    assert weights_of(policy) == data
    assert measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE)) == before


def test_files_that_do_not_fit_are_refused(base: FrozenModel, tmp_path: Path) -> None:
    policy = LoraPolicy(base, CONFIG)
    before = weights_of(policy)
    tensors = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    first = next(iter(tensors))
    cases: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in tensors.items() if k != first}, "missing or unknown"),
        (tensors | {"other.lora_A.weight": torch.zeros(1)}, "other.lora_A.weight"),
        (tensors | {first: torch.zeros(4, 32)}, r"shape \[4, 32\], expected \[8, 32\]"),
        (tensors | {first: torch.full_like(tensors[first], float("nan"))}, "not finite"),
    ]
    for broken, message in cases:
        with pytest.raises(AdapterError, match=message):
            policy.load(save_content(tmp_path / "weights", save(broken)))
    with pytest.raises(AdapterError, match="not readable as safetensors"):
        policy.load(save_content(tmp_path / "weights", b"junk"))
    assert weights_of(policy) == before


@pytest.mark.parametrize(
    ("modules", "message"),
    [(["qproj"], r"linear layers are called .*q_proj"), (["lm_head"], "head"), (["embed_tokens"], "embed_tokens")],
)
def test_target_modules_that_cannot_be_adapted(base: FrozenModel, modules: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraPolicy(base, LoraConfig(target_modules=modules))
    LoraPolicy(base, CONFIG)  # the base model is as it was


# -- optimiser --


def test_adamw_equals_its_formula(base: FrozenModel) -> None:
    policy = LoraPolicy(base, CONFIG)
    randomise(policy)
    optimizer = Optimizer(policy)
    config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_grad_norm=2.0)
    value = policy.values.double().clone()
    first = second = torch.zeros_like(value)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        policy.grads.copy_(torch.randn(policy.grads.shape, generator=generator))
        grad = policy.grads.double().clone()
        norm = optimizer.update(0.01, config)
        assert norm == pytest.approx(float(grad.norm()), rel=1e-6)
        grad *= 2.0 / grad.norm()
        first = 0.8 * first + 0.2 * grad
        second = 0.9 * second + 0.1 * grad**2
        value *= 1 - 0.01 * 0.1
        value -= 0.01 * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        torch.testing.assert_close(policy.values.double(), value, rtol=1e-4, atol=1e-7)


def test_optimiser_continues_from_its_file(base: FrozenModel, tmp_path: Path) -> None:
    policy = LoraPolicy(base, CONFIG)
    optimizer = Optimizer(policy)
    policy.grads.fill_(0.01)
    optimizer.update(0.1, OptimizerConfig())
    weights = save_content(tmp_path / "weights", weights_of(policy))
    moments = save_content(tmp_path / "moments", optimizer.stream())
    policy.grads.fill_(-0.02)
    optimizer.update(0.1, OptimizerConfig())
    expected = weights_of(policy)
    fresh = Optimizer(policy)
    policy.load(weights)
    fresh.load(moments, num_updates=1)
    policy.grads.fill_(-0.02)
    fresh.update(0.1, OptimizerConfig())
    assert weights_of(policy) == expected
    assert fresh.num_updates == 2
    with pytest.raises(AdapterError, match="optimizer"):
        fresh.load(weights, num_updates=1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing(base: FrozenModel, bad: float) -> None:
    policy = LoraPolicy(base, CONFIG)
    optimizer = Optimizer(policy)
    before = weights_of(policy), whole(optimizer.stream())
    policy.grads[7] = bad
    with pytest.raises(TrainingError, match="gradient is not finite"):
        optimizer.update(0.1, OptimizerConfig())
    assert (weights_of(policy), whole(optimizer.stream())) == before
