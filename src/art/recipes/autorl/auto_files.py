"""The folder of a call of `auto`: where it is, and task.toml and scenarios.jsonl, which a language model writes."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

from art.costs import Ledger
from art.errors import ConfigError
from art.recipes.autorl.auto_config import AutoConfig
from art.recipes.judged.clock import Clock
from art.recipes.progress import OnProgress, Progress
from art.rewards import params_at
from art.scenarios import Dataset, Writer, generate_dataset, generate_inputs, with_splits
from art.scenarios.dataset import TASK_FILE
from art.scenarios.generate import DEFAULT_NUM
from art.storage.layout import DataDir
from art.tasks.dataset import DatasetTask

MIN_WORDS = 3
"""Minimum number of words in a description. A shorter text is treated as a mistyped folder name."""
PREVIEW, _PREVIEW_CHARS = 5, 110
"""How many scenarios are shown as progress, and how many characters of each."""


@dataclass(slots=True)
class AutoFiles:
    """The files of one call of `auto`. It writes the task and scenarios that are missing, and never changes others."""

    what: str
    """The sentence that describes the task, or the folder."""
    folder: Path
    config: AutoConfig
    clock: Clock
    on_progress: OnProgress

    def check(self, *, trains: bool) -> None:
        """Check the files and options before anything is started or paid for.

        Args:
            trains: whether training follows, which needs scenarios to train on and to test with.

        Raises:
            ConfigError: a file cannot be used, or there are too few scenarios.
        """
        num = self.config.num_scenarios
        if not (self.folder / TASK_FILE).exists():
            if num is not None and num < 2:
                raise ConfigError(f"--num-scenarios must be 2 or more, one to train on and one to test with; got {num}")
            return
        dataset = self._load()
        if trains and (num or 0) <= len(dataset.scenarios):
            task_of(dataset, self.config.seed)

    async def write(self) -> Dataset:
        """Write the task and scenarios that are missing, save the options for the next call, and report the result."""
        dataset = await self._dataset()
        self.config.save(self.folder)
        self._show(dataset)
        return dataset

    async def _dataset(self) -> Dataset:
        if not (self.folder / TASK_FILE).exists():
            return await self._write_new()
        dataset, config = self._load(), self.config
        missing = (config.num_scenarios or 0) - len(dataset.scenarios)
        if missing <= 0:
            return dataset
        known = [scenario.input for scenario in dataset.scenarios]
        writer = self._writer()
        self.on_progress(Progress(f"{writer.name} writes {missing} scenarios more ...", "busy"))
        task = dataset.task.description
        new = await generate_inputs(task, missing, writer, instructions=config.instructions, known=known)
        dataset = replace(dataset, scenarios=[*dataset.scenarios, *with_splits(new)])
        dataset.save(self.folder)
        return dataset

    def _load(self) -> Dataset:
        if self.config.rubric is not None:
            raise ConfigError(
                f"the rubric is in {self.folder / TASK_FILE} by now: edit it there, and leave out --judge-rubric"
            )
        dataset = Dataset.load(self.folder)
        described = dataset.task.description
        if not Path(self.what).is_dir() and self.what.split() != described.split():
            raise ConfigError(
                f"{self.folder} holds another task: {described!r}. Give another `--out`, or go on with that one by "
                f"`art auto {inside(self.folder)}`"
            )
        return dataset

    async def _write_new(self) -> Dataset:
        config = self.config
        num = DEFAULT_NUM if config.num_scenarios is None else config.num_scenarios
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = self._writer()
        self.on_progress(Progress(f"{writer.name} writes {num} scenarios ...", "busy"))
        with self.clock.measure("writing scenarios"):
            dataset = await generate_dataset(self.what, num, writer, instructions=config.instructions)
        if config.rubric is not None:
            dataset = replace(dataset, task=dataset.task.model_copy(update={"rubric": config.rubric.strip()}))
        dataset.save(self.folder)
        return dataset

    def _writer(self) -> Writer:
        config = self.config
        model, url = config.writer
        ledger = Ledger(config.budget, path=DataDir(config.data_dir).model(config.project, str(config.name)).costs)
        return Writer(model, extra_litellm_params=params_at(url), settings=config.writer_settings(ledger))

    def _show(self, dataset: Dataset) -> None:
        for scenario in dataset.scenarios[:PREVIEW]:
            text = " ".join(scenario.input.split())
            text = text if len(text) <= _PREVIEW_CHARS else f"{text[: _PREVIEW_CHARS - 3]}..."
            self.on_progress(Progress(f"  {text}"))
        self.on_progress(Progress(dataset.summary()))
        for warning in dataset.warnings():
            self.on_progress(Progress(f"note: {warning}", "warning"))
        self.on_progress(Progress(f"files   {inside(self.folder)}"))


def task_of(dataset: Dataset, seed: int) -> DatasetTask:
    """Make a task from a data set, and check that it can be trained on and tested with.

    Raises:
        ConfigError: there is nothing to train on, or nothing to test with.
    """
    task = DatasetTask(dataset)
    for split in ("train", "test"):
        task.scenarios(split, seed=seed, count=1)
    return task


def folder_of(what: str, out: str | Path | None) -> Path:
    """The folder in which a call of `auto` keeps its files.

    Raises:
        ConfigError: `what` is neither a folder with a task nor a sentence.
    """
    folder = Path(what)
    if folder.is_dir():
        if out is not None:
            raise ConfigError(f"{what} is a folder already, so `--out {out}` has no meaning; leave it out")
        if not (folder / TASK_FILE).exists():
            raise ConfigError(
                f"the folder {what} has no {TASK_FILE}; give the sentence that describes the task, and `--out`"
            )
        return folder.resolve()
    if len(what.split()) < MIN_WORDS:
        raise ConfigError(
            f"{what!r} is no folder, and too short to describe a task: say in a sentence what the agent should do"
        )
    return Path(out or Path("auto") / slug(what)).resolve()


def slug(text: str) -> str:
    """Make a name of at most 41 characters for a folder and a model from a sentence.

    Example: "Answer questions about our café's opening hours, politely" gives
    "answer-questions-about-our-cafes-opening".
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower().replace("'", "")
    name = "-".join(re.findall(r"[a-z0-9]+", plain))
    return (name if len(name) <= 41 else name[:42].rpartition("-")[0]) or "task"


def inside(folder: Path) -> str:
    """Return a path as text for people: relative to the working directory if that is shorter."""
    return min(os.path.relpath(folder), str(folder), key=len)
