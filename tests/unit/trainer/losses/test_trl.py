"""Loss and gradient of our objectives against TRL's own code, where TRL has them.

TRL's trainers are made with the same base model and the same adapter, as a peft model, and their loss functions are
called with a batch written by hand: one padded row per rollout. What ours was given is what the optimiser saw in a
whole step (`objective_bench`). Both compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from art.config import (
    CispoConfig,
    DistillConfig,
    DpoConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    MismatchConfig,
    PpoConfig,
    ReinforceConfig,
    SapoConfig,
    TrainConfig,
)
from art.protocol.samples import TrainingSample
from tests.support.objective_bench import GROUP_ORDER, Bench, relative_error
from tests.support.objective_reference import Rollout
from tests.support.trainer_samples import VOCAB_SIZE
from tests.support.trl_trainers import (
    MAX_COMPLETION_LENGTH,
    STEPS,
    TEMPERATURE,
    Trl,
    finished_rollouts,
    gradient,
    mask_of,
    trl_step,
    without_results,
)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trl(bench: Bench, model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Trl:
    return Trl(bench, model_path("Qwen3"), tmp_path_factory.mktemp("trl"))


def rollouts(bench: Bench) -> list[Rollout]:
    """One sequence each and one temperature, which is what TRL knows."""
    return bench.rollouts(0, temperatures=(TEMPERATURE,) * 4, has_branches=False)


def settings(*terms: LossConfig, **fields: Any) -> TrainConfig:
    return TrainConfig(**{"loss": terms, "mismatch": None} | fields)


CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
PPO = PpoConfig(clip_low=0.2, clip_high=0.28)

GRPO_CASES = {
    # `grpo` takes the mean over sequences of the mean over their tokens.
    "grpo": ({"loss_type": "grpo", **CLIPS}, settings(PPO, normalize="rollout")),
    # `bnpo` takes the mean over all tokens of the batch.
    "bnpo": ({"loss_type": "bnpo", **CLIPS}, settings(PPO)),
    # `dapo` divides by the tokens of the whole optimiser step, which is one batch here.
    "dapo": ({"loss_type": "dapo", **CLIPS}, settings(PPO)),
    # `dr_grpo` divides by sequences times `max_completion_length`.
    "dr_grpo": ({"loss_type": "dr_grpo", **CLIPS}, settings(PPO, normalize=MAX_COMPLETION_LENGTH)),
    "sapo": ({"loss_type": "sapo"}, settings(SapoConfig(), normalize="rollout")),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
        settings(GspoConfig(clip_low=0.05, clip_high=0.1), normalize="rollout"),
    ),
    # `epsilon_high` is the cap itself, ours its distance from 1; there is no lower bound, and 1 - 1 is none.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, settings(CispoConfig(clip_low=1.0, clip_high=0.3))),
    # Without the correction TRL's estimator lacks the ratio, and the gradient is not that of the KL.
    "kl": (
        {"loss_type": "bnpo", **CLIPS, "beta": 0.2, "use_bias_correction_kl": True},
        settings(PPO, KlConfig(weight=0.2, reference=1, estimator="k3")),
    ),
}


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo_trainer(case: str, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, config = GRPO_CASES[case]
    batch = rollouts(bench)
    step, (seen,) = bench.train(batch, config, monkeypatch)
    trainer = trl.grpo(seen.adapter, **arguments)
    inputs = trl.batch(batch) | {
        "old_per_token_logps": trl.rows(batch, lambda branch: [branch.sampling_logprobs[i] for i in branch.learnt]),
        "ref_per_token_logps": trl.logprobs(batch, bench.adapters[1]),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert relative_error(seen.gradient, gradient(trainer.model, seen.adapter).double()) < TOLERANCE
    assert step.metrics["loss/train"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    clipped = trainer._metrics["train"]
    if case in ("grpo", "bnpo", "dapo", "dr_grpo"):
        for side in ("low", "high"):
            assert step.metrics[f"loss/clipped_{side}_share"] == pytest.approx(clipped[f"clip_ratio/{side}_mean"][0])
            assert clipped[f"clip_ratio/{side}_mean"][0] > 0
    elif case == "cispo":
        # TRL counts those with positive advantage only.
        assert step.metrics["loss/clipped_high_share"] > clipped["cispo_clip_ratio"][0] > 0
    elif case == "gspo":
        assert clipped["clip_ratio/region_mean"][0] > 0


def test_truncated_importance_sampling(bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's correction for vLLM in the mode `token_truncate`, in the second update of a step."""
    gate = MismatchConfig(rollouts=(1e-3, 1e3), truncate=1.2)
    config = settings(PPO, anchor="step_start", num_minibatches=2, mismatch=gate, learning_rate=0.02)
    everything = rollouts(bench)
    _, (_, seen) = bench.train(everything, config, monkeypatch)
    batch = [rollout for rollout in everything if rollout.group == GROUP_ORDER[1]]
    start = trl.logprobs(batch, bench.adapters[2])
    sampler = trl.rows(batch, lambda branch: [branch.sampling_logprobs[i] for i in branch.learnt])
    ratio = (start - sampler).exp()
    trainer = trl.grpo(seen.adapter, loss_type="dapo", **CLIPS)
    trainer.use_vllm = True  # as which it would need a server
    assert trainer.vllm_importance_sampling_correction
    inputs = trl.batch(batch) | {"old_per_token_logps": start, "importance_sampling_ratio": ratio.clamp(max=1.2)}
    trainer._compute_loss(trainer.model, inputs).backward()
    assert (ratio > 1.2).any()
    assert trainer._metrics["train"]["clip_ratio/region_mean"][0] > 0
    assert relative_error(seen.gradient, gradient(trainer.model, seen.adapter).double()) < TOLERANCE


def test_rloo_trainer(bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch) -> None:
    """On policy. TRL weighs whole sequences by their ratio, which is 1 then, and sums over tokens: so does `constant`
    but for its divisor."""
    config = settings(ReinforceConfig(), baseline="leave_one_out", anchor="step_start", normalize=MAX_COMPLETION_LENGTH)
    batch = [without_results(rollout) for rollout in rollouts(bench)]  # TRL's loss learns them too
    _, (seen,) = bench.train(batch, config, monkeypatch)
    trainer = trl.rloo(seen.adapter)
    inputs = trl.batch(batch)
    # Of a group of n, the mean of the others is R - mean = (1 - 1 / n) (R - mean of the others).
    inputs["advantages"] *= 4 / 3
    inputs["old_logps"] = trl.logprobs(batch, bench.adapters[2]).sum(1)
    trainer._compute_loss(trainer.model, inputs).backward()
    expected = gradient(trainer.model, seen.adapter).double() / MAX_COMPLETION_LENGTH
    assert relative_error(seen.gradient, expected) < TOLERANCE


def test_distillation_trainer(bench: Bench, trl: Trl) -> None:
    """TRL computes the reverse KL over the whole vocabulary, ours estimates it from sampled tokens. Every token of the
    vocabulary, weighted with its probability, takes the place of sampling: then they are equal."""
    (branch,) = bench.rollouts(0, has_branches=False)[0].branches
    student, teacher = (
        bench.model.distributions(branch, {name: tensor.double() for name, tensor in bench.adapters[step].items()})
        for step in (2, 1)
    )
    places = branch.learnt[:3]
    samples = []
    for place in places:
        for token in range(VOCAB_SIZE):
            ids, zeros = [*branch.token_ids[:place], token], [0.0] * place
            own, taught = student[place - 1, token], teacher[place - 1, token]
            samples.append(
                TrainingSample(
                    sample_id=f"{place} {token}",
                    rollout_id=f"{place} {token}",
                    token_ids=ids,
                    loss_mask=[False] * place + [True],
                    sampling_logprobs=[*zeros, own.item()],
                    advantages=[0.0] * len(ids),
                    teacher_logprobs=[*zeros, taught.item()],
                    weight=own.exp().item(),
                )
            )
    found, _ = bench.gradient(samples, [], settings(DistillConfig(teacher="p/t")))
    trainer = trl.distillation(bench.adapters[2], bench.adapters[1])
    start, end = places[0], places[-1] + 1
    prompt, completion = torch.tensor([branch.token_ids[:start]]), torch.tensor([branch.token_ids[start:end]])
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
    }
    loss, *_ = trainer._compute_loss(trainer.model, inputs, torch.tensor(len(places)))
    loss.backward()
    assert relative_error(found, gradient(trainer.model, bench.adapters[2]).double()) < TOLERANCE


@pytest.mark.parametrize("reference", [0, 1])
def test_dpo_trainer(reference: int, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = bench.rollouts(0, temperatures=(1.0,) * 4, has_branches=False)
    # Checkpoint 0 is the base model.
    term = DpoConfig(beta=0.3, reference=reference or "base")
    step, (seen,) = bench.train(batch, settings(term), monkeypatch)
    trainer = trl.dpo(seen.adapter, bench.adapters[reference], beta=0.3, loss_type=["sigmoid"])
    chosen, rejected = [], []
    for group in (0, 1):
        members = sorted((rollout for rollout in batch if rollout.group == group), key=lambda rollout: rollout.reward)
        rejected.append(members[0].branches[0])
        chosen.append(members[-1].branches[0])
    ids = [torch.tensor(branch.token_ids) for branch in chosen + rejected]
    masks = [torch.zeros(len(branch.token_ids), dtype=torch.long) for branch in chosen + rejected]
    for mask, branch in zip(masks, chosen + rejected, strict=True):
        mask[branch.learnt] = 1
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": mask_of(ids, padding_side="right"),
        "completion_mask": pad_sequence(masks, batch_first=True),
    }
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert step.metrics["loss/train"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_error(seen.gradient, gradient(trainer.model, seen.adapter).double()) < TOLERANCE


def test_sft_trainer(bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = [rollout.branches[0] for rollout in bench.rollouts(0, temperatures=(1.0,) * 4)]
    samples = [
        TrainingSample(
            sample_id=str(number),
            rollout_id=str(number),
            token_ids=branch.token_ids,
            loss_mask=[i in branch.learnt for i in range(len(branch.token_ids))],
            sampling_logprobs=[0.0] * len(branch.token_ids),
            advantages=[0.0] * len(branch.token_ids),
            component="sft",
        )
        for number, branch in enumerate(branches)
    ]
    step, (seen,) = bench.train_sft(samples, monkeypatch)
    trainer = trl.sft(seen.adapter)
    ids = [torch.tensor(branch.token_ids) for branch in branches]
    labels = [torch.full((len(branch.token_ids),), -100) for branch in branches]
    for label, row, branch in zip(labels, ids, branches, strict=True):
        label[branch.learnt] = row[branch.learnt]
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": mask_of(ids, padding_side="right"),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert step.metrics["loss/train"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_error(seen.gradient, gradient(trainer.model, seen.adapter).double()) < TOLERANCE


# -- from rewards on --


NUM_GROUPS = 16


@pytest.mark.slow
@pytest.mark.parametrize("num_alive", [16, 4, 1])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_trl(
    name: str, num_alive: int, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = finished_rollouts(bench, num_groups=NUM_GROUPS, num_alive=num_alive)
    step, (seen,) = bench.train(rollouts, STEPS[name][1], monkeypatch)
    loss, expected = trl_step(trl, name, rollouts, seen.adapter)
    assert relative_error(seen.gradient, expected.double()) < TOLERANCE
    if name != "rloo":  # -ratio * advantage in TRL, -advantage * log-prob here: different values, the same gradient
        assert step.metrics["loss/train"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert step.metrics["data/step_num_rollouts_trained"] == 4 * num_alive


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_masked_truncated_rollouts_are_those_of_trl(
    name: str, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = finished_rollouts(bench, num_groups=NUM_GROUPS, num_alive=4, cut=True)
    config = STEPS[name][1].model_copy(update={"mask_truncated": True})
    step, (seen,) = bench.train(rollouts, config, monkeypatch)
    _, expected = trl_step(trl, name, rollouts, seen.adapter, mask_truncated_completions=True)
    assert relative_error(seen.gradient, expected.double()) < TOLERANCE
    assert step.metrics["data/step_num_rollouts_trained"] < 16
