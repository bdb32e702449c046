"""Settings that all recipes share.

Each setting has the name of its command-line option, so messages that name `--judge-price` mean `judge_price`. A
recipe takes the settings by name, or as a config object:

    await art.recipes.train("tic_tac_toe", "./tiny", steps=20)
    await art.recipes.train("tic_tac_toe", config=TaskTrainingConfig(base_model="./tiny", steps=20))
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from art.config import EngineConfig, LoraConfig, ModelSettings, PipelineConfig, ServerConfig, VllmConfig
from art.config.base import Config
from art.costs import Ledger, Prices
from art.errors import ConfigError
from art.model import TrainableModel
from art.rewards import DEFAULT_RUBRIC, JudgeSettings, Ruler, params_at
from art.storage.labels import Notes, Tags
from art.task import TaskDefaults

_SHORT = {"lora_rank", "full_finetuning", "engine", "max_context"}
"""Settings that say a part of `ModelSettings` in short."""


class RecipeConfig(Config):
    """Settings that all recipes share: what is trained, who judges it, what it may cost, and how long it runs.

    The docstrings of the settings are also the help of the command-line options.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    base_model: str | None = None
    """Model to train: a hub id or a local path."""
    name: str | None = None
    """Name of the trained model. Each recipe derives a default from its input."""
    project: str | None = None
    """Project of the trained model. Each recipe has its own default."""
    data_dir: Path = Path(".art")
    """Folder in which models are kept."""
    report: tuple[str, ...] | None = None
    """Trackers that get metrics, e.g. wandb or tensorboard; `none` for no tracker. By default the
    environment chooses, e.g. by WANDB_API_KEY."""
    tags: Tags | None = None
    """Words by which the page finds the run, in place of those that it has."""
    notes: Notes | None = None
    """Text about the run for its page, in place of what it has."""
    judge: str | None = None
    """Language model that scores rollouts, as litellm names it, e.g. openai/o3 or ollama_chat/qwen3:8b."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible server that serves the judge."""
    judge_passes: Literal[1, 2] = 1
    """With 2, each group is judged in two orders, which cancels a preference for the first rollout."""
    judge_price: tuple[float, float] | None = None
    """USD per million prompt and completion tokens of the judge; the default is the price that litellm knows."""
    budget: float | None = Field(default=None, ge=0)
    """USD that the model may cost in this run and all earlier ones. A run that reaches it ends."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """USD per hour of this machine."""
    steps: int | None = Field(default=None, ge=1)
    """Step up to which the model is trained, by default the task's number."""
    seed: int = Field(default=0, ge=0)
    """Seed of scenarios and sampling, and of the tiny model if one is made."""
    learning_rate: float | None = Field(default=None, gt=0, le=1)
    """Peak learning rate; the default is the task's, or else 1e-5, and for a tiny model 3e-3, or 2e-3 if it calls
    tools."""
    groups: int | None = Field(default=None, ge=1)
    """Scenarios per step, by default the task's number."""
    rollouts: int | None = Field(default=None, ge=2)
    """Rollouts per scenario, whose rewards are compared with each other; by default the task's number."""
    max_staleness: int = Field(default=1, ge=0)
    """Training steps that rollouts may run ahead; 0 makes rollouts and training take turns, the same in every run."""
    lora_rank: int = Field(default=LoraConfig().rank, ge=1, le=512)
    """Rank of the LoRA adapter that is trained."""
    full_finetuning: bool = False
    """Train all weights of the decoder layers instead of an adapter."""
    engine: Literal["torch", "vllm"] = "torch"
    """Engine that samples: the embedded one, or vLLM, whose environment ART_VLLM_PYTHON names."""
    max_context: int | None = Field(default=None, ge=16)
    """Most tokens of prompt and completion together; the default is the model's own limit."""
    settings: ModelSettings | None = None
    """All settings of adapter, engine and trainer, in place of the four above, which must be left out then."""
    server_config: ServerConfig | None = None
    """Settings of the server that the run starts, such as `alerts`."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.settings is not None and (twice := sorted(_SHORT & self.model_fields_set)):
            raise ValueError(f"`{twice[0]}` is part of `settings`, which is given too; set it there")
        return self

    @classmethod
    def complete(cls, config: Self | None, model: str | None, settings: Mapping[str, Any]) -> Self:
        """Return `config` with the settings that were passed by name in place of its own.

        Raises:
            ConfigError: a setting is unknown, given twice, or has a value that it cannot have.
        """
        if model is not None and "base_model" in settings:
            raise ConfigError(f"the base model is given twice: {model!r} and base_model={settings['base_model']!r}")
        values = {} if config is None else config.model_dump(exclude_unset=True)
        return cls(**{**values, **settings, **({} if model is None else {"base_model": model})})

    def named(self, *, name: str, project: str = "") -> Self:
        """Return a copy with an absolute `data_dir`, and with this name and project if it has none."""
        missing = {"name": self.name or name, "project": self.project or project}
        return self.model_copy(update={**missing, "data_dir": self.data_dir.resolve()})

    def make_model(self) -> TrainableModel[Any, Any]:
        """Make the model to train, without registering it.

        Raises:
            ConfigError: no base model is set, or the prices make no sense.
        """
        if self.base_model is None or self.name is None or self.project is None:
            raise ConfigError("say what to train by `base_model`: a hub id or a local path")
        return TrainableModel(
            name=self.name, project=self.project, base_model=self.base_model, base_path=str(self.data_dir),
            settings=self.model_settings(), prices=self.prices(), budget_usd=self.budget,
            report_metrics=reported_to(self.report),
        )  # fmt: skip

    async def record(self, model: TrainableModel[Any, Any]) -> None:
        """Keep the settings with the run, without values that may be keys, and give it its tags and notes."""
        hidden = {"headers", "env", "server_config", "base_model", "name", "project", "data_dir", "tags", "notes"}
        await model.record_settings({"recipe": self.model_dump(mode="json", exclude=hidden, exclude_none=True)})
        if self.tags is not None or self.notes is not None:
            await asyncio.to_thread(model.set_labels, tags=self.tags, notes=self.notes)

    @property
    def serves_one_step(self) -> bool:
        """Whether the engine holds one checkpoint at a time, which rules out a comparison with the untrained policy."""
        settings = self.model_settings()
        return settings.lora is None and isinstance(settings.engine, VllmConfig)

    def model_settings(self) -> ModelSettings:
        if self.settings is not None:
            return self.settings
        lora = None if self.full_finetuning else LoraConfig(rank=self.lora_rank)
        if self.engine != "vllm":
            return ModelSettings(lora=lora, engine=EngineConfig(max_context=self.max_context))
        weights: Literal["lora", "merged"] = "merged" if self.full_finetuning else "lora"
        return ModelSettings(lora=lora, engine=VllmConfig(max_context=self.max_context, weights=weights))

    def prices(self) -> Prices:
        """The price of this machine, which costs are booked by.

        Raises:
            ConfigError: the judge's price is below 0, or there is a budget and nothing has a price.
        """
        if min(self.judge_price or (0,)) < 0:
            raise ConfigError("--judge-price must be 0 USD or more")
        is_free = all(price is None for price in (self.price_per_hour, self.judge))
        if self.budget is not None and is_free:
            raise ConfigError("--budget needs something that costs: add --price-per-hour of this machine, or a --judge")
        return Prices(device_usd_per_hour=self.price_per_hour)

    def check(self, defaults: TaskDefaults) -> None:
        """Check what the types of single settings do not, before anything is made.

        Raises:
            ConfigError: settings do not fit together, or not to the defaults of the task.
        """
        self.prices()
        self.model_settings()
        self.pace(self.loop_defaults(defaults))

    def loop_defaults(self, defaults: TaskDefaults) -> TaskDefaults:
        """Return a task's defaults, with this config's settings in their place and the base model's learning rate."""
        changes: dict[str, Any] = {
            "learning_rate": self.learning_rate, "groups_per_step": self.groups, "rollouts_per_group": self.rollouts,
            "num_steps": self.steps,
        }  # fmt: skip
        chosen = replace(defaults, **{key: value for key, value in changes.items() if value is not None})
        return chosen if self.base_model is None else chosen.for_base_model(self.base_model)

    def pace(self, defaults: TaskDefaults) -> PipelineConfig:
        """Return how far rollouts run ahead, with groups and steps of a task's sizes."""
        return PipelineConfig(
            max_staleness=self.max_staleness, in_flight="switch" if self.serves_one_step else "finish",
            groups_per_step=defaults.groups_per_step, rollouts_per_group=defaults.rollouts_per_group,
        )  # fmt: skip

    def judge_settings(self, settings: JudgeSettings, ledger: Ledger) -> JudgeSettings:
        """Return a copy of `settings` with the price `judge_price`, whose costs are booked in `ledger`."""
        prompt, completion = self.judge_price or (None, None)
        return replace(settings, budget=ledger, prompt_usd_per_million=prompt, completion_usd_per_million=completion)

    def make_judge(self, costs: Ledger, *, rubric: str | None = None) -> Ruler:
        """Make the judge that scores rollouts.

        Args:
            costs: ledger in which its answers are booked.
            rubric: what is good, in prose; RULER's own by default.

        Raises:
            ConfigError: no judge is set, or what its provider needs is not installed.
        """
        if self.judge is None:
            raise ConfigError("say who judges by `--judge`, e.g. openai/o3")
        settings = JudgeSettings(passes=self.judge_passes, seed=self.seed)
        judge = Ruler(
            self.judge, rubric=rubric or DEFAULT_RUBRIC, extra_litellm_params=params_at(self.judge_url),
            settings=self.judge_settings(settings, costs),
        )  # fmt: skip
        require_installed(judge)
        return judge


def reported_to(report: Sequence[str] | None) -> list[Any] | None:
    """Return the `report_metrics` of a model for the setting `report`, in which `none` means no tracker.

    Raises:
        ConfigError: `none` is given beside a tracker.
    """
    if report is None:
        return None
    if "none" in report and len(report) > 1:
        raise ConfigError(f"--report {' '.join(report)}: `none` means no tracker, so it is the only one")
    return [name for name in report if name != "none"]


def require_installed(judge: Ruler) -> None:
    """Check that the packages are installed that requests to a judge need.

    Raises:
        ConfigError: the judge needs a package that is not installed.
    """
    if problem := judge.grader.client.missing():
        raise ConfigError(problem)
