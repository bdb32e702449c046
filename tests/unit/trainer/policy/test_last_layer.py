"""The last layer's MLP skips tokens whose hidden states nobody reads, and no log-prob or gradient changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from art.config import LoraConfig, PpoConfig, TrainerConfig
from art.protocol.samples import TrainingSample
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import MicroBatch, split_micro_batches
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree.tree import check_sample
from tests.support.trainer_reference import reference_gradient
from tests.support.trainer_samples import VOCAB_SIZE

LORA = LoraConfig(rank=4, alpha=8)
PROMPT, ANSWER = 20, 3


def group() -> list[TrainingSample]:
    """Answers to one long prompt: most tokens predict nothing that is learnt."""
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT)]
    mask = [False] * PROMPT + [True] * ANSWER
    return [
        TrainingSample(
            sample_id=str(index),
            rollout_id=str(index),
            token_ids=prompt + [rng.randrange(VOCAB_SIZE) for _ in range(ANSWER)],
            loss_mask=mask,
            sampling_logprobs=[-4.0 if learnt else 0.0 for learnt in mask],
            advantages=[rng.gauss(0, 1) if learnt else 0.0 for learnt in mask],
        )
        for index in range(3)
    ]


def micro_batches(policy: Policy) -> list[MicroBatch]:
    paths = [path for sample in group() if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]
    return split_micro_batches(paths, policy.base, max_tokens=4096)


def make_policy(path: str, lora: LoraConfig | None, **config: Any) -> Policy:
    base = load_base_model(path, TrainerConfig(device="cpu", dtype="float32", num_threads=1, **config))
    policy = FullPolicy(base) if lora is None else LoraPolicy(base, lora, may_fold=False)
    noise = torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2))
    policy.values.add_(noise * (0.2 if lora else 0.01))
    return policy


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_gradients_are_those_of_sequences_one_by_one(
    lora: LoraConfig | None, checkpointing: Any, model_path: Callable[[str], str]
) -> None:
    policy = make_policy(model_path("Qwen3"), lora, gradient_checkpointing=checkpointing)
    seen: list[int] = []

    def note(module: Any, args: tuple[Tensor, ...], out: Any) -> None:
        seen.append(args[0].shape[1])

    layers = policy.trained_model.model.layers
    for layer in layers:
        layer.mlp.gate_proj.register_forward_hook(note)
    batches = micro_batches(policy)
    compute_gradient(
        policy, Update(paths=batches[0].paths, learning_rate=1.0, terms=(PpoConfig(),)), batches, StepRecord()
    )
    num_read = 1 + 3 * (ANSWER - 1)  # the prompt's last token, and all of an answer but its last
    assert set(seen) == {batches[0].layout.num_tokens, num_read}
    assert seen.count(num_read) == (2 if checkpointing else 1)  # a layer that is computed again does the same
    expected = reference_gradient(make_policy(model_path("Qwen3"), lora), group(), PpoConfig())
    assert float((policy.grads - expected).norm() / expected.norm()) < 1e-5


def test_layouts_name_what_is_read_where_that_saves_something(model_path: Callable[[str], str]) -> None:
    policy = make_policy(model_path("Qwen3"), LORA)
    (batch,) = micro_batches(policy)
    assert batch.layout.read is not None
    assert batch.layout.read.tolist() == sorted(set(batch.targets.queries.tolist()))
    everything = TrainingSample(
        sample_id="all",
        rollout_id="all",
        token_ids=list(range(20)),
        loss_mask=[False] + [True] * 19,
        sampling_logprobs=[0.0] + [-4.0] * 19,
        advantages=[1.0] * 20,
    )
    path = check_sample(everything, vocab_size=VOCAB_SIZE)
    assert path is not None
    assert split_micro_batches([path], policy.base, max_tokens=4096)[0].layout.read is None
