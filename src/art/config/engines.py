"""Settings of engines."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from art.config.base import Config, Device, Dtype, Quantization, check_indices


class EngineSettings(Config):
    """What every kind of engine understands."""

    device: Device = "auto"
    device_indices: tuple[int, ...] = ()
    """GPU by its index, of those that the server sees; empty: one that the trainer does not use, if there is one."""
    dtype: Dtype = "auto"
    """`auto`: float32 on CPU, bfloat16 on CUDA, the checkpoint's on MPS."""
    max_context: int | None = Field(default=None, ge=16)
    """Tokens of prompt plus completion; `None` takes the model's own limit, at most 32,768."""
    max_running: int = Field(default=64, ge=1)
    """Requests decoded together, which is the number of KV slots in use at once. Each loaded full checkpoint has as
    many of its own, and its own KV cache."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests that may queue; one more is refused with 429."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; `None` gives engine and trainer disjoint halves of the cores."""


class EngineConfig(EngineSettings):
    """The embedded engine."""

    kind: Literal["torch"] = "torch"
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """KV cache size; `None` fits `max_running` average requests and what memory allows."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Prompt tokens computed in one forward pass, so that long prompts do not stall decoding."""
    quantization: Quantization = "none"
    """As the trainer's: the engine computes with the values that NF4 leaves of the base weights, kept in `dtype`, so it
    becomes neither smaller nor faster."""

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        check_indices(self.device, self.device_indices)
        if len(self.device_indices) > 1:
            raise ValueError(f"the embedded engine runs on one device: `device_indices` has {self.device_indices}")
        return self


_VLLM_OWNED = {
    **dict.fromkeys(("model", "served_model_name", "tokenizer", "skip_tokenizer_init"), "follows from `base_model`"),
    **dict.fromkeys(("host", "port", "uds", "api_key"), "is chosen at each start, for this machine only"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_cpu_loras"), "follows from the LoRA settings"),
    **dict.fromkeys(("logprobs_mode", "max_logprobs", "generation_config"), "decides what log-probs mean"),
    **dict.fromkeys(("api_server_count",), "must be 1, because adapters are loaded through one API server"),
    **dict.fromkeys(("trust_remote_code",), "would run code that comes with a model"),
    "dtype": "is the field `dtype`",
    "enable_sleep_mode": "is the field `sleep`",
    "max_model_len": "is the field `max_context`",
    "max_num_seqs": "is the field `max_running`",
    "max_loras": "is the field `max_loras`",
}
"""Flags of `vllm serve` that a user cannot set, and why."""


class VllmConfig(EngineSettings):
    """vLLM: a server of its own, which ART starts and watches, or servers that run already."""

    kind: Literal["vllm"] = "vllm"
    urls: tuple[str, ...] = ()
    """Replicas that run already, e.g. `("http://gpu1:8000",)`; nothing is started then. Their key is read from
    VLLM_API_KEY, and checkpoints must be reachable for them under the same path."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters, which are steps of models, in one batch; requests for more of them wait."""
    weights: Literal["lora", "merged"] = "lora"
    """How a step gets into vLLM. `lora`: as an adapter, while requests run. `merged`: as whole weights in place of
    those that are there, between requests; full fine-tuning needs that. The server then holds one step of one model."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine gives its memory to the trainer while that works; requests wait meanwhile. `auto`: where the
    two share a GPU. `always` needs a shared device, which may be the CPU: vLLM only stands still there."""
    flags: dict[str, bool | int | float | str | list[str]] = {}
    """Any further flag of `vllm serve`, with underscores: `{"tensor_parallel_size": 2}`. True becomes `--flag`,
    False `--no-flag`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_indices(self.device, self.device_indices)
        if self.device == "mps":
            raise ValueError('vLLM has no device "mps"; expected "auto", "cpu" or "cuda"')
        for name in self.flags:
            if reason := _VLLM_OWNED.get(name.replace("-", "_").lstrip("_")):
                raise ValueError(f"flag {name!r} of vLLM {reason}; leave it out of `flags`")
        if self.urls and (self.flags or self.device_indices):
            raise ValueError(
                "`flags` and `device_indices` are for a server that ART starts; with `urls`, set them where those start"
            )
        if self.urls and self.weights == "merged":
            raise ValueError(
                '`weights` is "merged", which needs a server that ART starts; those of `urls` are given adapters. '
                "Leave one of the two out"
            )
        if self.urls and self.sleep == "always":
            raise ValueError('`sleep` is "always", but servers of `urls` are not put to sleep; leave one of them out')
        return self

    @property
    def num_devices(self) -> int:
        """GPUs that the flags ask for: replicas times stages times shards."""
        kinds = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
        sizes = [value for name, value in self.flags.items() if name.replace("-", "_").lstrip("_") in kinds]
        return math.prod(size for size in sizes if isinstance(size, int))


def _engine_kind(value: Any) -> str:
    """`torch` where nothing is said, as in settings that were stored before there was a choice."""
    return str(value.get("kind", "torch") if isinstance(value, dict) else getattr(value, "kind", "torch"))


AnyEngineConfig = Annotated[
    Annotated[EngineConfig, Tag("torch")] | Annotated[VllmConfig, Tag("vllm")], Discriminator(_engine_kind)
]
