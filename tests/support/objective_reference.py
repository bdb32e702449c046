"""Every objective once more, as the papers write it: float64, whole softmax, one sequence after another, Python loops.

Nothing of `art.trainer` is used. A rollout has branches (token sequences), a branch has learnt tokens. The policy is a
Hugging Face model whose weights are W + scale * B A, and autograd does the rest, also where the trainer has a closed
form (DPO) or only the gradient of a formula (GSPO). transformers computes norms and rotary angles in float32 whatever
the model's type; everything behind the last norm is float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from art.config import DpoConfig, KlConfig, MismatchConfig, TrainConfig

Adapter = Mapping[str, Tensor]
"""Matrices by their names in PEFT files."""


@dataclass(frozen=True)
class Branch:
    token_ids: list[int]  # [T]
    spans: list[tuple[int, int]]  # what the policy sampled: [start, end)
    sampling_logprobs: list[float] = field(default_factory=list)  # [T]
    teacher_logprobs: list[float] = field(default_factory=list)  # [T]
    temperature: float = 1.0
    is_cut: bool = False  # by the token limit

    @property
    def learnt(self) -> list[int]:
        return [place for start, end in self.spans for place in range(start, end)]


@dataclass(frozen=True)
class Rollout:
    name: str
    group: int
    reward: float
    branches: list[Branch]

    @property
    def num_tokens(self) -> int:
        return sum(len(branch.learnt) for branch in self.branches)


class PlainModel:
    """A causal language model in float64 with its own attention."""

    def __init__(self, path: str, *, scale: float) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        self._model.requires_grad_(False)
        self._scale = scale

    def logprobs(self, branch: Branch, adapter: Adapter | None) -> list[Tensor]:
        """Of the branch's learnt tokens, at its temperature."""
        found = self.distributions(branch, adapter)
        return [found[place - 1, branch.token_ids[place]] for place in branch.learnt]

    def distributions(self, branch: Branch, adapter: Adapter | None) -> Tensor:
        """Log-probs [T, V] of the whole vocabulary behind each token."""
        weights = dict(self._model.named_parameters())
        changed = {}
        for name, a in (adapter or {}).items():
            if ".lora_A." in name:
                b = (adapter or {})[name.replace(".lora_A.", ".lora_B.")]
                key = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                changed[key] = weights[key] + self._scale * (b @ a)
        ids = torch.tensor([branch.token_ids])
        logits = torch.func.functional_call(self._model, changed, kwargs={"input_ids": ids, "use_cache": False}).logits
        found: Tensor = (logits[0] / branch.temperature).log_softmax(-1)
        return found


@dataclass
class Token:
    """A learnt token and all that its loss depends on."""

    policy: Tensor  # log-prob, differentiable
    sampler: float
    start: float  # log-prob under the policy at the step's start
    teacher: float
    references: dict[str, float]
    advantage: float
    entropy: Tensor | None = None  # of the distribution it was drawn from, differentiable

    def anchor(self, config: TrainConfig) -> float:
        return self.sampler if config.anchor == "sampler" else self.start


@dataclass
class Clips:
    """Learnt tokens that a bound of a loss decided about, and that the gate left out or truncated."""

    low: set[int] = field(default_factory=set)  # ids of tokens
    high: set[int] = field(default_factory=set)
    masked_rollouts: int = 0
    masked_tokens: int = 0
    truncated: int = 0


@dataclass
class Result:
    loss: Tensor
    clips: Clips
    num_tokens: int


@dataclass(frozen=True)
class Policies:
    """Where log-probs come from. `references` has "base" (`None`: no adapter) and checkpoints by their step."""

    model: PlainModel
    policy: Adapter
    start: Adapter
    references: Mapping[str, Adapter | None]


def objective(rollouts: Sequence[Rollout], config: TrainConfig, policies: Policies) -> Result:
    """The loss of one update over `rollouts`; its gradient comes from `loss.backward()`."""
    tokens = [
        _tokens(rollout, advantage, policies)
        for rollout, advantage in zip(rollouts, _advantages(rollouts, config), strict=True)
    ]
    clips = Clips()
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    if isinstance(config.terms[0], DpoConfig):
        return Result(_dpo(rollouts, tokens, config.terms[0], config.mismatch, clips), clips, num_tokens)
    kl_reward = [term for term in config.terms if isinstance(term, KlConfig) and term.where == "reward"]
    for term in kl_reward:
        _take_kl_off(rollouts, tokens, term, config)
    total = torch.zeros((), dtype=torch.float64)
    for number, rollout in enumerate(rollouts):
        scale = _scale(rollout, rollouts, config)
        is_masked = config.mismatch is not None and _is_mismatched(tokens[number], config.mismatch)
        clips.masked_rollouts += is_masked
        for branch in tokens[number]:
            factors = _gate(branch, config.mismatch, is_masked, clips)
            for term in config.terms:
                if term not in kl_reward:
                    losses = LOSSES[term.type](branch, term, config, clips)
                    for factor, loss in zip(factors, losses, strict=True):
                        total = total + scale * term.weight * factor * loss
    return Result(total, clips, num_tokens)


# -- from rewards to weighted tokens --


def _advantages(rollouts: Sequence[Rollout], config: TrainConfig) -> list[float]:
    """Reward less its baseline, over its scale."""
    rewards = [rollout.reward for rollout in rollouts]
    result = []
    for number, rollout in enumerate(rollouts):
        group = [rewards[i] for i, other in enumerate(rollouts) if other.group == rollout.group]
        others = [rewards[i] for i, other in enumerate(rollouts) if other.group == rollout.group and i != number]
        baseline = statistics.fmean(group if config.baseline == "mean" else others)
        scale = {
            "none": 1.0,
            "group": statistics.pstdev(group) + 1e-6,
            "batch": statistics.pstdev(rewards) + 1e-6,
            "mean": statistics.fmean(group),
        }[config.scale_rewards]
        result.append((rewards[number] - baseline) / scale)
    return result


def _tokens(rollout: Rollout, advantage: float, policies: Policies) -> list[list[Token]]:
    result = []
    for branch in rollout.branches:
        found = policies.model.distributions(branch, policies.policy)
        policy = [found[place - 1, branch.token_ids[place]] for place in branch.learnt]
        entropy = -(found.exp() * found).sum(-1)
        with torch.no_grad():
            start = policies.model.logprobs(branch, policies.start)
            references = {name: policies.model.logprobs(branch, a) for name, a in policies.references.items()}
        result.append(
            [
                Token(
                    policy=policy[i],
                    sampler=branch.sampling_logprobs[place],
                    start=start[i].item(),
                    teacher=branch.teacher_logprobs[place],
                    references={name: values[i].item() for name, values in references.items()},
                    advantage=advantage,
                    entropy=entropy[place - 1],
                )
                for i, place in enumerate(branch.learnt)
            ]
        )
    return result


def _scale(rollout: Rollout, rollouts: Sequence[Rollout], config: TrainConfig) -> float:
    """What one token of `rollout` counts in the loss of the update."""
    match config.normalize:
        case "token":  # the mean over all tokens
            return 1 / sum(other.num_tokens for other in rollouts)
        case "rollout":  # the mean over rollouts of the mean over their tokens
            return 1 / (len(rollouts) * rollout.num_tokens)
        case "group":  # the mean over groups of the mean over their tokens
            of_group = sum(other.num_tokens for other in rollouts if other.group == rollout.group)
            return 1 / (len({other.group for other in rollouts}) * of_group)
        case divisor:  # the mean over rollouts of the sum over their tokens, divided by a constant
            return 1 / (len(rollouts) * divisor)


def _take_kl_off(
    rollouts: Sequence[Rollout], tokens: list[list[list[Token]]], term: KlConfig, config: TrainConfig
) -> None:
    """A_t -= beta * (KL_t - mean KL), with a mean that leaves the sum of all advantages, as they are weighted, alone."""
    scales = [_scale(rollout, rollouts, config) for rollout in rollouts]
    found = []
    for scale, branches in zip(scales, tokens, strict=True):
        for branch in branches:
            for token in branch:
                found.append((scale, token, _kl_estimate(token.sampler - token.references[str(term.reference)], term)))
    mean = sum(scale * kl for scale, _, kl in found) / sum(scale for scale, _, _ in found)
    for _, token, kl in found:
        token.advantage -= term.weight * (kl - mean)


def _gate(branch: list[Token], gate: MismatchConfig | None, is_masked: bool, clips: Clips) -> list[float]:
    """Factors of the branch's tokens: 0 for what the policy did not produce, else the truncated ratio or 1."""
    if gate is None:
        return [1.0] * len(branch)
    if is_masked:
        clips.masked_tokens += len(branch)
        return [0.0] * len(branch)
    factors = []
    for token in branch:
        ratio = math.exp(token.start - token.sampler)
        if gate.mask_tokens and not gate.mask_tokens[0] <= ratio <= gate.mask_tokens[1]:
            clips.masked_tokens += 1
            factors.append(0.0)
        elif gate.truncate is None:
            factors.append(1.0)
        else:
            clips.truncated += ratio > gate.truncate
            factors.append(min(ratio, gate.truncate))
    return factors


def _is_mismatched(branches: list[list[Token]], gate: MismatchConfig) -> bool:
    """Whether a rollout, all its branches together, is outside of bounds that the test has set."""
    assert gate.rollouts is not None
    ratios = [math.exp(token.start - token.sampler) for branch in branches for token in branch]
    mean = math.prod(ratios) ** (1 / len(ratios))
    outlier = any(not gate.tokens[0] <= ratio <= gate.tokens[1] for ratio in ratios)
    return outlier or not gate.rollouts[0] <= mean <= gate.rollouts[1]


# -- losses: the learnt tokens of a branch to as many numbers --


def _ppo(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    """Case by case, which is what the minimum amounts to."""
    losses = []
    for token in branch:
        ratio = (token.policy - token.anchor(config)).exp()
        a = token.advantage
        if a > 0 and ratio > 1 + term.clip_high:
            clips.high.add(id(token))
            losses.append(_constant(-(1 + term.clip_high) * a))
        elif a < 0 and ratio < 1 - term.clip_low:
            clips.low.add(id(token))
            losses.append(_constant(-(1 - term.clip_low) * a))
        else:
            losses.append(-ratio * a)
    return losses


def _dppo(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    losses = []
    for token in branch:
        anchor, a = token.anchor(config), token.advantage
        moved = math.exp(token.policy.item()) - math.exp(anchor)
        log_ratio = token.policy - anchor
        if a > 0 and moved > term.max_move:
            clips.high.add(id(token))
            losses.append(_constant(0.0))
        elif a < 0 and moved < -term.max_move:
            clips.low.add(id(token))
            losses.append(_constant(0.0))
        elif a == 0:
            losses.append(_constant(0.0))
        elif log_ratio.exp() > 5:
            clips.high.add(id(token))
            losses.append(-a * 5 + term.log_ratio_penalty * log_ratio**2)
        else:
            losses.append(-a * log_ratio.exp() + term.log_ratio_penalty * log_ratio**2)
    return losses


def _gspo(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    """Equation 5 of the paper: one ratio, one clip, differentiated as it stands; the same loss at every token.

    The gradient is that of GSPO-token where all tokens of the branch have the same advantage and the same factor.
    """
    a = branch[0].advantage
    ratio = (sum(token.policy - token.anchor(config) for token in branch) / len(branch)).exp()
    loss = -ratio * a
    if a > 0 and ratio > 1 + term.clip_high:
        clips.high.update(id(token) for token in branch)
        loss = _constant(-(1 + term.clip_high) * a)
    elif a < 0 and ratio < 1 - term.clip_low:
        clips.low.update(id(token) for token in branch)
        loss = _constant(-(1 - term.clip_low) * a)
    return [loss] * len(branch)


def _sapo(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    losses = []
    for token in branch:
        ratio = (token.policy - token.anchor(config)).exp()
        steepness = term.temperature_positive if token.advantage > 0 else term.temperature_negative
        losses.append(-token.advantage * 4 / (steepness * (1 + (-steepness * (ratio - 1)).exp())))
    return losses


def _weighted(
    weigh: Callable[[float, Any], float], credit: Callable[[Token, Any], float]
) -> Callable[[list[Token], Any, TrainConfig, Clips], list[Tensor]]:
    """-w(ratio) * credit * log pi with constants w and credit."""

    def losses(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
        result = []
        for token in branch:
            ratio = math.exp(token.policy.item() - token.anchor(config))
            weight = weigh(ratio, term)
            if weight > ratio:
                clips.low.add(id(token))
            elif weight < ratio:
                clips.high.add(id(token))
            result.append(-weight * credit(token, term) * token.policy)
        return result

    return losses


def _advantage(token: Token, term: Any) -> float:
    return token.advantage


def _teacher_gain(token: Token, term: Any) -> float:
    return token.teacher - token.policy.item()


def _sft(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    return [-token.policy if token.advantage > 0 else _constant(0.0) for token in branch]


def _kl(branch: list[Token], term: Any, config: TrainConfig, clips: Clips) -> list[Tensor]:
    losses = []
    for token in branch:
        ratio: Any = (token.policy - token.anchor(config)).exp()
        if ratio > 5:
            clips.high.add(id(token))
            ratio = 5.0
        if term.estimator == "k2":
            ratio = ratio.detach() if isinstance(ratio, Tensor) else ratio
        losses.append(ratio * _kl_estimate(token.policy - token.references[str(term.reference)], term))
    return losses


def _kl_estimate(difference: Any, term: KlConfig) -> Any:
    match term.estimator:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
        case "k3":
            inverse = (-difference).exp() if isinstance(difference, Tensor) else math.exp(-difference)
            return inverse - 1 + difference


def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


LOSSES: dict[str, Callable[[list[Token], Any, TrainConfig, Clips], list[Tensor]]] = {
    "ppo": _ppo,
    "dppo": _dppo,
    "gspo": _gspo,
    "sapo": _sapo,
    "cispo": _weighted(lambda ratio, term: min(max(ratio, 1 - term.clip_low), 1 + term.clip_high), _advantage),
    "reinforce": _weighted(lambda ratio, term: ratio, _advantage),
    "distill": _weighted(lambda ratio, term: min(ratio, 5.0), _teacher_gain),
    "sft": _sft,
    "kl": _kl,
    "entropy": lambda branch, *_: [-token.entropy for token in branch],
}


def _dpo(
    rollouts: Sequence[Rollout],
    tokens: list[list[list[Token]]],
    term: DpoConfig,
    gate: MismatchConfig | None,
    clips: Clips,
) -> Tensor:
    """The mean over pairs, differentiated through both rollouts of each."""
    gains = []
    for branches in tokens:
        gain = _constant(0.0)
        for branch in branches:
            for token in branch:
                reference = token.sampler if term.reference == "sampler" else token.references[str(term.reference)]
                gain = gain + token.policy - reference
        gains.append(gain)
    usable = [gate is None or not _is_mismatched(branches, gate) for branches in tokens]
    pairs = _pairs(rollouts)
    kept = [pair for pair in pairs if usable[pair[0]] and usable[pair[1]]]
    losses = []
    for chosen, rejected in kept:
        margin = term.beta * (gains[chosen] - gains[rejected])
        # -log sigmoid(m) = log(1 + exp(-m))
        losses.append((1 + (-margin).exp()).log())
    paired, learnt = ({rollout for pair in found for rollout in pair} for found in (pairs, kept))
    clips.masked_rollouts = sum(not usable[rollout] for rollout in paired)
    clips.masked_tokens = sum(rollouts[rollout].num_tokens for rollout in paired - learnt)
    return term.weight * sum(losses) / len(losses)


def _pairs(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """(best, worst) of every group."""
    pairs = []
    for group in sorted({rollout.group for rollout in rollouts}):
        members = [i for i, rollout in enumerate(rollouts) if rollout.group == group]
        members.sort(key=lambda i: rollouts[i].reward)
        pairs.append((members[-1], members[0]))
    return pairs
