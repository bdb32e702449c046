"""What the index is made from: files of a run, rows of logged groups, and what training did with them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain, takewhile
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import orjson

from art.errors import InvalidRequestError
from art.storage.layout import ModelPaths, validate_name
from art.storage.step_files import RolloutPlan, read_plans
from art.trajectory import says_policy_fault
from art_page import conversation as talk
from art_page.conversation import Row
from art_page.databases import searchable

TRAIN = "train"


class FileState(NamedTuple):
    """What the disk has of one split and step. All fields are 0 where there is no file."""

    size: int = 0
    changed_ns: int = 0
    plan_ns: int = 0
    """When the folder of the step changed, which has the records of what training did with the rollouts."""


Place = tuple[str, int]
"""Split and step."""


def survey(paths: ModelPaths) -> dict[Place, FileState]:
    """Look at all files of a run, without opening them."""
    plans = {step: entry.stat().st_mtime_ns for step, entry in _numbered(paths.steps, "")}
    states: dict[Place, FileState] = {}
    folder = paths.root / "trajectories"
    splits = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(InvalidRequestError):
                if each.is_dir(follow_symlinks=False):
                    splits.append(validate_name(each.name, param="split"))
    for split in splits:
        for step, entry in _numbered(folder / split, ".jsonl"):
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                if not S_ISREG(stat.st_mode):  # a link may lead to a private file, which an export would publish
                    continue
                plan_ns = plans.get(step, 0) if split == TRAIN else 0
                states[split, step] = FileState(stat.st_size, stat.st_mtime_ns, plan_ns)
    return states


def read_groups(path: Path) -> Iterator[tuple[int, int, Row]]:
    """Yield offset and length in bytes of each complete line, and its group. A damaged line is skipped.

    A last line without a newline counts if it is a JSON object. Else a writer is in the middle of it, or crashed there.

    Raises:
        OSError: the file cannot be read.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            row = read_row(line)
            if row is None and not line.endswith(b"\n"):
                return
            if row is not None and isinstance(row.get("trajectories"), list):
                yield offset, len(line), row
            offset += len(line)


def read_line(path: Path, offset: int, length: int) -> Row | None:
    """Read the group at a byte offset; `None` if the file has changed, and none is there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return read_row(file.read(length))
    except OSError:
        return None


def read_row(line: bytes) -> Row | None:
    """Decode a line; `None` if it is not a JSON object.

    Python's JSON has NaN, and single surrogates, which UTF-8 cannot hold. They become null and question marks.
    """
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            plain = json.dumps(json.loads(line, parse_constant=lambda name: None), ensure_ascii=False)
            row = orjson.loads(plain.encode(errors="replace"))
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def _numbered(folder: Path, suffix: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Yield the entries of a folder that are named by a step, as `ModelPaths` names them."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(suffix)
            is_number = name.isascii() and name.isdecimal() and len(name) < 16
            if is_number and entry.name == f"{int(name):04d}{suffix}":
                yield int(name), entry


_SCENARIO_LENGTH = 200
MOST_NUMBERS = 64
"""Metrics of one rollout that the table can show and filter by."""


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
    metrics: str | None
    """The task's numbers as JSON, at most `MOST_NUMBERS`."""


class RolloutEntry(NamedTuple):
    """What the index takes from one rollout."""

    values: RolloutValues
    text: str
    numbers: dict[str, float]
    """Reward and metrics, of which the index keeps sums."""
    exchange_ids: list[str]

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield the names of its metrics, as choices of the kind `metric`."""
        return (("metric", name) for name in self.numbers if name != "reward")


def group_entries(group: Row) -> list[RolloutEntry]:
    """Make the entries of a logged group: its trajectories, then its exceptions."""
    metadata = talk.mapping(group.get("metadata"))
    entries = [trajectory_entry(item, metadata) for item in talk.dicts(group.get("trajectories"))]
    scenario, key = scenario_of({}, {}, metadata)
    for exception in talk.dicts(group.get("exceptions")):
        values = RolloutValues(scenario, key, None, 0, None, None, "infra_fault", None, None, None, None, None, None)
        text = "\n".join(talk.as_text(exception.get(name)) for name in ("type", "message"))
        entries.append(RolloutEntry(values, searchable(text), {}, []))
    return entries


def trajectory_entry(trajectory: Row, group_metadata: Row) -> RolloutEntry:
    """Make the entry of a trajectory. Metadata of its group names the scenario, where its own does not."""
    metadata, metrics = talk.mapping(trajectory.get("metadata")), talk.mapping(trajectory.get("metrics"))
    numbers = {name: value for name, item in metrics.items() if (value := talk.number(item)) is not None}
    outcome = "policy_fault" if says_policy_fault(metadata, numbers) else "ok"
    choices, ids = talk.choices(trajectory), talk.exchange_ids(trajectory)
    sizes = [talk.num_tokens(choice) for choice in choices]
    known = [size for size in sizes if size is not None]
    exchanges = [talk.exchange(choice) for choice in choices]
    starts, ends = (
        [at for exchange in exchanges if (at := talk.number(exchange.get(name))) is not None]
        for name in ("started_at", "ended_at")
    )
    duration_s = numbers.get("duration")
    if duration_s is None and starts and ends:
        duration_s = max(0.0, max(ends) - min(starts))
    started_at = None
    with contextlib.suppress(ValueError, TypeError):
        started = datetime.fromisoformat(trajectory.get("start_time", ""))
        started_at = (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
    main = [choice for _, choice in talk.items(trajectory) if choice is not None]
    judge = judge_name(metrics)
    scenario, key = scenario_of(trajectory, metadata, group_metadata)
    values = RolloutValues(
        scenario=scenario, scenario_key=key, reward=talk.number(trajectory.get("reward")), num_turns=len(choices),
        num_tokens=sum(known) if known and len(known) == len(sizes) else None,
        stop=talk.text_or_none(main[-1].get("finish_reason")) if main else None,
        outcome="infra_fault" if metadata.get("outcome") == "infra_fault" else outcome,
        started_at=started_at, duration_s=duration_s, judge_score=numbers.get(f"{judge}_score"),
        policy_version=talk.whole(trajectory.get("initial_policy_version")), first_exchange=ids[0] if ids else None,
        metrics=orjson.dumps(dict(sorted(numbers.items())[:MOST_NUMBERS])).decode() if numbers else None,
    )  # fmt: skip
    if values.reward is not None:
        numbers["reward"] = values.reward
    return RolloutEntry(values, searchable("\n".join(talk.texts(trajectory))), numbers, ids)


def scenario_of(trajectory: Row, metadata: Row, group_metadata: Row) -> tuple[str | None, int]:
    """Name the scenario of a rollout, and make a number that is equal for rollouts of the same scenario."""
    for source in (metadata, group_metadata):
        for name in ("scenario_id", "scenario"):
            if isinstance(source.get(name), (str, int)):
                text = str(source[name])
                return text[:_SCENARIO_LENGTH], _hash(b"id", text.encode())
    # The messages before the first sampled answer.
    prompt = [message for message, _ in takewhile(lambda item: item[1] is None, talk.items(trajectory))]
    if not prompt:
        return None, 0
    asked = [message for message in prompt if message.get("role") == "user"] or prompt
    text = " ".join(talk.as_text(asked[-1].get("content")).split())
    return text[:_SCENARIO_LENGTH] or None, _hash(b"prompt", orjson.dumps(prompt, default=str))


def judge_name(metrics: Row) -> str | None:
    """Return the name of the judge that scored a trajectory: the last one that `score_group` applied."""
    if "independent_reward" not in metrics:
        return None
    names = [name.removesuffix("_score") for name in metrics if name.endswith("_score") and "/" not in name]
    return names[-1] if names else None


def _hash(kind: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "big", signed=True)


def exchanges_of(plan: RolloutPlan) -> list[str]:
    """Return the ids of the exchanges of a rollout, each once."""
    return list(dict.fromkeys(chain.from_iterable(plan.exchange_ids)))


def read_fates(folder: Path) -> dict[str, RolloutPlan]:
    """Read what training did with the rollouts of a step, by exchange. Of several jobs the newest one counts."""
    groups = chain.from_iterable(record.groups for record in read_plans(folder))
    plans = chain.from_iterable(group.rollouts for group in groups)
    return {exchange_id: plan for plan in plans for exchange_id in exchanges_of(plan)}
