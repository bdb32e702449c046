"""Settings of the processes that sample (engines) and that train (the trainer), and of the adapter."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from art.config.base import Config, Device, Dtype, Quantization, check_no_userinfo

PREFILL_TOKENS = 4096
"""Prompt tokens in one forward pass of the embedded engine, so that long prompts do not delay decoding. Keys share
them. A token that attends to many others counts as several."""
DEFAULT_LORAS = 4
"""Adapters that vLLM computes in one batch, unless its flags say otherwise."""
DEFAULT_RUNNING = 64
"""Requests that are decoded together, unless settings or the engine say otherwise."""


class ProcessConfig(Config):
    """Settings that engines and trainers have alike: where a process computes, and with which type."""

    device: Device = "auto"
    """Device to compute on; `auto` takes CUDA, then MPS, then the CPU."""
    device_indices: tuple[int, ...] = ()
    """Indices of GPUs among those that the server sees, one per process. Empty takes GPUs for the trainer first, and
    for the engine those that the trainer does not use, if there are enough."""
    dtype: Dtype = "auto"
    """Type of the base weights, and of the rounded copy that full fine-tuning computes with; `auto` is float32 on CPU,
    bfloat16 on CUDA, and the checkpoint's type on MPS. Adapters, trained weights and logits of the trainer are always
    float32."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of all processes together; `None` gives engine and trainer disjoint halves of the cores."""

    @model_validator(mode="after")
    def _check_indices(self) -> Self:
        indices = self.device_indices
        if indices and self.device not in ("auto", "cuda"):
            raise ValueError(f'`device_indices` names GPUs, but `device` is "{self.device}"; leave one of the two out')
        if len(set(indices)) < len(indices) or any(index < 0 for index in indices):
            raise ValueError(f"`device_indices` must be different numbers from 0; got {indices}")
        return self


class EngineSettings(ProcessConfig):
    """Settings that every kind of engine has. An engine is the process that samples from a model."""

    replicas: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    """Engine processes that sample from the same model, each with all of its weights. On CUDA each has GPUs of its own;
    on CPU they share the threads. `max_running` holds for each. `auto`: as many as find room beside the trainer when
    the model's processes are first needed; on this machine one per GPU, and one in all on CPU."""
    max_context: int | None = Field(default=None, ge=16)
    """Limit of tokens in prompt plus completion; `None` takes the model's own limit, `max_position_embeddings`, but at
    most 32,768. Set it for a longer context."""
    max_running: int | None = Field(default=None, ge=1)
    """Requests that are decoded together; a request with `n` choices counts as n. Where more wait, projects and their
    keys take turns. With vLLM `None` takes what the GPU's memory holds for this model, at most 512 in all; it is 64 on
    CPU and for servers in `urls`."""

    @property
    def num_replicas(self) -> int:
        """`replicas` as a number; 1 as long as "auto" is not decided."""
        return 1 if self.replicas == "auto" else self.replicas

    @property
    def num_at_once(self) -> int:
        """Requests that one replica decodes together, as far as it is known."""
        return self.max_running or DEFAULT_RUNNING


class EngineConfig(EngineSettings):
    """The embedded engine, which samples with PyTorch."""

    kind: Literal["torch"] = "torch"
    """Tells this engine from the others in settings that are stored."""
    max_running: int = Field(default=DEFAULT_RUNNING, ge=1)
    """Requests that are decoded together; a request with `n` choices counts as n. Where more wait, projects and their
    keys take turns. Each loaded full checkpoint has a KV cache of its own."""
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """Size of the KV cache in tokens; `None` fits `max_running` average requests, within the memory that is free."""

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.replicas != "auto" and len(self.device_indices) not in (0, self.replicas):
            raise ValueError(
                f"the embedded engine runs on one device, each replica on its own: `device_indices` has "
                f"{self.device_indices}, and `replicas` is {self.replicas}"
            )
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
        if self.device == "mps":
            raise ValueError('vLLM has no device "mps"; expected "auto", "cpu" or "cuda"')
        for name in self.flags:
            if reason := _VLLM_OWNED.get(name.replace("-", "_").lstrip("_").partition(".")[0]):
                raise ValueError(f"flag {name!r} of vLLM {reason}; leave it out of `flags`")
        for url in self.urls:
            check_no_userinfo(url, "urls")
        if self.urls and (self.flags or self.device_indices):
            raise ValueError("`flags` and `device_indices` are for a server that ART starts; leave out them or `urls`")
        if self.urls and self.replicas != 1:
            raise ValueError("`replicas` are servers that ART starts, and `urls` names servers that run; leave out one")
        if self.urls and self.weights == "merged":
            raise ValueError('`weights` is "merged", which needs a server that ART starts; leave out it or `urls`')
        if self.urls and self.sleep == "always":
            raise ValueError('`sleep` is "always", but servers in `urls` are never put to sleep; leave one of them out')
        return self

    @property
    def is_quantized(self) -> bool:
        """Whether the flags make vLLM round weights, activations or KV cache more than its number type does."""
        flags = self._flags()
        cache = str(flags.get("kv_cache_dtype", "auto"))
        return "quantization" in flags or cache.startswith(("fp8", "int8", "nvfp4", "turboquant"))

    @property
    def max_loras(self) -> int:
        """Adapters in one batch. Each checkpoint that is sampled from is one; requests for further ones wait."""
        return int(str(self._flags().get("max_loras", DEFAULT_LORAS)))

    @property
    def num_devices(self) -> int:
        """Number of GPUs that the flags ask for, for each replica: copies times stages times shards."""
        return self._size("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")

    @property
    def num_at_once(self) -> int:
        """Requests that one replica decodes together, or all servers in `urls`, by all their copies of the model."""
        return (self.max_running or DEFAULT_RUNNING) * max(1, len(self.urls)) * self.num_copies

    @property
    def num_copies(self) -> int:
        """Number of copies of the model in one server."""
        return self._size("data_parallel_size")

    @property
    def uses_ray(self) -> bool:
        """Whether Ray spreads the server over machines, so that its GPUs are not only those of this one."""
        flags = self._flags()
        return "ray" in (flags.get("distributed_executor_backend"), flags.get("data_parallel_backend"))

    def _flags(self) -> dict[str, Any]:
        """The flags by the names that vLLM's own settings have."""
        return {name.replace("-", "_").lstrip("_"): value for name, value in self.flags.items()}

    def _size(self, *kinds: str) -> int:
        """The product of these flags; a flag that is not set counts as 1."""
        sizes = [value for name, value in self._flags().items() if name in kinds]
        return math.prod(size for size in sizes if isinstance(size, int))


# Settings that were stored before there was a choice of engines name no kind.
AnyEngineConfig = Annotated[
    Annotated[EngineConfig, Tag("torch")] | Annotated[VllmConfig, Tag("vllm")],
    Discriminator(lambda value: (value if isinstance(value, dict) else vars(value)).get("kind", "torch")),
]


class LoraConfig(Config):
    """The LoRA adapter that is trained: two small matrices A and B for each adapted layer."""

    rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter, the inner dimension of B @ A. "LoRA without regret" finds low ranks enough for RL."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter: the product B @ A is multiplied by `alpha / rank`."""
    target_modules: list[str] | None = None
    """Endings of the names of modules to adapt; `None` adapts every linear layer except the language-model head."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial A matrices. B starts at zero."""

    @property
    def scale(self) -> float:
        """The factor of the product B @ A."""
        return self.alpha / self.rank


class TrainerConfig(ProcessConfig):
    """Settings of the trainer, the processes that compute gradients: devices, number types, memory and speed."""

    max_tokens: int = Field(default=16_384, ge=64)
    """Most tokens in one forward and backward pass. A prefix that samples share counts once, and not at all where it
    is longer than half of this. A larger batch is split. On CPU at most 4,096 are used, and the trainer's log says
    so."""
    gradient_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Compute activations again in the backward pass instead of storing them: slower, with less memory. `true` does so
    for whole layers, `selective` for all but the attention, which costs most at long contexts. `auto` takes on CUDA the
    fastest of the three that fits into the free memory, by a forecast that the trainer's log shows, and is `false`
    elsewhere."""
    quantization: Quantization = "none"
    """`nf4` keeps the frozen linear layers in 4 bits (QLoRA), an eighth of float32; it needs the extra `qlora`. The
    rounded weights are then the base model, for the embedded engine too, which stores them in `dtype`: it is neither
    smaller nor faster."""
    keep_moments: int | None = Field(default=3, ge=2)
    """Newest steps whose optimiser moments stay on disk; `None` keeps all. Moments are twice as large as what is
    trained. Weights of older steps stay, and training from one starts with an optimiser that has seen no updates."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that train together, each with a share of the micro-batches. On CUDA each has its own device; on CPU
    they share the threads."""
    shard_base: bool = False
    """Split the frozen base weights over the processes: slower, for models that do not fit on one device. Without it
    each process holds all weights."""

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.shard_base and self.num_processes == 1:
            raise ValueError("`shard_base` splits the weights over several processes: set `num_processes` too")
        if self.shard_base and self.quantization != "none":
            raise ValueError("`shard_base` splits whole weights, not quantised ones: use one of the two")
        if self.device == "mps" and self.num_processes > 1:
            raise ValueError('device "mps" is a single device: `num_processes` must be 1')
        if self.device_indices and len(self.device_indices) != self.num_processes:
            count = len(self.device_indices)
            raise ValueError(
                f"`device_indices` has {count} GPUs for `num_processes` = {self.num_processes}; give one each"
            )
        return self
