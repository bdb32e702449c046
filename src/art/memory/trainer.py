"""Forecast of a trainer process's memory: every part, from the model's shape and the settings, without torch.

    fixed        process, base weights, copies of them, trained weights, gradients, optimiser moments
    a pass       activations, workspaces of a layer, its attention and the head, what the allocator cannot reuse
    an update    temporary tensors of AdamW

The peak is the fixed parts and the larger one of the other two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from art.config import LoraConfig, TrainerConfig
from art.memory.activations import (
    Batch,
    PassSettings,
    attention_workspace,
    head_workspace,
    kept_bytes,
    layer_workspace,
)
from art.memory.shape import ALL_TARGETS, Checkpointing, ModelShape, Part, resolve_dtype, total

PROCESS_BYTES = {"cpu": 420 * 2**20, "cuda": 2**29}
"""Python with torch, transformers and peft in main memory, measured with torch 2.13 for CPU; CUDA's context and kernels
on a GPU, approximately."""
CPU_TOKENS = 4096
"""Most tokens per micro-batch on a CPU. Larger ones do not run faster there; they leave the cache and take memory."""
NF4_BYTES = 0.5625
"""Bytes of a 4-bit weight with a float32 scale per block of 64 (arXiv 2305.14314, without double quantisation)."""
_MERGED_LIMIT = 2**29
"""Most memory for merged copies of weights, as in the trainer's LoRA layers."""
_SLACK = 0.1
"""Memory that the allocator holds but cannot reuse, as a share of a pass's tensors: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerForecast:
    """The forecast memory of one trainer process at its peak."""

    fixed: tuple[Part, ...]
    passing: tuple[Part, ...]
    """Parts of a forward and backward pass over the largest micro-batch."""
    updating: tuple[Part, ...]
    """Parts of the optimiser's update."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts at the peak."""
        return self.fixed + max(self.passing, self.updating, key=total)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are needed between steps too."""
        return total(self.fixed)

    @property
    def peak_bytes(self) -> int:
        return total(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """What the forecast of a trainer depends on besides the model and the micro-batch."""

    config: TrainerConfig
    lora: LoraConfig | None
    """`None` for full fine-tuning."""
    device: str
    """`cpu`, `cuda` or `mps`: the device that is really used, not "auto"."""

    @property
    def dtype(self) -> str:
        return resolve_dtype(self.config.dtype, self.device)

    mode: Checkpointing | None = None
    """What the backward pass computes again; `None` follows the settings, where "auto" counts as "none"."""

    @property
    def checkpointing(self) -> Checkpointing:
        """What the backward pass computes again."""
        if self.mode is not None:
            return self.mode
        setting = self.config.gradient_checkpointing
        return "full" if setting is True else "selective" if setting == "selective" else "none"

    @property
    def pass_settings(self) -> PassSettings:
        targets = None if self.lora is None else self.lora.target_modules
        names = ALL_TARGETS if targets is None else [name.rpartition(".")[2] for name in targets]
        return PassSettings(
            device=self.device,
            dtype=self.dtype,
            rank=None if self.lora is None else self.lora.rank,
            targets=names,
            checkpointing=self.checkpointing,
        )


def forecast_trainer(shape: ModelShape, setup: TrainerSetup, batch: Batch) -> TrainerForecast:
    """Forecast the peak memory of one trainer process that trains micro-batches such as `batch`."""
    settings = setup.pass_settings
    num_trained, num_processes = shape.decoder_weights, setup.config.num_processes
    if setup.lora is not None:
        num_trained = shape.adapter_weights(setup.lora.rank, setup.lora.target_modules)
    fixed = [
        _part("process (Python, torch, CUDA)", PROCESS_BYTES.get(setup.device, PROCESS_BYTES["cpu"])),
        _part("base weights", _weight_bytes(shape, setup), remedy=_WEIGHTS_REMEDY),
        _copies(shape, setup),
        _part("trained weights", 4 * num_trained, remedy=_trained_remedy(setup)),
        _part("trained weights before the step", 4 * num_trained, remedy=_trained_remedy(setup)),
        _part("gradients", 4 * num_trained, remedy=_trained_remedy(setup)),
        _part("optimiser moments", 8 * num_trained / num_processes, remedy=_trained_remedy(setup)),
    ]
    passing = [
        _pass_part("activations", kept_bytes(shape, batch, settings), _ACTIVATIONS_REMEDY),
        _pass_part("workspace of a layer", layer_workspace(shape, batch, settings)),
        _pass_part("workspace of attention", attention_workspace(shape, batch, settings)),
        _pass_part("workspace of the head", head_workspace(shape, batch, settings)),
    ]
    passing.append(_pass_part("unused by the allocator", int(_SLACK * total(passing))))
    updating = [_part("workspace of the optimiser", 8 * num_trained / num_processes, remedy=_trained_remedy(setup))]
    return TrainerForecast(fixed=_non_zero(fixed), passing=_non_zero(passing), updating=_non_zero(updating))


_WEIGHTS_REMEDY = 'use dtype "bfloat16", `trainer.quantization="nf4"`, `trainer.shard_base` or a smaller base model'
_ACTIVATIONS_REMEDY = "lower `trainer.max_tokens`, or set `trainer.gradient_checkpointing`"


def _trained_remedy(setup: TrainerSetup) -> str:
    return "lower `lora.rank`" if setup.lora is not None else "train a LoRA instead of all weights"


def _part(name: str, size_bytes: float, remedy: str | None = None) -> Part:
    return Part("trainer", name, int(size_bytes), remedy=remedy)


def _pass_part(name: str, size_bytes: int, remedy: str = _ACTIVATIONS_REMEDY) -> Part:
    return Part("trainer", name, size_bytes, grows_with_tokens=True, remedy=remedy)


def _non_zero(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.size_bytes)


def _weight_bytes(shape: ModelShape, setup: TrainerSetup) -> float:
    """Bytes of the base weights in one process. Embedding and head are neither rounded nor split."""
    size = setup.pass_settings.size
    if setup.config.quantization == "nf4":
        return shape.embedding_weights * size + shape.decoder_weights * NF4_BYTES
    shards = setup.config.num_processes if setup.config.shard_base else 1
    # A layer's whole weights are gathered while it runs.
    gathered = 2 * shape.decoder_weights / shape.num_layers if shards > 1 else 0
    return size * (shape.embedding_weights + shape.decoder_weights / shards + gathered)


def _copies(shape: ModelShape, setup: TrainerSetup) -> Part:
    """Copies of base weights: the decoder that full fine-tuning trains, or what makes a LoRA on a CPU faster."""
    size = setup.pass_settings.size
    if setup.lora is None:  # in float32 the trained decoder consists of the trained weights themselves
        copied = shape.decoder_weights * size if size < 4 else 0
        return _part("rounded copy of the trained weights", copied, remedy="train a LoRA instead of all weights")
    copied = _merged_copies(shape, setup, setup.lora)
    return Part(
        "trainer", "copies of the base weights for speed", copied, is_optional=True, remedy="use dtype bfloat16"
    )


def _merged_copies(shape: ModelShape, setup: TrainerSetup, lora: LoraConfig) -> int:
    """Bytes of merged weights, which only whole float32 weights on a CPU have."""
    config = setup.config
    if setup.device != "cpu" or setup.dtype != "float32" or config.shard_base or config.quantization != "none":
        return 0
    merged = 4 * shape.num_layers * sum(map(math.prod, shape.adapted_layers(lora.target_modules).values()))
    return merged if merged <= _MERGED_LIMIT else 0


def largest_batch(shape: ModelShape, setup: TrainerSetup, limit_bytes: int) -> int:
    """Return the most tokens of a micro-batch whose forecast fits into `limit_bytes`; 0 if not even one token does."""

    def fits(num_tokens: int) -> bool:
        return forecast_trainer(shape, setup, Batch(num_tokens, longest=num_tokens)).peak_bytes <= limit_bytes

    low, high = 0, 1
    while high < 2**24 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_checkpointing(setup: TrainerSetup) -> TrainerSetup:
    """Return `setup` with gradient checkpointing of whole layers."""
    return replace(setup, mode="full")


def choose_mode(shape: ModelShape, setup: TrainerSetup, batch: Batch, room_bytes: int) -> TrainerSetup:
    """Return `setup` with the least recomputation whose forecast fits into `room_bytes`, else with the most."""
    modes: tuple[Checkpointing, ...] = ("none", "selective", "full")
    setups = [replace(setup, mode=mode) for mode in modes]
    return next((one for one in setups if forecast_trainer(shape, one, batch).peak_bytes <= room_bytes), setups[-1])
