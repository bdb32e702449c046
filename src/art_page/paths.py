"""The table of what can be asked of a `Viewer` by a path, e.g. `runs/games/agent-001/rollouts?step=12`.

The server has a route for each row below `/view/api/`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from pydantic import ValidationError

from art.errors import InvalidRequestError
from art.protocol.chat_completions import invalid_request
from art.storage.layout import validate_name
from art_page.rollout_answers import (
    PageAnswer,
    PageQuery,
    RolloutKey,
    RolloutTableQuery,
    TokensQuery,
    TreeQuery,
)
from art_page.run_answers import (
    CompareQuery,
    SeriesQuery,
)
from art_page.viewer import Viewer

NUMBERS = frozenset({"step", "group", "index"})
"""Parameters of paths that are whole numbers. All others are names."""
_MOST_DIGITS = 9


class NoQuery(PageQuery):
    """The query of a path that has no parameters."""


class RunsQuery(PageQuery):
    """Which runs to list."""

    project: str | None = None
    """Only those of one project."""


class LedgerQuery(PageQuery):
    """Which steps to sum, both ends included; null for no bound."""

    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a path asks for: the run and the parameters in the path, and the query."""

    values: Mapping[str, str]
    query: Any


@dataclass(frozen=True, slots=True)
class ReadPath:
    """One row of the table."""

    path: str
    """The path, in which `{name}` is a parameter that matches one component."""
    method: Callable[..., PageAnswer]
    """Method of `Viewer` that answers. Its parameters are those of the path and `query`, or fields of the query."""
    query: type[PageQuery] = NoQuery
    names_files: bool = False
    """Whether the answer can say where files lie on the machine, which only keys with scope `admin` may see."""

    @property
    def summary(self) -> str:
        line = (inspect.getdoc(self.method) or "").partition("\n")[0].rstrip(".")
        return line[0].lower() + line[1:]

    @property
    def answer(self) -> type[PageAnswer]:
        answer: type[PageAnswer] = get_type_hints(self.method)["return"]
        return answer

    def read(self, viewer: Viewer, asked: Asked) -> PageAnswer:
        """Ask the viewer."""
        values = {name: int(text) if name in NUMBERS else text for name, text in asked.values.items()}
        known = {**asked.query.__dict__, **values, "query": asked.query}
        arguments = {
            name: RolloutKey.model_validate({field: values[field] for field in RolloutKey.model_fields})
            if name == "key"
            else known[name]
            for name in inspect.signature(self.method).parameters
            if name != "self"
        }
        answer: PageAnswer = getattr(viewer, self.method.__name__)(**arguments)
        return answer

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


PATHS: list[ReadPath] = [
    ReadPath("runs", Viewer.runs, RunsQuery, names_files=True),
    ReadPath(_RUN, Viewer.run, names_files=True),
    ReadPath(f"{_RUN}/series", Viewer.series, SeriesQuery),
    ReadPath(f"{_RUN}/rollouts", Viewer.rollouts, RolloutTableQuery),
    ReadPath(_ROLLOUT, Viewer.rollout),
    ReadPath(f"{_ROLLOUT}/tokens", Viewer.tokens, TokensQuery),
    ReadPath(f"{_RUN}/groups/{{split}}/{{step}}/{{group}}", Viewer.group),
    ReadPath(f"{_RUN}/steps/{{step}}", Viewer.step),
    ReadPath(f"{_RUN}/steps/{{step}}/tree", Viewer.tree, TreeQuery),
    ReadPath(f"{_RUN}/ledger", Viewer.ledger, LedgerQuery),
    ReadPath(f"{_RUN}/checkpoints", Viewer.checkpoints),
    ReadPath(f"{_RUN}/checkpoints/compare", Viewer.compare, CompareQuery),
    ReadPath("comparisons", Viewer.comparisons, names_files=True),
    ReadPath("comparisons/{comparison}", Viewer.comparison, names_files=True),
    ReadPath(f"{_RUN}/costs", Viewer.costs),
]
"""All paths. Each is one method of `Viewer`."""


def query_parameters(row: ReadPath) -> dict[str, Any]:
    """Names and types of the parameters that the query of a path may have."""
    return {name: field.annotation for name, field in row.query.model_fields.items()}
