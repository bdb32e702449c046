"""The trainer: the one object with state in this package.

    samples -> check -> plan (measure references, cut mini-batches into updates) -> micro-batches (pack) -> prefix trees
       -> log-probs -> losses -> gradient -> optimiser update, for each update;  then probe -> checkpoint

A reader follows `Trainer.train` -> `plans.plan_rl` -> `run_updates.run_updates` -> `update.compute_gradient`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from art.config import LoraConfig, OptimizerConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ConfigError, NothingTrainableError
from art.kernels.threads import default_num_threads
from art.protocol.samples import StepResult, TrainingSample
from art.trainer.machine import usage
from art.trainer.machine.distributed import ALONE, Team
from art.trainer.machine.headroom import headroom_bytes
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.compilation import compile_layers
from art.trainer.resident import Loaded, Origin, Resident, existing_step, recorded_result
from art.trainer.step.measure import Measurer
from art.trainer.step.micro_batcher import MicroBatcher
from art.trainer.step.plans import UpdatePlan, plan_rl, plan_sft
from art.trainer.step.probe import PROBE_TOKENS, fresh_probe_tokens
from art.trainer.step.progress import OnProgress as OnProgress
from art.trainer.step.progress import Progress
from art.trainer.step.run_updates import run_updates
from art.trainer.step.step_metrics import summarise, summarise_weights
from art.trainer.step.update import Update
from art.trainer.tree.tree import SamplePath, check_sample

_log = logging.getLogger(__name__)

_CPU_TOKENS = 4096
"""Most tokens per micro-batch on a CPU. Larger ones do not run faster there; they leave the cache and take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that has begun: what it trains on, and the checkpoint that it continues from."""

    paths: list[SamplePath]
    loaded: Loaded
    progress: Progress
    started: float


class Trainer:
    """Trains one base model: a LoRA adapter on it, or all of its weights. Not for use by several threads."""

    def __init__(self, base_model: str, config: TrainerConfig, team: Team = ALONE) -> None:
        """Load `base_model`.

        Every process of `team` makes one `Trainer`, and then the same calls. A call returns the same in all processes,
        or raises in all of them. More calls may follow an error, except after a `ProcessError`.

        Raises:
            ConfigError: the model cannot be loaded or trained, or `team` does not have `config.num_processes`.
        """
        if config.num_processes != team.size:
            raise ConfigError(
                f"the trainer is configured for {config.num_processes} processes, but {team.size} run; start "
                f"{config.num_processes} with `torchrun`, and pass `Team.from_environment(config)`",
                param="num_processes",
            )
        torch.set_num_threads(max(1, (config.num_threads or default_num_threads()) // team.size))
        self._team = team
        with team.call(in_lockstep=config.shard_base):
            self._base = load_base_model(base_model, config)
            if config.compile_layers:
                compile_layers(self._base)
        self._resident = Resident(self._base, config, team)
        self._batcher = MicroBatcher(self._base, max_tokens=_max_tokens(config, self._base.device), team=team)
        self._peak_flops = team.size * usage.peak_flops(self._base.device, self._base.head.weight.dtype)

    def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> StepResult:
        """Write step 0: a fresh adapter that changes nothing, or with `lora=None` (full fine-tuning) the base weights.

        If `path` holds a valid checkpoint already, that one stays and its step is returned.

        Raises:
            ConfigError: `lora` does not fit the model, or `None` does not fit this trainer's settings.
            DiskFullError, StorageError, CorruptCheckpointError
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            if (step := self._team.from_first(lambda: existing_step(path))) is not None:
                return StepResult(step=step)
            loaded = self._resident.start_fresh(lora)
            origin = Origin(probe_tokens=fresh_probe_tokens(self._base.vocab_size), config={}, metrics={})
            self._resident.write(path, loaded, origin)
            return StepResult(step=0)

    def train(
        self,
        samples: Sequence[TrainingSample],
        config: TrainConfig,
        *,
        from_checkpoint: Path,
        to_checkpoint: Path,
        job_id: str,
        pairs: Sequence[tuple[str, str]] = (),
        references: Mapping[int, Path] | None = None,
        on_progress: OnProgress | None = None,
    ) -> StepResult:
        """Make one reinforcement-learning step: `config.num_minibatches` updates, then a checkpoint.

        If `to_checkpoint` exists and this job wrote it, its recorded result is returned and nothing is trained.

        Args:
            pairs: (chosen, rejected) rollout ids, for the loss dpo.
            references: the checkpoints that `config.loss` names, by step.

        Raises:
            TrajectoryError, NothingTrainableError: the samples cannot be trained.
            TrainingError: non-finite numbers or too much mismatch; nothing was changed.
            DiskFullError, StorageError, CorruptCheckpointError, ConflictError: from the checkpoints.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            if (recorded := self._team.from_first(lambda: recorded_result(to_checkpoint, job_id))) is not None:
                return recorded
            step = self._begin(samples, from_checkpoint, on_progress)
            measurer = Measurer(step.loaded.policy, self._batcher, step.progress, references)
            plan = plan_rl(step.paths, config, pairs, measurer, step=step.loaded.step)
            return self._finish(step, plan, config, to_checkpoint, job_id)

    def train_sft(
        self,
        samples: Sequence[TrainingSample],
        config: TrainSFTConfig,
        *,
        from_checkpoint: Path,
        to_checkpoint: Path,
        job_id: str,
        on_progress: OnProgress | None = None,
    ) -> StepResult:
        """Make one step of supervised fine-tuning: one update per batch of trajectories, then one checkpoint.

        If `to_checkpoint` exists and this job wrote it, its recorded result is returned and nothing is trained.

        Raises:
            ConfigError: a list of learning rates does not have one per batch.
            TrajectoryError: a sample is not of component "sft".
            NothingTrainableError, TrainingError, DiskFullError, StorageError, CorruptCheckpointError, ConflictError:
                see `train`.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            if (recorded := self._team.from_first(lambda: recorded_result(to_checkpoint, job_id))) is not None:
                return recorded
            step = self._begin(samples, from_checkpoint, on_progress)
            return self._finish(step, plan_sft(step.paths, config), config, to_checkpoint, job_id)

    def trial(self, samples: Sequence[TrainingSample], lora: LoraConfig | None) -> dict[str, float]:
        """Make one update on `samples` (component "sft") from a fresh step 0, and forget it.

        No checkpoint is read or written. The next call loads the checkpoint that it names.

        Returns:
            `seconds` of the update, `num_tokens` of the samples, `num_tree_tokens` with shared tokens counted once,
            `grad_norm`, `peak_memory_bytes` of the process that took most and `headroom_bytes` of the one that had
            least left.

        Raises:
            ConfigError: `lora` does not fit the model.
            NothingTrainableError: no sample has a token to learn.
            TrainingError: a sample does not fit into memory, or the loss is not finite.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            updates = [Update(paths=self._check(samples), learning_rate=1e-5)]
            loaded = self._resident.start_fresh(lora)
            usage.reset_peak_memory(self._base.device)
            started = time.perf_counter()
            record = run_updates(loaded, updates, OptimizerConfig(), self._batcher, Progress())
            return {
                "seconds": time.perf_counter() - started,
                "num_tokens": float(sum(len(sample.token_ids) for sample in samples)),
                "num_tree_tokens": float(record.num_tree_tokens),
                "grad_norm": record.grad_norms[-1],
                "peak_memory_bytes": float(max(self._team.gather(usage.peak_memory_bytes(self._base.device)))),
                "headroom_bytes": float(min(self._team.gather(headroom_bytes(self._base.device)))),
            }

    # -- one step --

    def _begin(self, samples: Sequence[TrainingSample], from_checkpoint: Path, on_progress: OnProgress | None) -> _Step:
        started = time.perf_counter()
        paths = self._check(samples)
        loaded = self._resident.load(from_checkpoint)
        return _Step(paths=paths, loaded=loaded, progress=Progress(on_progress), started=started)

    def _check(self, samples: Sequence[TrainingSample]) -> list[SamplePath]:
        checked = [check_sample(sample, vocab_size=self._base.vocab_size) for sample in samples]
        paths = [path for path in checked if path is not None]
        if not paths:
            raise NothingTrainableError(
                f"none of the {len(samples)} samples has a token to learn: each has an empty loss mask or weight 0"
            )
        return paths

    def _finish(
        self, step: _Step, plan: UpdatePlan, config: TrainConfig | TrainSFTConfig, to_checkpoint: Path, job_id: str
    ) -> StepResult:
        """Run the planned updates, report them and write the checkpoint."""
        loaded = step.loaded
        before = loaded.policy.values.clone()
        usage.reset_peak_memory(self._base.device)
        planned = time.perf_counter()
        record = run_updates(loaded, plan.updates, config.optimizer, self._batcher, step.progress)
        updates_s = time.perf_counter() - planned
        metrics = summarise(record, step.paths, step=loaded.step, max_grad_norm=config.optimizer.max_grad_norm)
        metrics |= plan.metrics | usage.measure_usage(
            self._base,
            record,
            updates_s,
            peak_flops=self._peak_flops,
            trains_base_weights=loaded.policy.trains_base_weights,
        )
        metrics["throughput/peak_memory_bytes"] = max(self._team.gather(metrics["throughput/peak_memory_bytes"]))
        metrics |= summarise_weights(loaded.policy, before, learning_rate=plan.updates[-1].learning_rate)
        trained = time.perf_counter()
        metrics["throughput/train_tokens_per_s"] = metrics["data/step_tokens_unshared"] / (trained - step.started)
        loaded.step += 1
        origin = Origin(
            probe_tokens=step.paths[0].sample.token_ids[:PROBE_TOKENS],
            job_id=job_id,
            config=config.model_dump(mode="json"),
            metrics=metrics,
        )
        self._resident.write(to_checkpoint, loaded, origin)
        metrics["time/step_checkpoint_s"] = time.perf_counter() - trained
        metrics["time/step_trainer_s"] = time.perf_counter() - step.started
        return StepResult(step=loaded.step, metrics=metrics)


def _max_tokens(config: TrainerConfig, device: torch.device) -> int:
    """Tokens per micro-batch: the setting, cut to what is useful on a CPU."""
    if device.type != "cpu" or config.max_tokens <= _CPU_TOKENS:
        return config.max_tokens
    _log.info(
        "`max_tokens` is %d, but a CPU gains nothing above %d: micro-batches have at most %d tokens",
        config.max_tokens,
        _CPU_TOKENS,
        _CPU_TOKENS,
    )
    return _CPU_TOKENS
