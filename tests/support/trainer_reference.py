"""The slow and plain way: each sequence alone, transformers' attention and head, losses of `objective_reference`.

It computes in float64, so that what differs is the trainer's own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from art.config import DppoConfig, LossConfig, TrainConfig
from art.protocol.samples import COMPONENTS, TrainingSample
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree_attention import ATTENTION_NAME
from tests.support.objective_reference import LOSSES, Clips, Token
from tests.support.trainer_samples import paths_of, random_samples


def tree_gradient(
    policy: Policy,
    samples: Sequence[TrainingSample] = (),
    loss: LossConfig | None = None,
    *,
    max_tokens: int = 4096,
) -> tuple[Tensor, float]:
    """What is compared with the reference: gradient and loss of one update of the trainer's own."""
    paths, record = paths_of(samples or random_samples(3)), StepRecord()
    update = Update(paths=paths, learning_rate=1.0, terms=(loss or DppoConfig(),))
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=max_tokens), record)
    return policy.grads.clone(), record.losses[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _merged_weights(policy: Policy, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that training changes, W + scale * B A where there is an adapter, by their name in the whole model."""
    if not isinstance(policy, LoraPolicy):
        return {name: tensor.double() for name, tensor in values.items()}
    weights = {}
    for key, layer in policy._layers.items():
        a, b = values[f"{key}.lora_A.weight"], values[f"{key}.lora_B.weight"]
        name = key.removeprefix("base_model.model.") + ".base_layer.weight"
        weights[name] = layer.base_layer.weight.double() + policy.config.scale * (b @ a)
    return weights


def sequence_logprobs(policy: Policy, values: dict[str, Tensor], sample: TrainingSample) -> Tensor:
    """Log-probs of `token_ids[1:]`, by the model's own code."""
    return _of_tokens(_distributions(policy, values, sample), sample)


def _of_tokens(distributions: Tensor, sample: TrainingSample) -> Tensor:
    return distributions.gather(1, torch.tensor(sample.token_ids)[1:, None])[:, 0]


def _distributions(policy: Policy, values: dict[str, Tensor], sample: TrainingSample) -> Tensor:
    """Log-probs [T - 1, V] of all tokens at the places of `token_ids[1:]`."""
    model = policy.base.model
    model.set_attn_implementation("eager")
    experts = model.get_experts_implementation()
    model.set_experts_implementation("eager")  # the others multiply no float64
    enabled = isinstance(policy, LoraPolicy)
    if enabled:
        policy._peft_model.base_model.disable_adapter_layers()
    try:
        ids = torch.tensor([sample.token_ids])
        own = {name: tensor.double() for name, tensor in model.named_parameters() if tensor.is_floating_point()}
        weights = own | _merged_weights(policy, values)
        output = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False})
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        model.set_experts_implementation(experts)
        if enabled:
            policy._peft_model.base_model.enable_adapter_layers()
    logits = output.logits[0, :-1] / (sample.temperature or 1.0)
    logits = logits.masked_fill(~allowed_tokens(sample, logits.shape[1])[1:], float("-inf"))
    distributions: Tensor = logits.log_softmax(-1)
    return distributions


def allowed_tokens(sample: TrainingSample, vocab_size: int) -> Tensor:
    """[T, V] what each token could be drawn from. Grammars are not looked at, only kept tokens."""
    allowed = torch.ones(len(sample.token_ids), vocab_size, dtype=torch.bool)
    for span in sample.constraints:
        for place, ids in enumerate(span.constraint.kept or []):
            if ids:
                allowed[span.start + place] = False
                allowed[span.start + place, ids] = True
    return allowed


def token_loss(
    logp: Tensor, sample: TrainingSample, place: int, config: LossConfig, entropy: Tensor | None = None
) -> Tensor:
    """Of an objective that looks at each token alone."""
    sampler = sample.sampling_logprobs[place]
    token = Token(
        policy=logp, sampler=sampler, start=sampler, teacher=0.0, references={}, advantage=sample.advantages[place],
        entropy=entropy,
    )  # fmt: skip
    (loss,) = LOSSES[config.type]([token], config, TrainConfig(), Clips())
    return loss


def _total_loss(policy: Policy, values: dict[str, Tensor], samples: list[TrainingSample], config: LossConfig) -> Tensor:
    sums = dict.fromkeys(COMPONENTS, torch.zeros(()))
    weights = dict.fromkeys(COMPONENTS, 0.0)
    for sample in samples:
        distributions = _distributions(policy, values, sample)
        logprobs = _of_tokens(distributions, sample)
        entropies = -(distributions.exp() * distributions.clamp(min=-1e30)).sum(-1)
        for place, wanted in enumerate(sample.loss_mask):
            if not wanted:
                continue
            logp = logprobs[place - 1]
            if sample.component != "rl":
                loss = -logp
            else:
                loss = token_loss(logp, sample, place, config, entropies[place - 1])
            sums[sample.component] = sums[sample.component] + sample.weight * loss
            share = sample.weight if sample.share is None else sample.share / sum(sample.loss_mask)
            weights[sample.component] += share
    return sum((sums[name] / weights[name] for name in sums if weights[name]), torch.zeros(()))


def _doubled(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in policy.tensors.items()}


def reference_gradient(policy: Policy, samples: list[TrainingSample], config: LossConfig) -> Tensor:
    """[P] gradient with respect to what is trained, in the order of `policy.tensors`."""
    values = {name: tensor.double().requires_grad_() for name, tensor in policy.tensors.items()}
    _total_loss(policy, values, samples, config).backward()
    return torch.cat([value.grad.flatten() for value in values.values()])


def reference_loss(policy: Policy, samples: list[TrainingSample], config: LossConfig) -> float:
    with torch.no_grad():
        return float(_total_loss(policy, _doubled(policy), samples, config))


def with_own_logprobs(policy: Policy, samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the policy's own log-probs as those of the sampler."""
    result = []
    for sample in samples:
        with torch.no_grad():
            logprobs = [0.0, *sequence_logprobs(policy, _doubled(policy), sample).tolist()]
        kept = [p if wanted else 0.0 for p, wanted in zip(logprobs, sample.loss_mask, strict=True)]
        result.append(replace(sample, sampling_logprobs=kept))
    return result
