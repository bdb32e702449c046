"""Custom losses: equal to a built-in loss bit by bit, given only what they may have, and refused where they are wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from art.config import CispoConfig, CustomLossConfig, KlConfig, LossConfig, PpoConfig, ReinforceConfig, TrainConfig
from art.config.losses import LOSS_PATH_VARIABLE
from art.errors import ConfigError, TrainingError
from art.losses import LossInputs, LossOutput, log_ratio, unclipped
from art.trainer.losses import custom_loss
from art.trainer.step.update import _target_losses
from tests.support.objective_bench import Bench

N = 6


def plain(inputs: LossInputs) -> LossOutput:
    return unclipped(-inputs.advantages * inputs.policy_logprobs)


def reinforce(inputs: LossInputs, *, cap: float | None = None) -> LossOutput:
    """What `CispoConfig(clip_high=cap - 1)` is."""
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(max=cap) if cap is not None else ratio
    return LossOutput(-weight * inputs.advantages * inputs.policy_logprobs, ratio < weight, ratio > weight)


def kl(inputs: LossInputs) -> LossOutput:
    """What `KlConfig(estimator="k2")` is, for ratios below 5."""
    ratio = log_ratio(inputs).detach().exp()
    return unclipped(ratio * 0.5 * (inputs.policy_logprobs - inputs.streams["base"]).square())


def bonus(inputs: LossInputs) -> LossOutput:
    return unclipped(-inputs.entropy)


def weighs_entropy(inputs: LossInputs) -> LossOutput:
    return unclipped(-inputs.entropy.detach() * inputs.advantages * inputs.policy_logprobs)


def changes_its_inputs(inputs: LossInputs) -> LossOutput:
    for each in fields(inputs):
        if isinstance(value := getattr(inputs, each.name), Tensor):
            value.detach().fill_(1)
    inputs.streams["base"].fill_(1)
    return plain(inputs)


def sees_negative_advantages(inputs: LossInputs) -> LossOutput:
    assert inputs.advantages.tolist() == pytest.approx([-1.0, -0.6, 0.6, 1.0])
    return LossOutput(0 * inputs.policy_logprobs, inputs.advantages < 0, inputs.advantages > 9)


def raises(inputs: LossInputs) -> LossOutput:
    raise IndexError(f"no such key among {len(inputs.advantages)}")


def returns_a_tensor(inputs: LossInputs) -> Tensor:
    return plain(inputs).values


def returns_a_mean(inputs: LossInputs) -> LossOutput:
    return unclipped(plain(inputs).values.mean())


def returns_numbers_for_booleans(inputs: LossInputs) -> LossOutput:
    values = plain(inputs).values
    return LossOutput(values, values, values > 0)


def is_infinite(inputs: LossInputs) -> LossOutput:
    return unclipped(inputs.policy_logprobs / (inputs.advantages - inputs.advantages[0]))


def has_a_bad_gradient(inputs: LossInputs) -> LossOutput:
    return unclipped((inputs.policy_logprobs - inputs.policy_logprobs.detach()).sqrt())


def trains_nothing(inputs: LossInputs) -> LossOutput:
    return unclipped(-inputs.advantages * inputs.policy_logprobs.detach())


def config(function: Callable[..., object] | str, **options: object) -> CustomLossConfig:
    return CustomLossConfig(function=function, **options)


def inputs() -> LossInputs:
    logprobs = torch.linspace(-3, -0.1, N).requires_grad_()
    return LossInputs(
        policy_logprobs=logprobs * 1.0,
        anchor_logprobs=logprobs.detach() + 0.1,
        sampling_logprobs=logprobs.detach() + 0.2,
        entropy=torch.linspace(0, 2, N).requires_grad_() * 1.0,
        advantages=torch.linspace(-1, 1, N),
        samples=torch.tensor([0, 0, 1, 1, 1, 2]),
        num_samples=4,
        streams={"base": logprobs.detach() - 0.3},
    )


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        ((config(reinforce),), (ReinforceConfig(),)),
        ((config(reinforce, settings={"cap": 1.25}, weight=0.5),), (CispoConfig(clip_high=0.25, weight=0.5),)),
        ((PpoConfig(), config(kl, reference="base", weight=0.1)), (PpoConfig(), KlConfig(estimator="k2", weight=0.1))),
    ],
    ids=["reinforce", "with settings", "with a reference"],
)
def test_a_step_equals_that_of_the_built_in_loss_bit_by_bit(
    own: tuple[LossConfig, ...], built_in: tuple[LossConfig, ...], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = (
        bench.train(bench.rollouts(0), TrainConfig(loss=terms, mismatch=None, num_minibatches=2), monkeypatch)
        for terms in (own, built_in)
    )
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one.gradient, other.gradient)
        assert bool(one.gradient.any())
    for name in ("loss/train", "loss/clipped_high_share", "loss/entropy", "loss/adapter_norm"):
        assert found[0].metrics[name] == expected[0].metrics[name]


def test_a_function_cannot_change_what_other_losses_see() -> None:
    given = inputs()
    before = {name: getattr(given, name).clone() for name in ("advantages", "policy_logprobs", "samples")}
    custom_loss(given, config(changes_its_inputs))
    for name, value in before.items():
        assert torch.equal(getattr(given, name), value)
    assert not torch.equal(given.streams["base"], torch.ones(N))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"(?s)raised an error:.*Traceback.*test_custom\.py.*IndexError: no such key among 6"),
        (returns_a_tensor, r"must return an `art\.losses\.LossOutput`, and returned a Tensor; .*unclipped"),
        (returns_a_mean, r"`values` with one entry per target, of shape \[6\]; got shape \[\]"),
        (returns_numbers_for_booleans, r"`clipped_low` as booleans on the CPU; got torch\.float32"),
        (is_infinite, r"returned 1 values of 6 that are not finite"),
        (has_a_bad_gradient, r"gradient that is not finite"),
        (trains_nothing, r"does not depend on `inputs\.policy_logprobs`"),
        (bonus, r"differentiated with respect to `inputs\.entropy`.*EntropyConfig"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_functions_fail_the_step(function: Callable[..., object], message: str) -> None:
    with pytest.raises(TrainingError, match=message) as error:
        custom_loss(inputs(), config(function))
    assert f"test_custom:{function.__name__}" in str(error.value)
    assert "losses/custom.py" not in str(error.value)


def test_an_entropy_without_a_gradient_may_be_a_weight() -> None:
    given = inputs()
    output = custom_loss(given, config(weighs_entropy))
    assert torch.equal(output.values, -given.entropy * given.advantages * given.policy_logprobs)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"function": "no_such_package_of_mine:loss"}, "cannot import .*No module named.*PYTHONPATH"),
        ({"function": f"{__name__}:no_such_function"}, "cannot import .*has no attribute 'no_such_function'"),
        ({"function": f"{__name__}:N"}, "is not a function, but 6"),
        ({"function": f"{__name__}:reinforce", "settings": {"lid": 2}}, "keyword arguments .lid.*unexpected keyword"),
        ({"function": f"{__name__}:reinforce", "settings": {"cap": 2, "inputs": 1}}, "multiple values"),
    ],
    ids=str,
)
def test_a_function_that_cannot_be_called_fails_before_anything_is_computed(
    loss: dict[str, object], message: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from art.trainer.step import micro_batch

    monkeypatch.setattr(micro_batch, "make_micro_batch", lambda *_: pytest.fail("a forward pass was prepared"))
    with pytest.raises(ConfigError, match=message):
        bench.train(bench.rollouts(0), TrainConfig(loss=CustomLossConfig(**loss), mismatch=None), monkeypatch)


def test_modules_are_found_in_the_folders_of_the_variable_and_hide_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from art.losses import unclipped\ndef loss(inputs):\n    return unclipped(-inputs.policy_logprobs)\n"
    (tmp_path / "my_own_losses.py").write_text(code)
    (tmp_path / "json.py").write_text("raise ImportError('hides a module of the standard library')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(LOSS_PATH_VARIABLE, str(tmp_path))
    given = inputs()
    assert torch.equal(custom_loss(given, config("my_own_losses:loss")).values, -given.policy_logprobs)
    assert sys.path[-1] == str(tmp_path)


def test_supervised_samples_are_not_shown_to_a_custom_loss() -> None:
    given = inputs()
    chosen = torch.tensor([True, True, False, False, True, True])
    part = given.where(chosen)
    assert torch.equal(part.advantages, given.advantages[chosen])
    assert torch.equal(part.streams["base"], given.streams["base"][chosen])
    assert part.samples.tolist() == [0, 0, 1, 2]
    assert part.num_samples == 4
    output = _target_losses(given, (config(plain), config(sees_negative_advantages)), chosen)
    expected = torch.where(chosen, -given.advantages * given.policy_logprobs, -given.policy_logprobs)
    assert torch.equal(output.values, expected)
    assert torch.equal(output.clipped_low, chosen & (given.advantages < 0))
    assert torch.equal(
        _target_losses(given, (config(raises),), torch.zeros(N, dtype=torch.bool)).values, -given.policy_logprobs
    )


def test_a_function_is_named_by_where_it_is_defined() -> None:
    assert config(plain).function == f"{__name__}:plain"
    assert TrainConfig.model_validate_json(TrainConfig(loss=config(plain)).model_dump_json()).terms == (config(plain),)
    script = type(plain)(plain.__code__, {"__name__": "__main__"}, "loss")
    script.__module__ = "__main__"
    for function in (lambda inputs: plain(inputs), script):
        with pytest.raises(ConfigError, match="top level of a module"):
            CustomLossConfig(function=function)
    for text in ("my_loss", "my_package:", "os.system('x')", "a b:c", "../x:y"):
        with pytest.raises(ConfigError, match=re.escape("`module:name`")):
            CustomLossConfig(function=text)
