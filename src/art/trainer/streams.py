"""The names of further log-probs that a target carries beside those of the sampler, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable

from art.trainer.tree.tree import SamplePath

ANCHOR = "anchor"
"""The policy's log-probs at the start of the step."""

BASE = "base"
"""The log-probs of the base model; also the source by which `Measure` knows the base model."""

SAMPLED_BASE = "sampled_base"
"""The log-probs of the base model for some of the samples, NaN for the rest."""

TEACHER = "teacher"
"""The log-probs of the model that a distillation loss learns from."""

Measure = Callable[[list[SamplePath], int | str, str], list[SamplePath]]
"""`measure(paths, source, stream)`: the same paths with one more stream, the log-probs of `source`: "policy",
`BASE`, or the step of a checkpoint."""


def reference_name(reference: int | str) -> str:
    """The stream of a reference policy: the base model, or a checkpoint by its step."""
    return str(reference)
