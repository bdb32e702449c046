"""Weights & Biases: metrics over `training_step`, a table of sample rollouts, checkpoints as artifacts.

Each row of the log has its number as wandb's own `_step`, so wandb drops a row that it has already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.sinks.samples import COLUMNS, SAMPLES, Sampler
from art.sinks.sink import Artefact, LoggedGroups, Row, Run, Sink
from art.sinks.wandb_file import count_rows, note_first_row

AXIS = "training_step"


class WandbSink(Sink):
    """Reports to W&B as wandb's variables say: `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE`."""

    name = "wandb"
    takes_groups = holds_groups = True
    takes_artefacts = True

    def __init__(self, samples: int = SAMPLES) -> None:
        """
        Args:
            samples: rollouts of each split and step in the table `rollouts/<split>`; 0 for no table.
        """
        self._sampler = Sampler(samples)
        self._run: Any = None
        self._has_rows = False

    def start(self, run: Run) -> int | None:
        import wandb

        mode = wandb.setup().settings.mode  # of WANDB_MODE, or of `wandb offline`
        if mode == "disabled":
            raise ConfigError("W&B is disabled by WANDB_MODE: unset it, or leave 'wandb' out of `report_metrics`")
        offline = mode in ("offline", "dryrun")
        try:
            has_key = offline or wandb.run is not None or wandb.login(prompt=False)
        except (wandb.Error, ValueError) as error:
            raise ConfigError(f"W&B did not accept the key: {error}. Check WANDB_API_KEY and WANDB_BASE_URL") from error
        if not has_key:
            raise ConfigError(
                "W&B needs a key: set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline to keep its "
                "files on this machine"
            )
        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        num_rows = count_rows(folder / "wandb", run.id)  # before this process has a file of its own
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run.project, id=run.id, name=run.name, resume="allow",
                reinit="create_new", dir=folder, config=dict(run.config),
                # What the program prints may hold anything, so it is not uploaded.
                settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(
                f"W&B did not start the run {run.project}/{run.name}: {error}. Check WANDB_API_KEY, WANDB_BASE_URL and "
                "WANDB_ENTITY, set WANDB_MODE=offline, or leave 'wandb' out of `report_metrics`"
            ) from error
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)
        return num_rows if offline else int(self._run.starting_step)

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def metrics(self, row: Row) -> None:
        import wandb

        if self._run.offline and not self._has_rows:
            note_first_row(Path(self._run.dir).parent, row.number)
        self._has_rows = True
        data: dict[str, Any] = {**row.metrics, AXIS: row.step, "_timestamp": row.recorded_at.timestamp()}
        for split, samples in self._sampler.waiting().items():
            rows = [[sample.to_row()[column] for column in COLUMNS] for sample in samples]
            data[f"rollouts/{split}"] = wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log(data, step=row.number, commit=True)
        self._sampler.forget()

    def groups(self, groups: LoggedGroups) -> None:
        self._sampler.add(groups)

    def artefact(self, artefact: Artefact) -> None:
        import wandb

        uploaded = wandb.Artifact(
            f"{self._run.name}-{artefact.name}", artefact.kind, metadata={**artefact.metadata, "step": artefact.step}
        )
        if artefact.path.is_dir():
            uploaded.add_dir(str(artefact.path))
        else:
            uploaded.add_file(str(artefact.path))
        logged = self._run.log_artifact(uploaded, aliases=["latest", f"step{artefact.step}"])
        if not self._run.offline:
            logged.wait()

    def close(self, timeout_s: float) -> None:
        self._run.finish()
