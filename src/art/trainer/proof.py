"""The probe of a checkpoint: log-probs of a token path. The engine must reproduce them before it serves the weights.

Loud test adapters: for each kind of adapted layer, an adapter with random weights in these layers and no others.

    self_attn.q_proj/  adapter_model.safetensors  adapter_config.json  probe.json
    mlp.down_proj/     ...

A trained adapter begins by changing almost nothing, so its first steps do not tell whether an engine applies it. A loud
one moves the log-probs of the probe by far more than the noise between trainer and engine. An engine that ignores one
kind of layer does not follow (`art.runtime.publish`).
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import torch

from art.protocol.samples import plain_sample
from art.storage import checkpoints
from art.storage.atomic import storage_errors
from art.storage.checkpoints import Probe
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import make_micro_batch, target_logprobs_in_order
from art.trainer.tensor_files import stream_named
from art.trainer.tree import check_sample

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
        if len(tokens) == PROBE_TOKENS and len({*tokens}) >= _MIN_DIFFERENT and max(tokens) < vocab_size:
            return tokens
        problem = "it does not fit the text"
    except Exception as error:  # many kinds, by the files that are missing; the probe does without them
        problem = str(error)
    _log.info("the probe has pseudo-random tokens, without the tokenizer of %s: %s", base_model, problem)
    return fresh_probe_tokens(vocab_size)


def fresh_probe_tokens(vocab_size: int) -> list[int]:
    """Make up the tokens of a probe for a vocabulary that has no text. The stride is a prime, to spread them."""
    return [(1 + 7919 * i) % vocab_size for i in range(PROBE_TOKENS)]


def measure_probe(policy: Policy, token_ids: list[int]) -> Probe:
    """Measure the log-probs of `token_ids` (at least 2) under the policy and the base model, at temperature 1."""
    path = check_sample(plain_sample(token_ids, "probe"), vocab_size=policy.base.vocab_size)
    assert path is not None
    micro_batch = make_micro_batch([path], policy.base)

    with torch.no_grad():
        own, base = (
            target_logprobs_in_order(micro_batch, policy.base, hidden_states).tolist()
            for hidden_states in (policy.hidden_states, policy.base_hidden_states)
        )
    return Probe(token_ids=token_ids, logprobs=own, base_logprobs=base)


LOUD_NATS = 0.5
"""Root mean square change of the probe's log-probs from which an adapter is loud: ten times the noise of bfloat16."""
_GAINS = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Sizes of the change of a layer's output to try, in units of its input. The first loud one is taken."""
_SEED = 20_011


def write_loud_adapters(policy: LoraPolicy, token_ids: list[int], folder: Path | None) -> dict[str, float]:
    """Write one adapter per kind of layer into `folder`, with its probe. `None` only computes, for other processes.

    Afterwards `policy` is at step 0 again. The weights are exact in bfloat16, so no engine has to round them.

    Returns:
        by kind of layer, the root mean square change of the probe's log-probs in nats.

    Raises:
        DiskFullError, StorageError: the files cannot be written.
    """
    effects = {}
    kinds: dict[str, list[str]] = {}  # names of the factors A of all layers of a kind
    for name in policy.tensors:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")  # e.g. model.layers.3.self_attn.q_proj
            kinds.setdefault(re.sub(r"^.*\.\d+\.", "", layer), []).append(name)
    for kind, names in kinds.items():
        factors = [(name, name.replace(".lora_A.", ".lora_B.")) for name in names]
        for gain in _GAINS:  # until it is loud, if that is possible
            _randomise(policy, factors, gain)
            probe = measure_probe(policy, token_ids)
            pairs = zip(probe.logprobs, probe.base_logprobs, strict=True)
            effects[kind] = math.sqrt(math.fsum((own - base) ** 2 for own, base in pairs) / len(probe.logprobs))
            if effects[kind] >= LOUD_NATS:
                break
        if folder is not None:
            weights = {name: policy.tensors[name] for pair in factors for name in pair}
            files = {
                checkpoints.ADAPTER_WEIGHTS: b"".join(stream_named(weights)),
                checkpoints.ADAPTER_CONFIG: policy.adapter_config(),
                checkpoints.PROBE: probe.model_dump_json().encode(),
            }
            with storage_errors(folder / kind, "writing"):
                (folder / kind).mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (folder / kind / name).write_bytes(data)
    policy.reset()
    return effects


def _randomise(policy: LoraPolicy, factors: list[tuple[str, str]], gain: float) -> None:
    """Give the layers with these factors (A, B) random weights that are exact in bfloat16, and all others none."""
    policy.reset()
    generator = torch.Generator().manual_seed(_SEED)
    for names in factors:
        a, b = (policy.tensors[name] for name in names)
        noise = torch.randn(b.shape, generator=generator) * (gain / math.sqrt(b.shape[1]))
        a.copy_(a.bfloat16().float())
        b.copy_(noise.bfloat16().float())
