"""What a step reports, against the same written out in plain Python, target by target."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest

from art.metrics import catalogue
from art.protocol.samples import COMPONENTS, Component
from art.trainer.step.record import MicroBatchRecord, StepRecord, summarise
from art.trainer.tree import SamplePath, build_tree
from tests.support.metric_names import find_metric
from tests.support.trainer_samples import paths_of, random_samples

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Target:
    update: int
    policy: float
    sampling: float
    advantage: float
    entropy: float
    clipped_low: bool
    clipped_high: bool
    component: Component
    base: float


def random_targets(rng: random.Random, count: int, update: int) -> list[Target]:
    return [
        Target(
            update=update,
            policy=(policy := -rng.uniform(0.01, 4.0)),
            sampling=policy + rng.gauss(0.0, 0.15),
            advantage=rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0]),
            entropy=rng.uniform(0.0, 2.0),
            clipped_low=rng.random() < 0.2,
            clipped_high=rng.random() < 0.2,
            component=rng.choice([*["rl"] * 4, "sft", "observation"]),
            base=policy + rng.gauss(0.0, 0.5) if rng.random() < 0.5 else math.nan,
        )
        for _ in range(count)
    ]


def micro_batch(targets: list[Target]) -> MicroBatchRecord:
    def floats(name: str) -> np.ndarray:
        return np.asarray([getattr(target, name) for target in targets], dtype=np.float32)

    return MicroBatchRecord(
        update=np.asarray([target.update for target in targets]),
        policy_logprobs=floats("policy"),
        sampling_logprobs=floats("sampling"),
        advantages=floats("advantage"),
        entropy=floats("entropy"),
        clipped_low=floats("clipped_low") > 0,
        clipped_high=floats("clipped_high") > 0,
        components=np.asarray([COMPONENTS.index(target.component) for target in targets], dtype=np.int8),
        base_logprobs=floats("base"),
        anchor_logprobs=floats("sampling"),
        ranks=np.arange(len(targets)),
        reasons=np.zeros(len(targets), dtype=np.uint8),
    )


def quantile(values: list[float], share: float) -> float:
    values = sorted(values)
    below = math.floor(share * (len(values) - 1))
    rest = share * (len(values) - 1) - below
    return values[below] if rest == 0 else values[below] * (1 - rest) + values[below + 1] * rest


def k3(above: float, below: float) -> float:
    return math.exp(above - below) - 1 - (above - below)


@pytest.fixture
def paths() -> list[SamplePath]:
    samples = [replace(s, policy_version=number % 3) for number, s in enumerate(random_samples(5))]
    return paths_of(samples)


@pytest.mark.parametrize("seed", range(3))
def test_every_metric_is_what_the_catalogue_says(seed: int, paths: list[SamplePath]) -> None:
    rng = random.Random(seed)
    first, second, third = (random_targets(rng, count, update) for count, update in ((40, 0), (25, 0), (30, 1)))
    second = [replace(target, base=math.nan) for target in second]  # the base model was not measured
    record = StepRecord(
        micro_batches=[micro_batch(first), micro_batch(second), micro_batch(third)],
        losses=[0.5, -0.25],
        grad_norms=[0.5, 3.0],
        num_tree_tokens=len(build_tree(paths)),
        num_gated=8,
        gate_noise=[(0.03, 0.1), (0.2, 0.1)],
        num_mismatched=3,
        num_mismatched_targets=17,
        num_truncated_targets=5,
    )
    every = first + second + third
    rl, sft, observed = ([target for target in every if target.component == name] for name in COMPONENTS)
    ratios = [math.exp(target.policy - target.sampling) for target in rl]
    outside = [not 0.9 <= ratio <= 1.1 for ratio in ratios]
    known = [target for target in rl if not math.isnan(target.base)]
    unshared = sum(len(path.sample.token_ids) for path in paths)

    def mean(values: list[float]) -> float:
        return statistics.fmean(values)

    def of_update(number: int) -> list[int]:
        return [index for index, target in enumerate(rl) if target.update == number]

    assert summarise(record, paths, step=4, max_grad_norm=MAX_GRAD_NORM) == pytest.approx(
        {
            "loss/train": 0.125,
            "loss/sft": -mean([t.policy for t in sft]),
            "loss/observation": -mean([t.policy for t in observed]),
            "loss/entropy": mean([t.entropy for t in rl]),
            "loss/entropy_varying": sum(t.entropy**2 for t in rl) / sum(t.entropy for t in rl),
            "loss/grad_norm": 1.75,
            "loss/grad_clipped_share": 0.5,
            "loss/masked_share": mean([t.clipped_low or t.clipped_high for t in rl]),
            "loss/clipped_low_share": mean([t.clipped_low for t in rl]),
            "loss/clipped_high_share": mean([t.clipped_high for t in rl]),
            "loss/kl_to_sampler": mean([k3(t.policy, t.sampling) for t in rl]),
            "loss/kl_to_base": mean([k3(t.base, t.policy) for t in known]),
            "loss/kl_to_base_k1": mean([t.policy - t.base for t in known]),
            "loss/kl_to_base_targets": len(known),
            "offpolicy/ratio_mean": mean(ratios),
            "offpolicy/ratio_max": max(ratios),
            **{f"offpolicy/ratio_p{p:02d}": quantile(ratios, p / 100) for p in (1, 10, 50, 90, 99)},
            "offpolicy/ratio_outside_share": mean(outside),
            "offpolicy/first_update_gap": mean([abs(rl[i].policy - rl[i].sampling) for i in of_update(0)]),
            "offpolicy/first_update_gap_max": max(abs(rl[i].policy - rl[i].sampling) for i in of_update(0)),
            "offpolicy/first_update_kl": mean([k3(rl[i].policy, rl[i].sampling) for i in of_update(0)]),
            "offpolicy/first_update_outside_share": mean([outside[i] for i in of_update(0)]),
            "offpolicy/last_update_kl": mean([k3(rl[i].policy, rl[i].sampling) for i in of_update(1)]),
            "offpolicy/mismatch_noise": 0.03,
            "offpolicy/mismatch_noise_allowed": 0.1,
            "offpolicy/mismatch_masked_share": 3 / 8,
            "offpolicy/mismatch_masked_tokens": 17,
            "offpolicy/truncated_share": 5 / len(rl),
            "offpolicy/mean_staleness": mean(
                [4 - path.sample.policy_version for path in paths for _ in path.query_positions]
            ),
            "data/step_trainer_tokens": len(build_tree(paths)),
            "data/step_tokens_unshared": unshared,
            "data/step_shared_share": 1 - len(build_tree(paths)) / unshared,
            "data/step_trainable_tokens": len(every),
            "data/step_sft_tokens": len(sft),
            "data/step_observation_tokens": len(observed),
            "data/step_num_rollouts_trained": len({path.sample.rollout_id for path in paths}),
            "data/step_num_gradient_steps": 2,
        },
        rel=1e-5,
    )


def test_supervised_steps_have_no_sampler_and_no_base(paths: list[SamplePath]) -> None:
    targets = [replace(t, component="sft") for t in random_targets(random.Random(0), 10, 0)]
    record = StepRecord(micro_batches=[micro_batch(targets)], losses=[1.0], grad_norms=[1.0], num_tree_tokens=5)
    metrics = summarise(record, paths, step=0, max_grad_norm=MAX_GRAD_NORM)
    reported = (catalogue.ALWAYS, catalogue.SFT)
    assert metrics.keys() <= {n for n, m in catalogue.TRAINER_METRICS.items() if m.when in reported}
    assert metrics["loss/grad_clipped_share"] == 0, "a norm at the bound is not clipped"


def test_a_broken_sampler_gives_large_numbers_and_no_error(paths: list[SamplePath]) -> None:
    target = replace(random_targets(random.Random(0), 1, 0)[0], component="rl", policy=-0.1, sampling=-5000.0)
    record = StepRecord(micro_batches=[micro_batch([target])], losses=[0.0], grad_norms=[0.0], num_tree_tokens=1)
    metrics = summarise(record, paths, step=0, max_grad_norm=MAX_GRAD_NORM)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["offpolicy/ratio_max"] == pytest.approx(math.exp(50))


# -- distributions --


def test_a_distribution_is_that_of_numpy() -> None:
    values = np.random.default_rng(0).normal(size=57)
    found = catalogue.describe("x", values.tolist())
    counts, _ = np.histogram(values, catalogue.NUM_BINS)
    quartiles = dict(zip(("x_p25", "x_p50", "x_p75"), np.quantile(values, [0.25, 0.5, 0.75]), strict=True))
    assert found == pytest.approx(
        {"x_mean": values.mean(), "x_std": values.std(), "x_min": values.min(), "x_max": values.max()}
        | quartiles
        | {f"x_hist/{number}": count for number, count in enumerate(counts)}
    )


@pytest.mark.parametrize("values", [[0.5], [2.0] * 7])
def test_equal_values_are_in_the_first_bin(values: list[float]) -> None:
    found = catalogue.describe("x", values)
    assert found["x_std"] == 0
    assert {found[f"x_{part}"] for part in ("mean", "min", "p25", "p50", "p75", "max")} == {values[0]}
    assert [found[f"x_hist/{number}"] for number in range(catalogue.NUM_BINS)] == [len(values)] + [0] * 9


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("data/reward_p50", True),
        ("data/reward_hist/3", True),
        ("ledger/dropped_tokens/no_reward_spread", True),
        ("data/reward_p51", False),
    ],
)
def test_a_metric_is_found_by_its_full_name(name: str, known: bool) -> None:
    assert (find_metric(name, catalogue.PLAN_METRICS) is not None) == known
