"""`TrainableModel`: a model that is trained, served and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal

from pydantic import PrivateAttr

from art.capture import remember
from art.client.arguments import check_groups
from art.config import ModelSettings, OptimizerConfig, SamplingConfig, TrainConfig, TrainSFTConfig
from art.costs import PolicyMeter
from art.errors import ArtError, ConfigError
from art.model.model import ConfigT, Model, StateT
from art.plugins import load_plugin
from art.trajectory import MetadataValue, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art.backend import Backend, ModelRegistration, TrainResult
    from art.client.collector import RolloutCollector
    from art.protocol.rollouts import Outcome, RolloutStatus

logger = logging.getLogger(__name__)


class TrainableModel(Model[ConfigT, StateT], Generic[ConfigT, StateT]):
    """A model that is trained: a base model and a checkpoint per step."""

    base_model: str
    """Hub id, short name or path of the model to train; a path is on the server's machine."""
    settings: ModelSettings | None = None
    """Settings of adapter, engine, trainer and rendering. They are fixed at the first registration."""

    _internal_config: Mapping[str, Any] | None = PrivateAttr(default=None)
    """Settings in the words of older code, `art.dev.InternalModelConfig`."""
    _registered_as: tuple[str, str] | None = PrivateAttr(default=None)
    _collector: RolloutCollector | None = PrivateAttr(default=None)
    _meter: PolicyMeter = PrivateAttr(default_factory=PolicyMeter)

    def __init__(self, *, _internal_config: Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self._internal_config = _internal_config

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        if self.inference_base_url is not None:
            remember(self)

    @property
    def trainable(self) -> bool:
        return True

    def model_settings(self) -> ModelSettings:
        """Return the settings to register the model with.

        Raises:
            ConfigError: they are given twice, or `_internal_config` asks for something that cannot be honoured.
        """
        if not self._internal_config:
            return self.settings or ModelSettings()
        if self.settings is not None:
            raise ConfigError(f"model {self.name!r} has both `settings` and `_internal_config`: keep one")
        older = load_plugin("art.names", "older")
        settings: ModelSettings = older.settings_from_internal_config(self._internal_config)
        return settings

    def _run_config(self) -> dict[str, Any]:
        chosen = self.model_settings()
        settings = chosen.model_dump(mode="json", exclude_defaults=True)
        if chosen.lora is not None:
            settings["lora"] = {"rank": chosen.lora.rank, **settings.get("lora", {})}
        return super()._run_config() | {"base_model": self.base_model, "settings": settings}

    def default_optimizer(self) -> OptimizerConfig | None:
        """Return the optimiser in `trainer_args` of older code, for training steps that set none; else `None`."""
        if not self._internal_config:
            return None
        older = load_plugin("art.names", "older")
        optimizer: OptimizerConfig | None = older.optimizer_from_internal_config(self._internal_config)
        return optimizer

    async def register(self, backend: Backend) -> None:
        """Connect the model to a backend, which serves it from then on."""
        started = time.monotonic()
        try:
            await super().register(backend)
        except ArtError as error:
            if not self._internal_config:
                raise
            older = load_plugin("art.names", "older")
            raise older.in_older_names(error, self._internal_config) from error.__cause__
        self._meter.start(started)

    def _adopt(self, registration: ModelRegistration) -> None:
        super()._adopt(registration)
        self._collector = None
        self._registered_as = (self.project, self.name)
        remember(self)

    def get_inference_name(self, step: int | Literal["promoted"] | None = None) -> str:
        # After a copy was renamed, the name that the server gave is not its own.
        known = self.inference_model_name if self._registered_as == (self.project, self.name) else None
        name = known or f"{self.project}/{self.name}"
        if step is None:  # a rollout of a pipeline ends with the checkpoint that it began with
            from art.client.rollout_context import pinned_step

            step = pinned_step(f"{self.project}/{self.name}")
        if step is None:
            return name
        return f"{name}@{step}" if self._backend is None else self._backend.name_of_step(name, step)

    async def get_step(self) -> int:
        """Return the step of the checkpoint that the server serves now."""
        return await self.backend().get_step(self)

    async def book_costs(self, *, trainer_s: float = 0.0) -> None:
        """Book the costs of tokens and device time since the last call. `log` calls this before it adds a row.

        Args:
            trainer_s: seconds of that time in which the trainer worked; the rest is rollouts, rewards and waiting.
        """
        if self._backend is None or not self._meter.is_running:
            return
        tokens = await self._backend.token_counts(self)
        counters = None if tokens is None else (tokens.prompt, tokens.cached, tokens.completion)
        passed_s, book = self._meter.lap(), self._meter.book
        await asyncio.to_thread(book, self.costs, self.prices, counters, passed_s=passed_s, trainer_s=trainer_s)

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        sft: Iterable[Trajectory] | None = None,
        verbose: bool = False,
        **settings: Any,
    ) -> TrainResult:
        """Train one step and log groups and metrics under `train`.

        Arguments and errors are those of `Backend.train`.
        """
        groups = check_groups(trajectory_groups)
        result: TrainResult = await self.backend().train(self, groups, config, sft=sft, verbose=verbose, **settings)
        await self.log(groups, split="train", metrics=result.metrics, step=result.step)
        return result

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        **settings: Any,
    ) -> TrainResult:
        """Fine-tune on the assistant messages of `trajectories` and log the metrics under `train`.

        Arguments and errors are those of `Backend.train_sft`.
        """
        result: TrainResult = await self.backend().train_sft(self, trajectories, config, verbose=verbose, **settings)
        await self.log(split="train", metrics=result.metrics, step=result.step)
        return result

    async def put_rollout(
        self,
        rollout_id: str,
        *,
        group_id: str | None = None,
        scenario_id: str | None = None,
        reward: float | None = None,
        outcome: Outcome | None = None,
        error: str | None = None,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, MetadataValue] | None = None,
        sampling: SamplingConfig | dict[str, Any] | None = None,
    ) -> RolloutStatus:
        """Announce or finish a rollout that another program runs. `PUT /api/rollouts/{rollout_id}` does the same.

        Once it is announced, this model answers requests under the rollout's base URL that name an unknown model.

        Args:
            group_id: id shared by the rollouts of one group and by no others.
            scenario_id: id of the scenario; it is kept in the trajectory's metadata.
            reward: reward of the rollout; it finishes the rollout with outcome `ok`.
            outcome: how the rollout ended; it finishes the rollout.
            error: what went wrong outside the policy, with outcome `infra_fault`.
            metrics: numbers about the rollout.
            metadata: anything to keep with the rollout.
            sampling: how the rollout is sampled from now on, whatever its requests ask for: `{"temperature": 1.0}` for
                an agent that asks for temperature 0.

        Raises:
            ConflictError: the rollout is finished, and this call would change it.
        """
        from art.protocol.rollouts import RolloutUpdate

        update = RolloutUpdate(
            project=self.project, model=f"{self.project}/{self.name}", group_id=group_id, scenario_id=scenario_id,
            reward=reward, outcome=outcome, error=error, metrics=metrics, metadata=metadata,
            sampling=None if sampling is None else SamplingConfig.model_validate(sampling),
        )  # fmt: skip
        return await self.backend().put_rollout(rollout_id, update)

    async def collect_trajectory_groups(
        self,
        num_groups: int,
        rollouts_per_group: int,
        *,
        timeout_s: float | None = None,
        pbar_desc: str | None = "collect",
    ) -> list[TrajectoryGroup]:
        """Wait until other programs have finished `num_groups` groups, and return them, each group once.

        After a restart of this program, groups that no training job has used are returned again.

        Args:
            num_groups: groups to wait for.
            rollouts_per_group: finished rollouts that make a group complete.
            timeout_s: seconds to wait at most.
            pbar_desc: label of the progress bar, `None` for no bar.

        Raises:
            ProcessError: `timeout_s` seconds have passed; the message says what is missing.
        """
        if self._collector is None:
            self._collector = self.backend().rollout_collector(self)
        return await self._collector.collect(num_groups, rollouts_per_group, timeout_s=timeout_s, pbar_desc=pbar_desc)

    async def promote(
        self,
        step: int | None = None,
        *,
        require: float | None = None,
        split: str = "val",
        force: bool = False,
        note: str = "",
    ) -> str:
        """Declare a checkpoint good for production: it answers requests to `project/name@promoted` from then on.

        Training goes on and leaves it alone, and no deletion removes it. Promoting another step replaces it at once.

        Args:
            step: step of the checkpoint; by default the newest.
            require: promote it only if it is better than the promoted checkpoint by more than this, by the interval of
                the difference of the rewards that were logged for both; see docs/organisation.md.
            split: held-out split of the log that `require` looks at.
            force: promote it even if it does not meet `require`. The history says so.
            note: why, for the history.

        Returns:
            The name to send as `model` in a request; `get_inference_name("promoted")` is the same.

        Raises:
            NotFoundError: there is no such checkpoint.
            PromotionError: it does not meet `require`. The message has the figures.
            ConfigError: the engine cannot serve a step beside the newest, with `VllmConfig(weights="merged")`.
        """
        from art.protocol.promotions import Gate

        gate = None if require is None else Gate(require=require, split=split)
        promotion = await self.backend().checkpoints.promote(self, step, gate=gate, force=force, note=note)
        return promotion.inference_name

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints but the newest, the promoted, those in use, and the best by the mean of the metric.

        If the history has damaged lines, nothing is deleted: the best checkpoint could be in one of them.
        """
        from art.storage.history import means_by_step

        history = self._paths().history
        means, num_damaged = await asyncio.to_thread(means_by_step, history, best_checkpoint_metric)
        if num_damaged:
            logger.warning(
                "no checkpoint is deleted: %d lines are damaged in %s, so the best is not known; remove those lines",
                num_damaged, history,
            )  # fmt: skip
            return
        keep = {await self.get_step()}
        if means:
            keep.add(max(means, key=lambda step: (means[step], step)))
        else:
            logger.info("%s was never logged: only the newest checkpoint is kept", best_checkpoint_metric)
        checkpoints = self.backend().checkpoints
        deleted = await checkpoints.delete(self, keep_steps=sorted(keep), best_metric=best_checkpoint_metric)
        logger.info("kept checkpoints %s, deleted %s", sorted(keep), deleted)
