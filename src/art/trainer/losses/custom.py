"""Custom losses: a function of the user's, which the trainer's process imports and calls.

    "my_package.losses:my_loss" --import--> function --(inputs, **settings)--> LossOutput --check--> one more term

The function is trusted code: it runs with the trainer's rights. Who may name one is the server's decision. What it
returns is checked, so that a mistake in it fails the step instead of training nothing or nonsense.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from art.config import CustomLossConfig
from art.config.losses import LOSS_PATH_VARIABLE
from art.errors import ConfigError, TrainingError
from art.trainer.losses.base import LossInputs, LossOutput


def find_function(config: CustomLossConfig) -> Callable[..., LossOutput]:
    """Import the function of a custom loss.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take `settings`.
    """
    module, _, name = config.function.partition(":")
    for folder in filter(None, os.environ.get(LOSS_PATH_VARIABLE, "").split(os.pathsep)):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that it hides no module of the trainer's
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # importing a module runs its code, which can raise anything
        raise ConfigError(
            f"the trainer cannot import the custom loss {config.function!r}: {type(error).__name__}: {error}. Install "
            "its package in the server's environment, or add its folder to PYTHONPATH before the server starts",
            param="loss",
        ) from error
    if not callable(function):
        raise ConfigError(f"the custom loss {config.function!r} is not a function, but {function!r}", param="loss")
    try:
        inspect.signature(function).bind(None, **config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the custom loss {config.function!r} must take `inputs`, and `settings` as keyword arguments "
            f"({', '.join(config.settings) or 'none are given'}): {error}",
            param="loss",
        ) from error
    return function


def custom_loss(inputs: LossInputs, config: CustomLossConfig) -> LossOutput:
    """Call the function of a custom loss, and check what it returns.

    Raises:
        ConfigError: the function cannot be imported or called like this.
        TrainingError: it raised an error, or returned something that cannot be trained on.
    """
    function = find_function(config)
    own = _own_copy(inputs, config)
    try:
        output = function(own, **config.settings)
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, frames)).strip()
        raise TrainingError(f"the custom loss {config.function!r} raised an error:\n{text}", param="loss") from error
    if problem := _find_problem(output, own, config):
        raise TrainingError(f"the custom loss {config.function!r} {problem}", param="loss")
    return LossOutput(output.values.to(inputs.policy_logprobs.dtype), output.clipped_low, output.clipped_high)


def _own_copy(inputs: LossInputs, config: CustomLossConfig) -> LossInputs:
    """Copy `inputs`, so that the function cannot change them. Its uses of an entropy without a gradient are noticed."""
    entropy = inputs.entropy.clone() if config.entropy_gradient else inputs.entropy.detach().clone().requires_grad_()
    return replace(
        inputs,
        policy_logprobs=inputs.policy_logprobs.clone(),
        anchor_logprobs=inputs.anchor_logprobs.clone(),
        sampling_logprobs=inputs.sampling_logprobs.clone(),
        entropy=entropy,
        advantages=inputs.advantages.clone(),
        samples=inputs.samples.clone(),
        streams={name: values.clone() for name, values in inputs.streams.items()},
    )


def _find_problem(output: object, inputs: LossInputs, config: CustomLossConfig) -> str | None:
    """What is wrong with the result of a custom loss, as the end of a sentence; `None` if nothing is."""
    if not isinstance(output, LossOutput):
        hint = "; wrap the loss of each target by `art.losses.unclipped`" if isinstance(output, Tensor) else ""
        return f"must return an `art.losses.LossOutput`, and returned a {type(output).__name__}{hint}"
    shape = inputs.policy_logprobs.shape
    for name, kind in (("values", "numbers"), ("clipped_low", "booleans"), ("clipped_high", "booleans")):
        tensor = getattr(output, name)
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            what = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            return f"must return `{name}` with one entry per target, of shape {list(shape)}; got {what}"
        if (kind == "booleans") != (tensor.dtype == torch.bool) or tensor.is_complex() or tensor.device.type != "cpu":
            return f"must return `{name}` as {kind} on the CPU; got {tensor.dtype} on {tensor.device}"
    if count := int((~output.values.isfinite()).sum()):
        return f"returned {count} values of {len(output.values)} that are not finite"
    return _find_problem_of_gradient(output.values, inputs, config)


def _find_problem_of_gradient(values: Tensor, inputs: LossInputs, config: CustomLossConfig) -> str | None:
    of_policy, of_entropy = None, None
    if values.requires_grad:
        read = (inputs.policy_logprobs, inputs.entropy)
        of_policy, of_entropy = torch.autograd.grad(values.sum(), read, allow_unused=True, retain_graph=True)
    if of_entropy is not None and not config.entropy_gradient:
        return (
            "is differentiated with respect to `inputs.entropy`, which has no gradient here; set "
            "CustomLossConfig(entropy_gradient=True), or use `inputs.entropy.detach()`"
        )
    if of_policy is None and of_entropy is None:
        return (
            "does not depend on `inputs.policy_logprobs`, so it would train nothing; check for `.detach()`, "
            "`.item()` and `torch.no_grad()`"
        )
    if any(grad is not None and not bool(grad.isfinite().all()) for grad in (of_policy, of_entropy)):
        return (
            "has a gradient that is not finite; a branch of `torch.where` that is not taken must have a finite "
            "gradient too"
        )
    return None
