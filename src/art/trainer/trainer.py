"""The trainer: the one object with state in this package.

    samples -> check -> measure (references, anchor) -> updates (mini-batches) -> micro-batches (pack) -> prefix trees
       -> log-probs -> losses -> gradient -> optimiser update, for each update;  then probe -> checkpoint

What it holds between calls is exactly one checkpoint: base model, trained weights, moments, generator. Each call names
the checkpoint that it continues from, and whatever is in memory is replaced by it unless it *is* that checkpoint. So a
trainer that died, or failed half-way through a step, needs no repair: the next call loads and goes on.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from art.config import KlConfig, LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ConfigError, ConflictError, NothingTrainableError, TrajectoryError
from art.storage import checkpoints
from art.storage.checkpoints import CheckpointState
from art.trainer.attention.kernel_check import check_kernel
from art.trainer.attention.tree_attention import KernelName
from art.trainer.contract import StepResult, TrainingSample
from art.trainer.machine import usage
from art.trainer.machine.distributed import ALONE, Team
from art.trainer.machine.headroom import headroom_bytes
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.compilation import compile_layers
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step.base_kl import with_sampled_base
from art.trainer.step.measure import add_stream
from art.trainer.step.micro_batch import MicroBatch, split_micro_batches
from art.trainer.step.optimizer import Optimizer
from art.trainer.step.prepare import prepare_paths
from art.trainer.step.probe import PROBE_TOKENS, fresh_probe_tokens, measure_probe
from art.trainer.step.step_metrics import StepRecord, summarise
from art.trainer.step.update import Update, compute_gradient
from art.trainer.streams import Measure
from art.trainer.tree.pack import split_batches, split_minibatches
from art.trainer.tree.tree import SamplePath, check_sample

_log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with (micro-batches done, of how many), both of this process."""

_CPU_TOKENS = 4096
"""Tokens per micro-batch on CPU: more do not run faster there, they only leave the cache and take memory."""

_SFT_AUTO_BATCH_SIZE = 2


@dataclass(slots=True)
class _Loaded:
    """The checkpoint in memory."""

    policy: Policy
    optimizer: Optimizer
    step: int
    identity: str | None
    """Of the checkpoint whose bytes these are; `None` while a step changes them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a step does, and what is known of it before it runs."""

    updates: list[Update]
    metrics: dict[str, float] = field(default_factory=dict)
    """Take the place of those that the updates report."""


_MakePlan = Callable[[list[SamplePath], _Loaded], _Plan]


class Trainer:
    """Trains one base model: a LoRA adapter on it, or all of its weights. Not for use by several threads."""

    def __init__(self, base_model: str, config: TrainerConfig, team: Team = ALONE) -> None:
        """Load `base_model`.

        Every process of `team` makes one of these, and then the same calls. A call returns the same in all, or raises
        in all and the next one may follow; but after a `ProcessError` the team is beyond repair.

        Raises:
            ConfigError: it cannot be loaded or trained, or `team` is not of `config.num_processes`.
        """
        if config.num_processes != team.size:
            raise ConfigError(
                f"the trainer is configured for {config.num_processes} processes, but {team.size} run; start as many "
                "with `torchrun`, and pass `Team.from_environment(config)`",
                param="num_processes",
            )
        torch.set_num_threads(max(1, (config.num_threads or default_num_threads()) // team.size))
        self._config = config
        self._team = team
        with team.call(in_lockstep=config.shard_base):
            self._base = load_base_model(base_model, config)
            if config.compile_layers:
                compile_layers(self._base)
        self._max_tokens = min(config.max_tokens, _CPU_TOKENS) if self._base.device.type == "cpu" else config.max_tokens
        self._loaded: _Loaded | None = None
        self._checked_kernels: set[KernelName] = set()
        self._peak_flops = team.size * usage.peak_flops(self._base.device, self._base.head.weight.dtype)

    def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> StepResult:
        """Write step 0: a fresh adapter that changes nothing, or with `lora=None` (full fine-tuning) the base weights.
        A valid checkpoint that is there already stays.

        Raises:
            ConfigError: `lora` does not fit the model, or `None` this trainer's settings.
            DiskFullError, StorageError, CorruptCheckpointError
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            if (step := self._team.from_first(lambda: _existing_step(path))) is not None:
                return StepResult(step=step)
            loaded = self._inject(lora)
            self._write(path, loaded, fresh_probe_tokens(self._base.vocab_size), job_id=None, config={}, metrics={})
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
        """One reinforcement-learning step: `config.num_minibatches` updates, then a checkpoint.

        If `to_checkpoint` exists and is of this job, its recorded result is returned and nothing is trained.

        Args:
            pairs: (chosen, rejected) rollout ids, for the loss dpo.
            references: the checkpoints that `config.loss` names, by step.

        Raises:
            TrajectoryError, NothingTrainableError: the samples cannot be trained.
            TrainingError: non-finite numbers or too much mismatch; nothing was changed.
            DiskFullError, StorageError, CorruptCheckpointError, ConflictError: from the checkpoints.
        """

        def make_plan(paths: list[SamplePath], loaded: _Loaded) -> _Plan:
            measure = self._measure(loaded, references or {}, on_progress)
            paths, metrics = prepare_paths(paths, config, pairs, measure)
            paths = with_sampled_base(paths, measure, step=loaded.step)
            parts = split_minibatches(paths, config.num_minibatches)
            # With the sampler as the anchor, later updates differ from it by design and cannot be judged.
            later = config.mismatch if config.anchor == "step_start" else None
            gates = [config.mismatch, *[later] * (len(parts) - 1)]
            terms = tuple(term for term in config.terms if not (isinstance(term, KlConfig) and term.where == "reward"))
            updates = [
                Update(
                    paths=part,
                    learning_rate=config.learning_rate,
                    terms=terms,
                    anchor=config.anchor,
                    mismatch=gate,
                )
                for part, gate in zip(parts, gates, strict=True)
            ]
            return _Plan(updates, metrics)

        with self._team.call(in_lockstep=self._base.is_sharded):
            return self._step(samples, config, make_plan, from_checkpoint, to_checkpoint, job_id, on_progress)

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
        """Supervised fine-tuning: one update per batch of trajectories, then one checkpoint. Else as `train`.

        Raises:
            ConfigError: a list of learning rates does not have one per batch.
            TrajectoryError: a sample is not of component "sft".
        """

        def make_plan(paths: list[SamplePath], loaded: _Loaded) -> _Plan:
            if other := [path.sample.sample_id for path in paths if path.sample.component != "sft"]:
                raise TrajectoryError(
                    f"sample {other[0]!r} has component 'rl'; supervised fine-tuning takes 'sft' only"
                )
            size = _SFT_AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size
            batches = split_batches(paths, size)
            rates = config.learning_rate
            if not isinstance(rates, list):
                rates = [rates] * len(batches)
            elif len(rates) != len(batches):
                raise ConfigError(
                    f"`learning_rate` lists {len(rates)} rates, but the trajectories make {len(batches)} batches of "
                    f"{size}; give one rate per batch, or a single number",
                    param="learning_rate",
                )
            return _Plan([Update(paths=batch, learning_rate=rate) for batch, rate in zip(batches, rates, strict=True)])

        with self._team.call(in_lockstep=self._base.is_sharded):
            return self._step(samples, config, make_plan, from_checkpoint, to_checkpoint, job_id, on_progress)

    def trial(self, samples: Sequence[TrainingSample], lora: LoraConfig | None) -> dict[str, float]:
        """One update on `samples`, of component "sft", from step 0 that is then forgotten: no checkpoint is read or
        written, and the next call begins from the one that it names.

        Returns:
            `seconds` of the update, `num_tokens` of the samples, `num_tree_tokens` without what they share,
            `grad_norm`, `peak_memory_bytes` of the process that took most and `headroom_bytes` of the one that had
            least left.

        Raises:
            ConfigError: `lora` does not fit the model.
            NothingTrainableError: no sample has a token to learn.
            TrainingError: a sample does not fit into memory, or the loss is not finite.
        """
        with self._team.call(in_lockstep=self._base.is_sharded):
            paths = self._checked(samples)
            loaded = self._inject(lora)
            usage.reset_peak_memory(self._base.device)
            start = time.perf_counter()
            record = self._run_updates(loaded, [Update(paths=paths, learning_rate=1e-5)], TrainSFTConfig(), None)
            return {
                "seconds": time.perf_counter() - start,
                "num_tokens": float(sum(len(sample.token_ids) for sample in samples)),
                "num_tree_tokens": float(record.num_tree_tokens),
                "grad_norm": record.grad_norms[-1],
                "peak_memory_bytes": float(max(self._team.gather(usage.peak_memory_bytes(self._base.device)))),
                "headroom_bytes": float(min(self._team.gather(headroom_bytes(self._base.device)))),
            }

    # -- one step --

    def _step(
        self,
        samples: Sequence[TrainingSample],
        config: TrainConfig | TrainSFTConfig,
        make_plan: _MakePlan,
        from_checkpoint: Path,
        to_checkpoint: Path,
        job_id: str,
        on_progress: OnProgress | None,
    ) -> StepResult:
        if (recorded := self._team.from_first(lambda: _recorded_result(to_checkpoint, job_id))) is not None:
            return recorded
        start = time.perf_counter()
        paths = self._checked(samples)
        loaded = self._load(from_checkpoint)
        plan = make_plan(paths, loaded)
        before = loaded.policy.values.clone()
        usage.reset_peak_memory(self._base.device)
        planned = time.perf_counter()
        record = self._run_updates(loaded, plan.updates, config, on_progress)
        updates_s = time.perf_counter() - planned
        metrics = summarise(record, paths, step=loaded.step, max_grad_norm=config.optimizer.max_grad_norm)
        metrics |= plan.metrics | usage.measure_usage(
            self._base,
            record,
            updates_s,
            peak_flops=self._peak_flops,
            trains_base_weights=loaded.policy.trains_base_weights,
        )
        metrics["throughput/peak_memory_bytes"] = max(self._team.gather(metrics["throughput/peak_memory_bytes"]))
        metrics["loss/learning_rate"] = plan.updates[-1].learning_rate
        metrics["loss/adapter_norm"] = norm = loaded.policy.norm()
        metrics["loss/adapter_change"] = loaded.policy.change_norm(before) / norm if norm else 0.0
        trained = time.perf_counter()
        loaded.step += 1
        probe_tokens = paths[0].sample.token_ids[:PROBE_TOKENS]
        metrics["throughput/train_tokens_per_s"] = metrics["data/step_tokens_unshared"] / (trained - start)
        self._write(
            to_checkpoint, loaded, probe_tokens, job_id=job_id, config=config.model_dump(mode="json"), metrics=metrics
        )
        metrics["time/step_checkpoint_s"] = time.perf_counter() - trained
        metrics["time/step_trainer_s"] = time.perf_counter() - start
        return StepResult(step=loaded.step, metrics=metrics)

    def _checked(self, samples: Sequence[TrainingSample]) -> list[SamplePath]:
        checked = [check_sample(sample, vocab_size=self._base.vocab_size) for sample in samples]
        paths = [path for path in checked if path is not None]
        if not paths:
            raise NothingTrainableError(
                f"none of the {len(samples)} samples has a token to learn: each has an empty loss mask or weight 0"
            )
        return paths

    def _run_updates(
        self,
        loaded: _Loaded,
        updates: list[Update],
        config: TrainConfig | TrainSFTConfig,
        on_progress: OnProgress | None,
    ) -> StepRecord:
        policy, record = loaded.policy, StepRecord()

        def split(updates: list[Update]) -> list[list[MicroBatch]]:
            return [
                split_micro_batches(update.paths, self._base, max_tokens=self._max_tokens, team=self._team)
                for update in updates
            ]

        batches = split(updates)
        for kernel in {part.layout.kernel for batch in batches for part in batch} - self._checked_kernels:
            check_kernel(self._base, kernel, updates[0].paths)
            self._checked_kernels.add(kernel)
        total, done = sum(map(len, batches)), itertools.count(1)

        def tick() -> None:
            if on_progress is not None:
                on_progress(min(next(done), total), total)  # an update that starts again does more than was known

        for number, update in enumerate(updates):
            fitting = compute_gradient(policy, update, batches[number], record, tick, self._team)
            if fitting is not None:  # from now on, and for what is cut already
                self._max_tokens = min(self._max_tokens, fitting)
                batches[number + 1 :] = split(updates[number + 1 :])
            loaded.identity = None  # from here on memory is no checkpoint until the next one is written
            record.grad_norms.append(loaded.optimizer.update(update.learning_rate, config.optimizer))
        return record

    def _measure(self, loaded: _Loaded, references: Mapping[int, Path], on_progress: OnProgress | None) -> Measure:
        """Adds log-probs of "policy", of "base", or of a checkpoint by its step, as a stream."""
        policy = loaded.policy

        def tick() -> None:
            if on_progress is not None:
                on_progress(0, 1)  # nothing is learnt yet, but it moves

        def measure(paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
            hidden_states = policy.base_hidden_states if source == "base" else policy.hidden_states
            with contextlib.ExitStack() as stack:
                if isinstance(source, int):
                    weights = _weights_of(references, source, policy.weights_file)
                    stack.enter_context(policy.using(weights))
                self._team.gather(None)  # nobody begins before all could read it
                paths, fitting = add_stream(
                    paths, name, self._base, hidden_states, max_tokens=self._max_tokens, tick=tick, team=self._team
                )
            if fitting is not None:  # what does not fit without a gradient does not fit with one
                self._max_tokens = min(self._max_tokens, fitting)
            return paths

        return measure

    # -- the checkpoint in memory --

    def _inject(self, lora: LoraConfig | None) -> _Loaded:
        """A fresh policy in memory, in place of whatever was there."""
        if self._loaded is not None and self._loaded.policy.config == lora:
            loaded = self._loaded
            loaded.policy.reset()
            loaded.optimizer.reset()
            loaded.step, loaded.identity = 0, None
            return loaded
        if self._loaded is not None:
            self._loaded.policy.remove()
            self._loaded = None
        policy = self._make_policy(lora)
        self._loaded = _Loaded(policy, Optimizer(policy), step=0, identity=None)
        return self._loaded

    def _make_policy(self, lora: LoraConfig | None) -> Policy:
        if lora is None:
            return FullPolicy(self._base, compiles=self._config.compile_layers)
        may_fold = not (self._config.gradient_checkpointing or self._base.is_sharded)
        return LoraPolicy(self._base, lora, may_fold=may_fold)

    def _load(self, path: Path) -> _Loaded:
        """The checkpoint `path` in memory, read only if it is not there already."""
        has_it = self._loaded is not None and self._loaded.identity == checkpoints.identify(path)
        if all(self._team.gather(has_it)) and self._loaded is not None:
            return self._loaded
        checkpoints.verify(path)
        state = checkpoints.read_state(path)
        if state.base_model != self._base.name:
            raise ConflictError(f"checkpoint {path} is of base model {state.base_model!r}, not {self._base.name!r}")
        loaded = self._inject(None if state.lora is None else LoraConfig.model_validate(state.lora))
        loaded.policy.load(checkpoints.read_file(path, loaded.policy.weights_file))
        loaded.optimizer.load(checkpoints.read_file(path, checkpoints.OPTIMIZER), state.num_updates)
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))
        loaded.step, loaded.identity = state.step, checkpoints.identify(path)
        self._team.gather(None)  # nobody begins before all could read it
        _log.info("continuing from step %d at %s", state.step, path)
        return loaded

    def _write(
        self,
        path: Path,
        loaded: _Loaded,
        probe_tokens: list[int],
        *,
        job_id: str | None,
        config: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        lora = loaded.policy.config
        state = CheckpointState(
            step=loaded.step,
            job_id=job_id,
            base_model=self._base.name,
            lora=None if lora is None else lora.model_dump(mode="json"),
            config=config,
            num_updates=loaded.optimizer.num_updates,
            rng=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            metrics=metrics,
        )
        probe = measure_probe(loaded.policy, probe_tokens)

        def write() -> str:
            return checkpoints.write_checkpoint(
                path,
                {
                    **loaded.policy.files(),
                    checkpoints.OPTIMIZER: loaded.optimizer.dump(),
                    checkpoints.STATE: state.model_dump_json().encode(),
                    checkpoints.PROBE: probe.model_dump_json().encode(),
                },
            )

        loaded.identity = self._team.from_first(write)


def _weights_of(references: Mapping[int, Path], step: int, file: str) -> bytes:
    if step not in references:
        raise ConfigError(f"the loss compares with checkpoint {step}, which was not given to the trainer", param="loss")
    checkpoints.verify(references[step])
    return checkpoints.read_file(references[step], file)


def default_num_threads() -> int:
    """Half of the cores that this process may use: the engine has the other half."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // 2)


def _existing_step(path: Path) -> int | None:
    """The step of the valid checkpoint `path`, if there is one."""
    if not path.exists():
        return None
    checkpoints.verify(path)
    return checkpoints.read_state(path).step


def _recorded_result(path: Path, job_id: str) -> StepResult | None:
    """What the job wrote to `path` in an earlier attempt, if it did."""
    if not path.exists():
        return None
    checkpoints.verify(path)
    state = checkpoints.read_state(path)
    if state.job_id != job_id:
        raise ConflictError(
            f"checkpoint {path} exists already, made by job {state.job_id!r}; job {job_id!r} must write another step"
        )
    return StepResult(step=state.step, metrics=state.metrics)
