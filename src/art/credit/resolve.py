"""Find the exact tokens of submitted trajectories: each choice names a recorded exchange. No text is tokenised again.

WireGroup[] --resolve--> ResolvedGroup[] --plan_step (art.credit.plan)--> StepPlan
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from art.errors import TrajectoryError, TrajectoryMismatchError
from art.gateway.tool_calls import has_unread_call
from art.protocol.chat import conversation_digest, essence, message_digest
from art.protocol.training import WireAnswer, WireGroup, WireHistory, WireTrajectory
from art.record.recorded_answers import RecordedAnswer, TokenArray

FindAnswers = Callable[[Iterable[str]], Mapping[str, RecordedAnswer]]
"""Function that reads exchanges from the record, by id: `Recorder.find_answers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAnswer:
    """The sampled tokens of one exchange (recorded request and answer) on a token path. It holds no tokens itself."""

    exchange_id: str
    choice: int | None
    """Index of the choice in the trajectory's first history; `None` in a further history."""
    start: int
    """Index of the first sampled token on the path: the prompt of an exchange holds everything before it."""
    num_tokens: int
    policy_version: int
    temperature: float = 1.0
    is_cut_off: bool = False
    """Whether the answer reached its largest number of tokens."""
    is_malformed: bool = False
    """Whether it has a tool call that could not be read."""
    num_observed: int = 0
    """Number of tokens between the answer before it on the path and itself that the environment produced: tool results
    and messages of users, with the template's tokens around them."""


@dataclass(slots=True)
class ResolvedPath:
    """Exchanges of a trajectory that extend one another: each prompt begins with all tokens of the exchange before."""

    answers: list[ResolvedAnswer]  # in order

    @property
    def sampled_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)


@dataclass(slots=True, kw_only=True)
class ResolvedTrajectory:
    """One rollout as exact tokens, with its rewards."""

    group: int
    """Index of its group in the request."""
    index: int
    """Its index in the group."""
    reward: float
    has_reward: bool = True
    """Whether `reward`, a turn reward or a token reward was set."""
    turn_rewards: list[float] = field(default_factory=list)
    """One per choice; empty for none."""
    token_rewards: list[list[float]] = field(default_factory=list)
    """For each choice, one per sampled token; empty for none."""
    num_choices: int = 0
    """Number of choices in the first history, from this model or another one; turn and token rewards refer to them."""
    paths: list[ResolvedPath] = field(default_factory=list)
    context_tokens: int = 0
    """Number of tokens that another model sampled."""
    policy_fault: bool = False
    """Whether the trajectory says that the policy spoilt it, e.g. by an invalid action."""
    untracked_choices: int = 0
    """Number of choices without a recorded exchange. They come from elsewhere and cannot be trained."""
    copied_answers: int = 0
    """Number of plain assistant messages: written by hand, or copies of the texts of choices."""

    @property
    def label(self) -> str:
        """Its place in the request; errors name it."""
        return f"groups[{self.group}].trajectories[{self.index}]"

    @property
    def sampled_tokens(self) -> int:
        return sum(path.sampled_tokens for path in self.paths)

    @property
    def is_truncated(self) -> bool:
        """Whether a token limit cut off an answer of the model."""
        return any(answer.is_cut_off for answer in self.answers())

    def answers(self) -> Iterator[ResolvedAnswer]:
        return (answer for path in self.paths for answer in path.answers)


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    index: int
    """Its index in the request."""
    trajectories: list[ResolvedTrajectory]

    @property
    def label(self) -> str:
        return f"groups[{self.index}]"


def exchange_ids(groups: Iterable[WireGroup]) -> list[str]:
    """The ids of all exchanges that the groups name, each once."""
    ids: set[str | None] = set()
    for group in groups:
        for history in (history for trajectory in group.trajectories for history in trajectory.histories):
            ids |= {_exchange_id(item) for item in history.items}
            ids |= {answer.exchange_id for answer in history.answers or ()}
    return sorted(exchange_id for exchange_id in ids if exchange_id is not None)


def resolve(groups: list[WireGroup], find: FindAnswers, *, project: str, name: str) -> list[ResolvedGroup]:
    """Find the exact token paths of every trajectory. Groups without trajectories are left out.

    The record is read group by group, so that the tokens of one group at a time are in memory.

    Args:
        find: reads the record. Exchanges of other projects are taken for unknown, so that no error shows them.

    Raises:
        TrajectoryMismatchError: an exchange id is unknown, a text differs from what was sampled or sent, or an answer
            was sampled at temperature 0 or with `top_p` below 1.
        TrajectoryError: turn or token rewards do not fit the choices.
    """
    resolved = []
    for index, group in enumerate(groups):
        recorded = find(exchange_ids([group]))
        own = {exchange_id: exchange for exchange_id, exchange in recorded.items() if exchange.project == project}
        digests: dict[Hashable, bytes] = {}
        try:
            trajectories = [
                _resolve_trajectory(trajectory, own, (index, t), (project, name), digests)
                for t, trajectory in enumerate(group.trajectories)
            ]
        except TrajectoryError as error:
            error.group = index
            raise
        if trajectories:
            resolved.append(ResolvedGroup(index, trajectories))
    return resolved


def _resolve_trajectory(
    trajectory: WireTrajectory,
    exchanges: Mapping[str, RecordedAnswer],
    place: tuple[int, int],
    model: tuple[str, str],
    digests: dict[Hashable, bytes],
) -> ResolvedTrajectory:
    """Find the exchanges of a trajectory, check that nothing was changed since, and join them to token paths."""
    resolved = ResolvedTrajectory(
        group=place[0],
        index=place[1],
        reward=trajectory.reward or 0.0,
        has_reward=trajectory.reward is not None or bool(trajectory.turn_rewards or trajectory.token_rewards),
        turn_rewards=trajectory.turn_rewards,
        token_rewards=trajectory.token_rewards,
        policy_fault=trajectory.policy_fault,
    )
    ends: list[tuple[TokenArray, RecordedAnswer]] = []  # of each path: its tokens, and its last exchange
    seen: set[str] = set()  # a history that repeats another's turns must not train them twice
    for h, history in enumerate(trajectory.histories):
        where = resolved.label + (f".histories[{h}]" if len(trajectory.histories) > 1 else "")
        if history.answers is None:
            choices = _checked_exchanges(history, exchanges, where, model[0])
        else:
            choices = [_checked_answer(one, exchanges, where, model[0], digests) for one in history.answers]
        resolved.untracked_choices += choices.count(None)
        resolved.copied_answers += history.num_copied_answers
        resolved.copied_answers += sum(item.get("role") == "assistant" for item in history.items)
        if h == 0:
            resolved.num_choices = len(choices)
            _check_lengths(trajectory, choices, resolved.label)
        for c, exchange in enumerate(choices):
            if exchange is None or exchange.id in seen:
                continue
            seen.add(exchange.id)
            if (exchange.project, exchange.name) != model:
                resolved.context_tokens += len(exchange.completion_token_ids)
                continue
            _check_trainable(exchange, where)
            _extend(resolved.paths, ends, exchange, choice=c if h == 0 else None)
    return resolved


def _checked_exchanges(
    history: WireHistory, exchanges: Mapping[str, RecordedAnswer], where: str, project: str
) -> list[RecordedAnswer | None]:
    """Find the exchange of each choice of a history, and compare it with the messages around the choice. `None` for a
    choice that was made elsewhere."""
    choices: list[RecordedAnswer | None] = []
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(history.items):
        choice = item.get("choice")
        if choice is not None:
            place = f"{where}.messages_and_choices[{i}]"
            exchange = _find(_exchange_id(item), exchanges, place, project)
            if exchange is not None:
                _check_unchanged(exchange, choice["message"], messages, place)
            choices.append(exchange)
        messages.append(item if choice is None else choice["message"])
    return choices


def _checked_answer(
    answer: WireAnswer,
    exchanges: Mapping[str, RecordedAnswer],
    where: str,
    project: str,
    digests: dict[Hashable, bytes],
) -> RecordedAnswer | None:
    """Find the exchange of an answer that was sent without texts, and compare its digest. `None` as above.

    `digests` are those of messages that were hashed already: turns of a rollout repeat the same messages.
    """
    exchange = _find(answer.exchange_id, exchanges, where, project)
    if exchange is None:
        return None

    def digest(message: Mapping[str, Any]) -> bytes:
        if message.get("tool_calls"):
            return message_digest(message)
        key = (message["role"], message.get("content"), message.get("name"))
        if key not in digests:
            digests[key] = message_digest(message)
        return digests[key]

    if answer.digest != conversation_digest(map(digest, [*exchange.request_messages(), exchange.message()])):
        raise TrajectoryMismatchError(
            f"{where}: the answer of exchange {exchange.id}, or a message before it, was changed after sampling. Keep "
            "choices and messages as they were; to train on other text use `train_sft`"
        )
    return exchange


def _find(
    exchange_id: str | None, exchanges: Mapping[str, RecordedAnswer], where: str, project: str
) -> RecordedAnswer | None:
    if exchange_id is None:
        return None
    if (exchange := exchanges.get(exchange_id)) is None:
        raise TrajectoryMismatchError(
            f"{where}: exchange {exchange_id!r} of project {project} is not recorded on this server. Train a "
            "trajectory on the server and in the project that sampled it, and before its record is deleted "
            "(`ServerConfig.record_retention_s`)"
        )
    return exchange


def _check_lengths(trajectory: WireTrajectory, choices: list[RecordedAnswer | None], label: str) -> None:
    """Refuse turn and token rewards that do not fit the choices of the first history."""
    lengths = {"turn_rewards": len(trajectory.turn_rewards), "token_rewards": len(trajectory.token_rewards)}
    for name, length in lengths.items():
        if length not in (0, len(choices)):
            raise TrajectoryError(
                f"{label} has {length} {name} for {len(choices)} choices; give one per choice, or none at all"
            )
    for c, (rewards, exchange) in enumerate(zip(trajectory.token_rewards, choices, strict=False)):
        num_tokens = len(exchange.completion_token_ids) if exchange is not None else 0
        if len(rewards) != num_tokens:
            sampled = f"{num_tokens} sampled tokens" if exchange is not None else "no recorded tokens"
            raise TrajectoryError(
                f"{label}.token_rewards[{c}] has {len(rewards)} rewards, but that choice has {sampled}; give one per "
                "token"
            )


def _check_unchanged(
    exchange: RecordedAnswer, answer: dict[str, Any], before: list[dict[str, Any]], where: str
) -> None:
    recorded = exchange.message()
    if essence(answer) != essence(recorded):
        raise TrajectoryMismatchError(
            f"{where}: the answer was changed after sampling: recorded {_short(recorded)}, got "
            f"{_short(answer)}. Keep choices as they came; to train on other text use `train_sft`"
        )
    sent = exchange.request_messages()
    for j, (message, original) in enumerate(zip(before, sent, strict=False)):
        if essence(message) != essence(original):
            raise TrajectoryMismatchError(
                f"{where}: message {j} before it differs from what the model was sent: sent {_short(original)}, got "
                f"{_short(message)}. Keep messages as they were sent; another conversation belongs in "
                "`additional_histories`"
            )
    if len(before) != len(sent):
        raise TrajectoryMismatchError(
            f"{where}: {len(before)} messages come before this answer, but the model was sent {len(sent)}. "
            "Keep messages as they were sent; another conversation belongs in `additional_histories`"
        )


def _check_trainable(exchange: RecordedAnswer, where: str) -> None:
    if exchange.temperature <= 0:
        raise TrajectoryMismatchError(
            f"{where}: exchange {exchange.id} was sampled greedily (temperature 0), which has no policy gradient; "
            "sample rollouts for training with temperature 1"
        )
    if exchange.top_p < 1 and (exchange.constraint is None or exchange.constraint.kept is None):
        raise TrajectoryMismatchError(
            f"{where}: exchange {exchange.id} was sampled with top_p={exchange.top_p}, and the tokens that this kept "
            "are not recorded, so its importance ratio is unknown. Sample rollouts for training with top_p=1, or from "
            "an engine that reports the tokens it kept"
        )


def _extend(
    paths: list[ResolvedPath],
    ends: list[tuple[TokenArray, RecordedAnswer]],
    exchange: RecordedAnswer,
    *,
    choice: int | None,
) -> None:
    """Add the exchange to the path that it continues, or begin a new path. `ends` are those of the paths."""
    prompt = exchange.prompt_token_ids
    whole = np.concatenate([prompt, exchange.completion_token_ids])
    answer = ResolvedAnswer(
        exchange_id=exchange.id,
        choice=choice,
        start=len(prompt),
        num_tokens=len(exchange.completion_token_ids),
        policy_version=exchange.policy_version,
        temperature=exchange.temperature,
        is_cut_off=exchange.finish_reason == "length",
        is_malformed=exchange.has_tools and has_unread_call(exchange.message()),
    )
    for number in reversed(range(len(paths))):
        path, (known, last) = paths[number], ends[number]
        start = prompt[: len(known)]
        is_fitting = path.answers[0].temperature == exchange.temperature and len(start) == len(known)
        # The last token first: branches of a conversation mostly differ there, and the rest need not be read.
        if is_fitting and np.array_equal(start[-1:], known[-1:]) and np.array_equal(start, known):
            size = len(last.texts)
            if exchange.texts[:size] == last.texts and len(exchange.texts) == size + 2:
                between = orjson.loads(exchange.texts[size])  # of long conversations, only what is new is read
            else:
                between = exchange.request_messages()[len(last.request_messages()) + 1 :]
            # The environment alone spoke between the two answers, not another model or the user's code.
            if all(message["role"] != "assistant" for message in between):
                answer = replace(answer, num_observed=len(prompt) - len(known))
            path.answers.append(answer)
            ends[number] = (whole, exchange)
            return
    paths.append(ResolvedPath([answer]))
    ends.append((whole, exchange))


def _exchange_id(item: dict[str, Any]) -> str | None:
    choice = item.get("choice")
    return choice.get("exchange_id") if isinstance(choice, dict) else None


def _short(message: Mapping[str, Any], limit: int = 120) -> str:
    text = repr({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
    return text if len(text) <= limit else text[: limit - 3] + "..."
