"""How much a vLLM server can compute at once on its GPUs: requests, and tokens of scored prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

LARGEST_RUNNING = 512
"""vLLM records CUDA graphs for up to 512 requests; larger batches run without."""
SMALLEST_RUNNING = 16
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that `vllm serve` takes by default (`gpu_memory_utilization`)."""
KV_SHARE = 0.85
"""Part of the memory beside the weights that is left for keys and values, after activations and CUDA graphs."""
AVERAGE_TOKENS = 2048
"""Tokens of keys and values that an average running request has for itself, beside what it shares with its group. vLLM
pauses requests when this was too little."""
BYTES = 2
"""Bytes of a weight, key or value in bfloat16."""
MAX_SCORED_TOKENS = 32_768
"""Tokens of prompts that a server scores at once."""
MAX_SCORED_PROMPTS = 8
LOGIT_BYTES = 2**30
"""Memory for the logits of one piece of a scored prompt. vLLM computes them in one tensor, outside its memory share."""
BYTES_PER_LOGIT = 10
"""Bytes of a logit in bfloat16, and of its log-prob in float32 twice."""
SMALLEST_PIECE = 512


def choose_max_running(
    model: Mapping[str, Any], *, memory_bytes: int, num_gpus: int, share: float, context: int
) -> int:
    """Choose how many requests a vLLM server computes at once, `max_num_seqs`.

    As many as the KV cache holds when each has `AVERAGE_TOKENS` or its whole context, in multiples of 16, from 16 to
    512.

    Example: Qwen3-8B has 16.4 GB of weights, and 144 KiB of keys and values for a token (36 layers, 8 heads of 128). On
    one GPU of 139 GiB that makes room for 320 requests, on one of 80 GiB for 160.

    Args:
        model: the model's config.json, its text part.
        memory_bytes: memory of one GPU.
        num_gpus: GPUs that hold one copy of the model together.
        share: the part of that memory that vLLM may take.
        context: longest context in tokens.
    """
    free = share * memory_bytes * num_gpus - BYTES * count_weights(model)
    request_bytes = kv_bytes_per_token(model) * min(AVERAGE_TOKENS, context)
    fits = int(KV_SHARE * max(0.0, free) / request_bytes)
    return max(SMALLEST_RUNNING, min(LARGEST_RUNNING, fits // 16 * 16))


def kv_bytes_per_token(model: Mapping[str, Any]) -> int:
    """Return the bytes of keys and values that a model keeps for one token of a request in bfloat16.

    Layers with a sliding window count as whole ones, so the result is an upper bound for them.
    """
    layers = int(model["num_hidden_layers"])
    if "kv_lora_rank" in model:  # multi-head latent attention keeps one compressed vector
        return BYTES * layers * (int(model["kv_lora_rank"]) + int(model.get("qk_rope_head_dim") or 0))
    return 2 * BYTES * layers * _kv_heads(model) * _head_dim(model)


def count_weights(model: Mapping[str, Any]) -> int:
    """Estimate the number of weights of a decoder from its config.json: attention, MLP with experts, embeddings."""
    hidden, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    heads = int(model["num_attention_heads"])
    attention = hidden * _head_dim(model) * (2 * heads + 2 * _kv_heads(model))
    experts = int(model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0)
    width = int(model.get("moe_intermediate_size") or 0) if experts else 0
    mlp = 3 * hidden * (width or int(model.get("intermediate_size") or 4 * hidden)) * max(1, experts)
    embeddings = int(model["vocab_size"]) * hidden * (1 if model.get("tie_word_embeddings") else 2)
    return layers * (attention + mlp) + embeddings


def _kv_heads(model: Mapping[str, Any]) -> int:
    return int(model.get("num_key_value_heads") or model["num_attention_heads"])


def _head_dim(model: Mapping[str, Any]) -> int:
    return int(model.get("head_dim") or int(model["hidden_size"]) // int(model["num_attention_heads"]))


def choose_prefill_piece(vocab_size: int, context: int) -> int:
    """Choose the most tokens of one prompt that vLLM computes in one step, `long_prefill_token_threshold`.

    A scored prompt needs the logits of all tokens of a piece at once: 8,192 tokens of a vocabulary of 151,936 are 12 GB
    that vLLM has not reserved, and the server ends for want of memory.
    """
    piece = LOGIT_BYTES // (BYTES_PER_LOGIT * vocab_size)
    return min(context, max(SMALLEST_PIECE, 1 << max(0, piece.bit_length() - 1)))


class ScoreLimit:
    """Bounds how many prompts, and tokens of them, one server scores at once. It belongs to one event loop."""

    def __init__(self, max_tokens: int = MAX_SCORED_TOKENS, max_prompts: int = MAX_SCORED_PROMPTS) -> None:
        self._max_tokens = max_tokens
        self._prompts = asyncio.Semaphore(max_prompts)
        self._changed = asyncio.Condition()
        self.num_tokens = 0
        """Tokens that are being scored."""

    @asynccontextmanager
    async def taken(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room, and hold it during the body. A prompt that is longer than the limit is scored alone."""
        async with self._prompts:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens
                )
                self.num_tokens += num_tokens
            try:
                yield
            finally:
                self.num_tokens -= num_tokens
                async with self._changed:
                    self._changed.notify_all()
