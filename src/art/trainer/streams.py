"""Names of streams, the log-probs that a target has in addition to its sampler's, and of the models they come from.

The stream of another checkpoint is named by its step, as text.
"""

from __future__ import annotations

POLICY = "policy"
"""Source of log-probs: the policy that is trained, before the step's first update."""

BASE = "base"
"""Source of log-probs: the base model. Also the name of the stream with its log-probs."""

ANCHOR = "anchor"
"""Stream: the policy's log-probs at the start of the step."""

SAMPLED_BASE = "sampled_base"
"""Stream: the log-probs of the base model for some of the samples, NaN for the rest."""

TEACHER = "teacher"
"""Stream: the log-probs of the model that a distillation loss learns from."""

SAMPLER = "sampler"
"""Stream: log-probs under the checkpoint that sampled each token, for some of the stale samples, NaN for the rest."""
