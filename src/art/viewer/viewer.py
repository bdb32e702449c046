"""`Viewer`: every answer of the page. The server's routes and `art view` call nothing else.

    viewer = Viewer(DataDir(Path(".art")))
    viewer.runs().runs[0].step
    viewer.rollouts("games", "agent-001", RolloutQuery(step=12, sort="reward")).rows

Methods block on files; call them in a thread. Any number of threads may share a viewer. It only reads: the one thing
that it writes is its index of rollouts, which can be deleted at any time.
"""

from __future__ import annotations

from pathlib import Path

from art.storage.layout import DataDir, ModelPaths
from art.viewer.answers.checkpoint_list import CheckpointList, CompareQuery, Comparison
from art.viewer.answers.costs import CostsAnswer
from art.viewer.answers.curves import SeriesAnswer, SeriesQuery
from art.viewer.answers.group import GroupAnswer
from art.viewer.answers.rollout import RolloutDetail
from art.viewer.answers.rollout_rows import RolloutKey, RolloutPage, RolloutQuery
from art.viewer.answers.run_list import RunDetail, RunList
from art.viewer.answers.step_ledger import LedgerAnswer, StepDetail
from art.viewer.answers.tokens import RolloutTokens, TokensQuery
from art.viewer.answers.tree import TreeAnswer, TreeQuery
from art.viewer.database import ReadOnlyDatabase
from art.viewer.tokens.reader import TokenReader


class Viewer:
    """Answers what the page asks about a data directory.

    Every method that takes `project` and `name` raises `NotFoundError` for a run that does not exist, and
    `InvalidRequestError` for a name that is no name.
    """

    def __init__(self, data_dir: DataDir, *, index_path: Path | None = None) -> None:
        """
        Args:
            index_path: file of the index of rollouts; by default `.viewer.db` in the data directory, or a file in the
                user's cache folder where the directory cannot be written.
        """
        self.data_dir = data_dir
        self.database = ReadOnlyDatabase(data_dir.database)
        self._tokens = TokenReader(data_dir, self.database)

    def close(self) -> None:
        """End indexing and close the files."""
        self.database.close()

    def run_paths(self, project: str, name: str) -> ModelPaths:
        """Return the paths of a run.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: `project` or `name` is no name.
        """
        raise NotImplementedError

    def version(self, project: str | None = None, name: str | None = None) -> str:
        """Return a text that changes when an answer about the run can change; of all runs without a name. It is made
        of sizes and times of files, and costs no more than looking at them."""
        raise NotImplementedError

    def runs(self, project: str | None = None) -> RunList:
        """List all runs, or those of one project."""
        raise NotImplementedError

    def run(self, project: str, name: str) -> RunDetail:
        """Describe one run."""
        raise NotImplementedError

    def series(self, project: str, name: str, query: SeriesQuery) -> SeriesAnswer:
        """Return curves of metrics."""
        raise NotImplementedError

    def rollouts(self, project: str, name: str, query: RolloutQuery) -> RolloutPage:
        """List the rollouts that match a query."""
        raise NotImplementedError

    def rollout(self, project: str, name: str, key: RolloutKey) -> RolloutDetail:
        """Describe one rollout.

        Raises:
            NotFoundError: there is no such rollout.
        """
        raise NotImplementedError

    def group(self, project: str, name: str, split: str, step: int, group: int) -> GroupAnswer:
        """Describe the rollouts of one scenario side by side.

        Raises:
            NotFoundError: there is no such group.
        """
        raise NotImplementedError

    def tokens(self, project: str, name: str, key: RolloutKey, query: TokensQuery) -> RolloutTokens:
        """Describe the exact tokens of one path of a rollout.

        Raises:
            NotFoundError: there is no such rollout, or it has no such path.
        """
        self.run_paths(project, name)
        return self._tokens.rollout(project, name, key, query)

    def tree(self, project: str, name: str, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained.

        Raises:
            NotFoundError: nothing is known of the step, or the tree has no such node.
        """
        self.run_paths(project, name)
        return self._tokens.tree(project, name, step, query)

    def step(self, project: str, name: str, step: int) -> StepDetail:
        """Describe one step.

        Raises:
            NotFoundError: nothing was logged for the step.
        """
        raise NotImplementedError

    def ledger(self, project: str, name: str, first: int | None = None, last: int | None = None) -> LedgerAnswer:
        """Sum the ledgers of steps from `first` to `last`, both included."""
        raise NotImplementedError

    def checkpoints(self, project: str, name: str) -> CheckpointList:
        """List the checkpoints on the disk."""
        raise NotImplementedError

    def compare(self, project: str, name: str, query: CompareQuery) -> Comparison:
        """Compare the rewards of two steps scenario by scenario."""
        raise NotImplementedError

    def costs(self, project: str, name: str) -> CostsAnswer:
        """Return what the run has cost, by source and step."""
        raise NotImplementedError
