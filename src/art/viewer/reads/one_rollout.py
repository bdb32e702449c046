"""One rollout: its conversations with what the record knows of each answer, its numbers and its judgement."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import orjson

from art.errors import NotFoundError
from art.viewer import conversation as talk
from art.viewer.answers.rollout import Conversation, Item, Judgement, RolloutDetail, Tool, ToolCall
from art.viewer.answers.rollout_rows import RolloutKey
from art.viewer.conversation import Row
from art.viewer.index.files import read_line
from art.viewer.index.plans import as_trajectory, find_exchanges, planned_rollouts
from art.viewer.index.rows import judge_name
from art.viewer.reads.table_of_rollouts import COLUMNS, make_row, member
from art.viewer.run_files import RunFiles

_CHANGED = "The file of this rollout has changed since it was read; look again in a moment."
_FORGOTTEN = "Nobody logged this rollout, and the server has deleted its record of it: only its numbers are known."
_PASS = "/pass_"


class Answer(NamedTuple):
    """What the record knows of one answer."""

    policy_version: int
    num_tokens: int
    created_at: float


def read_rollout(run: RunFiles, number: int, key: RolloutKey) -> RolloutDetail:
    """Describe one rollout.

    Args:
        number: number of the run in the index.

    Raises:
        NotFoundError: there is no such rollout.
    """
    row = find_row(run, number, key)
    values = dict(zip(COLUMNS, row, strict=True))
    if values["length"]:
        group = read_line(run.paths.trajectories(key.split, key.step), values["place"], values["length"])
        content = member(group, key.index)
        missing = None if content else _CHANGED
    else:
        content = trained_rollouts(run, key.step).get((key.group, key.index), {})
        missing = None if content.get("messages_and_choices") else _FORGOTTEN
    detail = describe(run, row, content, missing)
    detail.previous, detail.next = _neighbour(run, values, before=True), _neighbour(run, values, before=False)
    return detail


def find_row(run: RunFiles, number: int, key: RolloutKey) -> tuple[Any, ...]:
    """Return the index's columns of one rollout.

    Raises:
        NotFoundError: there is no such rollout.
    """
    rows = run.indexer.store.read(
        f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE file = (SELECT id FROM files WHERE run = ? AND split = ? "
        "AND step = ?) AND grp = ? AND idx = ?",
        (number, key.split, key.step, key.group, key.index),
    )
    if not rows:
        raise NotFoundError(
            f"{run.project}/{run.name} has no rollout {key.index} in group {key.group} of step {key.step} ({key.split})"
        )
    return rows[0]


def trained_rollouts(run: RunFiles, step: int) -> dict[tuple[int, int], Row]:
    """Rebuild the rollouts of a step that nobody logged from the record, by group and index."""
    rollouts = list(planned_rollouts(run.paths.step(step)))
    exchanges = find_exchanges(run.database, chain.from_iterable(rollout.exchange_ids for rollout in rollouts))
    return {(r.group, r.place): as_trajectory(run.database, r, exchanges) for r in rollouts}


def describe(run: RunFiles, row: Sequence[Any], content: Row, missing: str | None) -> RolloutDetail:
    """Describe a rollout by its row in the index and its trajectory or exception."""
    answers = _answers(run, talk.exchange_ids(content))
    logs = content.get("logs")
    return RolloutDetail(
        **make_row(row).model_dump(),
        histories=[
            _conversation(history, number, answers)
            for number, history in enumerate(talk.histories(content))
            if isinstance(history.get("messages_and_choices"), list)
        ],
        metrics={str(name): talk.number(value) for name, value in talk.mapping(content.get("metrics")).items()},
        metadata={str(name): _plain(value) for name, value in talk.mapping(content.get("metadata")).items()},
        logs=[line for line in logs if isinstance(line, str)] if isinstance(logs, list) else [],
        judge=judgement(content),
        error=_error(content),
        missing=missing,
    )


def judgement(content: Row) -> Judgement | None:
    """Return what the judge said that gave the reward; `None` if no judge did."""
    metrics = talk.mapping(content.get("metrics"))
    name = judge_name(metrics)
    if name is None:
        return None
    passes = [
        value
        for metric in sorted(metrics)
        if metric.startswith(name + _PASS) and (value := talk.number(metrics[metric])) is not None
    ]
    parts = {
        metric.removeprefix(f"{name}/"): value
        for metric in sorted(metrics)
        if metric.startswith(f"{name}/")
        and not metric.startswith(name + _PASS)
        and (value := talk.number(metrics[metric])) is not None
    }
    begin = f"{name.upper()} explanation: "
    said = [line for line in content.get("logs") or [] if isinstance(line, str) and line.startswith(begin)]
    return Judgement(
        name=name,
        score=talk.number(metrics.get(f"{name}_score")),
        passes=passes or None,
        disagreement=statistics.stdev(passes) if len(passes) > 1 else None,
        parts=parts,
        explanation=said[-1].removeprefix(begin) if said else None,
    )


def _answers(run: RunFiles, exchange_ids: Sequence[str]) -> dict[str, Answer]:
    if not exchange_ids:
        return {}
    rows = run.database.read(
        "SELECT id, policy_version, length(completion) / 4, created_at FROM exchanges "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (orjson.dumps(list(exchange_ids)).decode(),),
    )
    return {exchange_id: Answer(*values) for exchange_id, *values in rows}


def _conversation(history: Row, number: int, answers: Mapping[str, Answer]) -> Conversation:
    return Conversation(
        name="main" if number == 0 else f"further {number}",
        items=[_item(message, choice, answers) for message, choice in talk.items(history)],
        tools=[_tool(tool) for tool in talk.dicts(history.get("tools"))],
    )


def _item(message: Row, choice: Row | None, answers: Mapping[str, Answer]) -> Item:
    item = Item(
        role=str(message.get("role") or ("assistant" if choice else "unknown")),
        text=talk.as_text(message.get("content")),
        reasoning=talk.reasoning(message),
        tool_calls=[ToolCall(id=i, name=name, arguments=arguments) for i, name, arguments in talk.tool_calls(message)],
        tool_call_id=talk.text_or_none(message.get("tool_call_id")),
    )
    if choice is None:
        return item
    item.is_sampled = True
    item.exchange_id = talk.text_or_none(choice.get("exchange_id"))
    item.finish_reason = talk.text_or_none(choice.get("finish_reason"))
    item.num_tokens = talk.num_logprobs(choice)
    if (answer := answers.get(item.exchange_id or "")) is not None:
        item.policy_version, item.num_tokens = answer.policy_version, answer.num_tokens
        asked = asked_at(item.exchange_id)
        item.started_at = asked or answer.created_at
        item.duration_s = None if asked is None else max(0.0, answer.created_at - asked)
    return item


def asked_at(exchange_id: str | None) -> float | None:
    """Return when an exchange began, which its id says in microseconds since the epoch."""
    digits = (exchange_id or "").removeprefix("ex_")[:14]
    try:
        return int(digits, 16) / 1e6 if len(digits) == 14 else None
    except ValueError:
        return None


def _tool(tool: Row) -> Tool:
    function = talk.mapping(tool.get("function")) or tool
    parameters = function.get("parameters")
    return Tool(
        name=str(function.get("name") or ""),
        description=talk.text_or_none(function.get("description")),
        parameters=parameters if isinstance(parameters, dict) else None,
    )


def _error(content: Row) -> str | None:
    if not {"type", "traceback"} <= content.keys():
        return None
    name, text, traceback = (talk.as_text(content.get(field)) for field in ("type", "message", "traceback"))
    return f"{name}: {text}\n\n{traceback}".strip()


def _plain(value: Any) -> str | float | bool | None:
    if value is None or isinstance(value, (bool, str)):
        return value
    return talk.number(value) if isinstance(value, (int, float)) else orjson.dumps(value, default=str).decode()


def _neighbour(run: RunFiles, values: Mapping[str, Any], *, before: bool) -> RolloutKey | None:
    sign, direction = ("<", "DESC") if before else (">", "ASC")
    rows = run.indexer.store.read(
        f"SELECT grp, idx FROM rollouts WHERE file = ? AND (grp, idx) {sign} (?, ?) "
        f"ORDER BY grp {direction}, idx {direction} LIMIT 1",
        (values["file"], values["grp"], values["idx"]),
    )
    if not rows:
        return None
    return RolloutKey(split=values["split"], step=values["step"], group=rows[0][0], index=rows[0][1])
