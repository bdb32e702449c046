"""The probe of a checkpoint: log-probs of a token path. The engine must reproduce them before it serves the weights."""

from __future__ import annotations

import torch

from art.protocol.samples import plain_sample
from art.storage.checkpoints import Probe
from art.trainer.policy.policy import Policy
from art.trainer.step.measure import HiddenStates, target_logprobs_in_order
from art.trainer.step.micro_batch import make_micro_batch
from art.trainer.tree.tree import check_sample

PROBE_TOKENS = 64
_FRESH_PROBE_TOKENS = 32
_STRIDE = 7919
"""A prime number: spreads the tokens of the probe at step 0 over any vocabulary."""


def fresh_probe_tokens(vocab_size: int) -> list[int]:
    """Make up the tokens of the probe, on which engine and trainer are compared, for step 0: none was sampled yet."""
    return [(1 + _STRIDE * i) % vocab_size for i in range(_FRESH_PROBE_TOKENS)]


def measure_probe(policy: Policy, token_ids: list[int]) -> Probe:
    """Measure the log-probs of `token_ids` (at least 2) under the policy and the base model, at temperature 1."""
    path = check_sample(plain_sample(token_ids, "probe"), vocab_size=policy.base.vocab_size)
    assert path is not None
    micro_batch = make_micro_batch([path], policy.base)

    def logprobs(hidden_states: HiddenStates) -> list[float]:
        values: list[float] = target_logprobs_in_order(micro_batch, policy.base, hidden_states).tolist()
        return values

    with torch.no_grad():
        return Probe(
            token_ids=token_ids,
            logprobs=logprobs(policy.hidden_states),
            base_logprobs=logprobs(policy.base_hidden_states),
        )
