"""Settings of AutoRL, and `run.toml`, which keeps them so that the next call needs none."""

from __future__ import annotations

from pathlib import Path

from art.recipes.judged.judged_config import JudgedConfig
from art.scenarios.toml_file import read_toml, write_toml
from art.storage.atomic import write_file

RUN_FILE = "run.toml"
_HEAD = (
    "The options of `art auto` for this folder, each by its name there. Options that are given win and are kept here."
)


class AutoConfig(JudgedConfig):
    """Settings of `art.recipes.auto`, which trains an agent from a sentence."""

    project: str = "auto"
    """Project of the trained model."""
    num_scenarios: int | None = None
    """Scenarios in all; missing ones are written. The default is what the folder has, or 64 in a new one."""
    instructions: str | None = None
    """What the inputs should be about, in your words."""
    rubric: str | None = None
    """What the judge is told is good, in prose, in place of the rubric that is written. Only for a new task."""

    def completed(self, folder: Path) -> AutoConfig:
        """Return a copy in which settings that are not set are those of the last call, from `run.toml` in `folder`.

        Raises:
            ConfigError: `run.toml` cannot be used; the message names file and line.
        """
        path = folder / RUN_FILE
        kept = read_toml(path, JudgedConfig).model_dump(exclude_unset=True) if path.exists() else {}
        config = AutoConfig(**kept | self.model_dump(exclude_unset=True)).named(name=folder.name)
        if config.base_model is not None and Path(config.base_model).is_dir():
            absolute = str(Path(config.base_model).resolve())  # the next call may come from another folder
            config = config.model_copy(update={"base_model": absolute})
        return config

    def save(self, folder: Path) -> None:
        """Write the settings to `run.toml` in `folder`, for the next call, unless the file has them already."""
        values = {name: getattr(self, name) for name in JudgedConfig.model_fields} | {"data_dir": str(self.data_dir)}
        path = folder / RUN_FILE
        if not path.exists() or read_toml(path, JudgedConfig) != JudgedConfig(**values):
            write_file(path, write_toml(values, {}, head=_HEAD).encode())
