"""A group: its rollouts side by side, the best first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from art.errors import NotFoundError
from art.viewer import conversation as talk
from art.viewer.answers.group import GroupAnswer
from art.viewer.answers.rollout import Judgement, RolloutDetail
from art.viewer.conversation import Row
from art.viewer.index.files import read_line
from art.viewer.reads.one_rollout import describe, trained_rollouts
from art.viewer.reads.table_of_rollouts import COLUMNS, member
from art.viewer.run_files import RunFiles

MOST_SHOWN = 64
_CHANGED = "The file of this group has changed since it was read; look again in a moment."


def read_group(run: RunFiles, number: int, split: str, step: int, group: int) -> GroupAnswer:
    """Describe a group.

    Args:
        number: number of the run in the index.

    Raises:
        NotFoundError: there is no such group.
    """
    rows = run.indexer.store.read(
        f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE file = (SELECT id FROM files WHERE run = ? AND split = ? "
        "AND step = ?) AND grp = ? ORDER BY advantage DESC NULLS LAST, reward DESC NULLS LAST, idx",
        (number, split, step, group),
    )
    if not rows:
        raise NotFoundError(f"{run.project}/{run.name} has no group {group} in step {step} of {split}")
    first = dict(zip(COLUMNS, rows[0], strict=True))
    content: Row | None = None
    if first["length"]:
        content = read_line(run.paths.trajectories(split, step), first["place"], first["length"])
        members = {index: member(content, index) for index in range(len(rows))}
    else:
        members = {index: row for (place, index), row in trained_rollouts(run, step).items() if place == group}
    shown = [describe(run, row, members.get(row[COLUMNS.index("idx")], {}), None) for row in rows[:MOST_SHOWN]]
    metrics = talk.mapping((content or {}).get("metrics"))
    logs = (content or {}).get("logs")
    reasons = {row[COLUMNS.index("dropped")] for row in rows}
    return GroupAnswer(
        split=split,
        step=step,
        group=group,
        scenario=first["scenario"],
        rollouts=shown,
        num_rollouts=len(rows),
        metrics={str(name): talk.number(value) for name, value in metrics.items()},
        logs=[line for line in logs if isinstance(line, str)] if isinstance(logs, list) else [],
        judges=_judges(shown, metrics),
        dropped_because=reasons.pop() if len(reasons) == 1 else None,
        missing=_CHANGED if first["length"] and content is None else None,
    )


def _judges(rollouts: Sequence[RolloutDetail], metrics: Row) -> list[Judgement]:
    """Describe each judge of the group: the mean of its scores, and its disagreement with itself."""
    judged = [rollout.judge for rollout in rollouts if rollout.judge is not None]
    judgements = []
    for name in dict.fromkeys(judge.name for judge in judged):
        own = [judge for judge in judged if judge.name == name]
        scores = [judge.score for judge in own if judge.score is not None]
        passes = [judge.passes for judge in own if judge.passes is not None]
        same_number = len({len(values) for values in passes}) == 1
        judgements.append(
            Judgement(
                name=name,
                score=statistics.fmean(scores) if scores else None,
                passes=[statistics.fmean(values) for values in zip(*passes, strict=True)] if same_number else None,
                disagreement=talk.number(metrics.get("judge_disagreement")),
            )
        )
    return judgements
