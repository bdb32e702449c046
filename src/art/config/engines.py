"""Settings of engines, the processes that sample."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from art.config.addresses import check_no_userinfo
from art.config.base import Config, Device, Dtype, Quantization, check_indices

DEFAULT_LORAS = 4
"""Adapters that vLLM computes in one batch, unless its flags say otherwise."""
DEFAULT_RUNNING = 64
"""Requests of one key that are decoded together, unless settings or the engine say otherwise."""


class EngineSettings(Config):
    """Settings that every kind of engine has. An engine is the process that samples from a model."""

    device: Device = "auto"
    """Device to sample on; `auto` takes CUDA, then MPS, then the CPU."""
    device_indices: tuple[int, ...] = ()
    """Index of the GPU, among those that the server sees; empty takes one that the trainer does not use, if any."""
    dtype: Dtype = "auto"
    """Type of the weights; `auto` is float32 on CPU, bfloat16 on CUDA, and the checkpoint's type on MPS."""
    max_context: int | None = Field(default=None, ge=16)
    """Limit of tokens in prompt plus completion; `None` takes the model's own limit, `max_position_embeddings`, but at
    most 32,768. Set it for a longer context."""
    max_running: int | None = Field(default=None, ge=1)
    """Requests of one key that are decoded together; a request with `n` choices counts as n. An eighth more, rounded
    up, is for other keys, so that none waits until a long answer of another ends."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests of one project that may wait for their turn; further ones are refused with the HTTP status 429."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; `None` gives engine and trainer disjoint halves of the cores."""

    @property
    def num_at_once(self) -> int:
        """Requests of one key that are decoded together, by all copies of the engine, as far as it is known."""
        return self.max_running or DEFAULT_RUNNING


class EngineConfig(EngineSettings):
    """The embedded engine, which samples with PyTorch."""

    kind: Literal["torch"] = "torch"
    """Tells this engine from the others in settings that are stored."""
    max_running: int = Field(default=DEFAULT_RUNNING, ge=1)
    """Requests of one key that are decoded together; a request with `n` choices counts as n. An eighth more, rounded
    up, is for other keys, so that none waits until a long answer of another ends. The KV cache has this number of slots
    in use at once; each loaded full checkpoint has a KV cache of its own."""
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """Size of the KV cache in tokens; `None` fits `max_running` average requests, within the memory that is free."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Limit of prompt tokens in one forward pass, so that long prompts do not delay decoding. Keys share it. A token
    that attends to many others counts as several."""
    quantization: Quantization = "none"
    """Rounding of the base weights; by default that of the trainer, which it must equal. With `nf4` the engine computes
    with the rounded values, stored in `dtype`, so it is neither smaller nor faster."""

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
    "structured_outputs_config": "decides which tokens a grammar allows",
    **dict.fromkeys(("api_server_count",), "must be 1, because adapters are loaded through one API server"),
    **dict.fromkeys(("trust_remote_code",), "would run code that comes with a model"),
    "dtype": "is the field `dtype`",
    "enable_sleep_mode": "is the field `sleep`",
    "max_model_len": "is the field `max_context`",
    "max_num_seqs": "is the field `max_running`",
}
"""Flags of `vllm serve` that a user cannot set, and why."""


class VllmConfig(EngineSettings):
    """vLLM: a server that ART starts and supervises, or servers that already run."""

    kind: Literal["vllm"] = "vllm"
    """Tells this engine from the others in settings that are stored."""
    max_running: int | None = Field(default=None, ge=1)
    """Requests of one key that each server decodes together; a request with `n` choices counts as n. An eighth more,
    rounded up, is for other keys. `None` takes what the GPU's memory holds for this model, at most 512 in all; it is 64
    on CPU and for servers in `urls`."""
    urls: tuple[str, ...] = ()
    """Addresses of vLLM servers that already run, e.g. `("http://gpu1:8000",)`; none is started then. Their API key is
    read from VLLM_API_KEY, and they must see checkpoints under the same path. Set `max_running` to what one of them
    computes at once (its `--max-num-seqs`): further requests wait for their turn."""
    weights: Literal["lora", "merged"] = "lora"
    """How a checkpoint is loaded into vLLM. `lora`: as an adapter, while requests run. `merged`: as whole weights that
    replace the present ones, between requests. Full fine-tuning needs `merged`; vLLM then holds one checkpoint."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine frees its memory while the trainer works; requests wait then. `auto`: if both share a GPU.
    `always` needs a shared device; if that is the CPU, vLLM only pauses and frees nothing."""
    flags: dict[str, bool | int | float | str | list[str]] = {}
    """Other flags of `vllm serve`, with underscores: `{"tensor_parallel_size": 2}`. True becomes `--flag` and False
    becomes `--no-flag`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_indices(self.device, self.device_indices)
        if self.device == "mps":
            raise ValueError('vLLM has no device "mps"; expected "auto", "cpu" or "cuda"')
        for name in self.flags:
            if reason := _VLLM_OWNED.get(name.replace("-", "_").lstrip("_").partition(".")[0]):
                raise ValueError(f"flag {name!r} of vLLM {reason}; leave it out of `flags`")
        for url in self.urls:
            check_no_userinfo(url, "urls")
        if self.urls and (self.flags or self.device_indices):
            raise ValueError(
                "`flags` and `device_indices` are for a server that ART starts; with `urls`, set them there"
            )
        if self.urls and self.weights == "merged":
            raise ValueError(
                '`weights` is "merged", which needs a server that ART starts; those in `urls` get adapters. '
                "Leave one of the two out"
            )
        if self.urls and self.sleep == "always":
            raise ValueError('`sleep` is "always", but servers in `urls` are never put to sleep; leave one of them out')
        return self

    @property
    def is_quantized(self) -> bool:
        """Whether the flags make vLLM round weights, activations or KV cache more than its number type does."""
        flags = {name.replace("-", "_").lstrip("_"): value for name, value in self.flags.items()}
        cache = str(flags.get("kv_cache_dtype", "auto"))
        return "quantization" in flags or cache.startswith(("fp8", "int8", "nvfp4", "turboquant"))

    @property
    def max_loras(self) -> int:
        """Adapters in one batch. Each checkpoint that is sampled from is one; requests for further ones wait."""
        flags = {name.replace("-", "_").lstrip("_"): value for name, value in self.flags.items()}
        return int(str(flags.get("max_loras", DEFAULT_LORAS)))

    @property
    def num_devices(self) -> int:
        """Number of GPUs that the flags ask for: replicas times stages times shards."""
        return self._size("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")

    @property
    def num_at_once(self) -> int:
        """Requests of one key that are decoded together, by all servers and replicas."""
        return (self.max_running or DEFAULT_RUNNING) * max(1, len(self.urls)) * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model in one server."""
        return self._size("data_parallel_size")

    @property
    def uses_ray(self) -> bool:
        """Whether Ray spreads the server over machines, so that its GPUs are not only those of this one."""
        names = {name.replace("-", "_").lstrip("_"): value for name, value in self.flags.items()}
        return names.get("distributed_executor_backend") == "ray" or names.get("data_parallel_backend") == "ray"

    def _size(self, *kinds: str) -> int:
        """The product of these flags; a flag that is not set counts as 1."""
        sizes = [value for name, value in self.flags.items() if name.replace("-", "_").lstrip("_") in kinds]
        return math.prod(size for size in sizes if isinstance(size, int))


def _engine_kind(value: Any) -> str:
    """The kind of engine; `torch` in settings that were stored before there was a choice."""
    return str(value.get("kind", "torch") if isinstance(value, dict) else getattr(value, "kind", "torch"))


AnyEngineConfig = Annotated[
    Annotated[EngineConfig, Tag("torch")] | Annotated[VllmConfig, Tag("vllm")], Discriminator(_engine_kind)
]
