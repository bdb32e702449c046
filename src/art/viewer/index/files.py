"""What the index is made from: files of a run, rows of logged groups, and plan records of steps that nobody logged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from art.errors import InvalidRequestError
from art.gateway.record.recorder import Exchange, Recorder
from art.gateway.record.rollout_store import rollout_histories
from art.storage.database import Database
from art.storage.layout import ModelPaths, validate_name
from art.storage.steps.plan_record import RolloutPlan, read_plans
from art.trajectory import says_policy_fault
from art.viewer import conversation as talk
from art.viewer.conversation import Row
from art.viewer.database import ReadOnlyDatabase

_MARK_SIZE = 4096
_CHUNK_BYTES = 1 << 20
"""Lines that are read at once take about this much, and one line at least."""
TRAIN = "train"


class FileState(NamedTuple):
    """What the disk has of one split and step. All fields are 0 where there is no file."""

    size: int = 0
    inode: int = 0
    changed_ns: int = 0
    plan_ns: int = 0
    """When the folder of the step changed, which has the records of what training did with the rollouts."""


Place = tuple[str, int]
"""Split and step."""


class Chunk(NamedTuple):
    """Some lines of a file."""

    groups: list[tuple[int, int, Row]]
    """Offset, length and content of each line that is a group, in bytes."""
    num_damaged: int
    end: int
    """Offset of the first byte that was not read."""
    is_last: bool
    """Whether every complete line was read."""


def survey(paths: ModelPaths) -> dict[Place, FileState]:
    """Look at all files of a run, without opening them."""
    plans = {step: entry.stat().st_mtime_ns for step, entry in _numbered(paths.steps, "")}
    states: dict[Place, FileState] = {}
    for split in _splits(paths.root / "trajectories"):
        for step, entry in _numbered(paths.root / "trajectories" / split, ".jsonl"):
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                if not S_ISREG(stat.st_mode):  # a link may lead to a private file, which an export would publish
                    continue
                plan_ns = plans.get(step, 0) if split == TRAIN else 0
                states[split, step] = FileState(stat.st_size, stat.st_ino, stat.st_mtime_ns, plan_ns)
    for step, changed_ns in plans.items():
        states.setdefault((TRAIN, step), FileState(plan_ns=changed_ns))
    return states


def outline(paths: ModelPaths) -> list[tuple[int, int]]:
    """Return times and sizes that tell whether a run has changed, without looking at each of its files.

    A script that logs rollouts adds a row to the history last. A job that ends adds a folder, but for a job that
    trained nothing.
    """
    folder = paths.root / "trajectories"
    states = []
    for path in (paths.history, paths.steps, folder, *(folder / split for split in _splits(folder))):
        try:
            stat = path.stat()
        except OSError:
            continue
        states.append((stat.st_mtime_ns, stat.st_size))
    return states


def read_chunk(path: Path, offset: int) -> Chunk:
    """Read complete lines from a byte offset. A last line without a newline counts if it is a JSON object.

    Raises:
        OSError: the file cannot be read.
    """
    groups: list[tuple[int, int, Row]] = []
    num_damaged = 0
    with path.open("rb") as file:
        file.seek(offset)
        end, is_last = offset, True
        for line in file:
            row = read_row(line)
            if row is None and not line.endswith(b"\n"):
                break  # a writer is in the middle of it, or crashed there
            if row is not None and isinstance(row.get("trajectories"), list):
                groups.append((end, len(line), row))
            elif line.strip():
                num_damaged += 1
            end += len(line)
            if end - offset >= _CHUNK_BYTES:
                is_last = False
                break
    return Chunk(groups, num_damaged, end, is_last)


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


def mark(path: Path, size: int) -> bytes:
    """Hash the beginning of a file and what is before `size`, by which a file that was replaced is noticed."""
    digest = hashlib.blake2b(digest_size=16)
    with contextlib.suppress(OSError), path.open("rb") as file:
        digest.update(_read(file, 0, min(_MARK_SIZE, size)))
        digest.update(_read(file, max(0, size - _MARK_SIZE), min(_MARK_SIZE, size)))
    return digest.digest()


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _splits(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(InvalidRequestError):
                if entry.is_dir(follow_symlinks=False):
                    yield validate_name(entry.name, param="split")


def _numbered(folder: Path, suffix: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Yield the entries of a folder that are named by a step, as `ModelPaths` names them."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(suffix)
            is_number = name.isascii() and name.isdecimal() and len(name) < 16
            if is_number and entry.name == f"{int(name):04d}{suffix}":
                yield int(name), entry


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


class Fate(NamedTuple):
    """What training did with one rollout."""

    advantage: float | None
    is_trained: bool
    dropped_because: str | None
    num_tokens: int
    """Tokens that the model sampled."""


class PlannedRollout(NamedTuple):
    """One rollout of a step that nobody logged."""

    group: int
    """Number of the group, over all jobs that ended at the step, the oldest first."""
    place: int
    """Place in the group."""
    plan: RolloutPlan

    @property
    def exchange_ids(self) -> list[str]:
        return exchanges_of(self.plan)


def exchanges_of(plan: RolloutPlan) -> list[str]:
    """Return the ids of the exchanges of a rollout, each once."""
    return list(dict.fromkeys(chain.from_iterable(plan.exchange_ids)))


def fate_of(plan: RolloutPlan) -> Fate:
    """Describe what training did with a rollout."""
    return Fate(
        advantage=plan.advantage,
        is_trained=plan.trained_tokens > 0,
        dropped_because=plan.dropped_because,
        num_tokens=plan.trained_tokens + sum(plan.dropped_tokens.values()),
    )


def read_fates(folder: Path) -> dict[str, Fate]:
    """Read the plan records of a step, by exchange. Where several jobs had a rollout, the newest one counts."""
    fates: dict[str, Fate] = {}
    for record in read_plans(folder):
        for plan in chain.from_iterable(group.rollouts for group in record.groups):
            fates |= dict.fromkeys(exchanges_of(plan), fate_of(plan))
    return fates


def planned_rollouts(folder: Path) -> Iterator[PlannedRollout]:
    """Yield the rollouts of all jobs that ended at a step."""
    number = 0
    for record in read_plans(folder):
        for group in record.groups:
            for index, plan in enumerate(group.rollouts):
                yield PlannedRollout(number, index, plan)
            number += 1


def find_exchanges(database: ReadOnlyDatabase, ids: Iterable[str]) -> dict[str, Exchange]:
    """Return the recorded exchanges among `ids`, by id. Old ones may have been deleted."""
    # The recorder only reads here, and needs no more of its database than that.
    return Recorder(cast("Database", database)).find(ids)


def as_trajectory(database: ReadOnlyDatabase, rollout: PlannedRollout, exchanges: dict[str, Exchange]) -> Row:
    """Build the trajectory of a rollout from the record, in the form of a logged one."""
    recorded = [exchanges[i] for i in rollout.exchange_ids if i in exchanges]
    histories: list[Row] = rollout_histories(recorded) if recorded else []
    first: Row = histories[0] if histories else {"messages_and_choices": [], "tools": None}
    trajectory: Row = {**first, "additional_histories": histories[1:], "reward": rollout.plan.reward, "metrics": {}}
    trajectory["metadata"] = {}
    if recorded and recorded[0].rollout_id is not None:
        trajectory |= _announced(database, recorded[0].project, recorded[0].rollout_id)
    if recorded:
        trajectory["initial_policy_version"] = recorded[0].policy_version
    return trajectory


def _announced(database: ReadOnlyDatabase, project: str, rollout_id: str) -> dict[str, Any]:
    """What another program told about its rollout, as fields of a trajectory."""
    rows = database.read(
        "SELECT scenario_id, outcome, metrics, metadata FROM rollouts WHERE project = ? AND id = ?",
        (project, rollout_id),
    )
    if not rows:
        return {"metadata": {"rollout_id": rollout_id}}
    scenario, outcome, metrics, metadata = rows[0]
    known = {"rollout_id": rollout_id, "scenario_id": scenario, "outcome": outcome}
    told = {key: value for key, value in known.items() if value is not None}
    return {"metrics": orjson.loads(metrics), "metadata": {**orjson.loads(metadata), **told}}
