"""A real trainer in which the proofs of objectives run steps and see what its optimiser is given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from art.config import (
    DpoConfig,
    KlConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.protocol.calls import Train, TrainSft
from art.protocol.samples import StepResult, TrainingSample
from art.trainer.distributed import Team
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import StepProgress, split_micro_batches
from art.trainer.step.plans import Measurer, prepare_paths
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Optimizer, Update, compute_gradient
from art.trainer.trainer import Trainer
from art.trainer.tree import check_sample
from tests.support.objective_reference import Adapter, PlainModel, Policies, Result, Rollout, objective
from tests.support.objective_rollouts import plan, random_rollouts
from tests.support.trainer_samples import VOCAB_SIZE, make_gate

LORA = LoraConfig(rank=4, alpha=8)
GROUP_ORDER = (1, 0)
"""Groups of the updates of a step from checkpoint 2 with two mini-batches, as `random.Random(2)` shuffles them."""


@dataclass(frozen=True)
class Seen:
    """What an optimiser update was given."""

    adapter: dict[str, Tensor]
    gradient: Tensor  # [P] before clipping


class Bench:
    """A trainer with checkpoints 0 (fresh), 1 (a reference) and 2 (the policy), and the reference's model of them."""

    def __init__(self, model_path: str, root: Path) -> None:
        self.trainer = Trainer(model_path, TrainerConfig(device="cpu", num_threads=1))
        self.model = PlainModel(model_path, scale=LORA.alpha / LORA.rank)
        self.root = root
        self.adapters: list[dict[str, Tensor]] = []
        self._numbers = itertools.count(3)
        self.trainer.init_checkpoint(root / "0", LORA)
        self.adapters.append(self._adapter())
        for step in (1, 2):  # a large rate moves every matrix
            self.trainer.train(
                TrainSft(
                    samples=[_text(step)],
                    config=TrainSFTConfig(learning_rate=0.1),
                    from_checkpoint=root / str(step - 1),
                    to_checkpoint=root / str(step),
                    job_id=f"sft-{step}",
                )
            )
            self.adapters.append(self._adapter())

    def rollouts(self, seed: int, **shape: Any) -> list[Rollout]:
        """Of a sampler near the policy; `shape` as of `random_rollouts`."""
        return random_rollouts(seed, lambda branch: self.model.logprobs(branch, self.adapters[2]), **shape)

    def train(
        self, rollouts: Sequence[Rollout], config: TrainConfig, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[StepResult, list[Seen]]:
        """One step from checkpoint 2, and what its updates were given."""
        samples, pairs = plan(rollouts, config)
        with self._watch(monkeypatch) as seen:
            number = next(self._numbers)
            result = self.trainer.train(
                Train(
                    samples=samples,
                    config=config,
                    from_checkpoint=self.root / "2",
                    to_checkpoint=self.root / str(number),
                    job_id=f"rl-{number}",
                    pairs=pairs,
                    references={step: self.root / str(step) for step in (0, 1)},
                )
            )
        return result, seen

    def train_sft(
        self, samples: Sequence[TrainingSample], monkeypatch: pytest.MonkeyPatch
    ) -> tuple[StepResult, list[Seen]]:
        """The same on texts, all in one update."""
        with self._watch(monkeypatch) as seen:
            number = next(self._numbers)
            result = self.trainer.train(
                TrainSft(
                    samples=samples,
                    config=TrainSFTConfig(batch_size=len(samples)),
                    from_checkpoint=self.root / "2",
                    to_checkpoint=self.root / str(number),
                    job_id=f"sft-{number}",
                )
            )
        return result, seen

    def expect(self, rollouts: Sequence[Rollout], config: TrainConfig, policy: Adapter) -> tuple[Result, Tensor]:
        """The reference's loss and gradient."""
        leaves = {name: tensor.double().requires_grad_() for name, tensor in policy.items()}
        references = {
            name: None if name == "base" else _double(self.adapters[int(name)])
            for term in config.terms
            if isinstance(term, (KlConfig, DpoConfig)) and (name := str(term.reference)) != "sampler"
        }
        result = objective(rollouts, config, Policies(self.model, leaves, _double(self.adapters[2]), references))
        result.loss.backward()
        return result, torch.cat([leaf.grad.flatten() for leaf in leaves.values()])

    def gradient(
        self,
        samples: Sequence[TrainingSample],
        pairs: Sequence[tuple[str, str]],
        config: TrainConfig,
        *,
        max_tokens: int = 4096,
        num_shares: int = 1,
    ) -> tuple[Tensor, StepRecord]:
        """Of checkpoint 2 in one update, summed over the shares of `num_shares` processes; and what all recorded.

        Nothing is trained, so the policy stays what it is.
        """
        loaded = self.trainer._resident.load(self.root / "2")
        references = {step: self.root / str(step) for step in (0, 1)}
        measurer = Measurer(loaded.policy, self.trainer._batcher, StepProgress(), references)
        paths = [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]
        gate = make_gate(paths, config.mismatch)
        paths, _ = prepare_paths(paths, config, pairs, measurer, gate)
        terms = tuple(term for term in config.terms if not (isinstance(term, KlConfig) and term.where == "reward"))
        update = Update(paths=paths, learning_rate=1.0, terms=terms, anchor=config.anchor, mismatch=gate)
        if gate is not None and num_shares > 1:  # each share alone has not seen all branches of a rollout
            everything = split_micro_batches(paths, loaded.policy.base, max_tokens=max_tokens)
            whole = StepRecord()
            compute_gradient(loaded.policy, update, everything, whole)
            update = replace(update, masked=gate.judge(whole.gate_views[0].sums).masked)
        total, record = torch.zeros_like(loaded.policy.grads), StepRecord()
        for rank in range(num_shares):
            batches = split_micro_batches(
                paths, loaded.policy.base, max_tokens=max_tokens, team=Team(rank=rank, size=num_shares)
            )
            compute_gradient(loaded.policy, update, batches, record)
            total += loaded.policy.grads
        return total, record

    @property
    def policy_adapter(self) -> dict[str, Tensor]:
        """The adapter of checkpoint 2, in float64."""
        return _double(self.adapters[2])

    @property
    def policy(self) -> LoraPolicy:
        loaded = self.trainer._resident._loaded
        assert loaded is not None
        return loaded.policy

    @contextlib.contextmanager
    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
        seen: list[Seen] = []
        update = Optimizer.update

        def spy(optimizer: Optimizer, learning_rate: float, settings: OptimizerConfig) -> float:
            seen.append(Seen(self._adapter(), self.policy.grads.clone()))
            return update(optimizer, learning_rate, settings)

        with monkeypatch.context() as patch:
            patch.setattr(Optimizer, "update", spy)
            yield seen

    def _adapter(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.tensors.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _double(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in adapter.items()}


def _text(step: int) -> TrainingSample:
    ids = [(7 * step + 11 * i * i) % VOCAB_SIZE for i in range(24)]
    return TrainingSample(
        sample_id="text",
        rollout_id="text",
        token_ids=ids,
        loss_mask=[i > 0 for i in range(24)],
        sampling_logprobs=[0.0] * 24,
        advantages=[0.0] * 24,
        component="sft",
    )
