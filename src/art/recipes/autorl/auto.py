"""AutoRL: train an agent from one sentence.

write inputs and a system prompt --> train with RULER --> compare before and after on held-out inputs --> report
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from art.backends.local import LocalBackend
from art.errors import ConfigError
from art.recipes.autorl.auto_config import AutoConfig
from art.recipes.autorl.auto_files import AutoFiles, folder_of, inside, task_of
from art.recipes.autorl.auto_report import describe_run
from art.recipes.judged.clock import Clock
from art.recipes.judged.judged_run import JudgedResult, JudgedRun, train_and_compare
from art.recipes.progress import OnProgress, Progress, log_progress
from art.scenarios import Dataset


async def auto(
    what: str,
    model: str | None = None,
    *,
    out: str | Path | None = None,
    config: AutoConfig | None = None,
    on_progress: OnProgress = log_progress,
    **settings: Any,
) -> JudgedResult:
    """Train an agent from a sentence: have a language model write its task, train, and compare with the untrained one.

    The files in the folder (task.toml, scenarios.jsonl, run.toml) may be edited. A later call uses them as they are and
    continues from the newest checkpoint.

    Args:
        what: what the agent should do, in a sentence; or the folder of an earlier call, which continues.
        model: base model to train, as in the setting `base_model`.
        out: folder of task, scenarios and report; by default `auto/` and a name after the sentence.
        config: settings as an object.
        on_progress: receives each line of progress.
        settings: fields of `AutoConfig`, which win over `config`. Settings that neither has come from `run.toml`.

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
    async with LocalBackend(path=config.data_dir) as backend:
        # Fails before inputs are paid for if the base model is missing or cannot be trained here.
        on_progress(Progress("Starting server, engine and trainer ...", "busy"))
        with files.clock.measure("starting"):
            await trained.register(backend)
            await trained.record_settings(config.to_record())
        dataset = await files.write()
        task, num_val = task_of(dataset, config.seed), len(dataset.split("val"))
        digest = hashlib.sha256(dataset.task.model_dump_json().encode())
        run = JudgedRun(
            config=config, model=trained, task=task, out=folder, clock=files.clock, on_progress=on_progress,
            judge=config.make_judge(trained.costs, rubric=dataset.task.rubric), step=await trained.get_step(),
            # Besides its input, the score of a rollout depends on the texts of the task.
            command=f"art auto {inside(folder)}", about=digest.hexdigest()[:16],
        )  # fmt: skip
        return await train_and_compare(
            run, describe=lambda: describe_run(run, dataset),
            held_out=task.scenarios("test", seed=config.seed, count=len(dataset.scenarios)),
            validation=task.scenarios("val", seed=config.seed, count=num_val) if num_val else [],
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
    return AutoFiles(what, folder, config.completed(folder), Clock.load(folder), on_progress)
