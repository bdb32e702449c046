"""The trainer as a whole: steps, restarts, refusals."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import (
    DppoConfig,
    KlConfig,
    LoraConfig,
    MismatchConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.errors import (
    ConfigError,
    ConflictError,
    CorruptCheckpointError,
    DiskFullError,
    NotFoundError,
    NothingTrainableError,
    TrainingError,
    TrajectoryError,
)
from art.metrics import catalogue
from art.protocol.calls import Train, TrainSft
from art.protocol.samples import StepResult, TrainingSample
from art.runtime.submission import random_sample
from art.storage import atomic, checkpoints
from art.trainer.proof import measure_probe
from art.trainer.trainer import OnProgress, Trainer
from tests.support.trainer_reference import with_own_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, random_samples, sample_file

LORA = LoraConfig(rank=8, alpha=16)
RL = TrainConfig(learning_rate=1e-2, mismatch=None)
LENIENT = MismatchConfig(rollouts=(0.3, 3), tokens=(1e-9, 1e9), abort=1.0)


@pytest.fixture
def new_trainer(model_path: Callable[[str], str]) -> Callable[..., Trainer]:
    def new(family: str = "Qwen3", **config: Any) -> Trainer:
        return Trainer(model_path(family), TrainerConfig(device="cpu", num_threads=1, **config))

    return new


@pytest.fixture
def trainer(new_trainer: Callable[..., Trainer], tmp_path: Path) -> Trainer:
    trainer = new_trainer()
    trainer.init_checkpoint(tmp_path / "0000", LORA)
    return trainer


def step(
    trainer: Trainer,
    directory: Path,
    number: int,
    config: TrainConfig = RL,
    on_progress: OnProgress | None = None,
    **changes: Any,
) -> StepResult:
    """Train step `number` on its own random samples."""
    arguments: dict[str, Any] = {
        "samples": random_samples(number),
        "config": config,
        "from_checkpoint": directory / f"{number - 1:04d}",
        "to_checkpoint": directory / f"{number:04d}",
        "job_id": f"job-{number:08d}",
    }
    return trainer.train(Train(**arguments | changes), on_progress)


def weights(path: Path) -> bytes:
    return (path / checkpoints.ADAPTER_WEIGHTS).read_bytes()


def test_a_step_changes_the_policy_and_reports(trainer: Trainer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = step(trainer, tmp_path, 1, on_progress=lambda done, total: seen.append((done, total)))
    assert result.step == 1
    reported = (catalogue.ALWAYS, catalogue.RL, catalogue.BASE)
    assert set(result.metrics) == {name for name, m in catalogue.TRAINER_METRICS.items() if m.when in reported}
    assert all(math.isfinite(value) for value in result.metrics.values())
    trained = [at for at in seen if at[0] > 0]  # before that the base is measured
    assert trained == [(i + 1, seen[-1][1]) for i in range(seen[-1][1])]
    assert weights(tmp_path / "0001") != weights(tmp_path / "0000")
    state = checkpoints.read_state(tmp_path / "0001")
    assert (state.step, state.job_id, state.num_updates) == (1, "job-00000001", 1)
    assert TrainConfig.model_validate(state.config) == RL
    assert LoraConfig.model_validate(state.lora) == LORA
    samples = random_samples(1)
    assert result.metrics["data/step_tokens_unshared"] == sum(len(s.token_ids) for s in samples)
    assert result.metrics["data/step_trainable_tokens"] == sum(map(sum, (s.loss_mask for s in samples)))
    assert result.metrics["data/step_trainer_tokens"] < result.metrics["data/step_tokens_unshared"]


def test_samples_from_a_file_give_the_same_bits(trainer: Trainer, tmp_path: Path) -> None:
    from_lists = step(trainer, tmp_path, 1)
    paths = {"to_checkpoint": tmp_path / "0001-file", "job_id": "job-from-file"}
    from_file = step(trainer, tmp_path, 1, samples=sample_file(tmp_path, random_samples(1)), **paths)
    assert weights(tmp_path / "0001-file") == weights(tmp_path / "0001")
    for result in (from_lists, from_file):
        for name in [name for name in result.metrics if name.startswith(("time/", "throughput/"))]:
            del result.metrics[name]
    assert from_file == from_lists


def test_the_probe_is_that_of_the_trained_policy(trainer: Trainer, tmp_path: Path) -> None:
    fresh = checkpoints.read_probe(tmp_path / "0000")
    assert fresh.logprobs == fresh.base_logprobs
    assert len(fresh.token_ids) == 64
    step(trainer, tmp_path, 1)
    probe = checkpoints.read_probe(tmp_path / "0001")
    sampled = random_samples(1)[0].token_ids
    assert probe.token_ids == (sampled + fresh.token_ids)[:64]  # a few sampled tokens would not tell noise from a fault
    assert len(probe.logprobs) == len(probe.base_logprobs) == len(probe.token_ids) - 1
    assert max(abs(a - b) for a, b in zip(probe.logprobs, probe.base_logprobs, strict=True)) > 1e-3
    again = measure_probe(trainer._resident._loaded.policy, probe.token_ids)  # type: ignore[union-attr]
    assert again == probe


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_restarted_trainer_continues_bit_identically(
    checkpointing: bool, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    config = RL.model_copy(update={"num_minibatches": 2})
    settings = {"gradient_checkpointing": checkpointing}
    undisturbed = new_trainer(**settings)
    for name in ("a", "b"):
        undisturbed.init_checkpoint(tmp_path / name / "0000", LORA)
    expected = [step(undisturbed, tmp_path / "a", number, config) for number in (1, 2, 3)]
    for number in (1, 2, 3):
        result = step(new_trainer(**settings), tmp_path / "b", number, config)  # a new process each time
        for name, value in expected[number - 1].metrics.items():
            if not name.startswith(("time/", "throughput/")):
                assert result.metrics[name] == value, name
    for file in (checkpoints.ADAPTER_WEIGHTS, checkpoints.OPTIMIZER, checkpoints.PROBE):
        assert (tmp_path / "a/0003" / file).read_bytes() == (tmp_path / "b/0003" / file).read_bytes()


def test_going_back_to_an_older_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """Memory holds step 2, but the call continues from step 1: a fork, equal to one made by a fresh trainer."""
    first = step(trainer, tmp_path, 1)
    second = step(trainer, tmp_path, 2)
    fork = step(trainer, tmp_path, 2, to_checkpoint=tmp_path / "fork", job_id="job-fork")
    assert (first.step, second.step, fork.step) == (1, 2, 2)
    assert weights(tmp_path / "fork") == weights(tmp_path / "0002")


def test_a_checkpoint_replaced_under_the_same_name_is_noticed(trainer: Trainer, tmp_path: Path) -> None:
    step(trainer, tmp_path, 1)
    (tmp_path / "0001").rename(tmp_path / "other")
    (tmp_path / "0000").rename(tmp_path / "0001")
    result = step(trainer, tmp_path, 2, from_checkpoint=tmp_path / "0001")
    assert result.step == 1


def test_the_same_job_is_not_trained_twice(trainer: Trainer, tmp_path: Path) -> None:
    first = step(trainer, tmp_path, 1)
    before = weights(tmp_path / "0001")
    again = step(trainer, tmp_path, 1)
    assert again.step == first.step
    assert again.metrics["loss/train"] == first.metrics["loss/train"]
    assert weights(tmp_path / "0001") == before
    with pytest.raises(ConflictError, match=r"made by job 'job-00000001'; job 'job-another'"):
        step(trainer, tmp_path, 1, job_id="job-another")


def test_init_is_idempotent(trainer: Trainer, tmp_path: Path) -> None:
    before = checkpoints.identify(tmp_path / "0000")
    assert trainer.init_checkpoint(tmp_path / "0000", LORA).step == 0
    assert checkpoints.identify(tmp_path / "0000") == before


@pytest.mark.parametrize("file", [checkpoints.ADAPTER_WEIGHTS, checkpoints.OPTIMIZER])
def test_corrupted_files_are_refused_by_name(
    file: str, trainer: Trainer, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    step(trainer, tmp_path, 1)
    data = bytearray((tmp_path / "0001" / file).read_bytes())
    data[-5] ^= 0x40
    (tmp_path / "0001" / file).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=file):
        step(new_trainer(), tmp_path, 2)
    assert not (tmp_path / "0002").exists()


def test_a_checkpoint_of_another_base_model(
    trainer: Trainer, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    with pytest.raises(ConflictError, match="base model"):
        step(new_trainer("Llama"), tmp_path, 1)


def test_a_missing_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="0041"):
        step(trainer, tmp_path, 42)


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], NothingTrainableError, "none of the 0 samples"),
        ([replace(s, loss_mask=[False] * len(s.token_ids)) for s in random_samples(0)], NothingTrainableError, "of the 8"),
        ([replace(random_samples(0)[0], token_ids=[VOCAB_SIZE] * len(random_samples(0)[0].token_ids))], TrajectoryError, "s0"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_trained(
    samples: list[TrainingSample], error: type[Exception], message: str, trainer: Trainer, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        step(trainer, tmp_path, 1, samples=samples)
    assert not (tmp_path / "0001").exists()


def poisoned(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Advantages whose squares overflow float32, in the last sample only."""
    last = samples[-1]
    return [*samples[:-1], replace(last, advantages=[3e38 if m else 0.0 for m in last.loss_mask])]


def test_a_step_that_fails_half_way_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """The first mini-batch was applied in memory when the second failed; the retry starts from the checkpoint."""
    config = RL.model_copy(update={"num_minibatches": 2})
    with pytest.raises(TrainingError, match="not finite"):
        step(trainer, tmp_path, 1, config, samples=poisoned(random_samples(1)))
    assert not (tmp_path / "0001").exists()
    retried = step(trainer, tmp_path, 1)
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "0000").rename(tmp_path / "undisturbed/0000")
    undisturbed = step(trainer, tmp_path / "undisturbed", 1)
    assert retried.metrics["loss/train"] == undisturbed.metrics["loss/train"]
    assert weights(tmp_path / "0001") == weights(tmp_path / "undisturbed/0001")


def test_a_full_disk_loses_nothing(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", fsync)
        with pytest.raises(DiskFullError):
            step(trainer, tmp_path, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["0000"]
    step(trainer, tmp_path, 1)
    trainer.init_checkpoint(tmp_path / "b/0000", LORA)
    step(trainer, tmp_path / "b", 1)
    assert weights(tmp_path / "0001") == weights(tmp_path / "b/0001")


# -- reinforcement learning --


def test_advantages_move_probabilities_their_way(trainer: Trainer, tmp_path: Path) -> None:
    samples = [replace(random_samples(2)[0], sample_id=str(sign), temperature=1.0, weight=1.0) for sign in (1, -1)]
    liked = replace(
        samples[0], token_ids=[3, 9, 14, 20, 26], loss_mask=[False] + [True] * 4, advantages=[0.0] + [1.0] * 4
    )
    hated = replace(
        samples[1], token_ids=[3, 8, 13, 21, 27], loss_mask=[False] + [True] * 4, advantages=[0.0] + [-1.0] * 4
    )
    batch = [replace(s, sampling_logprobs=[0.0] * 5, rollout_id=s.sample_id) for s in (liked, hated)]
    policy = trainer._resident.load(tmp_path / "0000").policy
    before = [sum(measure_probe(policy, s.token_ids).logprobs) for s in batch]
    step(trainer, tmp_path, 1, samples=with_own_logprobs(policy, batch))
    after = [sum(measure_probe(policy, s.token_ids).logprobs) for s in batch]
    assert after[0] > before[0] + 0.01
    assert after[1] < before[1] - 0.01


def test_the_learning_rate_follows_its_schedule(trainer: Trainer, tmp_path: Path) -> None:
    """The rate depends on the step's number only: also for a trainer that has just loaded the checkpoint."""
    schedule = ScheduleConfig(type="cosine", peak=1e-2, warmup_steps=1, total_steps=3)
    config = RL.model_copy(update={"learning_rate": schedule, "num_minibatches": 2})
    found = [step(trainer, tmp_path, number, config).metrics["loss/learning_rate"] for number in (1, 2, 3)]
    assert found == [0.005, 0.01, 0.005]
    with pytest.raises(ConfigError, match="its schedule ended at `total_steps`=3"):
        step(trainer, tmp_path, 4, config)


def off_by(sample: TrainingSample, nats: float) -> TrainingSample:
    pairs = zip(sample.sampling_logprobs, sample.loss_mask, strict=True)
    return replace(sample, sampling_logprobs=[logprob + nats if learnt else 0.0 for logprob, learnt in pairs])


def test_the_gate_masks_reports_and_aborts(trainer: Trainer, tmp_path: Path) -> None:
    policy = trainer._resident.load(tmp_path / "0000").policy
    own = with_own_logprobs(policy, random_samples(3))
    config = TrainConfig(learning_rate=1e-2, mismatch=MismatchConfig())
    clean = step(trainer, tmp_path, 1, config, samples=own, to_checkpoint=tmp_path / "clean")
    assert clean.metrics["offpolicy/mismatch_masked_share"] == 0
    wrong = off_by(own[0], -0.1)
    gated = step(trainer, tmp_path, 1, config, samples=[wrong, *own[1:]], to_checkpoint=tmp_path / "gated")
    assert gated.metrics["offpolicy/mismatch_masked_share"] == pytest.approx(1 / 8)
    silent = replace(wrong, advantages=[0.0] * len(wrong.token_ids))  # masked is the same as no advantage
    ungated = config.model_copy(update={"mismatch": None})
    step(trainer, tmp_path, 1, ungated, samples=[silent, *own[1:]], to_checkpoint=tmp_path / "silent")
    assert weights(tmp_path / "gated") == weights(tmp_path / "silent")
    with pytest.raises(TrainingError, match=r"8 of 8 rollouts .* nothing was trained"):
        step(trainer, tmp_path, 1, config, samples=random_samples(3))
    assert not (tmp_path / "0001").exists()


def test_the_gate_knows_the_number_type_of_the_engine(trainer: Trainer, tmp_path: Path) -> None:
    own = with_own_logprobs(trainer._resident.load(tmp_path / "0000").policy, random_samples(3))
    noisy = [off_by(sample, 0.04 * (-1) ** i) for i, sample in enumerate(own)]
    for engine_dtype, is_masked in ((None, True), ("bfloat16", False)):
        config = TrainConfig(learning_rate=1e-2, mismatch=MismatchConfig(abort=1.0))
        target = tmp_path / f"as-{engine_dtype}"
        metrics = step(
            trainer, tmp_path, 1, config, samples=noisy, to_checkpoint=target, engine_dtype=engine_dtype
        ).metrics
        assert (metrics["offpolicy/mismatch_masked_share"] > 0) == is_masked
        assert metrics["offpolicy/mismatch_noise"] == pytest.approx(0.04, rel=0.01)
        assert metrics["offpolicy/mismatch_noise_allowed"] == (0.1 if engine_dtype else 0.02)


# -- supervised fine-tuning --


def sft_samples(count: int) -> list[TrainingSample]:
    return [replace(s, component="sft", temperature=1.0) for s in random_samples(20, count=count)]


def sft(trainer: Trainer, directory: Path, samples: list[TrainingSample], number: int = 1, **config: Any) -> StepResult:
    return trainer.train(
        TrainSft(
            samples=samples,
            config=TrainSFTConfig(**config),
            from_checkpoint=directory / f"{number - 1:04d}",
            to_checkpoint=directory / f"{number:04d}",
            job_id=f"job-{number}",
        )
    )


def test_sft_learns_and_reports(trainer: Trainer, tmp_path: Path) -> None:
    results = [sft(trainer, tmp_path, sft_samples(6), n, learning_rate=2e-2, batch_size=6) for n in range(1, 6)]
    losses = [result.metrics["loss/train"] for result in results]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert not any(name.startswith("offpolicy/") for name in results[-1].metrics)


@pytest.mark.parametrize(("batch_size", "updates"), [("auto", 3), (1, 6), (4, 2)])
def test_sft_batches(batch_size: Any, updates: int, trainer: Trainer, tmp_path: Path) -> None:
    result = sft(trainer, tmp_path, sft_samples(6), batch_size=batch_size)
    assert result.step == 1
    assert result.metrics["data/step_num_gradient_steps"] == updates


def test_sft_learning_rate_list(trainer: Trainer, tmp_path: Path) -> None:
    result = sft(trainer, tmp_path, sft_samples(4), learning_rate=[1e-3, 2e-3])
    assert result.metrics["loss/learning_rate"] == 2e-3
    with pytest.raises(ConfigError, match="lists 3 rates, but the trajectories make 2 batches of 2"):
        sft(trainer, tmp_path, sft_samples(4), 2, learning_rate=[1e-3] * 3)


def test_sft_refuses_samples_of_reinforcement_learning(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match="'s0' has component 'rl'"):
        sft(trainer, tmp_path, random_samples(0))


# -- supervised data and observations in a step of reinforcement learning --


def mixture(number: int) -> list[TrainingSample]:
    """Groups of two rollouts, supervised data, and an observation of every second rollout."""
    given = [replace(s, sample_id=f"sft[{i}]", rollout_id=f"sft[{i}]") for i, s in enumerate(sft_samples(3))]
    rl = [replace(s, group_id=f"g{i // 2}") for i, s in enumerate(random_samples(number, 12))]
    observed = [replace(s, sample_id=f"{s.sample_id}.observations", component="observation") for s in rl[::2]]
    return [*rl, *observed, *given]


@pytest.mark.parametrize(
    "config",
    [
        RL,
        RL.model_copy(update={"num_minibatches": 3}),
        RL.model_copy(update={"num_minibatches": 2, "anchor": "step_start", "mismatch": LENIENT}),
        RL.model_copy(update={"loss": (DppoConfig(), KlConfig(weight=0.1))}),
    ],
    ids=["one update", "mini-batches", "gated at the start of the step", "with a reference"],
)
def test_a_mixed_step_is_the_same_after_a_restart_and_in_another_order(
    config: TrainConfig, trainer: Trainer, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    result = step(trainer, tmp_path, 1, config, samples=mixture(1))
    again = step(new_trainer(), tmp_path, 1, config, samples=mixture(1), to_checkpoint=tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "0001")
    assert again.metrics["loss/train"] == result.metrics["loss/train"]
    assert result.metrics["data/step_num_gradient_steps"] == config.num_minibatches
    assert result.metrics["data/step_num_rollouts_trained"] == 12
    by_component = {
        name: sum(sum(s.loss_mask) for s in mixture(1) if s.component == name) for name in ("sft", "observation")
    }
    for name, count in by_component.items():
        assert result.metrics[f"data/step_{name}_tokens"] == count
        assert result.metrics[f"loss/{name}"] > 0
    if config.num_minibatches == 1:  # mini-batches follow the order in which groups come
        reverse = step(trainer, tmp_path, 1, config, samples=mixture(1)[::-1], to_checkpoint=tmp_path / "reverse")
        assert reverse.metrics["loss/grad_norm"] == pytest.approx(result.metrics["loss/grad_norm"], rel=1e-5)


def test_a_cut_of_max_tokens_on_a_cpu_is_logged(
    model_path: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="art.trainer.trainer")
    assert Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", max_tokens=4096))._batcher.max_tokens == 4096
    assert "max_tokens" not in caplog.text
    assert Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", max_tokens=5000))._batcher.max_tokens == 4096
    assert "`max_tokens` is 5000, but a CPU gains nothing above 4096" in caplog.text


# -- trials --


@pytest.fixture
def fresh_trainer(model_path: Callable[[str], str]) -> Trainer:
    return Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


def long_sample(fresh_trainer: Trainer, length: int = 200) -> TrainingSample:
    return random_sample(length=length, vocab_size=fresh_trainer._base.vocab_size)


def two_steps(fresh_trainer: Trainer, directory: Path, lora: LoraConfig | None, *, trial: bool) -> bytes:
    fresh_trainer.init_checkpoint(directory / "0000", lora)
    for number in (1, 2):
        if trial:
            fresh_trainer.trial([long_sample(fresh_trainer)], lora)
        fresh_trainer.train(
            Train(
                samples=random_samples(number),
                config=RL,
                from_checkpoint=directory / f"{number - 1:04d}",
                to_checkpoint=directory / f"{number:04d}",
                job_id=f"job-{number:08d}",
            )
        )
    name = checkpoints.MODEL_WEIGHTS if lora is None else checkpoints.ADAPTER_WEIGHTS
    return (directory / "0002" / name).read_bytes()


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "full"])
def test_training_goes_on_as_if_there_had_been_none(
    fresh_trainer: Trainer, tmp_path: Path, lora: LoraConfig | None
) -> None:
    with_trial = two_steps(fresh_trainer, tmp_path / "with", lora, trial=True)
    assert with_trial == two_steps(fresh_trainer, tmp_path / "without", lora, trial=False)


def test_it_measures_what_a_step_takes(fresh_trainer: Trainer) -> None:
    sample = long_sample(fresh_trainer)
    took = fresh_trainer.trial([sample, replace(sample, sample_id="again")], LORA)
    assert took["num_tokens"] == 400
    assert took["num_tree_tokens"] == 199  # both are the same path, and the last token needs no forward pass
    assert took["seconds"] > 0
    assert took["grad_norm"] > 0
    assert took["peak_memory_bytes"] > 2**20


def test_what_does_not_fit_into_memory_is_said(fresh_trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("art.trainer.step.update.train_micro_batch", out_of_memory)
    with pytest.raises(TrainingError, match="of 199 tokens, does not fit into memory even alone"):
        fresh_trainer.trial([long_sample(fresh_trainer)], LORA)


def test_what_cannot_be_tried_is_refused(fresh_trainer: Trainer) -> None:
    with pytest.raises(NothingTrainableError):
        fresh_trainer.trial([], LORA)
    with pytest.raises(ConfigError, match="target_modules"):
        fresh_trainer.trial([long_sample(fresh_trainer)], LoraConfig(target_modules=["no_such_layer"]))
