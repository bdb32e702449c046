"""Memory of one pass over a micro-batch: what the layers keep for the backward pass, and the workspaces.

What a layer keeps per token comes from `art.memory.shape`, which describes FlexAttention. On a CPU
attention runs chain by chain in float32 and keeps its probabilities up to a limit, and layers on merged, packed or
folded weights keep the input of the MLP's last product too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from art.memory.shape import ALL_TARGETS, DTYPE_BYTES, Checkpointing, ModelShape, saved_bytes_per_token

HEAD_TILE = {"cpu": (512, 2**19), "cuda": (4096, 2**26)}
"""Most rows and logits that the log-prob head computes at once, as in `art.trainer.step.logprobs`."""
KEPT_PROBABILITIES = 2**26
"""Most bytes of attention probabilities that a layer keeps on a CPU, as in `art.trainer.attention.chain_attention`."""
_BLOCK = 96
"""Queries of a block of attention on a CPU, as in `art.trainer.attention.chain_attention`."""
_DENSE_UP_TO = 256
"""Tokens up to which attention is dense, as in `art.trainer.attention.kernel_choice`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest micro-batch that is forecast."""

    num_tokens: int
    longest: int
    """Tokens of its longest sequence."""
    num_sequences: int | None = None
    """Number of sequences, all as long as the longest; `None` for any mixture, whose worst case is forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """What the memory of a pass depends on besides the model and the micro-batch."""

    device: str
    dtype: str
    rank: int | None
    """Rank of the adapter; `None` for full fine-tuning."""
    targets: Collection[str] = ALL_TARGETS
    checkpointing: Checkpointing = "none"

    @property
    def size(self) -> int:
        """Bytes of a number in the model's dtype."""
        return DTYPE_BYTES[self.dtype]


def kept_bytes(shape: ModelShape, batch: Batch, settings: PassSettings) -> int:
    """Bytes that all layers keep at the peak of a pass, between their forward and their backward passes."""
    whole = _layer_bytes(shape, batch, settings, "none")
    if settings.checkpointing == "none":
        return shape.num_layers * whole
    return shape.num_layers * _layer_bytes(shape, batch, settings, settings.checkpointing) + whole


def _layer_bytes(shape: ModelShape, batch: Batch, settings: PassSettings, checkpointing: Checkpointing) -> int:
    per_token = saved_bytes_per_token(
        shape.layer,
        dtype=settings.dtype,
        rank=settings.rank,
        targets=settings.targets,
        checkpointing=checkpointing,
    )
    if settings.device != "cpu" or checkpointing == "full":
        return batch.num_tokens * per_token
    layer = shape.layer
    rows = 2 * (layer.queries + layer.keys)
    per_token += 4 * rows - settings.size * rows  # attention on a CPU is in float32
    if checkpointing == "none":
        per_token += settings.size * layer.queries  # its result in the model's dtype, for the next linear layer
    if checkpointing == "none" and settings.rank is not None and settings.dtype == "float32":
        per_token += settings.size * layer.mlp
    return batch.num_tokens * per_token + _kept_probabilities(shape, batch)


def _kept_probabilities(shape: ModelShape, batch: Batch) -> int:
    """Bytes of attention probabilities that a layer keeps on a CPU: all of them, or none where they are too many."""
    if batch.num_tokens <= _DENSE_UP_TO:
        return 0  # the dense kernel keeps none
    seen = batch.longest / 2 + _BLOCK / 2
    scores = int(4 * shape.layer.num_heads * batch.num_tokens * seen)
    if batch.num_sequences is None:  # shorter sequences have fewer scores: just few enough, in the worst case
        return min(scores, KEPT_PROBABILITIES)
    return scores if scores <= KEPT_PROBABILITIES else 0


def layer_workspace(shape: ModelShape, batch: Batch, settings: PassSettings) -> int:
    """Bytes of temporary tensors in the backward pass of one layer, without attention.

    The largest are gradients of the MLP: of the product, of gate and up, and both factors computed again.
    """
    inner = shape.layer.mlp or shape.layer.experts
    return batch.num_tokens * settings.size * (4 * shape.layer.hidden + 5 * inner)


def attention_workspace(shape: ModelShape, batch: Batch, settings: PassSettings) -> int:
    """Bytes of temporary tensors in the backward pass of one layer's attention."""
    layer = shape.layer
    rows = 4 * batch.num_tokens * (3 * layer.queries + 2 * layer.keys)  # float32 gradients of queries, keys, values
    if settings.device != "cpu":
        return rows
    block = 3 * 4 * layer.num_heads * min(_BLOCK, batch.num_tokens) * batch.longest  # scores and their gradients
    return rows + block


def head_workspace(shape: ModelShape, batch: Batch, settings: PassSettings) -> int:
    """Bytes of the log-prob head: tiles of logits, a tile of its weight in float32, and rows of hidden states."""
    hidden = shape.layer.hidden
    num_rows, num_logits = HEAD_TILE.get(settings.device, HEAD_TILE["cuda"])
    block = min(num_rows, batch.num_tokens)
    width = min(shape.vocab_size, num_logits // block)
    tiles = 4 * (2 * block * width + block * hidden) + (4 * width * hidden if settings.size < 4 else 0)
    return tiles + batch.num_tokens * hidden * (2 * settings.size + 3 * 4)
