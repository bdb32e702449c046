"""KL to the base, measured on a part of the step: what it costs, that it is right, and that it disturbs nothing."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art.config import DppoConfig, KlConfig, LoraConfig, TrainConfig, TrainerConfig
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.storage import checkpoints
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import plans
from art.trainer.step.measure import Measurer, choose_paths, with_sampled_base
from art.trainer.streams import BASE
from art.trainer.trainer import Trainer
from art.trainer.tree.tree import SamplePath, build_tree, check_sample
from tests.support.trainer_reference import sequence_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, make_sample, random_samples

BUDGET = 1 / 16
LORA = LoraConfig(rank=8, alpha=16)
CONFIG = TrainConfig(learning_rate=1e-2, mismatch=None)


def checked(samples: Sequence[TrainingSample]) -> list[SamplePath]:
    return [path for s in samples if (path := check_sample(s, vocab_size=VOCAB_SIZE)) is not None]


def groups(rng: random.Random, *, count: int, size: int, prompt: int, completion: int) -> list[SamplePath]:
    """Groups that share a beginning with one another, and a whole prompt within."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    beginning = tokens(prompt // 2)
    samples = []
    for g in range(count):
        of_group = beginning + tokens(prompt - prompt // 2)
        for r in range(size):
            token_ids = of_group + tokens(rng.randint(1, completion))
            sample = make_sample(f"{g}.{r}", token_ids, rng)
            mask = [i >= prompt for i in range(len(token_ids))]
            samples.append(replace(sample, loss_mask=mask))
    return checked(samples)


def share_of_tokens(paths: list[SamplePath], step: int) -> float:
    chosen = choose_paths(paths, step=step)
    return len(build_tree([paths[index] for index in chosen])) / len(build_tree(paths)) if chosen else 0.0


@pytest.mark.parametrize("seed", range(3))
def test_many_samples_use_the_budget_and_keep_it(seed: int) -> None:
    paths = groups(random.Random(seed), count=16, size=8, prompt=40, completion=20)
    shares = [share_of_tokens(paths, step) for step in range(20)]
    assert max(shares) <= BUDGET
    assert statistics.fmean(shares) > 0.8 * BUDGET


def test_few_samples_with_a_long_prompt_keep_it_on_average() -> None:
    paths = groups(random.Random(0), count=1, size=8, prompt=200, completion=20)
    shares = [share_of_tokens(paths, step) for step in range(200)]
    assert shares.count(0.0) > 100, "most steps measure nothing"
    assert max(shares) > BUDGET
    assert 0.5 * BUDGET < statistics.fmean(shares) <= BUDGET


def test_a_repeated_step_measures_the_same_and_other_steps_measure_others() -> None:
    paths = groups(random.Random(0), count=16, size=8, prompt=40, completion=20)
    assert choose_paths(paths, step=3) == choose_paths(paths, step=3)
    assert len({index for step in range(100) for index in choose_paths(paths, step=step)}) > 0.9 * len(paths)
    turned = paths[::-1]
    in_turned = {turned[index].sample.sample_id for index in choose_paths(turned, step=3)}
    assert in_turned == {paths[index].sample.sample_id for index in choose_paths(paths, step=3)}


def test_only_samples_of_reinforcement_learning_are_measured() -> None:
    rl = groups(random.Random(0), count=16, size=8, prompt=10, completion=10)
    other = [replace(p, sample=replace(p.sample, component="sft", sample_id=f"sft {p.sample.sample_id}")) for p in rl]
    chosen = choose_paths(other + rl, step=0)
    assert chosen
    assert min(chosen) >= len(other)
    assert choose_paths(other, step=0) == []


def test_what_a_loss_has_measured_is_not_measured_again() -> None:
    paths = [path.with_stream(BASE, path.sampling_logprobs) for path in checked(random_samples(0))]

    class Never(Measurer):
        def __init__(self) -> None: ...

        def add_stream(self, paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
            raise AssertionError(f"{source} was measured")

    assert with_sampled_base(paths, Never(), step=0) is paths


@pytest.fixture
def trainer(model_path: Callable[[str], str], tmp_path: Path) -> Trainer:
    """One with a trained checkpoint `0001`."""
    trainer = Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    trainer.init_checkpoint(tmp_path / "0000", LORA)
    trainer.train(
        Train(
            samples=random_samples(1),
            config=CONFIG,
            from_checkpoint=tmp_path / "0000",
            to_checkpoint=tmp_path / "0001",
            job_id="job-1",
        )
    )
    return trainer


def second_step(trainer: Trainer, directory: Path, config: TrainConfig, to: str = "0002") -> dict[str, float]:
    result = trainer.train(
        Train(
            samples=random_samples(2),
            config=config,
            from_checkpoint=directory / "0001",
            to_checkpoint=directory / to,
            job_id=f"job-{to}",
        )
    )
    return result.metrics


def plain_kl(policy: LoraPolicy, samples: list[TrainingSample]) -> tuple[float, float]:
    """k3 and k1 over all targets, from merged weights and from those of the base."""
    trained = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    base = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    log_ratios: list[float] = []
    for sample in samples:
        with torch.no_grad():
            difference = sequence_logprobs(policy, base, sample) - sequence_logprobs(policy, trained, sample)
        log_ratios += [d for d, wanted in zip(difference.tolist(), sample.loss_mask[1:], strict=True) if wanted]
    return statistics.fmean(math.exp(d) - 1 - d for d in log_ratios), statistics.fmean(-d for d in log_ratios)


def test_where_a_loss_measures_everything_the_kl_is_exact(trainer: Trainer, tmp_path: Path) -> None:
    k3, k1 = plain_kl(trainer._resident.load(tmp_path / "0001").policy, random_samples(2))
    metrics = second_step(trainer, tmp_path, CONFIG.model_copy(update={"loss": (DppoConfig(), KlConfig())}))
    assert metrics["loss/kl_to_base_targets"] == metrics["data/step_trainable_tokens"]
    assert metrics["loss/kl_to_base"] == pytest.approx(k3, rel=1e-3)
    assert metrics["loss/kl_to_base_k1"] == pytest.approx(k1, rel=1e-3)
    assert k3 > 1e-4, "the first step has moved the policy"


def test_else_it_is_that_of_the_chosen_samples(trainer: Trainer, tmp_path: Path) -> None:
    paths = checked(random_samples(2))
    chosen = [paths[index].sample for index in choose_paths(paths, step=1)]
    assert 0 < len(chosen) < len(paths)
    k3, k1 = plain_kl(trainer._resident.load(tmp_path / "0001").policy, chosen)
    metrics = second_step(trainer, tmp_path, CONFIG)
    assert metrics["loss/kl_to_base_targets"] == sum(sum(sample.loss_mask) for sample in chosen)
    assert metrics["loss/kl_to_base"] == pytest.approx(k3, rel=1e-3)
    assert metrics["loss/kl_to_base_k1"] == pytest.approx(k1, rel=1e-3)


def test_measuring_does_not_change_what_is_trained(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = second_step(trainer, tmp_path, CONFIG)
    monkeypatch.setattr(plans, "with_sampled_base", lambda paths, measurer, *, step: paths)
    unmeasured = second_step(trainer, tmp_path, CONFIG, to="other")
    assert measured.keys() - unmeasured.keys() == {
        "loss/kl_to_base",
        "loss/kl_to_base_k1",
        "loss/kl_to_base_targets",
    }
    weights = [(tmp_path / name / checkpoints.ADAPTER_WEIGHTS).read_bytes() for name in ("0002", "other")]
    assert weights[0] == weights[1]
