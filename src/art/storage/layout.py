"""The paths in a data directory, of which `docs/architecture.md` has the tree. No other module builds them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from art.errors import InvalidRequestError

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(NAME_PATTERN)


def validate_name(value: str, *, param: str) -> str:
    """Return `value` if it is safe as one component of a path and in a URL, so that it cannot leave the data directory.
    Raises `InvalidRequestError` if the value is not a valid name. `param` names the parameter."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        raise InvalidRequestError(
            f"`{param}` must be 1-128 letters, digits, '.', '_' or '-', starting with a letter or digit and without "
            f"'..'; got {value!r}",
            param=param,
        )
    return value


def other_spelling(path: Path) -> str | None:
    """Return the real name of the file or folder at `path`, if it differs from that in `path` in its letters' case.

    `None` if they are equal or nothing is there. Names differ where the file system ignores case, as usual on macOS and
    Windows.
    """
    if not path.exists():
        return None
    names = os.listdir(path.parent)
    return None if path.name in names else next((n for n in names if n.lower() == path.name.lower()), None)


class ModelPaths:
    """The paths of one model in a data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state.json"
        self.settings = root / "settings.json"
        """What the run was started with (`art.model.run_settings`)."""
        self.labels = root / "labels.json"
        """Tags, notes and marks that people gave the run (`art.storage.labels`)."""
        self.history = root / "history.jsonl"
        self.costs = root / "costs.jsonl"
        self.totals = root / "totals.jsonl"
        """What the sums of the history need and do not find in it (`art.storage.history`)."""
        self.checkpoints = root / "checkpoints"
        self.exports = root / "exports"
        self.steps = root / "steps"
        self.all_trajectories = root / "trajectories"
        self.sinks = root / "sinks"
        """Folder of the cursors of sinks, one file per tracker."""
        self.pipeline = root / "pipeline"
        """Folder of the journal of `art.pipeline`: what is under way and not trained yet."""
        self.sent_jobs = root / "sent_jobs.json"
        """Training jobs that `ServerlessBackend` has sent to its service."""

    def check_spelling(self) -> None:
        """Check that this is not the folder of a model or project whose name differs in upper and lower case only.
        Raises `InvalidRequestError` if it is, because the file system takes the two names for one."""
        for param, folder in (("project", self.root.parents[1]), ("name", self.root)):
            if (known := other_spelling(folder)) is not None:
                raise InvalidRequestError(
                    f"`{param}` is {folder.name!r}, but {folder.parent} has a folder {known!r}: use that name, or one "
                    "that differs in more than upper and lower case",
                    param=param,
                )

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:04d}"

    def step(self, step: int) -> Path:
        """Folder of what is kept of a training step beside its checkpoint (`art.storage.step_files`)."""
        return self.steps / f"{step:04d}"

    def export(self, step: int, form: str) -> Path:
        return self.exports / f"{step:04d}-{validate_name(form, param='format')}"

    def trajectories(self, split: str, step: int) -> Path:
        return self.all_trajectories / validate_name(split, param="split") / f"{step:04d}.jsonl"


class DataDir:
    """The paths of a data directory, which contains everything that ART writes."""

    def __init__(self, root: Path) -> None:
        """
        Args:
            root: the directory. A `~` at its beginning is the user's home.
        """
        self.root = root = root.expanduser()
        self.database = root / "art.db"
        self.keys = root / "keys.db"
        self.lock = root / "server.lock"
        """The lock file, locked by the server that uses the directory."""
        self.samples = root / ".samples"
        """Folder of the samples that training calls are working on. What an earlier server left there is deleted."""
        self.logs = root / "logs"
        self.address = self.logs / "address.txt"
        """Address of the server that runs here, or of the last one that did."""
        self.comparisons = root / "comparisons"
        """Folder of the comparisons that `art compare` has made, one folder each."""
        self.alerts = root / "alerts.jsonl"
        """What was sent to the server's `alerts`, so that it is sent once."""
        self.viewer_index = root / ".viewer.db"
        """The index of rollouts that the page makes. It can be deleted at any time."""

    @property
    def is_known(self) -> bool:
        """Whether a server has run here, or keys were made for one."""
        return self.database.exists() or self.keys.exists()

    def merged(self, process: str) -> Path:
        """Folder of the whole model that is merged from a checkpoint for an engine process that takes no adapters."""
        return self.root / ".merged" / process

    def test_adapters(self, process: str) -> Path:
        """Folder of the test adapters by which the engine of a base model is proved. It is there only meanwhile."""
        return self.root / ".test-adapters" / process

    def model(self, project: str, name: str) -> ModelPaths:
        project = validate_name(project, param="project")
        return ModelPaths(self.root / project / "models" / validate_name(name, param="name"))
