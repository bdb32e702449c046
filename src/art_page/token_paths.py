"""The recorded exchanges of a rollout, joined into token paths, and the texts of their tokens.

Texts come from the model's tokenizer, where this machine has it. Nothing is downloaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import orjson

from art.errors import ArtError
from art.gateway.tokenizer import TextStream, Tokenizer
from art.protocol.answers import BranchReason
from art.record.recorded_answers import RecordedAnswer, TokenArray, assemble_answers, unpack_alternatives
from art.record.recorder import SELECT_ANSWERS
from art.storage import checkpoints
from art.storage.layout import ModelPaths
from art_page.databases import ReadOnlyDatabase
from art_page.rollout_answers import SpanRole


@dataclass(frozen=True, slots=True)
class PathBranch:
    """Where a path leaves the path of the same conversation with which it has most tokens in common."""

    parent: int
    """Number of the path that it leaves."""
    num_shared: int
    """Number of tokens at the start that both have."""
    reason: BranchReason | None
    """Why its first prompt did not continue recorded tokens; `None` where that is not recorded."""


@dataclass(slots=True)
class ExchangePath:
    """Exchanges of a rollout of which each continues the tokens of the one before."""

    label: str
    answers: list[RecordedAnswer] = field(default_factory=list)
    branch: PathBranch | None = None
    """Where it leaves another path of its conversation; `None` for the first path of a conversation."""

    @property
    def exchange_ids(self) -> list[str]:
        return [answer.id for answer in self.answers]

    def token_ids(self) -> TokenArray:  # [T]
        last = self.answers[-1]
        return np.concatenate([last.prompt_token_ids, last.completion_token_ids])


def read_exchanges(database: ReadOnlyDatabase, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
    """Read the exchanges among `ids` that are still recorded, by id."""
    unique_ids = set(ids)
    if not unique_ids:
        return {}
    parameters = (orjson.dumps(sorted(unique_ids)).decode(),)
    rows = database.read(SELECT_ANSWERS, parameters)
    try:
        answers = assemble_answers(rows)
    except KeyError:  # an ancestor is gone, which retention never does alone
        return {}
    return {exchange_id: answers[exchange_id] for exchange_id in unique_ids & answers.keys()}


def read_branch_reasons(database: ReadOnlyDatabase, ids: Iterable[str]) -> dict[str, BranchReason]:
    """Read why exchanges did not continue recorded tokens, by the id of the exchange."""
    rows = database.read(
        "SELECT id, branch_reason FROM exchanges WHERE branch_reason IS NOT NULL "
        "AND id IN (SELECT value FROM json_each(?))",
        (orjson.dumps(sorted(set(ids))).decode(),),
    )
    return dict(rows)


Alternatives: TypeAlias = list[list[tuple[int, float]]]
"""[C][up to K] The most likely tokens at each place of an answer, best first, with their log-probs."""


def read_alternatives(database: ReadOnlyDatabase, answers: Iterable[RecordedAnswer]) -> dict[str, Alternatives]:
    """Read the alternatives of answers, by the id of the exchange that has them."""
    lengths = {answer.id: len(answer.completion_token_ids) for answer in answers}
    rows = database.read(
        "SELECT id, alternatives FROM exchanges WHERE alternatives IS NOT NULL "
        "AND id IN (SELECT value FROM json_each(?))",
        (orjson.dumps(sorted(lengths)).decode(),),
    )
    return {exchange_id: unpack_alternatives(value, lengths[exchange_id]) for exchange_id, value in rows}


def join_paths(
    histories: Sequence[Sequence[str]],
    recorded: Mapping[str, RecordedAnswer],
    reasons: Mapping[str, BranchReason] | None = None,
) -> list[ExchangePath]:
    """Join the exchanges of a rollout's conversations into token paths, as training does.

    An exchange continues the last path of the same model and temperature whose tokens begin its prompt; otherwise it
    begins a path, a branch of its conversation. An exchange that a later conversation repeats counts once.
    """
    paths: list[ExchangePath] = []
    seen: set[str] = set()
    for number, exchange_ids in enumerate(histories):
        begun, first_path = 0, len(paths)
        for exchange_id in exchange_ids:
            if exchange_id in seen or (exchange := recorded.get(exchange_id)) is None:
                continue
            seen.add(exchange_id)
            if (path := _find_continued(paths, exchange)) is None:
                begun += 1
                branch = _branch(paths, first_path, exchange, (reasons or {}).get(exchange_id))
                label = "main conversation" if number == 0 else f"further conversation {number}"
                path = ExchangePath(label if begun == 1 else f"{label}, branch {begun - 1}", branch=branch)
                paths.append(path)
            path.answers.append(exchange)
    return paths


def _branch(
    paths: Sequence[ExchangePath], first: int, exchange: RecordedAnswer, reason: BranchReason | None
) -> PathBranch | None:
    """Find the path from number `first` on that a new path leaves; of equally long ones the newest."""
    prompt = exchange.prompt_token_ids
    best: PathBranch | None = None
    for number in range(first, len(paths)):
        tokens = paths[number].token_ids()
        size = min(len(tokens), len(prompt))
        different = np.flatnonzero(tokens[:size] != prompt[:size])
        num_shared = int(different[0]) if len(different) else size
        if best is None or num_shared >= best.num_shared:
            best = PathBranch(number, num_shared, reason)
    return best


def _find_continued(paths: Sequence[ExchangePath], exchange: RecordedAnswer) -> ExchangePath | None:
    prompt = exchange.prompt_token_ids
    for path in reversed(paths):
        last = path.answers[-1]
        if (last.project, last.name, last.temperature) != (exchange.project, exchange.name, exchange.temperature):
            continue
        size = len(last.prompt_token_ids) + len(last.completion_token_ids)
        if len(prompt) >= size and np.array_equal(prompt[:size], path.token_ids()):
            return path
    return None


def role_between(before: RecordedAnswer, exchange: RecordedAnswer) -> SpanRole:
    """Say who wrote the messages between two answers of a path."""
    messages = exchange.request_messages()[len(before.request_messages()) + 1 :]
    roles = {str(message.get("role")) for message in messages}
    if "assistant" in roles:
        return "context"
    return "tool" if "tool" in roles or "function" in roles else "user"


logger = logging.getLogger(__name__)


class TokenTexts:
    """Finds the texts of token ids. It keeps the tokenizers that it has loaded."""

    def __init__(self, database: ReadOnlyDatabase) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._loaded: dict[str, Tokenizer | None] = {}

    def of_run(self, project: str, name: str, paths: ModelPaths) -> Tokenizer | None:
        """Load the tokenizer of a run, whose base model the registry or its newest checkpoint names."""
        rows = self._database.read("SELECT base_model FROM models WHERE project = ? AND name = ?", (project, name))
        if rows:
            return self.tokenizer(str(rows[0][0]))
        try:
            steps = checkpoints.list_steps(paths.checkpoints)
            return self.tokenizer(checkpoints.read_state(paths.checkpoint(steps[-1])).base_model) if steps else None
        except ArtError:
            return None

    def tokenizer(self, base_model: str) -> Tokenizer | None:
        """Load the tokenizer of a base model from its folder or the hub's cache; `None` if this machine lacks it."""
        with self._lock:
            if base_model not in self._loaded:
                try:
                    self._loaded[base_model] = Tokenizer.load(base_model, may_download=False)
                except ArtError as error:
                    logger.info("tokens of %s are shown without texts: %s", base_model, error)
                    self._loaded[base_model] = None
            return self._loaded[base_model]


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; their join is the whole text.

    A character whose bytes are spread over several tokens belongs to the token that completes it.
    """
    stream = TextStream()
    table = tokenizer.token_bytes
    texts = [stream.push(table[token_id]) for token_id in token_ids]
    if texts:
        texts[-1] += stream.finish()
    return texts
