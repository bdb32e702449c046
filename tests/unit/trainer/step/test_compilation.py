from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from art.config import DppoConfig, LoraConfig, TrainerConfig
from art.errors import ConfigError
from art.trainer.policy.base_model import BaseModel, load_base_model
from art.trainer.policy.compilation import compile_layers
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.measure import add_stream
from art.trainer.step.micro_batch import MicroBatcher, split_micro_batches
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.trainer import Trainer
from art.trainer.tree.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples


def load(path: str, **config: Any) -> BaseModel:
    return load_base_model(path, TrainerConfig(device="cpu", num_threads=1, **config))


def make_policy(base: BaseModel) -> LoraPolicy:
    policy = LoraPolicy(base, LoraConfig(rank=8, alpha=16))
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


def make_paths(seed: int) -> list[SamplePath]:
    return [p for s in random_samples(seed) if (p := check_sample(s, vocab_size=VOCAB_SIZE))]


def gradient(policy: LoraPolicy, seed: int) -> torch.Tensor:
    paths = make_paths(seed)
    update = Update(paths=paths, learning_rate=1.0, terms=(DppoConfig(),))
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=4096), StepRecord())
    return policy.grads.clone()


def base_logprobs(policy: LoraPolicy) -> torch.Tensor:
    batcher = MicroBatcher(policy.base, max_tokens=4096)
    paths = add_stream(make_paths(4), "base", policy.base_hidden_states, batcher)
    return torch.cat([torch.from_numpy(path.streams["base"]) for path in paths])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_have_the_same_gradient(model_path: Callable[[str], str]) -> None:
    """For layouts of several lengths, and with the adapter off, by layers that really are compiled."""
    counters = torch._dynamo.utils.counters
    plain, compiled = (make_policy(load(model_path("Qwen3"))) for _ in range(2))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled.base)
    for seed in (1, 2, 3):
        found, expected = gradient(compiled, seed), gradient(plain, seed)
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0
    torch.testing.assert_close(base_logprobs(compiled), base_logprobs(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_in_bfloat16_that_are_checkpointed(model_path: Callable[[str], str]) -> None:
    torch._dynamo.reset()
    settings = {"dtype": "bfloat16", "gradient_checkpointing": "selective"}
    plain = make_policy(load(model_path("Qwen3"), dtype="bfloat16"))
    compiled = make_policy(load(model_path("Qwen3"), compile_layers=True, **settings))
    compile_layers(compiled.base)
    assert float(torch.cosine_similarity(gradient(compiled, 1), gradient(plain, 1), dim=0)) > 0.99


def test_without_a_compiler_it_is_an_error(model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: no C++ compiler")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"does not work here \(RuntimeError: InvalidCxxCompiler"):
        Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1, compile_layers=True))


def test_a_model_that_does_not_name_its_layers_is_refused(model_path: Callable[[str], str]) -> None:
    base = load(model_path("Qwen3"))
    base.model._no_split_modules = None
    with pytest.raises(ConfigError, match="does not name its decoder layers"):
        compile_layers(base)


@pytest.mark.parametrize("other", [{"quantization": "nf4"}, {"shard_base": True, "num_processes": 2}])
def test_only_whole_weights_are_compiled(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="`compile_layers` is for whole weights"):
        TrainerConfig.model_validate({"compile_layers": True, **other})
