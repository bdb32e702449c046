"""Makes the index's rows from one logged group: a row per rollout, its words, and sums of its numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from art.trajectory import says_policy_fault
from art.viewer import conversation as talk
from art.viewer.conversation import Row

_SCENARIO_LENGTH = 200
_MAX_TEXT = 1_000_000
"""Characters of one rollout that a search sees."""
_SYLLABLES = re.compile("([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
"""Scripts without spaces between words: kana and Han characters. Each character is a word of its own."""


class RolloutValues(NamedTuple):
    """A row of the table `rollouts`, without the columns that say where it is."""

    scenario: str | None
    scenario_key: int
    """Equal for rollouts of the same scenario: hash of its id, or of the messages before the first answer."""
    reward: float | None
    num_turns: int
    num_tokens: int | None
    stop: str | None
    outcome: str
    started_at: float | None
    duration_s: float | None
    policy_version: int | None
    judge_score: float | None
    first_exchange: str | None


class RolloutEntry(NamedTuple):
    """What the index takes from one rollout."""

    values: RolloutValues
    text: str
    numbers: dict[str, float]
    """Reward and metrics, of which the index keeps sums."""
    exchange_ids: list[str]


def group_entries(group: Row) -> list[RolloutEntry]:
    """Make the entries of a logged group: its trajectories, then its exceptions."""
    metadata = talk.mapping(group.get("metadata"))
    entries = [trajectory_entry(item, metadata) for item in talk.dicts(group.get("trajectories"))]
    return entries + [_exception_entry(item, metadata) for item in talk.dicts(group.get("exceptions"))]


def trajectory_entry(trajectory: Row, group_metadata: Row) -> RolloutEntry:
    """Make the entry of a trajectory. Metadata of its group names the scenario, where its own does not."""
    metadata, metrics = talk.mapping(trajectory.get("metadata")), talk.mapping(trajectory.get("metrics"))
    choices = talk.choices(trajectory)
    main = [choice for _, choice in talk.items(trajectory) if choice is not None]
    scenario, key = scenario_of(trajectory, metadata, group_metadata)
    ids = talk.exchange_ids(trajectory)
    values = RolloutValues(
        scenario=scenario,
        scenario_key=key,
        reward=talk.number(trajectory.get("reward")),
        num_turns=len(choices),
        num_tokens=_num_logprobs(choices),
        stop=talk.text_or_none(main[-1].get("finish_reason")) if main else None,
        outcome=_outcome(metadata, metrics),
        started_at=_seconds(trajectory.get("start_time")),
        duration_s=_duration(metrics, choices),
        policy_version=talk.whole(trajectory.get("initial_policy_version")),
        judge_score=judge_score(metrics),
        first_exchange=ids[0] if ids else None,
    )
    numbers = {name: value for name, item in metrics.items() if (value := talk.number(item)) is not None}
    if values.reward is not None:
        numbers["reward"] = values.reward
    return RolloutEntry(values, searchable("\n".join(talk.texts(trajectory))), numbers, ids)


def _duration(metrics: Row, choices: Sequence[Row]) -> float | None:
    """Return the seconds of a rollout: its metric `duration`, or the time from its first request to its last answer."""
    if (logged := talk.number(metrics.get("duration"))) is not None:
        return logged
    exchanges = [talk.mapping(choice.get("exchange")) for choice in choices]
    starts, ends = (
        [at for exchange in exchanges if (at := talk.number(exchange.get(name))) is not None]
        for name in ("started_at", "ended_at")
    )
    return max(0.0, max(ends) - min(starts)) if starts and ends else None


def scenario_of(trajectory: Row, metadata: Row, group_metadata: Row) -> tuple[str | None, int]:
    """Name the scenario of a rollout, and make a number that is equal for rollouts of the same scenario."""
    for source in (metadata, group_metadata):
        for name in ("scenario_id", "scenario"):
            if isinstance(source.get(name), (str, int)):
                text = str(source[name])
                return text[:_SCENARIO_LENGTH], _hash(b"id", text.encode())
    prompt = talk.prompt(trajectory)
    if not prompt:
        return None, 0
    asked = [message for message in prompt if message.get("role") == "user"] or prompt
    text = " ".join(talk.as_text(asked[-1].get("content")).split())
    return text[:_SCENARIO_LENGTH] or None, _hash(b"prompt", orjson.dumps(prompt, default=str))


def judge_score(metrics: Row) -> float | None:
    """Return the score of the judge that gave the reward; `None` if no judge did."""
    name = judge_name(metrics)
    return None if name is None else talk.number(metrics.get(f"{name}_score"))


def judge_name(metrics: Row) -> str | None:
    """Return the name of the judge that scored a trajectory: the last one that `score_group` applied."""
    if "independent_reward" not in metrics:
        return None
    names = [name.removesuffix("_score") for name in metrics if name.endswith("_score") and "/" not in name]
    return names[-1] if names else None


def searchable(text: str) -> str:
    """Prepare a text for the index of words."""
    text = text[:_MAX_TEXT]
    return text if text.isascii() else _SYLLABLES.sub(r" \1 ", text)


def _exception_entry(exception: Row, group_metadata: Row) -> RolloutEntry:
    scenario, key = scenario_of({}, {}, group_metadata)
    values = RolloutValues(scenario, key, None, 0, None, None, "infra_fault", None, None, None, None, None)
    text = "\n".join(talk.as_text(exception.get(name)) for name in ("type", "message"))
    return RolloutEntry(values, searchable(text), {}, [])


def _outcome(metadata: Row, metrics: Row) -> str:
    if metadata.get("outcome") == "infra_fault":
        return "infra_fault"
    numbers = {name: value for name, item in metrics.items() if (value := talk.number(item)) is not None}
    return "policy_fault" if says_policy_fault(metadata, numbers) else "ok"


def _num_logprobs(choices: Sequence[Row]) -> int | None:
    """The number of sampled tokens, where every answer was logged with its log-probs."""
    counts = [talk.num_logprobs(choice) for choice in choices]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return None


def _hash(kind: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "big", signed=True)
