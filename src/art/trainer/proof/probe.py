"""The probe of a checkpoint: log-probs of a token path. The engine must reproduce them before it serves the weights."""

from __future__ import annotations

import logging
from typing import Any

import torch

from art.protocol.samples import plain_sample
from art.storage.checkpoints import Probe
from art.trainer.policy.policy import Policy
from art.trainer.step.measure import HiddenStates, target_logprobs_in_order
from art.trainer.step.micro_batch import make_micro_batch
from art.trainer.tree.tree import check_sample

_log = logging.getLogger(__name__)

PROBE_TOKENS = 64
_TEXT = """\
The harbour was quiet when the first boats came back at 6:40. Mara counted eleven crates of fish, wrote the number in
her notebook, and asked why the twelfth was missing. "It fell overboard," said her brother, "somewhere between the
lighthouse and the old pier." She did not believe him, but she paid 24.50 for each crate, as they had agreed.

def total(prices: list[float], count: int) -> float:
    return sum(prices[:count])
"""
_MIN_DIFFERENT = 8
"""A tokenizer that turns the text into fewer different tokens does not know its characters."""
_STRIDE = 7919
"""A prime number: spreads made-up tokens over any vocabulary."""


def natural_probe_tokens(base_model: str, vocab_size: int) -> list[int]:
    """Return the `PROBE_TOKENS` tokens of the probe at step 0, when nothing was sampled yet.

    They are a fixed natural text in the tokens of the model, because log-probs of text are as exact as those that
    training compares. Log-probs of tokens that no text has are large, and so is their noise in bfloat16. A model
    without a usable tokenizer gets fixed pseudo-random tokens instead.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(base_model)
        tokens = list(tokenizer.encode(_TEXT))[:PROBE_TOKENS]
    except Exception as error:  # many kinds, by the files that are missing; the probe does without them
        _log.info("the probe has pseudo-random tokens, since the tokenizer of %s cannot be read: %s", base_model, error)
        return fresh_probe_tokens(vocab_size)
    if len(tokens) == PROBE_TOKENS and len({*tokens}) >= _MIN_DIFFERENT and max(tokens) < vocab_size:
        return tokens
    _log.info("the probe has pseudo-random tokens, since the tokenizer of %s does not fit the text", base_model)
    return fresh_probe_tokens(vocab_size)


def fresh_probe_tokens(vocab_size: int) -> list[int]:
    """Make up the tokens of a probe for a vocabulary that has no text."""
    return [(1 + _STRIDE * i) % vocab_size for i in range(PROBE_TOKENS)]


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
