"""What is trained, and where."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from art.config.base import Config, Device, Dtype, Quantization, check_indices


class LoraConfig(Config):
    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    """The product B @ A is scaled by `alpha / rank`."""
    target_modules: list[str] | None = None
    """Module name endings to adapt; `None` means every linear layer but the language-model head."""
    seed: int = Field(default=0, ge=0)
    """Of the initial A matrices; B starts at zero."""


class TrainerConfig(Config):
    device: Device = "auto"
    device_indices: tuple[int, ...] = ()
    """GPUs by their index, one per process; empty: the first that the engine is not told to use."""
    dtype: Dtype = "auto"
    """Of the base weights, and of the rounded copy that full fine-tuning computes with; adapters, trained weights and
    logits are always float32."""
    max_tokens: int = Field(default=16_384, ge=64)
    """Tree tokens in one forward and backward pass; larger trees are split."""
    gradient_checkpointing: bool = False
    compile_layers: bool = False
    """Run the decoder layers through torch.compile. The first step waits minutes for it; on CPU later ones gain between
    nothing and a tenth."""
    quantization: Quantization = "none"
    """`nf4` keeps the frozen linear layers in 4 bits (QLoRA), an eighth of float32; the extra `qlora` installs what it
    needs. The rounded model is the base model then, for the engine too: set `engine.quantization` to the same."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads, of all processes together; `None` gives engine and trainer disjoint halves of the cores."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes of this machine that train together, each with a share of the micro-batches. On CUDA each has its own
    device; on CPU they share the threads."""
    shard_base: bool = False
    """Split the frozen base weights over the processes instead of giving each all of them: slower, for models that do
    not fit one device."""

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
