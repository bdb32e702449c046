"""Forecast of an engine's memory: weights, KV cache, adapters, and what it needs besides, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from art.config import EngineConfig, EngineSettings, LoraConfig, VllmConfig
from art.config.engines import DEFAULT_RUNNING
from art.memory.shape import DTYPE_BYTES, GIB, ModelShape, Part, resolve_dtype, total
from art.memory.trainer import PROCESS_BYTES

VLLM_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that `vllm serve` takes by default (its flag `gpu_memory_utilization`)."""
LARGEST_RUNNING = 512
"""vLLM records CUDA graphs for up to 512 requests; larger batches run without."""
SMALLEST_RUNNING = 16
KV_SHARE = 0.85
"""Part of the memory beside the weights that is left for keys and values, after activations and CUDA graphs."""
AVERAGE_TOKENS = 2048
"""Tokens of keys and values that an average running request has for itself, beside what it shares with its group. vLLM
pauses requests when this was too little."""
ASLEEP_BYTES = 2 * GIB
"""What vLLM keeps of a GPU while it sleeps: CUDA's context and its captured graphs. vLLM's logs report 1 to 1.5 GiB of
each on one GPU (vllm-project/vllm pull requests 11743 and 45623); not measured here."""
_BATCHED_TOKENS = 8192
"""Most tokens of one pass of vLLM by default on large GPUs."""
_VLLM_HOST_BYTES = 4 * GIB
"""Main memory of vLLM's own processes, approximately."""
_CACHED_ADAPTERS = 32
"""Adapters that vLLM keeps in main memory, as ART starts it."""
_EMBEDDED_ADAPTERS = 4
_EMBEDDED_SHARE = {"cpu": 0.25, "cuda": 0.4, "mps": 0.25}
"""Most of the memory that the embedded engine gives to its KV cache, as in `art.engines.torch.base_model`."""
_AVERAGE_REQUEST_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForecast:
    """The forecast memory of an engine on one of its devices."""

    awake: tuple[Part, ...]
    asleep: tuple[Part, ...] = ()
    """What it keeps of the device while it sleeps; equal to `awake` for an engine that cannot sleep."""
    host: tuple[Part, ...] = ()
    """Main memory, if the device is a GPU."""
    least: tuple[Part, ...]
    """What it needs at least: its weights, and a cache for one request. The other parts adapt to the device."""


def forecast_engine(
    shape: ModelShape, config: EngineSettings, lora: LoraConfig | None, *, device: str, limit_bytes: int
) -> EngineForecast:
    """Forecast an engine on a device ("cpu", "cuda", "mps") with `limit_bytes` of memory."""
    size = DTYPE_BYTES[resolve_dtype(config.dtype, device)]
    num_devices = config.num_devices if isinstance(config, VllmConfig) else 1
    context = config.max_context or shape.max_context
    adapter = size * (0 if lora is None else shape.adapter_weights(lora.rank, lora.target_modules))
    num_adapters = config.max_loras if isinstance(config, VllmConfig) else _EMBEDDED_ADAPTERS
    tokens = _BATCHED_TOKENS if isinstance(config, VllmConfig) else getattr(config, "prefill_tokens", _BATCHED_TOKENS)
    inner = shape.layer.mlp or shape.layer.experts
    # Hidden states and MLP of a pass, and the logits of the running requests in float32 with their probabilities.
    running = config.max_running
    if running is None:
        assert isinstance(config, VllmConfig)
        running = max_running_of(config, shape, device=device, memory_bytes=limit_bytes, context=context)
    batch = size * tokens * (4 * shape.layer.hidden + 3 * inner) + 3 * 4 * running * shape.vocab_size
    process = ASLEEP_BYTES if isinstance(config, VllmConfig) and device == "cuda" else PROCESS_BYTES.get(device, 0)
    per_token = shape.kv_bytes_per_token(size) // num_devices
    base = [
        _part("process and captured graphs", process),
        _part("weights", shape.num_weights * size // num_devices, _WEIGHTS_REMEDY),
        _part("adapters", num_adapters * adapter // num_devices, "lower `lora.rank`"),
        _part("workspace of a batch", batch // num_devices, "lower `engine.max_running`"),
    ]
    cache = _cache_bytes(config, per_token, context, device, limit_bytes, total(base), running)
    awake = (*base, _part("KV cache", cache, _CACHE_REMEDY[isinstance(config, VllmConfig)]))
    least = (*base[:2], _part("KV cache of one request", per_token * context, "lower `engine.max_context`"))
    if not isinstance(config, VllmConfig):
        return EngineForecast(awake=awake, asleep=awake, least=least, host=_host(device))
    host = (
        _part("processes in main memory", _VLLM_HOST_BYTES),
        Part(
            "engine",
            "adapters in main memory",
            _CACHED_ADAPTERS * adapter,
            is_optional=True,
            remedy="lower `lora.rank`",
        ),
    )
    return EngineForecast(awake=awake, asleep=(base[0],), host=host, least=least)


_WEIGHTS_REMEDY = 'use `engine.dtype` "bfloat16", a smaller base model, or more GPUs'
_CACHE_REMEDY = {
    True: "lower `gpu_memory_utilization` in `engine.flags`",
    False: "lower `engine.kv_cache_tokens` or `engine.max_running`",
}


def sleeping_weights(shape: ModelShape, config: EngineSettings) -> Part:
    """The copy of vLLM's weights in main memory while it sleeps at level 1, of all its GPUs together."""
    size = DTYPE_BYTES[resolve_dtype(config.dtype, "cuda")]
    return _part("weights in main memory while asleep", shape.num_weights * size, 'set `engine.sleep` to "never"')


def memory_share(config: VllmConfig) -> float:
    """Share of each GPU's memory that vLLM takes: its flag `gpu_memory_utilization`, else its default."""
    flags = {name.replace("-", "_").lstrip("_"): value for name, value in config.flags.items()}
    return float(str(flags.get("gpu_memory_utilization", VLLM_MEMORY_SHARE)))


def max_running_of(
    config: VllmConfig, shape: ModelShape | None, *, device: str, memory_bytes: int | None, context: int
) -> int:
    """Return how many requests each vLLM server computes at once: the setting, or what its memory holds.

    Args:
        shape: the base model's; `None` if unknown.
        memory_bytes: memory of one GPU; `None` if unknown.
    """
    if config.max_running is not None:
        return config.max_running
    if device != "cuda" or shape is None or memory_bytes is None:
        return DEFAULT_RUNNING
    num_gpus = config.num_devices // config.num_replicas
    return choose_max_running(
        shape, memory_bytes=memory_bytes, num_gpus=num_gpus, share=memory_share(config), context=context
    )


def choose_max_running(shape: ModelShape, *, memory_bytes: int, num_gpus: int, share: float, context: int) -> int:
    """Choose how many requests a vLLM server computes at once, `max_num_seqs`.

    As many as the KV cache holds when each has `AVERAGE_TOKENS` or its whole context, in multiples of 16, from 16 to
    512.

    Example: Qwen3-8B has 16.4 GB of weights, and 144 KiB of keys and values for a token (36 layers, 8 heads of 128). On
    one GPU of 139 GiB that makes room for 320 requests, on one of 80 GiB for 160.

    Args:
        memory_bytes: memory of one GPU.
        num_gpus: GPUs that hold one copy of the model together.
        share: the part of that memory that vLLM may take.
        context: longest context in tokens.
    """
    size = DTYPE_BYTES["bfloat16"]
    free = share * memory_bytes * num_gpus - size * shape.num_weights
    request_bytes = shape.kv_bytes_per_token(size) * min(AVERAGE_TOKENS, context)
    fits = int(KV_SHARE * max(0.0, free) / request_bytes)
    return max(SMALLEST_RUNNING, min(LARGEST_RUNNING, fits // 16 * 16))


def _cache_bytes(
    config: EngineSettings, per_token: int, context: int, device: str, limit_bytes: int, others_bytes: int, running: int
) -> int:
    if isinstance(config, VllmConfig):
        if device == "cpu":
            return GIB  # see `CPU_KV_CACHE_GIB`
        return max(0, int(memory_share(config) * limit_bytes) - others_bytes)
    if isinstance(config, EngineConfig) and config.kv_cache_tokens is not None:
        return config.kv_cache_tokens * per_token
    needed = max(context, running * min(context, _AVERAGE_REQUEST_TOKENS)) * per_token
    return min(needed, int(_EMBEDDED_SHARE[device] * limit_bytes))


def _host(device: str) -> tuple[Part, ...]:
    return () if device != "cuda" else (_part("process in main memory", PROCESS_BYTES["cpu"]),)


def _part(name: str, size_bytes: int, remedy: str | None = None) -> Part:
    return Part("engine", name, size_bytes, remedy=remedy)
