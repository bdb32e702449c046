"""Plan the optimiser updates of a step from checked samples and a configuration, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from art.config import KlConfig, MismatchConfig, ScheduleConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError, TrajectoryError
from art.trainer.gate.gate import Drift, Gate
from art.trainer.gate.noise import Noise
from art.trainer.step.compared.base_kl import with_sampled_base
from art.trainer.step.compared.stale import with_samplers
from art.trainer.step.measure import Measurer
from art.trainer.step.prepare import prepare_paths
from art.trainer.step.update import Update
from art.trainer.tree.pack import split_batches, split_minibatches
from art.trainer.tree.tree import SamplePath

_SFT_AUTO_BATCH_SIZE = 2
"""Trajectories per update for `batch_size="auto"`."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The updates of a step, in order, and metrics that are known before they run."""

    updates: list[Update]
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that replace those of the same names that the updates report."""


def plan_rl(
    paths: list[SamplePath],
    config: TrainConfig,
    pairs: Sequence[tuple[str, str]],
    measurer: Measurer,
    *,
    step: int,
    noise: Noise,
) -> UpdatePlan:
    """Plan one update per mini-batch of a reinforcement-learning step. First add the log-probs that the losses need.

    Samples of other components are mixed in; no loss of `config` reads them.

    `noise` describes how far engine and trainer may differ, for the gate `mismatch`.

    Raises:
        ConfigError: a custom loss cannot be imported, or the schedule of the learning rate has ended.
        NothingTrainableError: the loss is dpo and no pair can be compared.
        TrajectoryError: the loss is distillation and a sample lacks its teacher's log-probs.
    """
    learning_rate = config.rate_at(step)
    make_gate = partial(_make_gate, config.mismatch, noise=noise, step=step)
    rl, metrics = [path for path in paths if path.sample.component == "rl"], dict[str, float]()
    supervised = [path for path in paths if path.sample.component != "rl"]
    if rl:
        rl, metrics = prepare_paths(rl, config, pairs, measurer, make_gate(rl))
        rl = with_sampled_base(rl, measurer, step=step)
    parts = split_minibatches([*rl, *supervised], config.num_minibatches, seed=step)
    if rl and config.mismatch is not None:
        parts[0], drift, measured = with_samplers(parts[0], measurer, step=step)
        make_gate = partial(make_gate, drift=drift)
        metrics |= measured
    # If the sampler is the anchor, later updates differ from it by design, so the gate cannot judge them.
    gates = [make_gate(part) if n == 0 or config.anchor == "step_start" else None for n, part in enumerate(parts)]
    terms = tuple(term for term in config.terms if not (isinstance(term, KlConfig) and term.where == "reward"))
    updates = [
        Update(paths=part, learning_rate=learning_rate, terms=terms, anchor=config.anchor, mismatch=gate)
        for part, gate in zip(parts, gates, strict=True)
    ]
    return UpdatePlan(updates, metrics)


def _make_gate(
    config: MismatchConfig | None, paths: list[SamplePath], *, noise: Noise, step: int, drift: Drift | None = None
) -> Gate | None:
    return None if config is None else Gate.over(paths, config, noise, step=step, drift=drift)


def plan_sft(paths: list[SamplePath], config: TrainSFTConfig) -> UpdatePlan:
    """Plan one update per batch of trajectories for a step of supervised fine-tuning.

    Raises:
        ConfigError: the number of learning rates is not the number of batches, or their schedule ends before the last.
        TrajectoryError: a sample is not of component "sft".
    """
    if other := [path.sample for path in paths if path.sample.component != "sft"]:
        raise TrajectoryError(
            f"sample {other[0].sample_id!r} has component {other[0].component!r}; supervised fine-tuning takes 'sft'"
        )
    size = _SFT_AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size
    batches = split_batches(paths, size)
    rates = config.learning_rate
    if isinstance(rates, ScheduleConfig):
        rates = [rates.rate_at(number, total_steps=len(batches)) for number in range(len(batches))]
    elif not isinstance(rates, list):
        rates = [rates] * len(batches)
    elif len(rates) != len(batches):
        raise ConfigError(
            f"`learning_rate` lists {len(rates)} rates, but the trajectories make {len(batches)} batches of "
            f"{size}; give one rate per batch, or a single number",
            param="learning_rate",
        )
    return UpdatePlan([Update(paths=batch, learning_rate=rate) for batch, rate in zip(batches, rates, strict=True)])
