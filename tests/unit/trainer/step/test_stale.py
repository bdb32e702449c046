"""Stale rollouts are compared with the checkpoints that sampled them: honest ones pass, however far the policy moved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from art.config import LoraConfig, TrainConfig, TrainerConfig
from art.errors import TrainingError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.trainer.step.measure import Measurer, choose_stale, with_samplers
from art.trainer.step.micro_batch import Progress
from art.trainer.streams import SAMPLER
from art.trainer.trainer import Trainer
from art.trainer.tree.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, make_sample, random_samples

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
    return Measurer(loaded.policy, trainer._batcher, Progress(), {v: folder / str(v) for v in range(step)})


def checked(samples: list[TrainingSample]) -> list[SamplePath]:
    return [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE)) is not None]


def as_sampled(run: tuple[Trainer, Path], samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the log-probs of the checkpoints that their versions name, each measured by itself."""
    paths = checked(samples)
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
    paths = checked(as_sampled(run, rollouts(versions)))
    found, drift, metrics = with_samplers(paths, measurer(run), step=NUM_STEPS)
    assert metrics["offpolicy/stale_rollouts_checked"] >= 8
    for path in found:
        if not np.isnan(path.streams[SAMPLER]).any():
            np.testing.assert_allclose(path.streams[SAMPLER], path.sampling_logprobs, atol=2e-5)
    assert drift is not None
    assert drift.rms > 0.1, "the steps have moved the policy far"


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


def test_nothing_is_measured_without_stale_rollouts(run: tuple[Trainer, Path]) -> None:
    paths = checked(rollouts({f"r{n}": [(0, NUM_STEPS)] for n in range(4)}))

    class Never(Measurer):
        def add_stream(self, paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
            raise AssertionError(f"{source} was measured")

    never = Never(measurer(run)._policy, run[0]._batcher, Progress(), {0: run[1] / "0"})
    assert with_samplers(paths, never, step=NUM_STEPS) == (paths, None, {})


def test_rollouts_of_a_deleted_checkpoint_are_not_chosen() -> None:
    paths = checked(rollouts(STALE))
    chosen = {paths[index].sample.policy_version for index in choose_stale(paths, {0, 2}, step=NUM_STEPS)}
    assert chosen == {0, 2}


def test_many_stale_rollouts_keep_the_budget_and_are_of_several_groups() -> None:
    samples = [
        replace(sample, group_id=f"g{number // 16}")
        for number, sample in enumerate(rollouts({f"r{n}": [(0, 1)] for n in range(256)}))
    ]
    paths = checked(samples)
    chosen = choose_stale(paths, {1}, step=NUM_STEPS)
    assert sum(paths[i].num_tokens for i in chosen) <= sum(path.num_tokens for path in paths) / 16
    groups = [paths[i].sample.group_id for i in chosen]
    assert max(map(groups.count, groups)) <= 4
    assert choose_stale(paths, {1}, step=NUM_STEPS) == chosen
    assert choose_stale(paths, {1}, step=NUM_STEPS + 1) != chosen


def test_whole_models_of_full_fine_tuning_are_compared_too(model_path: Callable[[str], str], tmp_path: Path) -> None:
    trainer = Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    trainer.init_checkpoint(tmp_path / "0", None)
    config = FAST.model_copy(update={"learning_rate": 1e-2})
    trainer.train(
        Train(
            samples=random_samples(0), config=config, from_checkpoint=tmp_path / "0", to_checkpoint=tmp_path / "1",
            job_id="1",
        )
    )  # fmt: skip
    run = trainer, tmp_path
    paths = checked(as_sampled(run, rollouts({f"r{n}": [(0, 0)] for n in range(4)})))
    now = measurer(run, 1)
    weights = now._policy.values.clone()
    found, drift, _ = with_samplers(paths, now, step=1)
    assert now._policy.values.equal(weights), "the weights that are trained come back"
    for path in found:
        np.testing.assert_allclose(path.streams[SAMPLER], path.sampling_logprobs, atol=2e-5)
    assert drift is not None
    assert drift.rms > 0.01
