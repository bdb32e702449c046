"""The table of what can be asked of a `Viewer` by a path, e.g. `runs/games/agent-001/rollouts?step=12`.

The server has a route for each row below `/view/api/`, `art view --json` takes the same paths, and the export writes
the same answers into files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin
from urllib.parse import parse_qs, unquote

from pydantic import ValidationError

from art.errors import InvalidRequestError, NotFoundError
from art.protocol.dialects.chat_completions import invalid_request
from art.storage.layout import validate_name
from art.viewer.rollout_answers import (
    Answer,
    GroupAnswer,
    Query,
    RolloutDetail,
    RolloutKey,
    RolloutPage,
    RolloutQuery,
    RolloutTokens,
    TokensQuery,
    TreeAnswer,
    TreeQuery,
)
from art.viewer.run_answers import (
    CheckpointList,
    CompareQuery,
    Comparison,
    ComparisonAnswer,
    ComparisonList,
    CostsAnswer,
    LedgerAnswer,
    RunDetail,
    RunList,
    SeriesAnswer,
    SeriesQuery,
    StepDetail,
)
from art.viewer.viewer import Viewer

NUMBERS = frozenset({"step", "group", "index"})
"""Parameters of paths that are whole numbers. All others are names."""
_MOST_DIGITS = 9


class NoQuery(Query):
    """The query of a path that has no parameters."""


class RunsQuery(Query):
    """Which runs to list."""

    project: str | None = None
    """Only those of one project."""


class LedgerQuery(Query):
    """Which steps to sum, both ends included; null for no bound."""

    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a path asks for: the run and the parameters in the path, and the query."""

    values: Mapping[str, str]
    query: Any

    @property
    def run(self) -> tuple[str, str]:
        return self.values["project"], self.values["name"]

    def number(self, name: str) -> int:
        return int(self.values[name])


@dataclass(frozen=True, slots=True)
class ReadPath:
    """One row of the table."""

    path: str
    """The path, in which `{name}` is a parameter that matches one component."""
    summary: str
    answer: type[Answer]
    read: Callable[[Viewer, Asked], Answer]
    query: type[Query] = NoQuery
    names_files: bool = False
    """Whether the answer can say where files lie on the machine, which only keys with scope `admin` may see."""

    is_of_log: bool = False
    """Whether the answer is made of files, jobs and the index only, and so stays the same between two steps."""

    def asked(self, values: Mapping[str, str], query: Mapping[str, Sequence[str]]) -> Asked:
        """Check parameters and query.

        Raises:
            InvalidRequestError: a parameter is not a name or number, or the query has an unknown or wrong value.
        """
        for param, value in values.items():
            validate_name(value, param=param)
            if param in NUMBERS and not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
                raise InvalidRequestError(f"`{param}` must be a whole number, got {value[:40]!r}", param=param)
        lists = {name for name, field in self.query.model_fields.items() if get_origin(field.annotation) is list}
        values_by_name = {name: list(texts) if name in lists else texts[-1] for name, texts in query.items()}
        try:
            return Asked(values, self.query.model_validate(values_by_name))
        except ValidationError as error:
            raise invalid_request(error) from None


_RUN = "runs/{project}/{name}"
_ROLLOUT = f"{_RUN}/rollouts/{{split}}/{{step}}/{{group}}/{{index}}"


def _key(asked: Asked) -> RolloutKey:
    step, group, index = (asked.number(name) for name in ("step", "group", "index"))
    return RolloutKey(split=asked.values["split"], step=step, group=group, index=index)


PATHS: list[ReadPath] = [
    ReadPath("runs", "list runs", RunList, lambda v, a: v.runs(a.query.project), RunsQuery, names_files=True),
    ReadPath(_RUN, "describe a run", RunDetail, lambda v, a: v.run(*a.run), names_files=True),
    ReadPath(
        f"{_RUN}/series", "curves of metrics", SeriesAnswer, lambda v, a: v.series(*a.run, a.query), SeriesQuery,
        is_of_log=True,
    ),
    ReadPath(
        f"{_RUN}/rollouts", "list rollouts", RolloutPage, lambda v, a: v.rollouts(*a.run, a.query), RolloutQuery,
        is_of_log=True,
    ),
    ReadPath(_ROLLOUT, "describe a rollout", RolloutDetail, lambda v, a: v.rollout(*a.run, _key(a))),
    ReadPath(
        f"{_ROLLOUT}/tokens", "the exact tokens of a rollout", RolloutTokens,
        lambda v, a: v.tokens(*a.run, _key(a), a.query), TokensQuery,
    ),
    ReadPath(
        f"{_RUN}/groups/{{split}}/{{step}}/{{group}}", "the rollouts of a scenario side by side", GroupAnswer,
        lambda v, a: v.group(*a.run, a.values["split"], a.number("step"), a.number("group")),
    ),
    ReadPath(
        f"{_RUN}/steps/{{step}}", "describe a step", StepDetail, lambda v, a: v.step(*a.run, a.number("step")),
        is_of_log=True,
    ),
    ReadPath(
        f"{_RUN}/steps/{{step}}/tree", "the prefix tree of a step as it was trained", TreeAnswer,
        lambda v, a: v.tree(*a.run, a.number("step"), a.query), TreeQuery,
    ),
    ReadPath(
        f"{_RUN}/ledger", "what became of sampled tokens", LedgerAnswer,
        lambda v, a: v.ledger(*a.run, a.query.first, a.query.last), LedgerQuery, is_of_log=True,
    ),
    ReadPath(f"{_RUN}/checkpoints", "list checkpoints", CheckpointList, lambda v, a: v.checkpoints(*a.run)),
    ReadPath(
        f"{_RUN}/checkpoints/compare", "compare two checkpoints on the same scenarios", Comparison,
        lambda v, a: v.compare(*a.run, a.query), CompareQuery,
    ),
    ReadPath(
        "comparisons", "list comparisons of models", ComparisonList, lambda v, a: v.comparisons(), names_files=True
    ),
    ReadPath(
        "comparisons/{comparison}", "describe a comparison of models", ComparisonAnswer,
        lambda v, a: v.comparison(a.values["comparison"]), names_files=True,
    ),
    ReadPath(f"{_RUN}/costs", "what a run has cost", CostsAnswer, lambda v, a: v.costs(*a.run), is_of_log=True),
]  # fmt: skip
"""All paths. Each is one method of `Viewer`."""


def find_path(text: str) -> tuple[ReadPath, Asked]:
    """Parse a path with its query, as `art view --json` takes it.

    Raises:
        NotFoundError: there is no such path.
        InvalidRequestError: a parameter or the query is wrong.
    """
    path, _, query = text.partition("?")
    components = [unquote(part) for part in path.strip("/").split("/")]
    for row in PATHS:
        names = row.path.split("/")
        if len(names) == len(components) and all(
            name.startswith("{") or name == component for name, component in zip(names, components, strict=True)
        ):
            values = {name[1:-1]: part for name, part in zip(names, components, strict=True) if name[0] == "{"}
            return row, row.asked(values, parse_qs(query))
    if components in (["system"], ["live"]):
        raise NotFoundError(f"{path!r} is answered by a running server only; give its address with --url", param="path")
    raise NotFoundError(f"there is no path {path!r}; `art view --json` alone lists the paths", param="path")


def query_parameters(row: ReadPath) -> dict[str, Any]:
    """Names and types of the parameters that the query of a path may have."""
    return {name: field.annotation for name, field in row.query.model_fields.items()}
