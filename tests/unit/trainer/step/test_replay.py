"""Replay of constraints, and steps on constrained answers: exact ratios, a closed ledger, refusals by name."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from art.config import DppoConfig, KlConfig, LoraConfig, TrainConfig, TrainerConfig
from art.credit.ledger import close_ledger
from art.credit.plan import plan_step
from art.errors import ConstraintMismatchError, TrajectoryError
from art.kernels.grammar import Vocabulary
from art.metrics import catalogue
from art.metrics.findings import find_findings
from art.protocol.calls import Train
from art.protocol.samples import ConstrainedSpan, Constraint, StepResult, TrainingSample
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from art.testing.tiny_model import build_tiny_model
from art.trainer.policy.base_model import load_base_model, run_backbone
from art.trainer.step.micro_batch import MicroBatcher
from art.trainer.step.plans import Measurer
from art.trainer.step.replay import Replayer
from art.trainer.trainer import Trainer
from art.trainer.tree import SamplePath, check_sample
from tests.support.constrained_samples import Drawn, Sampler, mask_digests, replayed, training_sample, with_kept
from tests.support.recorded_exchanges import USER, choice, exchange, resolved, samples_of
from tests.support.trainer_samples import sample_file

LORA = LoraConfig(rank=8, alpha=16)
JSON = 'start: %json {"type":"object","properties":{"move":{"type":"string"},"n":{"type":"integer"}},"required":["move","n"]}'
WORDS = 'start: ("win" | "draw" | "loss") " "? /[a-z]{0,6}/'
GRAMMARS = (JSON, WORDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", warm_start_steps=0, seed=3))


@pytest.fixture(scope="module")
def sampler(model: str) -> Sampler:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return Sampler(hf, Vocabulary.load(model, hf.config.vocab_size), [hf.config.eos_token_id])


@pytest.fixture(scope="module")
def drawn(sampler: Sampler) -> list[TrainingSample]:
    """Answers of two prompts: under two grammars, with top_k, with both, and free; most of them are cut."""
    samples = []
    for number in range(18):
        grammar = (None, *GRAMMARS)[number % 3]
        answer = sampler.draw([5, 6, 7 + number % 2], grammar=grammar, top_k=(0, 6)[number % 2], seed=number)
        samples.append(training_sample([5, 6, 7 + number % 2], answer, f"s{number}", advantage=number % 3 - 1.0))
    return samples


@pytest.fixture
def new_trainer(model: str, tmp_path: Path) -> Callable[..., Trainer]:
    def new(lora: LoraConfig | None = LORA, **config: Any) -> Trainer:
        trainer = Trainer(model, TrainerConfig(device="cpu", num_threads=1, **config))
        trainer.init_checkpoint(tmp_path / "0000", lora)
        return trainer

    return new


def train(trainer: Trainer, directory: Path, samples: list[TrainingSample], **changes: Any) -> StepResult:
    arguments: dict[str, Any] = {
        "samples": sample_file(directory, samples),
        "config": TrainConfig(learning_rate=1e-3),
        "from_checkpoint": directory / "0000",
        "to_checkpoint": directory / "0001",
        "job_id": "job-1",
    }
    return trainer.train(Train(**arguments | changes))


def check(samples: list[TrainingSample], vocab_size: int) -> list[SamplePath]:
    return [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size))]


# -- masks --


def test_masks_are_those_of_the_grammar_and_the_kept_tokens(sampler: Sampler, model: str) -> None:
    answer = sampler.draw([5], grammar=JSON, top_k=6, seed=1)
    assert answer.constraint is not None
    (path,) = replayed([training_sample([5], answer, "s")], model, sampler.vocabulary.vocab_size)
    assert path.masks is not None
    for number, ids in zip(path.masks.tolist(), answer.constraint.kept or [], strict=True):
        if ids:  # chosen among the tokens of the grammar
            assert path.mask_table[number].ids.tolist() == ids
        else:  # the grammar left no more than `top_k`
            assert path.mask_table[number].size <= 6


@pytest.mark.slow
def test_a_replay_gives_the_same_bits_in_another_process(
    drawn: list[TrainingSample], sampler: Sampler, model: str, tmp_path: Path
) -> None:
    vocab_size = sampler.vocabulary.vocab_size
    wire = json.dumps([str(sample_file(tmp_path, drawn).path), model, vocab_size])
    program = "import sys; from tests.support.constrained_samples import print_masks; print_masks(sys.stdin.read())"
    run = subprocess.run([sys.executable, "-c", program], input=wire, capture_output=True, text=True, check=True)
    assert run.stdout.split() == mask_digests(replayed(drawn, model, vocab_size))
    assert len(set(run.stdout.split())) > 10


def test_a_replay_gives_the_same_bits_with_threads_and_once_more(
    drawn: list[TrainingSample], sampler: Sampler, model: str
) -> None:
    vocab_size = sampler.vocabulary.vocab_size
    torch.set_num_threads(2)  # threads end in any order
    try:
        ours = [Replayer(model, vocab_size).replay(check(drawn, vocab_size))[0] for _ in range(2)]
    finally:
        torch.set_num_threads(1)
    for one, other in zip(*ours, strict=True):
        assert one.mask_table == other.mask_table
        assert (one.masks is None) == (other.masks is None)
        assert one.masks is None or (one.masks == other.masks).all()


# -- steps --


def test_the_first_ratio_is_one(
    drawn: list[TrainingSample], new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    metrics = train(new_trainer(), tmp_path, drawn).metrics
    assert metrics["offpolicy/first_update_gap"] < 1e-5
    assert abs(metrics["offpolicy/ratio_max"] - 1) < 1e-4
    assert abs(metrics["offpolicy/ratio_p01"] - 1) < 1e-4
    assert metrics["offpolicy/constraint_refused_tokens"] == 0
    assert metrics["data/step_constrained_tokens"] > 100
    assert metrics["data/step_forced_tokens"] > 10
    assert metrics["time/step_replay_s"] > 0
    assert [name for name in metrics if name not in catalogue.TRAINER_METRICS] == []


def test_engine_and_trainer_agree_as_well_as_without_a_grammar(sampler: Sampler, model: str) -> None:
    base = load_base_model(model, TrainerConfig(device="cpu", num_threads=1))

    def gap(grammar: str | None) -> float:
        samples = [
            training_sample([5, 6], sampler.draw([5, 6], grammar=grammar, seed=n, max_tokens=32), f"s{n}")
            for n in range(6)
        ]
        paths = replayed(samples, model, base.vocab_size)
        policy: Any = SimpleNamespace(hidden_states=partial(run_backbone, base))
        measured = Measurer(policy, MicroBatcher(base, max_tokens=4096)).add_stream(paths, "policy", "now")
        return max(float(np.abs(path.streams["now"] - path.sampling_logprobs).max()) for path in measured)

    free = gap(None)
    assert free < 1e-4
    assert gap(JSON) <= 2 * free
    assert gap(WORDS) <= 2 * free


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(learning_rate=1e-4, num_minibatches=2, anchor="step_start"),
        TrainConfig(learning_rate=1e-4, loss=(DppoConfig(), KlConfig(weight=0.1, reference="base"))),
        TrainConfig(learning_rate=1e-4, loss=(DppoConfig(), KlConfig(weight=0.1, reference=0, where="reward"))),
    ],
    ids=["anchor", "kl", "kl in the reward"],
)
def test_references_are_normalised_over_the_same_tokens(
    lora: LoraConfig | None,
    config: TrainConfig,
    drawn: list[TrainingSample],
    new_trainer: Callable[..., Trainer],
    tmp_path: Path,
) -> None:
    trainer = new_trainer(lora)
    metrics = train(trainer, tmp_path, drawn, config=config, references={0: tmp_path / "0000"}).metrics
    assert metrics["offpolicy/first_update_gap"] < 1e-5
    assert metrics["loss/kl_to_base"] < 1e-3  # without masks: above 1


# -- refusals --


def outside(sample: TrainingSample) -> TrainingSample:
    """The sample with another fifth token, which its grammar does not allow."""
    (span,) = sample.constraints
    place = span.start + 4
    return replace(sample, token_ids=[*sample.token_ids[:place], 0, *sample.token_ids[place + 1 :]])


def test_a_token_outside_its_mask_refuses_its_sample(
    drawn: list[TrainingSample], new_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = drawn[3]
    assert kept.constraints[0].constraint.grammar is None
    wrong = replace(kept.constraints[0].constraint, kept=[[0, 1]] * kept.constraints[0].num_tokens)
    spoilt = [
        outside(drawn[1]),
        replace(kept, constraints=[replace(kept.constraints[0], constraint=wrong)]),
        *drawn[4:],
    ]
    with caplog.at_level(logging.WARNING):
        metrics = train(new_trainer(), tmp_path, spoilt).metrics
    tokens = sum(map(sum, (sample.loss_mask for sample in spoilt[:2])))
    assert metrics["offpolicy/constraint_refused_tokens"] == tokens
    assert metrics["data/step_trainable_tokens"] == sum(sum(sample.loss_mask) for sample in spoilt[2:])
    assert "2 samples do not match their constraints" in caplog.text
    assert "'s1': its grammar does not allow token id 0, number 4 of the answer" in caplog.text
    assert "constraint_refused" in [finding.name for finding in find_findings(metrics, {})]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(grammar="start: nowhere", stop_token_ids=[2]), "grammar of the answer is not valid"),
        (Constraint(grammar='start: "x"', stop_token_ids=[]), "at least one stop token"),
        (Constraint(kept=[[9, 5]] * 24), "not ascending ids of the vocabulary"),
        (Constraint(kept=[[5, 10**6]] * 24), "not ascending ids of the vocabulary"),
    ],
    ids=["bad grammar", "no stop token", "not ascending", "too large"],
)
def test_nothing_but_refused_samples_is_an_error_with_the_reason(
    constraint: Constraint, reason: str, sampler: Sampler, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    answer = Drawn([5] * 24, [-1.0] * 24, constraint)
    with pytest.raises(ConstraintMismatchError, match=f"none of the 1 samples .*{reason}"):
        train(new_trainer(), tmp_path, [training_sample([5], answer, "s")])


def test_constraints_that_fit_no_tokens_are_refused() -> None:
    sample = with_kept([training_sample([1, 2], Drawn([3, 4], [-1.0, -1.0], Constraint(kept=[[3], [4]])), "s")])[0]
    span = ConstrainedSpan(start=2, num_tokens=2, constraint=Constraint(kept=[[3]]))
    with pytest.raises(TrajectoryError, match="kept tokens of 1 tokens in a constraint on 2"):
        check_sample(replace(sample, constraints=[span]), vocab_size=9)
    for start, length in ((0, 2), (3, 2), (2, 0)):
        span = ConstrainedSpan(start=start, num_tokens=length, constraint=Constraint())
        with pytest.raises(TrajectoryError, match=f"constraint on {length} tokens from token {start} on"):
            check_sample(replace(sample, constraints=[span]), vocab_size=9)


# -- from exchanges --


def test_recorded_exchanges_are_trained_exactly_and_the_ledger_closes(
    sampler: Sampler, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    exchanges, groups = [], []
    for number in range(12):
        prompt = [5, 6, 7 + number // 4]
        answer = sampler.draw(prompt, grammar=GRAMMARS[number % 2], top_k=(0, 0, 5)[number % 3], seed=number)
        changes = {"sampling_logprobs": answer.logprobs, "constraint": answer.constraint, "policy_version": 0}
        changes["top_p"] = 0.9 if number % 3 == 2 else 1.0  # the kept tokens say what it left
        exchanges.append(exchange(f"e{number}", prompt, answer.token_ids, messages=[USER], text="x", **changes))
    exchanges[5] = replace(exchanges[5], completion_token_ids=[0, *exchanges[5].completion_token_ids[1:]])
    for first in range(0, 12, 4):
        items = [WireHistory(items=[USER, choice(f"e{n}", "x")]) for n in range(first, first + 4)]
        groups.append(
            WireGroup(trajectories=[WireTrajectory(reward=float(n), histories=[h]) for n, h in enumerate(items)])
        )
    config = TrainConfig(learning_rate=1e-3)
    plan = plan_step(resolved(*groups, exchanges=tuple(exchanges)), config, step=0)
    samples = samples_of(plan, *exchanges)
    result = train(new_trainer(), tmp_path, samples, config=config)
    assert abs(result.metrics["offpolicy/ratio_max"] - 1) < 1e-4
    ledger = close_ledger(plan.ledger, result.metrics)
    assert ledger["ledger/dropped_tokens/constraint_mismatch"] == len(exchanges[5].completion_token_ids)
    parts = [value for name, value in ledger.items() if "dropped_tokens" in name or name == "ledger/trained_tokens"]
    assert sum(parts) == ledger["ledger/sampled_tokens"] == sum(len(e.completion_token_ids) for e in exchanges)
