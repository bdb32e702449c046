"""Two processes give what one gives: gradients, whole steps, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from art.config import (
    DpoConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    MismatchConfig,
    OptimizerConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.errors import (
    ArtError,
    ConfigError,
    DiskFullError,
    NotFoundError,
    NothingTrainableError,
    ProcessError,
    TrainingError,
)
from art.protocol.calls import TrainSft
from art.protocol.samples import StepResult
from art.storage import checkpoints
from art.storage.step_files import TokenFile
from art.trainer.distributed import Team
from art.trainer.trainer import Trainer
from tests.support.trainer_pair import (
    Gradient,
    Member,
    Pair,
    budget,
    gradient,
    held_weights,
    init,
    pair_of_processes,
    raise_inside,
    train,
    with_failure,
)
from tests.support.trainer_samples import random_samples

RL = TrainConfig(learning_rate=1e-2, mismatch=None)
SHARDED = {"shard_base": True}
WHOLE: dict[str, Any] = {}
both_ways = pytest.mark.parametrize("settings", [WHOLE, SHARDED], ids=["whole", "sharded"])


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pair_of_processes() as pair:
        yield pair


@pytest.fixture(scope="module")
def alone() -> Member:
    return Member()


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], str]) -> str:
    return model_path("Qwen3")


def close(one: np.ndarray, other: np.ndarray, tolerance: float = 1e-5) -> bool:
    """Equal but for rounding, relative to the largest number."""
    return bool(np.abs(one - other).max() <= tolerance * np.abs(one).max())


def succeeded(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


# -- gradients --


@both_ways
@pytest.mark.parametrize(
    ("seed", "count", "max_tokens"),
    [(1, 8, 20), pytest.param(2, 8, 30, marks=pytest.mark.slow), (3, 20, 64), (4, 1, 64)],
    ids=["1 and 2 micro-batches", "1 and 1", "many", "1 and none"],
)
def test_gradients_are_those_of_one_process(
    settings: dict[str, Any], seed: int, count: int, max_tokens: int, pair: Pair, alone: Member, model: str
) -> None:
    samples = random_samples(seed, count)
    if count > 1:
        samples[::3] = [replace(sample, component="sft") for sample in samples[::3]]
        samples[1::6] = [replace(sample, component="observation") for sample in samples[1::6]]
    # Pairs are branches of one rollout, which the gate judges as a whole wherever they are computed.
    samples = [replace(sample, rollout_id=f"r{number // 2}") for number, sample in enumerate(samples)]
    update = {"terms": (GspoConfig(),), "mismatch": MismatchConfig(rollouts=(0.5, 1.5), abort=1.0)}
    expected = gradient(alone, model, samples, update, max_tokens)
    found: list[Gradient] = succeeded(pair.run(gradient, model, samples, update, max_tokens, **settings))
    numbers = [part.num_micro_batches for part in found]
    if count == 1:
        assert numbers == [1, 0]
    if seed == 1:
        assert sorted(numbers) == [1, 2]
    for part in found:
        assert close(expected.grads, part.grads)
        assert part.record.losses == pytest.approx(expected.record.losses, rel=1e-5)
        for name in ("num_gated", "num_mismatched", "num_mismatched_targets", "num_truncated_targets"):
            assert getattr(part.record, name) == getattr(expected.record, name), name
        assert part.record.num_tree_tokens == sum(part.num_tokens for part in found)
        assert len(part.record.micro_batches) == sum(numbers)
    assert found[0].grads.tobytes() == found[1].grads.tobytes()  # or the adapters would drift apart


@pytest.mark.parametrize("mode", [True, "selective"])
def test_sharded_weights_with_gradient_checkpointing(mode: Any, pair: Pair, alone: Member, model: str) -> None:
    """What is computed again on the way back needs the layer gathered again."""
    samples, loss = random_samples(1), {"terms": (DppoConfig(),)}
    expected = gradient(alone, model, samples, loss, 20)
    for part in succeeded(pair.run(gradient, model, samples, loss, 20, gradient_checkpointing=mode, **SHARDED)):
        assert close(expected.grads, part.grads)


def test_full_finetuning_is_shared_out_and_refuses_sharded_weights(pair: Pair, alone: Member, model: str) -> None:
    arguments = (model, random_samples(1), {"terms": (DppoConfig(),)}, 20)
    expected = gradient(alone, *arguments, lora=None)
    for part in succeeded(pair.run(gradient, *arguments, lora=None)):
        assert close(expected.grads, part.grads)
    for refusal in pair.run(gradient, *arguments, lora=None, **SHARDED):
        assert isinstance(refusal, ConfigError)
        assert "set `shard_base` and `quantization` to their defaults" in refusal.message


def test_sharded_weights_are_held_in_parts(pair: Pair, model: str) -> None:
    whole, parts = (succeeded(pair.run(held_weights, model, **settings)) for settings in (WHOLE, SHARDED))
    layers = whole[0]["layers"]
    assert whole[1] == whole[0]
    assert sum(part["layers"] for part in parts) == pytest.approx(layers, rel=0.05)
    assert all(part["layers"] < 0.6 * layers for part in parts)
    assert all(part["rest"] == whole[0]["rest"] for part in parts)


# -- steps --


def files(directory: Path, step: int) -> dict[str, np.ndarray]:
    path = directory / f"{step:04d}"
    return load_file(path / checkpoints.ADAPTER_WEIGHTS) | {
        f"moments of {name}": value for name, value in load_file(path / checkpoints.OPTIMIZER).items()
    }


def compare_steps(directories: list[Path], step: int, results: list[StepResult]) -> None:
    """Checkpoints and metrics of one process, and then of others."""
    expected = files(directories[0], step)
    for directory in directories[1:]:
        for name, value in files(directory, step).items():
            assert close(expected[name], value, 1e-3), name
        probes = [checkpoints.read_probe(path / f"{step:04d}").logprobs for path in (directories[0], directory)]
        assert probes[1] == pytest.approx(probes[0], abs=1e-4)
    compare_tokens(*(TokenFile(directory / "steps" / f"{step:04d}") for directory in directories))
    for result in results[1:]:
        assert result.step == results[0].step
        assert result.metrics.keys() == results[0].metrics.keys()
        for name, value in results[0].metrics.items():
            if not name.startswith(("time/", "throughput/", "data/step_trainer_tokens", "data/step_shared_share")):
                assert result.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def compare_tokens(expected: TokenFile, *others: TokenFile) -> None:
    """What is recorded of each token, by one process and by others."""
    for other in others:
        for own, found in zip(expected.samples, other.samples, strict=True):
            assert replace(found, micro_batch=own.micro_batch, advantages=own.advantages) == own
        columns = expected.read_all()
        assert other.columns == expected.columns
        np.testing.assert_array_equal(other.read_all()["reasons"], columns["reasons"])
        for name, values in other.read_all().items():
            np.testing.assert_allclose(values, columns[name].astype(np.float64), rtol=2e-3, atol=2e-3, err_msg=name)


PAIRS = [("s0", "s1"), ("s2", "s3"), ("s4", "s0")]
STEPS = {
    "several updates": (RL.model_copy(update={"num_minibatches": 2}), {}),
    "anchor, references": (
        TrainConfig(
            learning_rate=1e-2,
            loss=(DppoConfig(), KlConfig(weight=0.1, reference=0)),
            anchor="step_start",
            num_minibatches=2,
            mismatch=None,
            # Where a gradient is nearly 0, rounding would decide the direction of Adam's step.
            optimizer=OptimizerConfig(eps=1e-4),
        ),
        {},
    ),
    "KL in the reward": (
        TrainConfig(learning_rate=1e-2, loss=(DppoConfig(), KlConfig(weight=0.1, where="reward")), mismatch=None),
        {},
    ),
    "dpo": (TrainConfig(learning_rate=1e-2, loss=DpoConfig(), mismatch=None), {"pairs": PAIRS}),
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(pytest.param(kind, WHOLE, id=f"{kind}-whole") for kind in STEPS),
        pytest.param("several updates", SHARDED, id="several updates-sharded"),
        pytest.param("anchor, references", SHARDED, id="anchor, references-sharded"),
        pytest.param("KL in the reward", SHARDED, id="KL in the reward-sharded", marks=pytest.mark.slow),
        pytest.param("dpo", SHARDED, id="dpo-sharded", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_process(
    kind: str, settings: dict[str, Any], pair: Pair, alone: Member, model: str, tmp_path: Path
) -> None:
    config, arguments = STEPS[kind]
    directories = [tmp_path / "alone", tmp_path / "pair"]
    init(alone, model, directories[0])
    succeeded(pair.run(init, model, directories[1], **settings))
    for number in (1, 2):
        job: dict[str, Any] = {"samples": random_samples(number, 12), "config": config, **arguments}
        if kind == "anchor, references":
            references = [{0: directory / "0000"} for directory in directories]
        else:
            references = [{}, {}]
        expected = train(alone, model, directories[0], number, references=references[0], **job)
        found = pair.run(train, model, directories[1], number, references=references[1], settings=settings, **job)
        compare_steps(directories, number, [expected, *succeeded(found)])
    assert files(directories[1], 2).keys() == files(directories[0], 2).keys()


@both_ways
def test_supervised_steps_and_a_repeated_job(
    settings: dict[str, Any], pair: Pair, alone: Member, model: str, tmp_path: Path
) -> None:
    samples = [replace(sample, component="sft") for sample in random_samples(5, 7)]
    job: dict[str, Any] = {"samples": samples, "config": TrainSFTConfig(batch_size=3, learning_rate=1e-2)}
    directories = [tmp_path / "alone", tmp_path / "pair"]
    init(alone, model, directories[0])
    succeeded(pair.run(init, model, directories[1], **settings))
    expected = train(alone, model, directories[0], 1, kind=TrainSft, **job)
    found = succeeded(pair.run(train, model, directories[1], 1, kind=TrainSft, settings=settings, **job))
    compare_steps(directories, 1, [expected, *found])
    before = (directories[1] / "0001").stat().st_ino
    again = succeeded(pair.run(train, model, directories[1], 1, kind=TrainSft, settings=settings, **job))
    assert [result.metrics for result in again] == [checkpoints.read_state(directories[1] / "0001").metrics] * 2
    assert (directories[1] / "0001").stat().st_ino == before


# -- errors --


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["update.target_logprobs", "trainer.summarise", "trainer.measure_probe"])
def test_what_fails_in_one_process_fails_in_all_and_the_next_call_succeeds(
    where: str, rank: int, pair: Pair, model: str, tmp_path: Path
) -> None:
    succeeded(pair.run(init, model, tmp_path))
    job: dict[str, Any] = {"samples": random_samples(1), "config": RL}
    bug = RuntimeError("a bug")
    errors = pair.run(with_failure, rank, where, bug, train, model, tmp_path, 1, **job)
    assert isinstance(errors[rank], RuntimeError)
    assert isinstance(errors[1 - rank], ArtError)
    assert f"RuntimeError: a bug (in process {rank} of 2)" in errors[1 - rank].message
    assert not (tmp_path / "0001").exists()
    assert [result.step for result in succeeded(pair.run(train, model, tmp_path, 1, **job))] == [1, 1]


def test_where_one_process_runs_out_of_memory_it_makes_smaller_passes_and_from_then_on_all_do(
    pair: Pair, alone: Member, model: str, tmp_path: Path
) -> None:
    directories = [tmp_path / "alone", tmp_path / "pair"]
    init(alone, model, directories[0])
    succeeded(pair.run(init, model, directories[1]))
    job: dict[str, Any] = {"samples": random_samples(1, 12), "config": RL}
    expected = train(alone, model, directories[0], 1, **job)
    full = torch.OutOfMemoryError("no memory left")
    found = pair.run(with_failure, 1, "update.target_logprobs", full, train, model, directories[1], 1, once=True, **job)
    compare_steps(directories, 1, [expected, *succeeded(found)])
    budgets = succeeded(pair.run(budget, model))
    assert budgets[0] == budgets[1] < budget(alone, model)


def test_an_error_of_ours_keeps_its_type_in_the_other_process(pair: Pair, model: str, tmp_path: Path) -> None:
    full = DiskFullError("no space left", param="path")
    for error in pair.run(with_failure, 0, "checkpoints.write_checkpoint", full, init, model, tmp_path):
        assert isinstance(error, DiskFullError)
        assert (error.message, error.param) == ("no space left", "path")
    succeeded(pair.run(init, model, tmp_path))


@both_ways
def test_refused_steps_leave_all_in_step(settings: dict[str, Any], pair: Pair, model: str, tmp_path: Path) -> None:
    succeeded(pair.run(init, model, tmp_path, **settings))
    samples = random_samples(1)
    ratio_overflows = [replace(sample, advantages=[1e38 * a for a in sample.advantages]) for sample in samples]
    foreign = MismatchConfig(rollouts=(0.999, 1.001), abort=0.1)
    refusals: list[tuple[type[ArtError], str, dict[str, Any]]] = [
        (NothingTrainableError, "none of the 0 samples", {"samples": []}),
        (TrainingError, "not finite", {"samples": ratio_overflows}),
        (TrainingError, "", {"config": RL.model_copy(update={"mismatch": foreign})}),
        (NotFoundError, "", {"number": 7}),
        (
            ConfigError,
            "checkpoint 5",
            {"config": RL.model_copy(update={"loss": (DppoConfig(), KlConfig(reference=5))})},
        ),
    ]
    for kind, text, changes in refusals:
        arguments: dict[str, Any] = {"number": 1, "samples": samples, "config": RL, "settings": settings} | changes
        for error in pair.run(train, model, tmp_path, **arguments):
            assert type(error) is kind
            assert text in error.message
    assert checkpoints.list_steps(tmp_path) == [0]
    succeeded(pair.run(train, model, tmp_path, 1, samples=samples, config=RL, settings=settings))


def test_who_fails_in_lockstep_does_not_wait_for_the_others(pair: Pair) -> None:
    for error in pair.run(raise_inside, ValueError("a bug"), in_lockstep=True):
        assert isinstance(error, ProcessError)
        assert "ValueError: a bug" in error.message
    for error in pair.run(raise_inside, TrainingError("of all"), in_lockstep=True):
        assert isinstance(error, TrainingError)


def test_number_of_processes_must_be_that_of_the_settings(model: str) -> None:
    with pytest.raises(ConfigError, match=r"configured for 2 processes, but 1 run.*torchrun"):
        Trainer(model, TrainerConfig(device="cpu", num_processes=2))


def test_each_process_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "64")
    with pytest.raises(ConfigError, match=r"needs 64 devices of type .*, one for each process, but this machine has"):
        Team.from_environment(TrainerConfig(device="cuda", num_processes=64))
