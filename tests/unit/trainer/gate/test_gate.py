"""The verdict of the gate on rollouts of any length, in every number type."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from art.config import DppoConfig, LoraConfig, MismatchConfig, TrainerConfig
from art.errors import ConfigError, TrainingError
from art.trainer.gate import Gate, GateVerdict, LogRatioSums, Noise, check_verdict, is_mixture
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import update as module
from art.trainer.step.micro_batch import make_micro_batch, split_micro_batches, target_logprobs_in_order
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, make_gate, make_sample, paths_of, random_samples

BFLOAT16 = Noise(trainer="bfloat16", engine="bfloat16")


def gate_of(num_rollouts: int, noise: Noise = BFLOAT16, *, stale: bool = False, **config: Any) -> Gate:
    rollouts = {str(index): index for index in range(num_rollouts)}
    return Gate(
        MismatchConfig(**config),
        noise,
        rollouts,
        np.full(num_rollouts, stale),
        np.zeros(num_rollouts, dtype=np.bool_),
    )


def judge(log_ratios: list[list[float]], noise: Noise = BFLOAT16, *, stale: bool = False, **config: Any) -> GateVerdict:
    gate = gate_of(len(log_ratios), noise, stale=stale, **config)
    flat = np.concatenate([np.asarray(values, dtype=np.float64) for values in log_ratios])
    rollouts = np.repeat(np.arange(len(log_ratios)), [len(values) for values in log_ratios])
    return gate.judge(LogRatioSums.collect(flat, rollouts, len(log_ratios), limit=gate.limit))


def masked(log_ratios: list[list[float]], noise: Noise = BFLOAT16, **settings: Any) -> list[bool]:
    return judge(log_ratios, noise, **settings).masked.tolist()


@pytest.mark.parametrize("tokens", [1, 2, 5, 10, 50, 100, 1000, 10_000])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("rms", [0.032, 0.045])
def test_a_correct_pair_in_bfloat16_passes_at_any_length(tokens: int, heavy: bool, rms: float) -> None:
    rng = np.random.default_rng(tokens)
    shape = (max(16, 40_000 // tokens), tokens)
    noise = rng.standard_t(3, shape) / math.sqrt(3) if heavy else rng.standard_normal(shape)
    log_ratios = (noise * rms - rms**2 / 2).tolist()
    verdict = judge(log_ratios)
    assert verdict.num_masked / len(log_ratios) < 0.005
    assert not verdict.is_shifted


def test_in_float32_the_handshake_says_how_much_noise_is_usual() -> None:
    def bounds(probe_gap: float | None, **settings: Any) -> tuple[float, float]:
        noise = Noise(probe_gap=probe_gap, **settings)
        return noise.usual, pytest.approx(noise.most)

    assert bounds(7e-7) == (1e-4, 4e-4)
    assert bounds(5e-5) == (5e-4, 2e-3)
    assert bounds(1e-3) == bounds(None) == (0.005, 0.02)  # TF32
    assert bounds(7e-7, engine="bfloat16") == (0.05, 0.1)
    assert bounds(7e-7, is_mixture=True) == (0.01, 0.04)  # one expert chosen otherwise is no rounding


@pytest.mark.parametrize("tokens", [4, 40])
def test_an_adapter_at_half_its_scale_stops_a_float32_step(tokens: int) -> None:
    halved = np.random.default_rng(0).normal(-(0.049**2) / 2, 0.049, (64, tokens)).tolist()
    verdict = judge(halved, Noise(probe_gap=7e-7))
    with pytest.raises(TrainingError, match="nothing was trained"):
        check_verdict(gate_of(64, Noise(probe_gap=7e-7)), verdict, num_masked=verdict.num_masked, num_judged=64)
    honest = np.random.default_rng(1).normal(0, 3e-5, (64, tokens)).tolist()  # at a temperature of 0.05
    assert judge(honest, Noise(probe_gap=7e-7)).num_masked == 0


@pytest.mark.parametrize("noise", [Noise(), BFLOAT16], ids=str)
def test_samples_that_are_all_wrong_do_not_excuse_themselves(noise: Noise) -> None:
    wrong = np.random.default_rng(0).normal(-0.08, 0.4, (64, 400))
    verdict = judge(wrong.tolist(), noise)
    assert verdict.noise == noise.most
    assert verdict.num_masked > 32


def test_a_shift_of_all_is_seen_where_no_single_rollout_shows_it() -> None:
    wrong = np.random.default_rng(0).normal(-0.03, 0.05, (2000, 5))
    verdict = judge(wrong.tolist())
    assert verdict.num_masked < 20
    assert verdict.is_shifted
    assert not judge((wrong + 0.03).tolist()).is_shifted


def test_bounds_follow_length_noise_and_number_types() -> None:
    def bound(tokens: int, noise: Noise) -> float:
        return float(judge([[0.0] * tokens], noise).high[0])

    assert bound(1, Noise()) == pytest.approx(0.001 + 5 * 0.005)
    assert bound(100, Noise()) == pytest.approx(0.001 + 5 * 0.005 / 10)
    assert bound(100, BFLOAT16) == pytest.approx(0.05**2 + 5 * 0.05 / 10)
    for other in (Noise(engine="bfloat16"), Noise(trainer="bfloat16"), Noise(engine="float16")):
        assert bound(100, other) == bound(100, BFLOAT16)  # the coarser of the two counts
    assert (
        bound(100, Noise(engine="quantized")) == bound(100, replace(BFLOAT16, is_mixture=True)) > bound(100, BFLOAT16)
    )


def test_noise_of_the_step_widens_the_bounds_up_to_what_the_number_type_explains() -> None:
    def noise(rms: float) -> float:
        return judge(np.random.default_rng(0).normal(0, rms, (64, 100)).tolist()).noise

    assert noise(0.03) == 0.05
    assert noise(0.08) == pytest.approx(0.08, rel=0.05)
    assert noise(0.3) == 0.1


def test_bounds_that_the_user_sets_hold_at_every_length() -> None:
    limit = math.log(1.01)
    log_ratios = [[0.99 * limit], [1.01 * limit], [0.99 * limit] * 500, [1.01 * limit] * 500]
    assert masked(log_ratios, rollouts=(0.99, 1.01)) == [False, True, False, True]
    verdict = judge([[-0.1] * 1000] * 8, rollouts=(0.9, 1.1))
    assert (verdict.num_masked, verdict.is_shifted) == (0, False)


def test_a_single_outlier_masks_its_rollout() -> None:
    far, low = math.log(101), math.log(1.01e4)
    assert masked([[far, -far], [-low, low / 2, low / 2], [0.0, 0.0]]) == [True, True, False]


# -- sums --


def make_paths(*branches: tuple[str, list[int], list[int]]) -> list[SamplePath]:
    """Samples of (rollout, tokens, indices of targets)."""
    sample = random_samples(0, 1)[0]
    samples = [
        replace(
            sample,
            sample_id=str(number),
            rollout_id=rollout,
            token_ids=tokens,
            loss_mask=[i in targets for i in range(len(tokens))],
            sampling_logprobs=[0.0] * len(tokens),
            advantages=[0.0] * len(tokens),
            weight=1.0,
        )
        for number, (rollout, tokens, targets) in enumerate(branches)
    ]
    return [path for each in samples if (path := check_sample(each, vocab_size=99))]


def test_branches_of_a_rollout_are_judged_together() -> None:
    paths = make_paths(("a", [1, 2, 3], [1, 2]), ("b", [1, 2, 3], [1, 2]), ("a", [1, 9, 9, 9], [2, 3]))
    gate = Gate.over(paths, MismatchConfig(rollouts=(0.9, 1.1)), Noise(), step=0)
    log_ratio = np.asarray([0.3, 0.3, 0.0, 0.0, -0.3, -0.3], dtype=np.float32)
    assert gate.judge(gate.collect(paths, log_ratio)).masked.tolist() == [False, False]
    assert gate.judge(gate.collect(paths[:2], log_ratio[:4])).masked.tolist() == [True, False]


def test_evidence_adds_up_however_it_is_cut() -> None:
    paths = make_paths(*[(str(n % 3), [1, 2 + n, 3, 4], [1, 2, 3]) for n in range(9)])
    gate = Gate.over(paths, MismatchConfig(), Noise(), step=0)
    log_ratio = np.random.default_rng(0).normal(0, 1, 27).astype(np.float32)
    whole = gate.collect(paths, log_ratio)
    parts = gate.collect(paths[:4], log_ratio[:12]) + gate.collect(paths[4:], log_ratio[12:])
    for name in ("counts", "totals", "squares", "lowest", "highest"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))


def test_a_rollout_is_stale_if_any_of_its_branches_is() -> None:
    paths = make_paths(("a", [1, 2], [1]), ("a", [1, 3], [1]), ("b", [1, 4], [1]))
    paths = [
        replace(path, sample=replace(path.sample, policy_version=v)) for path, v in zip(paths, (3, 2, 3), strict=True)
    ]
    assert Gate.over(paths, MismatchConfig(), Noise(), step=3).stale.tolist() == [True, False]


# -- what it says --


def test_it_says_what_was_observed_at_which_bound_and_what_to_check(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    right, wrong = rng.normal(0, 0.03, (24, 100)).tolist(), [[-0.2] * 100]
    config = {"abort": 0.5}
    gate, verdict = gate_of(25, **config), judge(right + wrong * 1, **config)
    with caplog.at_level(logging.WARNING):
        check_verdict(gate, verdict, num_masked=1, num_judged=25)
        assert not caplog.records  # 4 % are below the alarm
        gate, verdict = gate_of(26, **config), judge(right + wrong * 2, **config)
        check_verdict(gate, verdict, num_masked=2, num_judged=26)
    for text in (
        "2 of 26 rollouts have sampling log-probs that the trainer does not reproduce; they were left out",
        "In 2 the mean of log(policy / sampler) is outside of its bounds: at the worst -0.2 nats per token over 100 tok",
        "nats per token; the bounds allow for 0.0",
        "at most 0.1 (trainer in bfloat16, engine in bfloat16)",
        "Check whether the samples come from another or an older policy",
    ):
        assert text in caplog.text
    assert "mixture" not in caplog.text


def test_it_stops_a_step_that_is_mostly_wrong_or_shifted_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    wrong = judge([[-0.3] * 50] * 4)
    with pytest.raises(TrainingError, match=r"4 of 4 rollouts .* share of 0.5, so nothing was trained\. In 4 the mean"):
        check_verdict(gate_of(4), wrong, num_masked=4, num_judged=4)
    shifted = judge(np.random.default_rng(0).normal(-0.03, 0.05, (2000, 5)).tolist())
    with pytest.raises(TrainingError, match=r"over 2000 rollouts \(10000 tokens\) .* is -0\.0.*nothing was trained"):
        check_verdict(gate_of(2000), shifted, num_masked=0, num_judged=2000)
    check_verdict(gate_of(2000, abort=1.0), shifted, num_masked=0, num_judged=2000)
    assert "over 2000 rollouts" in caplog.text


def test_which_models_are_mixtures() -> None:
    transformers = pytest.importorskip("transformers")
    assert not is_mixture(transformers.Qwen3Config())
    for name in ("Qwen3MoeConfig", "GptOssConfig", "DeepseekV3Config", "MixtralConfig"):
        assert is_mixture(getattr(transformers, name)()), name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mask_tokens": (1e-5, 2)}, "`mask_tokens` must be within `tokens`"),
        ({"mask_tokens": (0.5, 5.0), "tokens": (1e-4, 4.0)}, "`mask_tokens` must be within `tokens`"),
        ({"truncate": 2.0, "mask_tokens": (0.5, 2.0)}, "never truncates"),
        ({"truncate": 200.0}, "never truncates"),
        ({"tokens": (2.0, 3.0)}, "less than or equal to 1"),
        ({"tokens": (0.1, 0.5)}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_would_do_nothing_are_refused(config: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MismatchConfig(**config)


# -- stale rollouts --


def stale_step(seed: int, *, error: float = 0.0, group_size: int = 1) -> tuple[Gate, GateVerdict]:
    """A step of 64 stale rollouts, of which 8 are compared with the checkpoint that sampled them, 4 of a group.

    The policy has moved by a random amount, of which a random part is common to the tokens of a group. `error` is the
    root mean square by which records are wrong beside that, also a part of it common to a group.
    """
    rng = np.random.default_rng(seed)
    num, length, moved, common = 64, int(rng.integers(1, 200)), 10 ** rng.uniform(-3, 0.5), rng.uniform(0, 1)

    def differences(rms: float, mean: float) -> np.ndarray:
        of_group = np.repeat(rng.standard_normal((num // group_size, 1)), group_size, axis=0) * math.sqrt(common)
        return rms * (of_group + rng.standard_normal((num, length)) * math.sqrt(1 - common)) + mean

    drift = differences(moved, -(moved**2) / 2)
    wrong = differences(error, -error / 2) if error else 0.0
    noise = rng.normal(0, 1e-5, (num, length))
    checked = np.arange(num) % 8 == 0 if group_size == 1 else np.arange(num) % 8 + np.arange(num) // 16 * 4 < 4
    log_ratio = noise + wrong + np.where(checked[:, None], 0.0, drift)
    gate = Gate(
        MismatchConfig(tokens=(1e-30, 1e30)),
        Noise(),
        {str(index): index for index in range(num)},
        np.ones(num, dtype=np.bool_),
        checked,
    )
    rollouts = np.repeat(np.arange(num), length)
    return gate, gate.judge(LogRatioSums.collect(log_ratio.ravel(), rollouts, num, limit=gate.limit))


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize("seed", range(8))
def test_honest_stale_rollouts_pass_however_far_the_policy_has_moved(seed: int, group_size: int) -> None:
    gate, verdict = stale_step(seed, group_size=group_size)
    assert verdict.num_masked == 0
    check_verdict(gate, verdict, num_masked=verdict.num_masked, num_judged=64)


@pytest.mark.parametrize(
    ("record_is_wrong", "config", "expected"),
    [
        (False, {}, [False] * 6),  # the policy has moved far, which is no fault of the rollouts
        (True, {}, [True, True, False, False, False, False]),  # the others are suspected
        (False, {"tokens": (1e-4, 50.0)}, [False, False, False, False, True, True]),  # what the user asked for
    ],
)
def test_stale_rollouts_are_left_out_only_if_their_own_checkpoint_disagrees(
    record_is_wrong: bool, config: dict[str, float], expected: list[bool]
) -> None:
    compared = [1.0 if record_is_wrong else 0.0] * 2  # mean of log(own checkpoint / record)
    means = [*compared, 0.0, 0.0, math.log(101), 5.0]
    gate = Gate(
        MismatchConfig(**config),
        Noise(),
        {str(index): index for index in range(6)},
        np.ones(6, dtype=np.bool_),
        np.arange(6) < 2,
    )
    sums = LogRatioSums.collect(np.repeat(means, 50), np.repeat(np.arange(6), 50), 6, limit=gate.limit)
    verdict = gate.judge(sums)
    assert verdict.masked.tolist() == expected
    assert verdict.num_suspected == (4 if record_is_wrong else 0)


@pytest.mark.parametrize("seed", range(8))
def test_wrong_records_of_stale_rollouts_stop_the_step_however_far_the_policy_has_moved(seed: int) -> None:
    gate, verdict = stale_step(seed, error=0.3)
    with pytest.raises(TrainingError, match="nothing was trained"):
        check_verdict(gate, verdict, num_masked=verdict.num_masked, num_judged=64)


# -- branches of a rollout in several micro-batches --


NUM_ROLLOUTS, NUM_TOKENS = 8, 8


@pytest.fixture
def policy(model_path: Callable[[str], str]) -> LoraPolicy:
    base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    policy = LoraPolicy(base, LoraConfig(rank=4, alpha=8))
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


def branched_paths(policy: LoraPolicy, offsets: tuple[float, float]) -> list[SamplePath]:
    """Rollouts of two branches that share nothing. The sampler is the policy itself, but for one rollout: there the
    log-ratios of the two branches are `offsets`."""
    rng = random.Random(0)
    samples = []
    for number in range(2 * NUM_ROLLOUTS):
        tokens = [number % 50, *(rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS - 1))]
        samples.append(make_sample(f"s{number}", tokens, rng, rollout_id=f"r{number // 2}"))
    paths = paths_of(samples)
    with torch.no_grad():
        micro_batch = make_micro_batch(paths, policy.base)
        own = target_logprobs_in_order(micro_batch, policy.base, policy.hidden_states)
    ends = np.cumsum([len(path.query_positions) for path in paths])
    paths = [replace(path, sampling_logprobs=part) for path, part in zip(paths, np.split(own, ends[:-1]), strict=True)]
    changed = [
        replace(path, sampling_logprobs=path.sampling_logprobs - o) for path, o in zip(paths[:2], offsets, strict=True)
    ]
    return [*changed, *paths[2:]]


def run(
    policy: LoraPolicy, paths: list[SamplePath], gate: MismatchConfig, *, max_tokens: int
) -> tuple[torch.Tensor, StepRecord]:
    update = Update(paths=paths, learning_rate=1.0, terms=(DppoConfig(),), mismatch=make_gate(paths, gate))
    record = StepRecord()
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=max_tokens), record)
    return policy.grads.clone(), record


@pytest.mark.parametrize(
    ("offsets", "gate", "num_masked"),
    [
        pytest.param((0.5, -0.5), MismatchConfig(rollouts=(0.7, 1.4)), 0, id="parts outside, whole inside"),
        pytest.param((0.05, 0.05), MismatchConfig(), 1, id="parts could be noise, the whole is not"),
        pytest.param((0.0, 5.0), MismatchConfig(), 1, id="one branch has an outlier"),
    ],
)
def test_branches_in_different_micro_batches_are_one_rollout(
    offsets: tuple[float, float],
    gate: MismatchConfig,
    num_masked: int,
    policy: LoraPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = branched_paths(policy, offsets)
    whole, record = run(policy, paths, gate, max_tokens=4096)
    assert len(record.micro_batches) == 1
    assert (record.num_gated, record.num_mismatched) == (NUM_ROLLOUTS, num_masked)
    silent = [replace(path, advantages=0 * path.advantages) for path in paths[:2]] if num_masked else paths[:2]
    expected, _ = run(
        policy, [*silent, *paths[2:]], gate.model_copy(update={"low": 1e-9, "high": 1e9}), max_tokens=4096
    )
    passes = 0
    backward = module.train_micro_batch

    def counted(*args: object, **options: object) -> float:
        nonlocal passes
        passes += 1
        return backward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "train_micro_batch", counted)
    parts, cut = run(policy, paths, gate, max_tokens=1)
    assert len(cut.micro_batches) == 2 * NUM_ROLLOUTS
    # All are computed again if a part was judged otherwise, which depends on whether it came early.
    assert passes in ([4 * NUM_ROLLOUTS] if num_masked == 0 else [2 * NUM_ROLLOUTS, 4 * NUM_ROLLOUTS])
    for gradient in (whole, parts):
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    for name in ("num_gated", "num_mismatched", "num_mismatched_targets"):
        assert getattr(cut, name) == getattr(record, name)
    assert cut.losses == pytest.approx(record.losses, rel=1e-5)
    assert cut.gate_noise[0] == pytest.approx(record.gate_noise[0], rel=1e-4)


def test_a_step_that_is_wrong_is_stopped_however_it_is_cut(policy: LoraPolicy) -> None:
    paths = [
        replace(path, sampling_logprobs=path.sampling_logprobs + 0.5) for path in branched_paths(policy, (0.0, 0.0))
    ]
    messages = set()
    for max_tokens in (1, 40, 4096):
        with pytest.raises(TrainingError, match="8 of 8 rollouts") as error:
            run(policy, paths, MismatchConfig(), max_tokens=max_tokens)
        messages.add(error.value.message)
    assert len(messages) == 1
