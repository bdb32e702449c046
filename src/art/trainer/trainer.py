"""The trainer, which makes training steps and writes their checkpoints: the one object with state in this package.

    samples -> check -> replay (of constraints) -> plan (measure references, cut mini-batches into updates)
       -> micro-batches (pack) -> prefix trees -> log-probs -> losses -> gradient -> optimiser update, for each update;
       then probe -> checkpoint

A reader follows `Trainer.train` -> `plans.plan_rl` -> `update.run_updates` -> `update.compute_gradient` ->
`update.train_micro_batch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from art.config import LoraConfig, OptimizerConfig, TrainerConfig
from art.errors import ConfigError, ConstraintMismatchError, NothingTrainableError
from art.kernels.process import default_num_threads
from art.memory import CPU_TOKENS
from art.protocol.calls import SampleFile, Train, TrainSft
from art.protocol.compact import read_samples
from art.protocol.samples import StepResult, TrainingSample
from art.trainer import memory
from art.trainer.distributed import ALONE, Team
from art.trainer.gate import Noise, is_mixture
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.proof import PROBE_TOKENS, natural_probe_tokens, write_loud_adapters
from art.trainer.resident import Loaded, Resident, recorded_result, recorded_state
from art.trainer.step.measure import Measurer
from art.trainer.step.micro_batch import MicroBatcher, StepProgress
from art.trainer.step.micro_batch import OnProgress as OnProgress
from art.trainer.step.plans import plan_rl, plan_sft
from art.trainer.step.record import summarise, summarise_weights, write_tokens
from art.trainer.step.replay import Replayer
from art.trainer.step.update import Update, run_updates
from art.trainer.tree import SamplePath, check_samples

_log = logging.getLogger(__name__)


class Trainer:
    """Trains one base model: a LoRA adapter on it, or all of its weights. Not for use by several threads."""

    def __init__(self, base_model: str, config: TrainerConfig, team: Team = ALONE) -> None:
        """Load `base_model`.

        Every process of `team` makes one `Trainer`, and then the same calls. A call returns the same in all processes,
        or raises in all of them. More calls may follow an error, except after a `ProcessError`.

        Raises:
            ConfigError: the model cannot be loaded or trained, or `team` has not `config.num_processes` processes.
        """
        if config.num_processes != team.size:
            raise ConfigError(
                f"the trainer is configured for {config.num_processes} processes, but {team.size} run; start "
                f"{config.num_processes} with `torchrun`, and pass `Team.from_environment(config)`",
                param="num_processes",
            )
        torch.set_num_threads(max(1, (config.num_threads or default_num_threads()) // config.num_processes))
        self._team = team
        self._config = config
        with team.call(in_lockstep=config.shard_base):
            self._base = load_base_model(base_model, config)
        self._resident = Resident(self._base, config, team)
        max_tokens = config.max_tokens
        if self._base.device.type == "cpu" and max_tokens > CPU_TOKENS:
            _log.info("`max_tokens` is %d, but a CPU gains nothing above %d, which is used", max_tokens, CPU_TOKENS)
            max_tokens = CPU_TOKENS
        self._batcher = MicroBatcher(self._base, max_tokens=max_tokens, team=team)
        self._replayer = Replayer(self._base.name, self._base.vocab_size, team)

    def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> StepResult:
        """Write step 0: a fresh adapter that changes nothing, or with `lora=None` (full fine-tuning) the base weights.

        If `path` holds a valid checkpoint already, that one stays and its step is returned.

        Raises:
            ConfigError: `lora` does not fit the model, or `None` does not fit this trainer's settings.
            DiskFullError, StorageError: the checkpoint cannot be written.
            CorruptCheckpointError: `path` holds a damaged checkpoint.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            if (state := self._team.from_first(lambda: recorded_state(path))) is not None:
                return StepResult(step=state.step)
            loaded = self._resident.start_fresh(lora)
            self._resident.write(path, loaded, self._natural_probe)
            return StepResult(step=0)

    def write_loud_adapters(self, folder: Path, lora: LoraConfig) -> dict[str, float]:
        """Write test adapters that an engine must follow, one per kind of layer (`proof.py`).

        Returns:
            by kind of layer, the root mean square change of the probe's log-probs in nats.

        Raises:
            ConfigError: `lora` does not fit the model.
            DiskFullError, StorageError: the files cannot be written.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            policy = self._resident.start_fresh(lora).policy
            assert isinstance(policy, LoraPolicy)
            return write_loud_adapters(policy, self._natural_probe, folder if self._team.rank == 0 else None)

    def train(self, call: Train | TrainSft, on_progress: OnProgress | None = None) -> StepResult:
        """Make one step, then write its checkpoint.

        `Train` is reinforcement learning, with `config.num_minibatches` updates. `TrainSft` is supervised fine-tuning,
        with one update per batch of trajectories. If `call.to_checkpoint` exists and this job wrote it, its recorded
        result is returned and nothing is trained.

        Raises:
            ConfigError: a list of learning rates does not have one per batch, or the loss names a checkpoint that is
                not among `call.references`.
            TrajectoryError, NothingTrainableError, ConstraintMismatchError: the samples cannot be trained.
            TrainingError: numbers are not finite, too many samples mismatch, or one does not fit into memory. No
                checkpoint is written.
            DiskFullError, StorageError, CorruptCheckpointError: a checkpoint cannot be read or written.
            ConflictError: `call.from_checkpoint` is of another base model, or another job wrote `call.to_checkpoint`.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            recorded = self._team.from_first(lambda: recorded_result(call.to_checkpoint, call.job_id))
            if recorded is not None:
                return recorded
            progress, started = StepProgress(on_progress), time.perf_counter()
            # What is trained, from which weights, in which updates: nothing changes yet.
            paths, refused, replay_metrics = self._check(_read(call.samples))
            loaded = self._resident.load(call.from_checkpoint)
            updates, planned_metrics = self._plan(call, paths, refused, loaded, progress)
            checkpointing = self._prepare_checkpointing(loaded, updates)
            before = loaded.policy.values.clone()
            memory.reset_peak(self._base.device)

            planned = time.perf_counter()
            loaded.identity = None  # what is in memory is not a checkpoint until the next one is written
            settings = call.config.optimizer
            record = run_updates(loaded.policy, loaded.optimizer, updates, settings, self._batcher, progress)
            updates_s = time.perf_counter() - planned

            # What was observed: metrics, and the log-prob of every token if the call asks for them.
            metrics = summarise(record, paths, step=loaded.step, max_grad_norm=settings.max_grad_norm)
            metrics |= replay_metrics | planned_metrics
            metrics |= summarise_weights(loaded.policy, before, learning_rate=updates[-1].learning_rate)
            peaks = self._team.gather(memory.peak_bytes(self._base.device))
            metrics |= {
                "throughput/checkpointing": checkpointing,
                "throughput/train_tree_tokens_per_s": record.num_tree_tokens / updates_s,
                "throughput/peak_memory_bytes": float(max(peaks)),
                "loss/optimizer_updates": float(loaded.optimizer.num_updates),
                "time/step_updates_s": updates_s,
            }
            reported = time.perf_counter()
            findings: list[str] = []
            if call.record_to is not None:
                by_update, branches = [update.paths for update in updates], not self._base.one_by_one
                findings = self._team.from_first(
                    lambda: write_tokens(call, record, by_update, refused, from_step=loaded.step, branches=branches)
                )
            trained = time.perf_counter()
            metrics["time/step_token_file_s"] = trained - reported
            metrics["throughput/train_tokens_per_s"] = metrics["data/step_tokens_unshared"] / (trained - started)

            # The checkpoint, with the probe that an engine must reproduce before it serves these weights.
            loaded.step += 1
            probe = list(paths[0].sample.token_ids[:PROBE_TOKENS])
            if len(probe) < PROBE_TOKENS:  # a few would not tell noise from a fault
                probe = (probe + self._natural_probe)[:PROBE_TOKENS]
            config = call.config.model_dump(mode="json")
            self._resident.write(call.to_checkpoint, loaded, probe, job_id=call.job_id, config=config, metrics=metrics)
            metrics["time/step_checkpoint_s"] = time.perf_counter() - trained
            metrics["time/step_trainer_s"] = time.perf_counter() - started
            return StepResult(step=loaded.step, metrics=metrics, findings=findings)

    def trial(self, samples: Sequence[TrainingSample] | SampleFile, lora: LoraConfig | None) -> dict[str, float]:
        """Make one update on `samples` (component "sft") from a fresh step 0, and forget it.

        No checkpoint is read or written. The next call loads the checkpoint that it names. It raises what `train` does.

        Returns:
            `seconds` of the update, `num_tokens` of the samples, `num_tree_tokens` with shared tokens counted once,
            `grad_norm`, `peak_memory_bytes` of the process that took most, `headroom_bytes` of the one that had least
            left, and `checkpointing`, what the backward pass computes again (0: nothing, 2: whole layers).
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            samples = _read(samples)
            paths, _, _ = self._check(samples)
            updates = [Update(paths=paths, learning_rate=1e-5)]
            loaded = self._resident.start_fresh(lora)
            checkpointing = self._prepare_checkpointing(loaded, updates)
            memory.reset_peak(self._base.device)
            started = time.perf_counter()
            parts = loaded.policy, loaded.optimizer
            record = run_updates(*parts, updates, OptimizerConfig(), self._batcher, StepProgress())
            return {
                "seconds": time.perf_counter() - started,
                "num_tokens": float(sum(len(sample.token_ids) for sample in samples)),
                "num_tree_tokens": float(record.num_tree_tokens),
                "grad_norm": record.grad_norms[-1],
                "peak_memory_bytes": float(max(self._team.gather(memory.peak_bytes(self._base.device)))),
                "headroom_bytes": float(min(self._team.gather(memory.headroom_bytes(self._base.device)))),
                "checkpointing": checkpointing,
            }

    @cached_property
    def _natural_probe(self) -> list[int]:
        """Tokens of a probe when nothing was sampled. All processes ask for them in the same call."""
        return self._team.from_first(lambda: natural_probe_tokens(self._base.name, self._base.vocab_size))

    def _check(self, samples: Sequence[TrainingSample]) -> tuple[list[SamplePath], list[SamplePath], dict[str, float]]:
        """Validate the samples and replay their constraints: samples to train (at least one), refused ones, metrics."""
        paths = check_samples(samples, vocab_size=self._base.vocab_size)
        if not paths:
            raise NothingTrainableError(
                f"none of the {len(samples)} samples has a token to learn: each has an empty loss mask or weight 0"
            )
        paths, metrics = self._replayer.replay(paths)
        usable = [path for path in paths if not path.refusal]
        if not usable:
            raise ConstraintMismatchError(
                f"none of the {len(paths)} samples could be drawn under the constraint that it was recorded with; "
                f"{paths[0].refusal}. Record and trainer belong to different tokenizers, or the record is damaged"
            )
        return usable, [path for path in paths if path.refusal], metrics

    def _plan(
        self,
        call: Train | TrainSft,
        paths: list[SamplePath],
        refused: list[SamplePath],
        loaded: Loaded,
        progress: StepProgress,
    ) -> tuple[list[Update], dict[str, float]]:
        """Plan the updates, and return metrics that replace those that the updates report."""
        if isinstance(call, TrainSft):
            return plan_sft(paths, call.config), {}
        measurer = Measurer(loaded.policy, self._batcher, progress, call.references)
        refused_rollouts = {path.sample.rollout_id for path in refused}
        pairs = [pair for pair in call.pairs if refused_rollouts.isdisjoint(pair)]
        dtype = str(self._base.head.weight.dtype).removeprefix("torch.")
        noise = Noise(
            trainer=dtype,
            engine=call.engine_dtype or dtype,
            is_mixture=is_mixture(self._base.model.config),
            probe_gap=call.probe_gap,
        )
        return plan_rl(paths, call.config, pairs, measurer, step=loaded.step, noise=noise)

    def _prepare_checkpointing(self, loaded: Loaded, updates: Sequence[Update]) -> float:
        paths = [path for update in updates for path in update.paths]
        max_tokens = self._batcher.max_tokens
        return memory.prepare_checkpointing(loaded.policy, self._config, paths, max_tokens=max_tokens, team=self._team)


def _read(samples: Sequence[TrainingSample] | SampleFile) -> Sequence[TrainingSample]:
    return read_samples(samples.path) if isinstance(samples, SampleFile) else samples
