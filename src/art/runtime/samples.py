"""From submitted trajectories to training samples: choices are resolved to recorded exchanges, never re-tokenised.

    WireGroup[] --resolve--> ResolvedTrajectory[][] --plan_step--> StepPlan (samples with advantages, and the ledger)

The ledger closes over the tokens that the model sampled for the submitted trajectories:

    sampled = trained + context + dropped(by reason)

where *context* are tokens of the same trajectories that another model sampled: the policy saw them and does not learn
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from art.config import TrainConfig
from art.errors import NothingTrainableError, TrainingError, TrajectoryMismatchError
from art.gateway.conversations import canonical_message
from art.gateway.recorder import Exchange
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from art.trainer.advantages import group_advantages
from art.trainer.types import TrainingSample


@dataclass(slots=True)
class Path:
    """A token path under construction: the exchanges of one history that extend one another."""

    token_ids: list[int]
    sampled: list[tuple[int, Exchange]]
    """(index of the first sampled token, exchange) in order."""


@dataclass(slots=True, kw_only=True)
class ResolvedTrajectory:
    """One rollout as exact tokens."""

    label: str
    """Where it stands in the request, e.g. `groups[2].trajectories[5]`; errors name it."""
    reward: float
    paths: list[Path] = field(default_factory=list)
    context_tokens: int = 0
    untracked_choices: int = 0
    """Choices without a recorded exchange (made elsewhere): not trainable."""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(exchange.completion_token_ids) for path in self.paths for _, exchange in path.sampled)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What goes to the trainer, and the account of what does not."""

    samples: list[TrainingSample]
    ledger: dict[str, float]
    metrics: dict[str, float]
    findings: list[str] = field(default_factory=list)
    """What a person should know, in plain words, e.g. which groups were left out."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """(chosen, rejected) rollout ids, for the loss dpo."""


def exchange_ids(groups: Iterable[WireGroup]) -> list[str]:
    """Every exchange that the groups name, once each."""
    ids = {
        exchange_id
        for group in groups
        for trajectory in group.trajectories
        for history in trajectory.histories
        for item in history.items
        if (exchange_id := _exchange_id(item)) is not None
    }
    return sorted(ids)


def resolve(
    groups: list[WireGroup], exchanges: Mapping[str, Exchange], *, project: str, name: str
) -> list[list[ResolvedTrajectory]]:
    """Exact token paths of every trajectory.

    Raises:
        TrajectoryMismatchError: an unknown exchange id, or a text that differs from what was sampled or sent.
    """
    return [
        [
            _resolve_trajectory(trajectory, exchanges, f"groups[{g}].trajectories[{t}]", (project, name))
            for t, trajectory in enumerate(group.trajectories)
        ]
        for g, group in enumerate(groups)
    ]


def plan_step(groups: list[list[ResolvedTrajectory]], config: TrainConfig, *, step: int) -> StepPlan:
    """Advantages and samples of one reinforcement-learning step that starts from checkpoint `step`.

    Raises:
        TrajectoryError: a reward is not finite.
        NothingTrainableError: nothing is left to learn from; the message says why.
    """
    samples: list[TrainingSample] = []
    dropped: Counter[str] = Counter()
    without_spread: list[str] = []
    for g, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in group]
        advantages = group_advantages(rewards, config, names=[trajectory.label for trajectory in group])
        if not advantages.has_spread:
            without_spread.append(f"groups[{g}]")
            dropped["no_reward_spread"] += sum(trajectory.sampled_tokens for trajectory in group)
            continue
        for trajectory, advantage in zip(group, advantages.values, strict=True):
            samples += _samples(trajectory, advantage)
    trajectories = [trajectory for group in groups for trajectory in group]
    trained = sum(sum(sample.loss_mask) for sample in samples)
    own = sum(trajectory.sampled_tokens for trajectory in trajectories)
    context = sum(trajectory.context_tokens for trajectory in trajectories)
    untracked = sum(trajectory.untracked_choices for trajectory in trajectories)
    ledger: dict[str, float] = {
        "ledger/sampled_tokens": own + context,
        "ledger/trained_tokens": trained,
        "ledger/context_tokens": context,
        "ledger/untracked_choices": untracked,
        **{f"ledger/dropped_tokens/{reason}": count for reason, count in dropped.items()},
    }
    assert own + context == trained + context + sum(dropped.values()), f"the ledger does not close: {ledger}"
    if not samples:
        raise NothingTrainableError(_nothing_trainable(len(groups), len(without_spread), own, untracked))
    versions = [sample.policy_version for sample in samples]
    metrics: dict[str, float] = {
        "data/step_num_groups_submitted": len(groups),
        "data/step_num_groups_trainable": len(groups) - len(without_spread),
        "data/step_num_trajectories": len(trajectories),
        "offpolicy/max_staleness": step - min(versions),
    }
    findings = []
    if without_spread:
        findings.append(f"{', '.join(without_spread)}: all rewards are equal, nothing to learn")
    return StepPlan(samples=samples, ledger=ledger, metrics=metrics, findings=findings)


def close_ledger(ledger: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    """The ledger of a step with what the trainer itself left out, checked against the trainer's own count.

    Args:
        ledger: of the step's plan.
        trained: metrics of the step.

    Raises:
        TrainingError: plan and trainer count different numbers of tokens.
    """
    planned, counted = ledger["ledger/trained_tokens"], trained["data/step_trainable_tokens"]
    if planned != counted:
        raise TrainingError(f"the ledger does not close: {planned:.0f} tokens were planned, {counted:.0f} were trained")
    left_out = trained.get("offpolicy/mismatch_masked_tokens", 0.0)
    if left_out == 0:
        return ledger
    return ledger | {
        "ledger/trained_tokens": planned - left_out,
        "ledger/dropped_tokens/sampler_mismatch": left_out,
    }


def _resolve_trajectory(
    trajectory: WireTrajectory, exchanges: Mapping[str, Exchange], label: str, model: tuple[str, str]
) -> ResolvedTrajectory:
    resolved = ResolvedTrajectory(label=label, reward=trajectory.reward)
    seen: set[str] = set()  # a history that repeats another's turns must not train them twice
    for h, history in enumerate(trajectory.histories):
        where = label if len(trajectory.histories) == 1 else f"{label}.histories[{h}]"
        for exchange in _checked_exchanges(history, exchanges, where, resolved):
            if exchange.id in seen:
                continue
            seen.add(exchange.id)
            if (exchange.project, exchange.name) != model:
                resolved.context_tokens += len(exchange.completion_token_ids)
                continue
            _check_trainable(exchange, where)
            _extend(resolved.paths, exchange)
    return resolved


def _checked_exchanges(
    history: WireHistory, exchanges: Mapping[str, Exchange], where: str, resolved: ResolvedTrajectory
) -> list[Exchange]:
    """The exchanges of a history, each compared with the messages that stand around it."""
    found: list[Exchange] = []
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(history.items):
        choice = item.get("choice")
        if choice is None:
            messages.append(item)
            continue
        exchange_id = _exchange_id(item)
        if exchange_id is None:
            resolved.untracked_choices += 1
        elif (exchange := exchanges.get(exchange_id)) is None:
            raise TrajectoryMismatchError(
                f"{where}.messages_and_choices[{i}]: exchange {exchange_id!r} is not recorded on this server. "
                "Train a trajectory on the server that sampled it"
            )
        else:
            _check_unchanged(exchange, choice["message"], messages, f"{where}.messages_and_choices[{i}]")
            found.append(exchange)
        messages.append(choice["message"])
    return found


def _check_unchanged(exchange: Exchange, answer: dict[str, Any], before: list[dict[str, Any]], where: str) -> None:
    recorded = canonical_message(exchange.message)
    if canonical_message(answer) != recorded:
        raise TrajectoryMismatchError(
            f"{where}: the answer was changed after sampling: recorded {_short(exchange.message)}, given "
            f"{_short(answer)}. "
            "Keep choices as they came; to train on other text use `train_sft`"
        )
    sent = exchange.request_messages
    for j, (given, original) in enumerate(zip(before, sent, strict=False)):
        if canonical_message(given) != canonical_message(original):
            raise TrajectoryMismatchError(
                f"{where}: message {j} before it differs from what the model was sent: sent {_short(original)}, given "
                f"{_short(given)}. Keep messages as they were sent; another conversation belongs in "
                "`additional_histories`"
            )
    if len(before) != len(sent):
        raise TrajectoryMismatchError(
            f"{where}: {len(before)} messages stand before this answer, but the model was sent {len(sent)}. "
            "Keep messages as they were sent; another conversation belongs in `additional_histories`"
        )


def _check_trainable(exchange: Exchange, where: str) -> None:
    if exchange.temperature <= 0:
        raise TrajectoryMismatchError(
            f"{where}: exchange {exchange.id} was sampled greedily (temperature 0), which has no policy gradient; "
            "sample rollouts for training with temperature 1"
        )
    if exchange.top_p < 1:
        raise TrajectoryMismatchError(
            f"{where}: exchange {exchange.id} was sampled with top_p={exchange.top_p}; the cut-off tail biases the "
            "importance "
            "ratio. Sample rollouts for training with top_p=1"
        )


def _extend(paths: list[Path], exchange: Exchange) -> None:
    """Add the exchange to the path that it continues, else begin a new one."""
    prompt = exchange.prompt_token_ids
    for path in reversed(paths):
        length = len(path.token_ids)
        same_temperature = path.sampled[0][1].temperature == exchange.temperature
        if same_temperature and len(prompt) >= length and prompt[:length] == path.token_ids:
            path.sampled.append((len(prompt), exchange))
            path.token_ids = prompt + exchange.completion_token_ids
            return
    paths.append(Path(token_ids=prompt + exchange.completion_token_ids, sampled=[(len(prompt), exchange)]))


def _samples(trajectory: ResolvedTrajectory, advantage: float) -> list[TrainingSample]:
    samples = []
    for p, path in enumerate(trajectory.paths):
        size = len(path.token_ids)
        loss_mask, logprobs, advantages = [False] * size, [0.0] * size, [0.0] * size
        for start, exchange in path.sampled:
            end = start + len(exchange.completion_token_ids)
            loss_mask[start:end] = [True] * (end - start)
            logprobs[start:end] = exchange.sampling_logprobs
            advantages[start:end] = [advantage] * (end - start)
        exchanges = [exchange for _, exchange in path.sampled]
        samples.append(
            TrainingSample(
                sample_id=f"{trajectory.label}.paths[{p}]",
                rollout_id=trajectory.label,
                token_ids=path.token_ids,
                loss_mask=loss_mask,
                sampling_logprobs=logprobs,
                advantages=advantages,
                temperature=exchanges[0].temperature,
                policy_version=min(exchange.policy_version for exchange in exchanges),
            )
        )
    return samples


def _exchange_id(item: dict[str, Any]) -> str | None:
    choice = item.get("choice")
    return choice.get("exchange_id") if isinstance(choice, dict) else None


def _short(message: Mapping[str, Any], limit: int = 120) -> str:
    text = repr({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _nothing_trainable(num_groups: int, without_spread: int, own_tokens: int, untracked: int) -> str:
    if own_tokens == 0:
        found = f"{untracked} choices without an exchange id" if untracked else "no choices"
        return (
            f"no trajectory holds tokens that this model sampled ({found} in {num_groups} groups). Append the "
            "`Choice` objects "
            "of `model.openai_client()` to `messages_and_choices`, not copies of their text"
        )
    return (
        f"all {without_spread} groups have equal rewards, so there is nothing to learn from. Give rewards that "
        "differ within a "
        "group, use more rollouts per group, or harder or easier scenarios"
    )
