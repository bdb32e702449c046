"""The trainer, which makes training steps and writes their checkpoints: the one object with state in this package.

    samples -> check -> replay (of constraints) -> plan (measure references, cut mini-batches into updates)
       -> micro-batches (pack) -> prefix trees -> log-probs -> losses -> gradient -> optimiser update, for each update;
       then probe -> checkpoint

Base model, trained weights, optimiser moments and random generator together are exactly one checkpoint (`Resident`).
Each call of the trainer names the checkpoint that it continues from. What is in memory is replaced, unless it *is* that
checkpoint. So a trainer that died, or failed half-way through a step, needs no repair.

A reader follows `Trainer.train` -> `plans.plan_rl` -> `update.run_updates` -> `update.compute_gradient` ->
`update.train_micro_batch`.
"""

from __future__ import annotations

import base64
import collections
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from art.config import LoraConfig, OptimizerConfig, TrainerConfig
from art.errors import ConfigError, ConflictError, ConstraintMismatchError, NothingTrainableError
from art.kernels.process import default_num_threads
from art.memory import CPU_TOKENS
from art.protocol.calls import SampleFile, Train, TrainSft
from art.protocol.compact import read_samples
from art.protocol.samples import StepResult, TrainingSample
from art.storage import checkpoints
from art.storage.checkpoints import CheckpointState
from art.trainer import memory
from art.trainer.distributed import ALONE, Team
from art.trainer.gate import Noise, is_mixture
from art.trainer.policy.base_model import FrozenModel, load_base_model
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.proof import PROBE_TOKENS, measure_probe, natural_probe_tokens, write_loud_adapters
from art.trainer.step.micro_batch import MicroBatcher, StepProgress
from art.trainer.step.micro_batch import OnProgress as OnProgress
from art.trainer.step.plans import Measurer, plan_rl, plan_sft
from art.trainer.step.record import summarise, write_tokens
from art.trainer.step.replay import Replayer
from art.trainer.step.update import Optimizer, Update, run_updates
from art.trainer.tree import SamplePath, check_samples

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """The checkpoint in the trainer's memory: trained weights, optimiser and the number of the step."""

    policy: Policy
    optimizer: Optimizer
    step: int
    identity: str | None
    """Identifies the checkpoint on disk that equals this one; `None` if there is none, e.g. during a step."""


class Resident:
    """Holds at most one checkpoint in memory, and loads, replaces and writes it."""

    def __init__(self, base: FrozenModel, config: TrainerConfig, team: Team) -> None:
        self._base = base
        self._config = config
        self._team = team
        self._loaded: Loaded | None = None

    def start_fresh(self, lora: LoraConfig | None) -> Loaded:
        """Replace what is in memory by step 0: a new adapter, or the base weights if `lora` is `None`."""
        if self._loaded is not None and self._loaded.policy.config == lora:
            loaded = self._loaded
            loaded.policy.reset()
            loaded.optimizer.reset()
            loaded.step, loaded.identity = 0, None
            return loaded
        if self._loaded is not None:
            self._loaded.policy.remove()
            self._loaded = None
        policy: Policy = FullPolicy(self._base) if lora is None else LoraPolicy(self._base, lora)
        self._loaded = Loaded(policy, Optimizer(policy, self._team), step=0, identity=None)
        return self._loaded

    def load(self, path: Path) -> Loaded:
        """Bring the checkpoint `path` into memory. Files are read only if it is not there already.

        Raises:
            ConflictError: the checkpoint belongs to another base model.
            AdapterError, StorageError, CorruptCheckpointError: its files are unreadable, damaged or do not fit.
        """
        # What is in memory is the checkpoint only if it is so in every process: one may have failed half-way.
        identity = checkpoints.identify(path) if self._team.rank == 0 else None
        held = self._loaded.identity if self._loaded is not None else None
        answers = self._team.gather((identity, held))
        identity = answers[0][0]
        if self._loaded is not None and all(held == identity for _, held in answers):
            return self._loaded
        checkpoints.verify(path)
        state = checkpoints.read_state(path)
        if state.base_model != self._base.name:
            raise ConflictError(f"checkpoint {path} is of base model {state.base_model!r}, not {self._base.name!r}")
        loaded = self.start_fresh(None if state.lora is None else LoraConfig.model_validate(state.lora))
        loaded.policy.load(path / loaded.policy.weights_file)
        if checkpoints.has_moments(path):
            loaded.optimizer.load(path / checkpoints.OPTIMIZER, state.num_updates)
        else:
            _log.warning("the optimiser's moments of step %d were removed: it starts again without them", state.step)
        # The step that follows then draws what it would have drawn had this process made the checkpoint itself.
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))
        loaded.step, loaded.identity = state.step, identity
        self._team.gather(None)  # nobody trains before all processes have read it
        _log.info("continuing from step %d at %s", loaded.step, path)
        return loaded

    def write(
        self,
        path: Path,
        loaded: Loaded,
        probe_tokens: list[int],
        *,
        job_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write `loaded` to the folder `path`. The first process of the team writes, the others wait.

        Args:
            probe_tokens: token path whose log-probs are stored, for the engine to reproduce.
            job_id, config, metrics: how the checkpoint was made; nothing for step 0.
        """
        lora = loaded.policy.config
        state = CheckpointState(
            step=loaded.step,
            job_id=job_id,
            base_model=self._base.name,
            lora=None if lora is None else lora.model_dump(mode="json"),
            config=dict(config or {}),
            num_updates=loaded.optimizer.num_updates,
            rng=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            metrics=dict(metrics or {}),
        )
        probe = measure_probe(loaded.policy, probe_tokens)
        moments = loaded.optimizer.stream()

        def write() -> str:
            files: dict[str, checkpoints.Content] = {
                checkpoints.OPTIMIZER: moments,
                checkpoints.STATE: state.model_dump_json().encode(),
                checkpoints.PROBE: probe.model_dump_json().encode(),
            }
            try:
                return checkpoints.write_checkpoint(path, loaded.policy.files() | files)
            finally:
                collections.deque(moments, maxlen=0)  # others take part in every piece, even where writing fails

        def send_parts() -> None:
            collections.deque(moments, maxlen=0)  # the other processes run their own stream to its end

        loaded.identity = self._team.from_first(write, meanwhile=send_parts)


def recorded_state(path: Path) -> CheckpointState | None:
    """Verify the checkpoint in folder `path` and read its state; `None` if the folder does not exist."""
    if not path.exists():
        return None
    checkpoints.verify(path)
    return checkpoints.read_state(path)


def recorded_result(path: Path, job_id: str) -> StepResult | None:
    """Read the result that job `job_id` wrote to checkpoint `path` in an earlier attempt, if there was one.

    Raises:
        ConflictError: another job wrote the checkpoint.
    """
    state = recorded_state(path)
    if state is None:
        return None
    if state.job_id != job_id:
        raise ConflictError(
            f"checkpoint {path} exists already, made by job {state.job_id!r}; job {job_id!r} must write another step"
        )
    return StepResult(step=state.step, metrics=state.metrics)


class Trainer:
    """Trains one base model: a LoRA adapter on it, or all of its weights. Not for use by several threads."""

    def __init__(self, base_model: str, config: TrainerConfig, team: Team = ALONE, *, name: str | None = None) -> None:
        """Load `base_model`, which checkpoints call `name` if that is another.

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
            self._base = load_base_model(base_model, config, name)
        self._resident = Resident(self._base, config, team)
        max_tokens = config.max_tokens
        if self._base.device.type == "cpu" and max_tokens > CPU_TOKENS:
            _log.info("`max_tokens` is %d, but a CPU gains nothing above %d, which is used", max_tokens, CPU_TOKENS)
            max_tokens = CPU_TOKENS
        self._batcher = MicroBatcher(self._base, max_tokens=max_tokens, team=team)
        self._replayer = Replayer(self._base.source, self._base.vocab_size, team)

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
            peaks = self._team.gather(memory.peak_bytes(self._base.device))
            metrics |= {
                "throughput/checkpointing": checkpointing,
                "throughput/train_tree_tokens_per_s": record.num_tree_tokens / updates_s,
                "throughput/peak_memory_bytes": float(max(peaks)),
                "loss/learning_rate": updates[-1].learning_rate,
                "loss/adapter_norm": loaded.policy.norm(),
                "loss/adapter_change": float(torch.dist(loaded.policy.values, before) / loaded.policy.values.norm()),
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
        return self._team.from_first(lambda: natural_probe_tokens(self._base.source, self._base.vocab_size))

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
        max_tokens = self._batcher.budget(paths)
        return memory.prepare_checkpointing(loaded.policy, self._config, paths, max_tokens=max_tokens, team=self._team)


def _read(samples: Sequence[TrainingSample] | SampleFile) -> Sequence[TrainingSample]:
    return read_samples(samples.path) if isinstance(samples, SampleFile) else samples
