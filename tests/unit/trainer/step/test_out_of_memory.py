"""Where memory runs out, a pass starts again on smaller micro-batches, and what comes of it stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import DppoConfig, LoraConfig, LossConfig, MismatchConfig, TrainConfig, TrainerConfig
from art.errors import TrainingError
from art.protocol.calls import Train
from art.trainer.memory import is_out_of_memory
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import update as module
from art.trainer.step.micro_batch import MicroBatcher, split_micro_batches
from art.trainer.step.plans import Measurer
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.trainer import Trainer
from art.trainer.tree import SamplePath, build_tree, check_samples, pack
from art.trainer.tree_attention import TreeLayout
from tests.support.constrained_samples import replayed, with_kept
from tests.support.trainer_reference import relative_error
from tests.support.trainer_samples import make_gate, random_samples

LORA = LoraConfig(rank=8, alpha=16)
ON_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
    "bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture
def policy(model_path: Callable[[str], str]) -> LoraPolicy:
    base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    policy = LoraPolicy(base, LORA)
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Give the trainer memory for so many tokens; returns the tokens of the passes that were tried."""

    backward = module.train_micro_batch

    def set_limit(max_tokens: int, error: Exception = ON_CPU) -> list[int]:
        tried: list[int] = []

        def limited(policy: Any, update: Any, micro_batch: Any, record: Any, **options: Any) -> float:
            tried.append(len(micro_batch.layout.token_ids))
            if tried[-1] > max_tokens:
                # The worst moment: most of the gradient is there already, and must not count twice.
                backward(policy, update, micro_batch, StepRecord(), **options)
                raise error
            return backward(policy, update, micro_batch, record, **options)

        monkeypatch.setattr(module, "train_micro_batch", limited)
        return tried

    return set_limit


def make_paths(seed: int = 11) -> list[SamplePath]:
    """Paths of which many have masks."""
    return replayed(with_kept(random_samples(seed, count=14)))


def run(
    policy: LoraPolicy,
    *,
    max_tokens: int = 4096,
    loss: LossConfig | None = None,
    gate: MismatchConfig | None = None,
    **options: Any,
) -> tuple[torch.Tensor, StepRecord, int | None]:
    paths = make_paths()
    update = Update(paths=paths, learning_rate=1.0, terms=(loss or DppoConfig(),), mismatch=make_gate(paths, gate))
    record = StepRecord()
    micro_batches = split_micro_batches(paths, policy.base, max_tokens=max_tokens)
    fitting = compute_gradient(policy, update, micro_batches, record, **options)
    return policy.grads.clone(), record, fitting


@pytest.mark.parametrize("error", [ON_CUDA, ON_CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("max_tokens", [4096, 90])
def test_the_gradient_is_that_of_the_whole_update(
    error: Exception, max_tokens: int, policy: LoraPolicy, limit: Callable[..., list[int]]
) -> None:
    gate = MismatchConfig(rollouts=(0.5, 2), abort=1)  # masks some of the samples, which must be counted once
    expected, whole, untouched = run(policy, gate=gate)
    assert untouched is None
    tried = limit(60, error)
    found, record, fitting = run(policy, max_tokens=max_tokens, gate=gate)
    assert tried[0] > 60
    assert fitting is not None
    assert fitting <= 60
    assert relative_error(found, expected) < 1e-5
    assert record.losses == pytest.approx(whole.losses, rel=1e-5)
    assert (record.num_gated, record.num_mismatched) == (whole.num_gated, whole.num_mismatched)
    counts = [sum(len(batch.policy_logprobs) for batch in r.micro_batches) for r in (record, whole)]
    assert counts[0] == counts[1]


def test_a_sample_that_does_not_fit_alone_is_named(policy: LoraPolicy, limit: Callable[..., list[int]]) -> None:
    limit(3)
    with pytest.raises(TrainingError, match=r"sample '.*', of \d+ tokens, does not fit into memory even alone"):
        run(policy)


def test_other_errors_are_passed_on(policy: LoraPolicy, limit: Callable[..., list[int]]) -> None:
    tried = limit(1, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(policy)
    assert len(tried) == 1


@pytest.mark.parametrize(("error", "expected"), [(ON_CUDA, True), (ON_CPU, True), (RuntimeError("other"), False)])
def test_is_out_of_memory(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_trainer_remembers_what_fits(
    model_path: Callable[[str], str], tmp_path: Path, limit: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Later updates of the step, and later steps, start with the budget that was found."""
    samples = random_samples(11, count=14)
    config = TrainConfig(learning_rate=1e-2, mismatch=None, num_minibatches=2)
    longest = max(len(path.token_ids) for path in make_paths())
    results = []
    for name, memory in (("plenty", 4096), ("little", longest)):
        trainer = Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
        steps = [tmp_path / name / f"{number:04d}" for number in range(3)]
        trainer.init_checkpoint(steps[0], LORA)
        failures, progress = [], []
        for number in (1, 2):
            tried = limit(memory)
            trainer.train(
                Train(
                    samples=samples,
                    config=config,
                    from_checkpoint=steps[number - 1],
                    to_checkpoint=steps[number],
                    job_id=f"job-{number}",
                ),
                lambda done, total: progress.append((done, total)),  # noqa: B023
            )
            failures.append(len([size for size in tried if size > memory]))
        assert all(done <= total for done, total in progress)
        assert bool(failures[0]) == (name == "little")
        assert failures[1] == 0
        results.append(trainer._resident._loaded.policy.values.clone())  # type: ignore[union-attr]
    warnings = [record for record in caplog.records if "do not fit into memory" in record.message]
    assert len(warnings) == failures[0]
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)


# -- passes that only measure --


class _Small:
    """A model whose forward pass has memory for so many tokens."""

    def __init__(
        self, hidden_states: Callable[[TreeLayout], torch.Tensor], max_tokens: int, error: Exception = ON_CPU
    ) -> None:
        self._hidden_states, self.max_tokens, self._error = hidden_states, max_tokens, error
        self.tried: list[int] = []

    def __call__(self, layout: TreeLayout) -> torch.Tensor:
        self.tried.append(len(layout.token_ids))
        if self.tried[-1] > self.max_tokens:
            raise self._error
        return self._hidden_states(layout)


def streams(paths: list[SamplePath], name: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(path.streams[name]) for path in paths])


@pytest.mark.parametrize("error", [ON_CUDA, ON_CPU], ids=["cuda", "cpu"])
def test_a_measurement_in_smaller_parts_is_the_same(
    error: Exception, policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_paths()
    batcher = MicroBatcher(policy.base, max_tokens=4096)
    expected = Measurer(policy, batcher).add_stream(paths, "base", "base")
    assert batcher.max_tokens == 4096
    small = _Small(policy.base_hidden_states, max(len(path.token_ids) for path in paths), error)
    monkeypatch.setattr(policy, "base_hidden_states", small)
    found = Measurer(policy, batcher).add_stream(paths, "base", "base")
    assert small.tried[0] > small.max_tokens
    assert batcher.max_tokens <= small.tried[0] // 2
    torch.testing.assert_close(streams(found, "base"), streams(expected, "base"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (ON_CPU, TrainingError, r"sample '.*', of \d+ tokens, does not fit into memory even alone"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "mat1 and mat2"),
    ],
)
def test_a_sample_that_cannot_be_measured_alone_is_named(
    error: Exception, expected: type[Exception], message: str, policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _Small(policy.hidden_states, 3, error)
    monkeypatch.setattr(policy, "hidden_states", small)
    with pytest.raises(expected, match=message):
        Measurer(policy, MicroBatcher(policy.base, max_tokens=4096)).add_stream(make_paths(), "policy", "anchor")
    assert expected is TrainingError or len(small.tried) == 1


@pytest.mark.parametrize("max_tokens", [20, 60, 200])
def test_the_parts_are_smaller_than_what_failed(max_tokens: int) -> None:
    """Each retry makes progress: several samples, cut at half of the tokens of their tree, make at least two parts."""
    paths = make_paths()
    for indices in pack(paths, max_tokens=max_tokens):
        if len(indices) > 1:
            part = [paths[index] for index in indices]
            assert len(pack(part, max_tokens=max(1, len(build_tree(part)) // 2))) > 1


def test_a_long_prefix_is_computed_once_until_memory_runs_out(policy: LoraPolicy) -> None:
    """Four samples of 60 tokens share 50. With room for 64 tokens, no two would fit beside each other."""
    sample = random_samples(1)[0]
    prefix = [5 + i % 40 for i in range(50)]
    samples = [
        replace(
            sample, sample_id=f"s{i}", token_ids=[*prefix, *[50 + i] * 10], loss_mask=[False] * 50 + [True] * 10,
            sampling_logprobs=[-1.0] * 60, advantages=[1.0] * 60, teacher_logprobs=None, constraints=[], versions=[],
        )
        for i in range(4)
    ]  # fmt: skip
    paths = check_samples(samples, vocab_size=policy.base.vocab_size)
    batcher = MicroBatcher(policy.base, max_tokens=64)
    assert [micro_batch.layout.num_tokens for micro_batch in batcher.split(paths)] == [
        50 + 4 * 9
    ]  # the last token is a target only
    assert batcher.budget(check_samples(samples[:1], vocab_size=policy.base.vocab_size)) == 64
    assert MicroBatcher(policy.base, max_tokens=128).budget(paths) == 128
    batcher.shrink(45)
    assert [micro_batch.layout.num_tokens for micro_batch in batcher.split(paths)] == [59] * 4
