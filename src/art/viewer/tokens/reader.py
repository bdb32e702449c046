"""Answers what the page asks about tokens: those of a rollout, and the prefix tree of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from art.errors import NotFoundError, StorageError
from art.storage.layout import DataDir, ModelPaths
from art.storage.steps.plan_record import PlanRecord, read_plans
from art.storage.steps.token_file import TokenFile
from art.viewer import conversation as talk
from art.viewer.answers.rollout_rows import RolloutKey
from art.viewer.answers.tokens import RolloutTokens, TokensQuery
from art.viewer.answers.tree import TreeAnswer, TreeQuery
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import read_chunk
from art.viewer.tokens.exchanges import join_paths, read_exchanges
from art.viewer.tokens.rollout_tokens import describe_tokens
from art.viewer.tokens.texts import TokenTexts, texts_of_choice
from art.viewer.tokens.training import RolloutTraining, find_training, open_token_file, open_training
from art.viewer.tokens.tree import describe_tree, no_tree

_TRAIN = "train"
_EXPIRED = (
    "{gone} of {all} exchanges (recorded requests and answers) of this rollout are not in the record any more or never "
    "were: `record_retention_s` deletes old ones."
)
_UNRECORDED = (
    "Nothing was recorded for this rollout: its answers name no exchange, as those of other servers and models do not."
)


class TokenReader:
    """Reads tokens of the runs of a data directory. Any number of threads may share it."""

    def __init__(self, data_dir: DataDir, database: ReadOnlyDatabase) -> None:
        self._data_dir = data_dir
        self._database = database
        self._texts = TokenTexts(database)

    def rollout(
        self, project: str, name: str, key: RolloutKey, query: TokensQuery, trajectory: Mapping[str, Any] | None = None
    ) -> RolloutTokens:
        """Describe the tokens of one path of a rollout.

        Args:
            trajectory: the logged trajectory, if it is at hand; otherwise it is read from its file.

        Raises:
            NotFoundError: there is no such rollout, or it has no such path.
        """
        paths = self._data_dir.model(project, name)
        logged = trajectory if trajectory is not None else _read_logged(paths, key)
        training = None
        if logged is None:
            training = _planned(paths, key)
            if training is None:
                raise NotFoundError(f"there is no rollout {key.group}/{key.index} in step {key.step} of {key.split!r}")
            histories = training.rollout.exchange_ids
        else:
            histories = [_exchange_ids(history) for history in talk.histories(dict(logged))]
        named = [exchange_id for ids in histories for exchange_id in ids]
        recorded = read_exchanges(self._database, named)
        training = training or find_training(paths, key.step, named)
        gone = len(set(named) - recorded.keys())
        missing = [_UNRECORDED] if not named else [_EXPIRED.format(gone=gone, all=len(set(named)))] if gone else []
        return describe_tokens(
            join_paths(histories, recorded),
            training,
            self._texts.tokenizer(self._texts.base_model(project, name, paths)),
            query,
            model=(project, name),
            choice_texts=_choice_texts(logged or {}),
            missing=missing + _why_no_file(training),
        )

    def tree(self, project: str, name: str, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained.

        Raises:
            NotFoundError: nothing is known of the step, or the tree has no such node.
        """
        paths = self._data_dir.model(project, name)
        plans = read_plans(paths.step(step))
        for plan in reversed(plans):
            if (file := open_token_file(paths, plan)) is not None:
                return self._tree(project, name, paths, plan, file, query)
        trained = [plan for plan in plans if plan.trained]
        if not plans and not paths.checkpoint(step).exists():
            raise NotFoundError(f"nothing is recorded of step {step} of {project}/{name}")
        if plans and not trained:
            return no_tree(step, "No step was trained here: none of the rollouts could be learnt from.")
        return no_tree(
            step,
            "This step has no token file: it was trained by an older version or with `keep_token_files=0`, or only "
            "newer steps keep theirs.",
        )

    def _tree(
        self, project: str, name: str, paths: ModelPaths, plan: PlanRecord, file: TokenFile, query: TreeQuery
    ) -> TreeAnswer:
        try:
            return describe_tree(
                file,
                plan,
                query,
                database=self._database,
                tokenizer=self._texts.tokenizer(self._texts.base_model(project, name, paths)),
                rollouts=_logged_keys(paths, plan.step) or _planned_keys(paths, plan.step),
            )
        except StorageError:  # retention deleted the file meanwhile
            return no_tree(
                plan.step, "The token file of this step has just been deleted: only newer steps keep theirs."
            )


def _exchange_ids(history: Mapping[str, Any]) -> list[str]:
    ids = (choice.get("exchange_id") for _, choice in talk.items(dict(history)) if choice is not None)
    return [one for one in ids if isinstance(one, str) and one]


def _choice_texts(trajectory: Mapping[str, Any]) -> dict[str, list[str]]:
    texts = {}
    for choice in talk.choices(dict(trajectory)):
        exchange_id, known = choice.get("exchange_id"), texts_of_choice(choice)
        if isinstance(exchange_id, str) and known is not None:
            texts[exchange_id] = known
    return texts


def _why_no_file(training: RolloutTraining | None) -> list[str]:
    if training is None or training.file is not None or not training.plan.trained:
        return []
    if training.plan.has_token_file:
        return ["The trainer's log-probs of this step have been deleted: only newer steps keep theirs."]
    return ["The trainer's log-probs of this step were not kept (`keep_token_files=0`, or an older version)."]


def _groups(paths: ModelPaths, split: str, step: int) -> Iterator[dict[str, Any]]:
    """Yield the logged groups of a split and step, in the order of logging."""
    path, offset = paths.trajectories(split, step), 0
    while path.exists():
        chunk = read_chunk(path, offset)
        for _, _, group in chunk.groups:
            yield group
        if chunk.end == offset:
            return
        offset = chunk.end


def _read_logged(paths: ModelPaths, key: RolloutKey) -> dict[str, Any] | None:
    """Read a logged trajectory; an empty one for a rollout that failed; `None` if nobody logged the split and step."""
    if not paths.trajectories(key.split, key.step).exists():
        return None
    for number, group in enumerate(_groups(paths, key.split, key.step)):
        if number == key.group:
            trajectories = talk.dicts(group.get("trajectories"))
            if key.index < len(trajectories):
                return trajectories[key.index]
            if key.index < len(trajectories) + len(talk.dicts(group.get("exceptions"))):
                return {}
            break
    raise NotFoundError(f"there is no rollout {key.group}/{key.index} in step {key.step} of {key.split!r}")


def _planned(paths: ModelPaths, key: RolloutKey) -> RolloutTraining | None:
    """Find a rollout that was trained and that nobody logged, by its place among all jobs that ended at the step."""
    number = 0
    for plan in read_plans(paths.step(key.step)) if key.split == _TRAIN else ():
        for group in plan.groups:
            if number == key.group and key.index < len(group.rollouts):
                return open_training(paths, plan, group, group.rollouts[key.index])
            number += 1
    return None


def _logged_keys(paths: ModelPaths, step: int) -> dict[str, RolloutKey]:
    """Where the rollouts around a step were logged, by exchange."""
    keys: dict[str, RolloutKey] = {}
    for number in (step - 1, step):  # scripts log before or after they train
        for place, group in enumerate(_groups(paths, _TRAIN, number) if number >= 0 else ()):
            for index, trajectory in enumerate(talk.dicts(group.get("trajectories"))):
                key = RolloutKey(split=_TRAIN, step=number, group=place, index=index)
                keys |= dict.fromkeys(talk.exchange_ids(trajectory), key)
    return keys


def _planned_keys(paths: ModelPaths, step: int) -> dict[str, RolloutKey]:
    keys: dict[str, RolloutKey] = {}
    groups = [group for plan in read_plans(paths.step(step)) for group in plan.groups]
    for place, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            key = RolloutKey(split=_TRAIN, step=step, group=place, index=index)
            keys |= {one: key for path in rollout.exchange_ids for one in path}
    return keys
