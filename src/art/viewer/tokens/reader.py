"""Answers what the page asks about tokens: those of a rollout, and the prefix tree of a step."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

from art.errors import NotFoundError, StorageError
from art.storage.layout import ModelPaths
from art.storage.steps.plan_record import PlanRecord, read_plans
from art.storage.steps.token_file import TokenFile
from art.viewer import conversation as talk
from art.viewer.conversation import Row
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import TRAIN, read_line
from art.viewer.rollout_answers import RolloutKey, RolloutTokens, TokensQuery, TreeAnswer, TreeQuery
from art.viewer.rollouts import COLUMNS, find_row, member
from art.viewer.run_files import RunFiles
from art.viewer.tokens.exchanges import TokenTexts, join_paths, read_branch_reasons, read_exchanges, texts_of_choice
from art.viewer.tokens.rollout_tokens import (
    RolloutTraining,
    describe_tokens,
    find_training,
    open_token_file,
    open_training,
)
from art.viewer.tokens.tree import StepTree, describe_tree, no_tree

_MOST_TREES = 4
"""Trees that stay in memory: some MB each for steps of thousands of paths."""
_UNRECORDED = (
    "Nothing was recorded for this rollout: its answers name no exchange, as those of other servers and models do not."
)


class TokenReader:
    """Reads tokens of the runs of a data directory. Any number of threads may share it."""

    def __init__(self, database: ReadOnlyDatabase) -> None:
        self._database = database
        self._texts = TokenTexts(database)
        self._trees: OrderedDict[tuple[str, str], StepTree] = OrderedDict()
        self._lock = threading.Lock()

    def rollout(self, run: RunFiles, number: int, key: RolloutKey, query: TokensQuery) -> RolloutTokens:
        """Describe the tokens of one path of a rollout.

        Args:
            number: number of the run in the index, which has the split and step of the rollout.

        Raises:
            NotFoundError: there is no such rollout, or it has no such path.
        """
        values = dict(zip(COLUMNS, find_row(run, number, key), strict=True))
        training, trajectory = None, Row()
        if values["length"]:
            line = read_line(run.paths.trajectories(key.split, key.step), values["place"], values["length"])
            trajectory = member(line, key.index)
            histories = [_exchange_ids(history) for history in talk.histories(trajectory)]
        else:
            training = _planned(run.paths, key)
            histories = [] if training is None else training.rollout.exchange_ids
        exchange_ids = list(dict.fromkeys(itertools.chain.from_iterable(histories)))
        recorded = read_exchanges(self._database, exchange_ids)
        training = training or find_training(run.paths, key.step, exchange_ids)
        return describe_tokens(
            join_paths(histories, recorded, read_branch_reasons(self._database, recorded)),
            training,
            self._texts.tokenizer(self._texts.base_model(run.project, run.name, run.paths)),
            query,
            model=(run.project, run.name),
            choice_texts=_choice_texts(trajectory),
            missing=[
                *_why_missing(len(exchange_ids), len(recorded), training),
                *_why_unknown(run.paths, key, training),
            ],
        )

    def tree(self, run: RunFiles, number: int, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained.

        Args:
            number: number of the run in the index, which has the places of the step's rollouts (`tree_places`).

        Raises:
            NotFoundError: nothing is known of the step, or the tree has no such node.
        """
        plans = read_plans(run.paths.step(step))
        for plan in reversed(plans):
            if (file := open_token_file(run.paths, plan)) is not None:
                return self._tree(run, number, plan, file, query)
        if not plans and not run.paths.checkpoint(step).exists():
            raise NotFoundError(f"nothing is recorded of step {step} of {run.project}/{run.name}", param="step")
        if not plans and step == 0:
            return no_tree(step, "Step 0 is the model before training: nothing was learnt yet.")
        if plans and not any(plan.trained for plan in plans):
            return no_tree(step, "No step was trained here: none of the rollouts could be learnt from.")
        return no_tree(
            step,
            "This step has no token file: it was trained by an older version or with `keep_token_files=0`, only newer "
            "steps keep theirs, or the file is damaged.",
        )

    def _tree(self, run: RunFiles, number: int, plan: PlanRecord, file: TokenFile, query: TreeQuery) -> TreeAnswer:
        try:
            return describe_tree(
                self._built(file, plan),
                query,
                database=self._database,
                tokenizer=self._texts.tokenizer(self._texts.base_model(run.project, run.name, run.paths)),
                rollouts=_keys(run, number, plan.step),
            )
        except StorageError:  # retention deleted the file meanwhile
            return no_tree(plan.step, "The token file of this step was just deleted: only newer steps keep theirs.")

    def _built(self, file: TokenFile, plan: PlanRecord) -> StepTree:
        """Return the tree of a step, built at most once while it is looked at."""
        key = (str(file.path), file.job_id)
        with self._lock:
            if key not in self._trees:
                self._trees[key] = StepTree.build(file, plan)
                while len(self._trees) > _MOST_TREES:
                    self._trees.popitem(last=False)
            self._trees.move_to_end(key)
            return self._trees[key]


def tree_places(step: int) -> list[tuple[str, int]]:
    """Splits and steps that may have logged the rollouts of a step: scripts log before or after they train."""
    return [(TRAIN, number) for number in (step - 1, step) if number >= 0]


def _keys(run: RunFiles, number: int, step: int) -> dict[str, RolloutKey]:
    """The places of the rollouts around a step, by the first exchange of each."""
    steps = [number for _, number in tree_places(step)]
    rows = run.indexer.store.read(
        "SELECT first_exchange, step, grp, idx FROM rollouts WHERE run = ? AND split = ? "
        f"AND first_exchange IS NOT NULL AND step IN ({', '.join('?' * len(steps))})",
        (number, TRAIN, *steps),
    )
    return {
        exchange_id: RolloutKey(split=TRAIN, step=of_step, group=group, index=index)
        for exchange_id, of_step, group, index in rows
    }


def _exchange_ids(history: Row) -> list[str]:
    ids = (choice.get("exchange_id") for _, choice in talk.items(history) if choice is not None)
    return [one for one in ids if isinstance(one, str) and one]


def _choice_texts(trajectory: Row) -> dict[str, list[str]]:
    texts = {}
    for choice in talk.choices(trajectory):
        exchange_id, known = choice.get("exchange_id"), texts_of_choice(choice)
        if isinstance(exchange_id, str) and known is not None:
            texts[exchange_id] = known
    return texts


def _why_missing(num_named: int, num_recorded: int, training: RolloutTraining | None) -> Sequence[str]:
    """Sentences about what is not known of a rollout's tokens."""
    if not num_named:
        return [_UNRECORDED]
    notes = []
    if gone := num_named - num_recorded:
        notes.append(
            f"{gone} of {num_named} exchanges (recorded requests and answers) of this rollout are not in the record: "
            "`record_retention_s` deletes old ones."
        )
    if training is None or training.file is not None or not training.plan.trained:
        return notes
    if training.plan.has_token_file:
        return [*notes, "The trainer's log-probs of this step have been deleted: only newer steps keep theirs."]
    return [*notes, "The trainer's log-probs of this step were not kept (`keep_token_files=0`, or an older version)."]


def _why_unknown(paths: ModelPaths, key: RolloutKey, training: RolloutTraining | None) -> Sequence[str]:
    """Say so where nothing can tell whether a rollout for training was trained."""
    if training is not None or key.split != TRAIN or read_plans(paths.step(key.step or 1)):
        return []
    return [
        "What the step learnt from this rollout is not known: it was trained by an older version of ART, or the record "
        "in `steps/` is gone or damaged."
    ]


def _planned(paths: ModelPaths, key: RolloutKey) -> RolloutTraining | None:
    """Find a rollout that was trained and that nobody logged, by its place among all jobs that ended at the step."""
    number = 0
    for plan in read_plans(paths.step(key.step)) if key.split == TRAIN else ():
        for group in plan.groups:
            if number == key.group and key.index < len(group.rollouts):
                return open_training(paths, plan, group, group.rollouts[key.index])
            number += 1
    return None
