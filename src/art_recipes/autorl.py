"""AutoRL: train an agent from one sentence.

write inputs and a system prompt --> train with RULER --> compare before and after on held-out inputs --> report
"""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from art.costs import Ledger
from art.errors import ConfigError
from art.local_backend import LocalBackend
from art.rewards import params_at
from art.storage.layout import DataDir
from art_recipes.dataset_task import DatasetTask
from art_recipes.judged import (
    JudgedConfig,
    JudgedResult,
    JudgedRun,
    make_report,
    train_and_compare,
)
from art_recipes.report import Report
from art_recipes.scenarios import Dataset, Writer, generate_dataset
from art_recipes.scenarios.dataset import TASK_FILE
from art_recipes.scenarios.generate import DEFAULT_NUM
from art_recipes.training.progress import OnProgress, Progress, Remedies, log_progress


class AutoConfig(JudgedConfig):
    """Settings of `art.recipes.auto`, which trains an agent from a sentence."""

    project: str = "auto"
    """Project of the trained model."""
    num_scenarios: int = Field(default=DEFAULT_NUM, ge=2)
    """Scenarios of a new task in all."""
    instructions: str | None = None
    """What the inputs should be about, in your words."""
    rubric: str | None = None
    """What the judge is told is good, in prose, in place of the rubric that is written. Only for a new task."""


MIN_WORDS = 3
"""Minimum number of words in a description. A shorter text is treated as a mistyped folder name."""


async def auto(
    what: str,
    model: str | None = None,
    *,
    out: str | Path | None = None,
    config: AutoConfig | None = None,
    on_progress: OnProgress = log_progress,
    command: str = "",
    **settings: Any,
) -> JudgedResult:
    """Train an agent from a sentence: have a language model write its task, train, and compare with the untrained one.

    The files in the folder (task.toml, scenarios.jsonl) may be edited. A later call with the same settings uses them as
    they are, and continues from the newest checkpoint.

    Args:
        what: what the agent should do, in a sentence; or the folder of an earlier call, which continues.
        model: base model to train, as in the setting `base_model`.
        out: folder of task, scenarios and report; by default `auto/` and a name after the sentence.
        config: settings as an object.
        on_progress: receives each line of progress.
        command: command that repeats the run, to show in the report.
        settings: fields of `AutoConfig`, which win over `config`.

    Raises:
        ConfigError: a setting or a file is wrong, or the base model cannot be trained here.
        GenerationError: the generator wrote nothing that can be used.
        TrainingError: nothing could be learnt in several steps in a row.
        FaultRateError: too many rollouts failed, or the judge scored too few groups.
    """
    files = _files(what, out, AutoConfig.complete(config, model, settings), on_progress)
    config, folder = files.config, files.folder
    if config.base_model is None:
        raise ConfigError("say what to train by `--model`; or `--write-only` to have the files written first")
    files.check(trains=True)
    trained = config.make_model()
    config.make_judge(trained.costs)  # fails now if the judge cannot be asked, before anything is paid
    folder.mkdir(parents=True, exist_ok=True)
    async with LocalBackend(path=config.data_dir, server_config=config.server_config) as backend:
        # Fails before inputs are paid for if the base model is missing or cannot be trained here.
        on_progress(Progress("Starting server, engine and trainer ...", "busy"))
        await trained.register(backend)
        await config.record(trained)
        dataset = await files.write()
        task = task_of(dataset, config.seed)
        run = JudgedRun(
            config=config, model=trained, task=task, out=folder, on_progress=on_progress,
            judge=config.make_judge(trained.costs, rubric=dataset.task.rubric), step=await trained.get_step(),
            command=command,
        )  # fmt: skip
        return await train_and_compare(
            run, describe=lambda: describe_run(run, dataset),
            held_out=task.scenarios("test", seed=config.seed, count=len(dataset.scenarios)),
        )  # fmt: skip


async def write_task(
    what: str,
    *,
    out: str | Path | None = None,
    config: AutoConfig | None = None,
    on_progress: OnProgress = log_progress,
    **settings: Any,
) -> Dataset:
    """Have a language model write the task and scenarios that `auto` trains on, without training yet.

    A later call of `auto` with the folder trains on them as they then are. The arguments are those of `auto`.
    """
    files = _files(what, out, AutoConfig.complete(config, None, settings), on_progress)
    files.check(trains=False)
    return await files.write()


def _files(what: str, out: str | Path | None, config: AutoConfig, on_progress: OnProgress) -> AutoFiles:
    folder = folder_of(what, out)
    return AutoFiles(what, folder, config.named(name=folder.name), on_progress)


REMEDIES = Remedies(
    endings={"cut_short": "Answers were cut short: raise `max_completion_tokens` in task.toml, or ask for less there"},
    no_spread=(
        "Edit the prompt in task.toml or the inputs in scenarios.jsonl towards what the policy solves now and then, "
        "give an input more --rollouts, and measure the judge with `art judge check`"
    ),
    unclear="Train on with a higher --steps, or measure on more `test` inputs and with more --held-out-rollouts",
    faults="Take a base model that follows instructions better",
)


def describe_run(run: JudgedRun, dataset: Dataset) -> Report:
    config = run.config
    summary = (
        f"{config.base_model} after {run.step} steps of reinforcement learning on {len(dataset.split('train'))} "
        f"inputs. {config.generator or config.judge} wrote inputs and system prompt, {config.judge} judged the answers "
        "(RULER); there were no labels. Both can be edited."
    )
    return make_report(
        run, title=dataset.task.description, summary=summary, remedies=REMEDIES,
        text_of=lambda scenario: str(scenario.inputs["input"]),
        note_of=lambda trajectory: "cut short" if trajectory.metrics.get("cut_short") else "",
    )  # fmt: skip


PREVIEW, _PREVIEW_CHARS = 5, 110
"""How many scenarios are shown as progress, and how many characters of each."""


@dataclass(slots=True)
class AutoFiles:
    """The files of one call of `auto`. It writes those of a new task, and never changes them."""

    what: str
    """The sentence that describes the task, or the folder."""
    folder: Path
    config: AutoConfig
    on_progress: OnProgress

    def check(self, *, trains: bool) -> None:
        """Check the files and options before anything is started or paid for.

        Args:
            trains: whether training follows, which needs scenarios to train on and to test with.

        Raises:
            ConfigError: a file cannot be used, or there are too few scenarios.
        """
        if (self.folder / TASK_FILE).exists():
            dataset = self._load()
            if trains:
                task_of(dataset, self.config.seed)

    async def write(self) -> Dataset:
        """Write the task and its scenarios, unless they are there already, and report the result."""
        dataset = self._load() if (self.folder / TASK_FILE).exists() else await self._write_new()
        for scenario in dataset.scenarios[:PREVIEW]:
            self.on_progress(Progress(f"  {textwrap.shorten(scenario.input, _PREVIEW_CHARS, placeholder=' ...')}"))
        self.on_progress(Progress(dataset.summary()))
        self.on_progress(Progress(f"files   {inside(self.folder)}"))
        return dataset

    def _load(self) -> Dataset:
        dataset = Dataset.load(self.folder)
        if self.config.rubric is not None and self.config.rubric.strip() != dataset.task.rubric:
            raise ConfigError(
                f"another rubric is in {self.folder / TASK_FILE} by now: edit it there, and leave out --judge-rubric"
            )
        described = dataset.task.description
        if not Path(self.what).is_dir() and self.what.split() != described.split():
            raise ConfigError(
                f"{self.folder} holds another task: {described!r}. Give another `--out`, or go on with that one by "
                f"`art auto {inside(self.folder)}`"
            )
        return dataset

    async def _write_new(self) -> Dataset:
        config = self.config
        num = config.num_scenarios
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = self._writer()
        self.on_progress(Progress(f"{writer.name} writes {num} scenarios ...", "busy"))
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
