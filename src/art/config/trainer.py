"""Settings of the adapter and of the trainer."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from art.config.base import Config, Device, Dtype, Quantization, check_indices


class LoraConfig(Config):
    """The LoRA adapter that is trained: two small matrices A and B for each adapted layer."""

    rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter, the inner dimension of B @ A. "LoRA without regret" finds low ranks enough for RL."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter: the product B @ A is multiplied by `alpha / rank`."""
    use_rslora: bool = False
    """Multiply B @ A by `alpha / sqrt(rank)` instead of `alpha / rank`, so that the adapter's effect does not shrink at
    large ranks (rsLoRA, arXiv 2312.03732). At rank 16 that is 4 times the scale: lower `alpha` or the learning rate."""
    target_modules: list[str] | None = None
    """Endings of the names of modules to adapt; `None` adapts every linear layer except the language-model head."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial A matrices. B starts at zero."""

    @property
    def scale(self) -> float:
        """The factor of the product B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class TrainerConfig(Config):
    """Settings of the trainer, the processes that compute gradients: devices, number types, memory and speed."""

    device: Device = "auto"
    """Device to train on; `auto` takes CUDA, then MPS, then the CPU."""
    device_indices: tuple[int, ...] = ()
    """Indices of GPUs, one per process; empty takes the first GPUs that are not given to the engine."""
    dtype: Dtype = "auto"
    """Type of the base weights, and of the rounded copy that full fine-tuning computes with. `auto` is float32 on CPU,
    bfloat16 on CUDA and the checkpoint's type on MPS. Adapters, trained weights and logits are always float32."""
    max_tokens: int = Field(default=16_384, ge=64)
    """Most tokens in one forward and backward pass; a prefix that samples share counts once. A larger batch is split.
    On CPU at most 4,096 are used, and the trainer's log says so."""
    gradient_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Compute activations again in the backward pass instead of storing them: slower, with less memory. `true` does so
    for whole layers, `selective` for all but the attention, which costs most at long contexts. `auto` takes on CUDA the
    fastest of the three that fits into the free memory, by a forecast that the trainer's log shows, and is `false`
    elsewhere."""
    compile_layers: bool = False
    """Run the decoder layers through torch.compile. The first step takes minutes longer; on CPU later steps are up to a
    tenth faster."""
    quantization: Quantization = "none"
    """`nf4` keeps the frozen linear layers in 4 bits (QLoRA), an eighth of float32; it needs the extra `qlora`. The
    rounded weights are then the base model, for the embedded engine too."""
    keep_moments: int | None = Field(default=3, ge=2)
    """Newest steps whose optimiser moments stay on disk; `None` keeps all. Moments are twice as large as what is
    trained. Weights of older steps stay, and training from one starts with an optimiser that has seen no updates."""
    keep_token_files: int | None = Field(default=500, ge=0)
    """Newest steps whose token files stay on disk; 0 writes none, `None` keeps all. A token file holds log-prob,
    entropy and mask reason of each trained token, which the page shows: about 8 bytes per token, 1 GB for 500 steps of
    256,000 tokens. Rollouts, metrics and plans of older steps stay."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of all processes together; `None` gives engine and trainer disjoint halves of the cores."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that train together, each with a share of the micro-batches. On CUDA each has its own device; on CPU
    they share the threads."""
    shard_base: bool = False
    """Split the frozen base weights over the processes: slower, for models that do not fit on one device. Without it
    each process holds all weights."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_loader(cls, data: Any) -> Any:
        if isinstance(data, dict) and "loader" in data:
            raise ValueError(
                f"`loader` = {data['loader']!r} does not exist: transformers loads every model. Unsloth's attention "
                "and LoRA layers cannot compute a prefix tree; leave it out, and see `compile_layers`"
            )
        return data

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.shard_base and self.num_processes == 1:
            raise ValueError("`shard_base` splits the weights over several processes: set `num_processes` too")
        if self.shard_base and self.quantization != "none":
            raise ValueError("`shard_base` splits whole weights, not quantised ones: use one of the two")
        if self.compile_layers and (self.shard_base or self.quantization != "none"):
            raise ValueError("`compile_layers` is for whole weights: not with `shard_base` or `quantization`")
        if self.device == "mps" and self.num_processes > 1:
            raise ValueError('device "mps" is a single device: `num_processes` must be 1')
        check_indices(self.device, self.device_indices)
        if self.device_indices and len(self.device_indices) != self.num_processes:
            raise ValueError(
                f"`device_indices` has {len(self.device_indices)} GPUs for `num_processes` = {self.num_processes}; "
                "give one per process"
            )
        return self
