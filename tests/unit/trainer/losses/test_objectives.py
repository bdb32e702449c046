"""Loss and gradient of every objective, from rewards to what the optimiser is given, against `objective_reference`.

The whole path of a step runs: plan (advantages, weights, pairs), references, anchors and the gate, packing, the prefix
tree, the loss. It computes in float32, the reference in float64. The largest relative error of a gradient seen here is
1.5e-6, which is what float32 leaves of these sums; a wrong weight of a few tokens shows as 1e-3 and more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from art.config import (
    CispoConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    EntropyConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    PpoConfig,
    ReinforceConfig,
    SapoConfig,
    SftConfig,
    TrainConfig,
)
from art.errors import TrajectoryError
from art.protocol.samples import TrainingSample
from tests.support.objective_bench import GROUP_ORDER, Bench, relative_error
from tests.support.objective_reference import Result, Rollout
from tests.support.objective_rollouts import plan

TOLERANCE = 1e-5


def check(
    bench: Bench,
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int = 0,
    rollouts: list[Rollout] | None = None,
) -> list[Result]:
    """Every update of a step against the reference; a step of two updates has a group in each, in shuffled order."""
    rollouts = rollouts or bench.rollouts(seed)
    step, seen = bench.train(rollouts, config, monkeypatch)
    parts = [rollouts] if len(seen) == 1 else [[r for r in rollouts if r.group == group] for group in GROUP_ORDER]
    results = []
    for number, (update, part) in enumerate(zip(seen, parts, strict=True)):
        # The gate looks at later updates only with the anchor at the step's start.
        gated = number == 0 or config.anchor == "step_start"
        judged = config if gated else config.model_copy(update={"mismatch": None})
        result, gradient = bench.expect(part, judged, update.adapter)
        if gradient.any():
            assert relative_error(update.gradient, gradient) < TOLERANCE
        else:  # the gate left nothing
            assert not update.gradient.any()
        results.append(result)
    losses = [result.loss.item() for result in results]
    assert step.metrics["loss/train"] == pytest.approx(sum(losses) / len(losses), rel=1e-5, abs=1e-6)
    total = sum(result.num_tokens for result in results)
    for side in ("low", "high"):
        clipped = sum(len(getattr(result.clips, side)) for result in results)
        assert step.metrics[f"loss/clipped_{side}_share"] == pytest.approx(clipped / total)
    clips = [result.clips for result in results]
    assert step.metrics["offpolicy/mismatch_masked_tokens"] == sum(found.masked_tokens for found in clips)
    assert step.metrics["offpolicy/truncated_share"] == pytest.approx(sum(found.truncated for found in clips) / total)
    return results


def settings(*terms: LossConfig, **fields: object) -> TrainConfig:
    return TrainConfig(**{"loss": terms, "mismatch": None, "learning_rate": 1e-3} | fields)


CLIPPING_BOTH_SIDES = [
    PpoConfig(),
    # A likely token of this small model has a few per cent, so the mask must be narrower than its default to bite.
    DppoConfig(max_move=0.004, log_ratio_penalty=0.1),
    GspoConfig(),
    GspoConfig(clip_low=0.05, clip_high=0.1),
    CispoConfig(clip_low=0.3, clip_high=0.3),
]


@pytest.mark.parametrize("term", CLIPPING_BOTH_SIDES, ids=str)
def test_clipped_objectives(term: LossConfig, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = check(bench, settings(term), monkeypatch)
    assert result.clips.low
    assert result.clips.high
    assert len(result.clips.low | result.clips.high) < result.num_tokens


@pytest.mark.parametrize(
    "term",
    [
        SapoConfig(),
        SapoConfig(temperature_negative=3.0),
        ReinforceConfig(),
        SftConfig(),
        DistillConfig(teacher="p/t"),
        DppoConfig(),
        CispoConfig(),
    ],
    ids=str,
)
def test_objectives_that_clip_little_or_nothing(
    term: LossConfig, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(bench, settings(term), monkeypatch)


@pytest.mark.parametrize("normalize", ["rollout", 20])
def test_entropy_is_normalised_and_gated_like_other_terms(
    normalize: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = (ReinforceConfig(weight=0.01), EntropyConfig(weight=1.0))
    (result,) = check(bench, settings(*terms, normalize=normalize, mismatch=GATE), monkeypatch)
    assert result.clips.masked_rollouts > 0


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reference", ["base", 1])
def test_kl(reference: str | int, estimator: str, where: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kl = KlConfig(weight=0.3, reference=reference, estimator=estimator, where=where)
    check(bench, settings(PpoConfig(), kl, normalize="rollout"), monkeypatch)


@pytest.mark.parametrize("reference", ["base", "sampler", 1])
def test_dpo(reference: str | int, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    term = DpoConfig(weight=0.7, beta=0.3, reference=reference)
    step, (seen,) = bench.train(bench.rollouts(3), settings(term), monkeypatch)
    result, gradient = bench.expect(bench.rollouts(3), settings(term), seen.adapter)
    assert relative_error(seen.gradient, gradient) < TOLERANCE
    assert step.metrics["loss/train"] == pytest.approx(result.loss.item(), rel=1e-5)


@pytest.mark.parametrize("normalize", ["token", "rollout", "group", 20])
@pytest.mark.parametrize("term", [PpoConfig(), GspoConfig(clip_low=0.05, clip_high=0.1)], ids=lambda term: term.type)
def test_normalisation(term: LossConfig, normalize: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    check(bench, settings(term, normalize=normalize), monkeypatch)


RECIPES = {
    "grpo": TrainConfig(loss="grpo", mismatch=None),
    "dr_grpo": TrainConfig(loss="dr_grpo", normalize=20, mismatch=None),
    "dapo": TrainConfig(loss="dapo", mismatch=None),
    "gspo": TrainConfig(loss="gspo", mismatch=None),
    "rloo": TrainConfig(loss="rloo", mismatch=None),
    "maxrl": TrainConfig(loss="maxrl", mismatch=None),
    "scaled by the batch": settings(PpoConfig(), scale_rewards="batch"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rewards on, with baselines and scales."""
    rollouts = bench.rollouts(0)
    if name == "maxrl":
        rollouts = [replace(rollout, reward=float(number % 4 < 1)) for number, rollout in enumerate(rollouts)]
    check(bench, RECIPES[name], monkeypatch, rollouts=rollouts)


@pytest.mark.parametrize(
    "terms",
    [
        (PpoConfig(weight=0.5), SftConfig(weight=0.2), KlConfig(weight=0.1)),
        (DppoConfig(), DistillConfig(teacher="p/t", weight=0.3), KlConfig(weight=0.1, where="reward", reference=1)),
        (PpoConfig(), EntropyConfig(weight=0.2)),
        (DppoConfig(), EntropyConfig(weight=3.0), KlConfig(weight=0.1)),
        (GspoConfig(weight=2.0), DistillConfig(teacher="p/t", weight=0.3), SftConfig(weight=0.1)),
    ],
    ids=lambda terms: "+".join(term.type for term in terms),
)
def test_sums_of_terms(terms: tuple[LossConfig, ...], bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    check(bench, settings(*terms), monkeypatch)


GATE = MismatchConfig(rollouts=(0.85, 1.2), tokens=(0.2, 5.0), abort=1.0)


@pytest.mark.parametrize("term", [PpoConfig(), GspoConfig(clip_low=0.05, clip_high=0.1)], ids=lambda term: term.type)
def test_gate_masks_samples(term: LossConfig, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = check(bench, settings(term, mismatch=GATE), monkeypatch)
    num_branches = sum(len(rollout.branches) for rollout in bench.rollouts(0))
    assert 0 < result.clips.masked_rollouts < num_branches


def test_gate_masks_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = []
    for bounds in ((0.7, 50), (1e-3, 1.5), (0.7, 1.5)):
        gate = MismatchConfig(rollouts=(1e-3, 1e3), mask_tokens=bounds, abort=1.0)
        (result,) = check(bench, settings(PpoConfig(), mismatch=gate), monkeypatch)
        assert result.clips.masked_rollouts == 0
        masked.append(result.clips.masked_tokens)
    assert masked[0] > 0 < masked[1]
    assert masked[2] == masked[0] + masked[1]


@pytest.mark.parametrize("reference", ["base", "sampler"])
def test_dpo_behind_the_gate(reference: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair with a masked sample is left out whole: its other rollout is not pushed either."""
    config = settings(DpoConfig(beta=0.3, reference=reference), mismatch=GATE)
    rollouts = bench.rollouts(0)
    step, (seen,) = bench.train(rollouts, config, monkeypatch)
    result, gradient = bench.expect(rollouts, config, seen.adapter)
    assert relative_error(seen.gradient, gradient) < TOLERANCE
    assert step.metrics["loss/train"] == pytest.approx(result.loss.item(), rel=1e-5)
    # One of the four rollouts in two pairs is masked, and the tokens of two are left out.
    assert (result.clips.masked_rollouts, step.metrics["offpolicy/mismatch_masked_share"]) == (1, 1 / 4)
    assert step.metrics["offpolicy/mismatch_masked_tokens"] == result.clips.masked_tokens == 15


@pytest.mark.parametrize(
    "terms",
    [
        (PpoConfig(clip_low=0.05, clip_high=0.05),),
        (GspoConfig(clip_low=0.02, clip_high=0.02),),
        (CispoConfig(clip_high=0.1), KlConfig(weight=0.2, estimator="k1", reference=1)),
        (DistillConfig(teacher="p/t"),),
    ],
    ids=lambda terms: "+".join(term.type for term in terms),
)
def test_two_updates_from_the_step_start(
    terms: tuple[LossConfig, ...], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is its own anchor; the second one's policy has moved, and the sampler's gap stays corrected."""
    is_gspo = isinstance(terms[0], GspoConfig)  # whose reference knows one factor per branch only
    gate = MismatchConfig(rollouts=(0.7, 1.4), truncate=None if is_gspo else 1.2, abort=1.0)
    config = settings(*terms, anchor="step_start", num_minibatches=2, mismatch=gate, learning_rate=0.01)
    first, second = check(bench, config, monkeypatch, seed=1)
    assert is_gspo or first.clips.truncated > 0 < second.clips.truncated
    assert not first.clips.low | first.clips.high
    if terms[0].type != "distill":
        assert second.clips.low | second.clips.high


@pytest.mark.parametrize("term", [DppoConfig(), CispoConfig()], ids=lambda term: term.type)
def test_two_updates_anchored_on_the_sampler(term: LossConfig, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(term, num_minibatches=2, mismatch=GATE, learning_rate=0.01)
    first, _ = check(bench, config, monkeypatch, seed=1)
    assert first.clips.masked_rollouts > 0


def test_a_single_update_is_its_own_anchor(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(PpoConfig(), anchor="step_start", mismatch=GATE.model_copy(update={"truncate": 1.1}))
    (result,) = check(bench, config, monkeypatch)
    assert result.clips.truncated > 0
    assert not result.clips.low | result.clips.high


# -- groups without spread --

PRESETS = {
    "grpo": TrainConfig(loss="grpo", mismatch=None),
    "dr_grpo": TrainConfig(loss="dr_grpo", normalize=20, mismatch=None),
    "dapo": TrainConfig(loss="dapo", mismatch=None),
    "gspo": TrainConfig(loss="gspo", mismatch=None),
    "rloo": TrainConfig(loss="rloo", mismatch=None),
    "dppo by group, gated": TrainConfig(normalize="group", mismatch=GATE),
    "kl": settings(PpoConfig(), KlConfig(weight=0.2, reference=1), normalize="rollout"),
}


def some_alive(bench: Bench, num_alive: int) -> list[Rollout]:
    """Six groups of different lengths. All but `num_alive` of them have equal rewards."""
    rollouts = bench.rollouts(0, num_groups=6)
    rollouts = [r for i, r in enumerate(rollouts) if i % 4 <= r.group % 3 + 1]
    return [r if r.group < num_alive else replace(r, reward=0.25) for r in rollouts]


@pytest.mark.parametrize("num_alive", [2, 1])
@pytest.mark.parametrize("preset", PRESETS)
def test_groups_without_spread_count_in_the_denominator(
    preset: str, num_alive: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference gives each rollout its advantage, 0 without spread, and divides by what all rollouts count."""
    rollouts = some_alive(bench, num_alive)
    step, (seen,) = bench.train(rollouts, PRESETS[preset], monkeypatch)
    result, gradient = bench.expect(rollouts, PRESETS[preset], seen.adapter)
    assert relative_error(seen.gradient, gradient) < TOLERANCE
    assert step.metrics["loss/train"] == pytest.approx(result.loss.item(), rel=1e-5, abs=1e-6)
    assert step.metrics["data/step_num_rollouts_trained"] == (
        len(rollouts) if preset == "kl" else sum(rollout.group < num_alive for rollout in rollouts)
    )


def test_mini_batches_share_the_groups_without_spread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two updates counts three groups: its own of four with spread, and its part of the others."""
    config = PRESETS["dr_grpo"].model_copy(update={"num_minibatches": 2, "optimizer": OptimizerConfig(eps=1.0)})
    rollouts = [replace(r, reward=0.25) if r.group > 3 else r for r in bench.rollouts(0, num_groups=6)]
    _, seen = bench.train(rollouts, config, monkeypatch)
    order = list(range(4))
    random.Random(2).shuffle(order)  # groups of equal sizes go to the updates in turn
    for part, update in zip((order[0::2], order[1::2]), seen, strict=True):
        own = [rollout for rollout in rollouts if rollout.group in part]
        _, gradient = bench.expect(own, config, update.adapter)
        assert relative_error(update.gradient, gradient * 2 / 3) < TOLERANCE


# -- refusals --


def test_distillation_without_a_teacher_is_refused(bench: Bench) -> None:
    config = settings(DistillConfig(teacher="p/t"))
    samples, _ = plan(bench.rollouts(0), config)
    untaught = [*samples[1:], replace(samples[0], teacher_logprobs=None)]
    with pytest.raises(TrajectoryError, match=r"'groups\[0\].trajectories\[0\].paths\[0\]' has no `teacher_logprobs`"):
        bench.gradient(untaught, [], config)


# -- any settings --


# -- properties --


MASKING_GATE = MismatchConfig(rollouts=(0.85, 1.2), tokens=(0.2, 5.0), mask_tokens=(0.3, 1.5), abort=1.0)


def config(*terms: LossConfig, **fields: object) -> TrainConfig:
    return TrainConfig(**{"loss": terms, "mismatch": None} | fields)


CONFIGS = {
    "dppo": config(DppoConfig(max_move=0.004)),
    "ppo": config(PpoConfig(), normalize="group"),
    "gspo": config(GspoConfig(clip_low=0.05, clip_high=0.1), normalize="rollout"),
    "cispo": config(CispoConfig(clip_low=0.3, clip_high=0.3), normalize=20),
    "reinforce": config(ReinforceConfig()),
    "sft": config(SftConfig()),
    "distill": config(DistillConfig(teacher="p/t")),
    "dpo": config(DpoConfig(), mismatch=MismatchConfig(rollouts=(0.5, 2.0), abort=1.0)),
    "kl": config(PpoConfig(), KlConfig(weight=0.3)),
    "kl in the reward": config(PpoConfig(), KlConfig(weight=0.3, where="reward", reference=1), normalize="rollout"),
    "gate": config(PpoConfig(), mismatch=MASKING_GATE),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_order_packing_and_workers_change_nothing(name: str, bench: Bench) -> None:
    samples, pairs = plan(bench.rollouts(5), CONFIGS[name])
    expected, record = bench.gradient(samples, pairs, CONFIGS[name])
    assert len(record.micro_batches) == 1

    @hypothesis_settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        ordered=st.permutations(samples),
        # 1 gives every sample a micro-batch of its own, so that nothing is merged.
        max_tokens=st.sampled_from([1, 20, 60, 4096]),
        num_shares=st.integers(1, 5),
    )
    def check(ordered: Sequence[TrainingSample], max_tokens: int, num_shares: int) -> None:
        found, parts = bench.gradient(ordered, pairs[::-1], CONFIGS[name], max_tokens=max_tokens, num_shares=num_shares)
        assert relative_error(found, expected.double()) < TOLERANCE
        assert math.fsum(parts.losses) == pytest.approx(record.losses[0], rel=1e-4, abs=1e-6)

    check()


@pytest.mark.parametrize("name", CONFIGS)
def test_twice_the_same_with_half_the_weight(name: str, bench: Bench) -> None:
    """Identical rollouts merge in the tree, and each counts by its weight. DPO means over pairs and has no weights."""
    samples, pairs = plan(bench.rollouts(7), CONFIGS[name])
    expected, single = bench.gradient(samples, pairs, CONFIGS[name])
    twice = [
        replace(
            sample,
            sample_id=f"{copy} {sample.sample_id}",
            rollout_id=f"{copy} {sample.rollout_id}",
            weight=sample.weight / 2,
            share=None if sample.share is None else sample.share / 2,
        )
        for copy in ("a", "b")
        for sample in samples
    ]
    doubled_pairs = [(f"{copy} {chosen}", f"{copy} {rejected}") for copy in ("a", "b") for chosen, rejected in pairs]
    found, double = bench.gradient(twice, doubled_pairs, CONFIGS[name])
    assert double.num_tree_tokens == single.num_tree_tokens
    assert relative_error(found, expected.double()) < TOLERANCE
    assert double.losses == pytest.approx(single.losses, rel=1e-4, abs=1e-6)
