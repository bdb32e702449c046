"""Stale rollouts are compared with the checkpoints that sampled them: honest ones pass, however far the policy moved."""

from __future__ import annotations

import math
import random
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from art.config import DppoConfig, KlConfig, LoraConfig, TrainConfig, TrainerConfig
from art.errors import TrainingError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import StepProgress
from art.trainer.step.plans import Measurer, choose_paths, choose_stale, with_samplers
from art.trainer.trainer import Trainer
from art.trainer.tree import SAMPLER, SamplePath
from tests.support.trainer_reference import sequence_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, make_sample, paths_of, random_samples

NUM_STEPS = 3
LORA = LoraConfig(rank=8, alpha=16)
FAST = TrainConfig(learning_rate=3e-2, mismatch=None)


@pytest.fixture(scope="module")
def run(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer, and a folder with checkpoints of steps that moved the policy far."""
    trainer, folder = (
        Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1)),
        tmp_path_factory.mktemp("r"),
    )
    trainer.init_checkpoint(folder / "0", LORA)
    for step in range(NUM_STEPS):
        samples = random_samples(step)
        trainer.train(
            Train(
                samples=samples,
                config=FAST,
                from_checkpoint=folder / str(step),
                to_checkpoint=folder / str(step + 1),
                job_id=str(step),
            )
        )
    return trainer, folder


def rollouts(versions: dict[str, list[tuple[int, int]]]) -> list[TrainingSample]:
    """One rollout of 24 tokens by name, with the versions of its tokens."""
    rng = random.Random(0)
    samples = []
    for name, parts in versions.items():
        made = make_sample(name, [rng.randrange(VOCAB_SIZE) for _ in range(24)], rng)
        samples.append(replace(made, policy_version=parts[0][1], versions=parts if len(parts) > 1 else []))
    return samples


def measurer(run: tuple[Trainer, Path], step: int = NUM_STEPS) -> Measurer:
    trainer, folder = run
    loaded = trainer._resident.load(folder / str(step))
    return Measurer(loaded.policy, trainer._batcher, StepProgress(), {v: folder / str(v) for v in range(step)})


def as_sampled(run: tuple[Trainer, Path], samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the log-probs of the checkpoints that their versions name, each measured by itself."""
    paths = paths_of(samples)
    logprobs = [np.zeros(len(path.query_positions), dtype=np.float32) for path in paths]
    for version in {int(version) for path in paths for version in path.policy_versions}:
        for path, values in zip(measurer(run, version).add_stream(paths, "policy", "x"), logprobs, strict=True):
            np.copyto(values, path.streams["x"], where=path.policy_versions == version)
    made = []
    for path, values in zip(paths, logprobs, strict=True):
        whole = np.zeros(len(path.sample.token_ids))
        whole[path.query_positions + 1] = values
        made.append(replace(path.sample, sampling_logprobs=whole.tolist()))
    return made


def train(run: tuple[Trainer, Path], samples: list[TrainingSample]) -> dict[str, float]:
    trainer, folder = run
    try:
        return trainer.train(
            Train(
                samples=samples,
                config=TrainConfig(learning_rate=1e-4),
                from_checkpoint=folder / str(NUM_STEPS),
                to_checkpoint=folder / "next",
                job_id="next",
                references={version: folder / str(version) for version in range(NUM_STEPS)},
            )
        ).metrics
    finally:
        shutil.rmtree(folder / "next", ignore_errors=True)


STALE = {f"r{n}": [(0, n % 3)] for n in range(12)}
MIXED = {f"r{n}": [(0, n % 2), (9, n % 2 + 1), (15, 3)] for n in range(8)}


@pytest.mark.parametrize("versions", [STALE, MIXED], ids=["whole", "mixed"])
def test_the_record_of_each_token_is_compared_with_the_checkpoint_that_sampled_it(
    run: tuple[Trainer, Path], versions: dict[str, list[tuple[int, int]]]
) -> None:
    paths = paths_of(as_sampled(run, rollouts(versions)))
    found, metrics = with_samplers(paths, measurer(run), step=NUM_STEPS)
    assert metrics["offpolicy/stale_rollouts_checked"] >= 8
    known = [path for path in found if not np.isnan(path.streams[SAMPLER]).all()]
    assert len(known) == metrics["offpolicy/stale_rollouts_checked"]
    for path in known:
        is_old = path.policy_versions < NUM_STEPS
        assert np.array_equal(np.isnan(path.streams[SAMPLER]), ~is_old)
        np.testing.assert_allclose(path.streams[SAMPLER][is_old], path.sampling_logprobs[is_old], atol=2e-5)


@pytest.mark.parametrize("versions", [STALE, MIXED], ids=["whole", "mixed"])
def test_honest_stale_rollouts_are_trained_however_far_the_policy_moved(
    run: tuple[Trainer, Path], versions: dict[str, list[tuple[int, int]]]
) -> None:
    metrics = train(run, as_sampled(run, rollouts(versions)))
    assert metrics["offpolicy/mismatch_masked_share"] == 0
    assert metrics["offpolicy/first_update_kl"] > 0.02
    assert metrics["offpolicy/mismatch_noise"] < 1e-4


def test_rollouts_of_another_checkpoint_than_their_record_says_stop_the_step(run: tuple[Trainer, Path]) -> None:
    honest = as_sampled(run, rollouts(STALE))
    wrong = [replace(sample, policy_version=(sample.policy_version + 1) % 3) for sample in honest]
    with pytest.raises(TrainingError, match=r"stale ones that it compared|is not the policy that is trained"):
        train(run, wrong)


def test_rollouts_of_a_deleted_checkpoint_are_not_chosen() -> None:
    paths = paths_of(rollouts(STALE))
    chosen = {paths[index].sample.policy_version for index in choose_stale(paths, {0, 2}, step=NUM_STEPS)}
    assert chosen == {0, 2}


def test_many_stale_rollouts_keep_the_budget_and_are_of_several_groups() -> None:
    samples = [
        replace(sample, group_id=f"g{number // 16}")
        for number, sample in enumerate(rollouts({f"r{n}": [(0, 1)] for n in range(256)}))
    ]
    paths = paths_of(samples)
    chosen = choose_stale(paths, {1}, step=NUM_STEPS)
    assert sum(paths[i].num_tokens for i in chosen) <= sum(path.num_tokens for path in paths) / 16
    groups = [paths[i].sample.group_id for i in chosen]
    assert max(map(groups.count, groups)) <= 4
    assert choose_stale(paths, {1}, step=NUM_STEPS) == chosen
    assert choose_stale(paths, {1}, step=NUM_STEPS + 1) != chosen


# -- the distance to the base model --


BUDGET = 1 / 16
CONFIG = TrainConfig(learning_rate=1e-2, mismatch=None)


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
    return paths_of(samples)


def test_many_samples_use_the_budget_and_keep_it() -> None:
    paths = groups(random.Random(0), count=16, size=8, prompt=40, completion=20)
    for step in range(20):
        share = sum(paths[i].num_tokens for i in choose_paths(paths, step=step)) / sum(p.num_tokens for p in paths)
        assert 0.8 * BUDGET < share <= BUDGET
    assert len(choose_paths(paths[:8], step=0)) == 1  # at least one, however few there are


def test_a_repeated_step_measures_the_same_and_other_steps_measure_others() -> None:
    paths = groups(random.Random(0), count=16, size=8, prompt=40, completion=20)
    assert choose_paths(paths, step=3) == choose_paths(paths, step=3)
    assert len({index for step in range(100) for index in choose_paths(paths, step=step)}) > 0.9 * len(paths)


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
    paths = paths_of(random_samples(2))
    chosen = [paths[index].sample for index in choose_paths(paths, step=1)]
    assert 0 < len(chosen) < len(paths)
    k3, k1 = plain_kl(trainer._resident.load(tmp_path / "0001").policy, chosen)
    metrics = second_step(trainer, tmp_path, CONFIG)
    assert metrics["loss/kl_to_base_targets"] == sum(sum(sample.loss_mask) for sample in chosen)
    assert metrics["loss/kl_to_base"] == pytest.approx(k3, rel=1e-3)
    assert metrics["loss/kl_to_base_k1"] == pytest.approx(k1, rel=1e-3)
