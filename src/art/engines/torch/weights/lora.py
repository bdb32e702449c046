"""Reading PEFT LoRA files (`adapter_config.json` and `adapter_model.safetensors`) without importing peft.

Everything that could make an adapter behave differently from how it was trained is refused: unreadable files, keys that
match no layer, shapes that do not fit, and settings that this engine does not support.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from art.engine import AdapterInfo
from art.engines.torch.weights.linear import Adapter, Factors, Part
from art.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Settings that describe how the adapter was trained, not what it computes.
_DESCRIPTIVE = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("init_lora_weights", "loftq_config", "eva_config", "lora_ga_config", "ensure_weight_tying"),
        *("megatron_core", "qalora_group_size", "runtime_config"),
    }
)
_COMPUTED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias"})
# Other initialisations (PiSSA, OLoRA, CorDA, LoftQ ...) also change the base weights.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "lora_ga")


@dataclass(frozen=True, slots=True)
class _Settings:
    rank: int
    scale: float


def read_adapter(
    name: str, path: Path, *, uid: int, parts: Mapping[str, Part], num_linears: int, dtype: torch.dtype, device: str
) -> Adapter:
    """Load the adapter in folder `path` for the layers `parts` (by Hugging Face module name).

    Raises:
        AdapterError: a file is unreadable, or does not fit the base model or this engine. Names the file and the key.
    """
    settings = _read_settings(name, path / CONFIG_FILE)
    weights = _read_weights(name, path / WEIGHTS_FILE)
    pairs = _pair_up(name, path / WEIGHTS_FILE, weights, parts)
    for module, (a, b) in pairs.items():
        _check_pair(name, path / WEIGHTS_FILE, module, a, b, settings.rank, parts[module])
    factors: list[Factors | None] = [None] * num_linears
    by_linear: dict[int, list[str]] = {}
    for module in pairs:
        by_linear.setdefault(parts[module].linear.index, []).append(module)
    for index, modules in by_linear.items():
        factors[index] = _fuse([(parts[m], *pairs[m]) for m in sorted(modules)], settings, dtype, device)
    info = AdapterInfo(name=name, num_layers=len(pairs), rank=settings.rank, norm=_norm(pairs, settings.scale))
    return Adapter(uid=uid, factors=factors, info=info)


def _read_settings(name: str, path: Path) -> _Settings:
    def refuse(problem: str) -> AdapterError:
        return AdapterError(f"adapter {name!r}: {path}: {problem}")

    try:
        config: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read ({error}); save the adapter with peft's save_pretrained") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise refuse("`peft_type` must be 'LORA'; other adapter kinds are not served")
    for key, value in config.items():
        if value and key not in _DESCRIPTIVE and key not in _COMPUTED:
            raise refuse(f"`{key}` is {value!r}, which the embedded engine does not support; train without it")
    if config.get("bias", "none") != "none":
        raise refuse(f"`bias` is {config['bias']!r}; only 'none' is supported")
    if (init := config.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise refuse(f"`init_lora_weights` is {init!r}, which changes the base weights; convert it to plain LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise refuse(f"`r` must be a positive integer, got {rank!r}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise refuse(f"`lora_alpha` must be a finite number, got {alpha!r}")
    return _Settings(rank=rank, scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _read_weights(name: str, path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: {path}: cannot be read, it is missing or corrupted ({error})") from error
    return weights


def _pair_up(
    name: str, path: Path, weights: Mapping[str, Tensor], parts: Mapping[str, Part]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Map module names to (A [r, in], B [out, r]). Every key must belong to a pair."""
    factors: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in weights.items():
        match = _KEY.fullmatch(key)
        if match is None or match["module"] not in parts:
            unknown.append(key)
        else:
            factors.setdefault(match["module"], {})[match["factor"]] = tensor
    if not factors:
        expected = f"base_model.model.{next(iter(parts), '<none>')}.lora_A.weight"
        raise AdapterError(
            f"adapter {name!r}: {path}: matches no layer of the base model (first key {next(iter(weights), None)!r}, "
            f"expected keys like {expected!r}); was it trained on another model?"
        )
    if unknown:
        shown = ", ".join(repr(key) for key in sorted(unknown)[:3])
        raise AdapterError(
            f"adapter {name!r}: {path}: {len(unknown)} of {len(weights)} keys match no adaptable linear layer of the "
            f"base model: {shown}; they would be ignored"
        )
    for module, pair in factors.items():
        if len(pair) != 2:
            missing = "AB".replace(next(iter(pair)), "")
            raise AdapterError(
                f"adapter {name!r}: {path}: 'base_model.model.{module}.lora_{missing}.weight' is missing, but the "
                "other matrix of the pair is there"
            )
    return {module: (pair["A"].float(), pair["B"].float()) for module, pair in factors.items()}


def _check_pair(name: str, path: Path, module: str, a: Tensor, b: Tensor, rank: int, part: Part) -> None:
    for factor, tensor, expected in (
        ("A", a, (rank, part.linear.num_in)),
        ("B", b, (part.end - part.start, rank)),
    ):
        key = f"base_model.model.{module}.lora_{factor}.weight"
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"adapter {name!r}: {path}: {key!r} has shape {list(tensor.shape)}, expected {list(expected)} for rank "
                f"{rank}; was it trained on another model?"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"adapter {name!r}: {path}: {key!r} holds NaN or infinite values")


def _fuse(items: list[tuple[Part, Tensor, Tensor]], settings: _Settings, dtype: torch.dtype, device: str) -> Factors:
    """Join the factors of all parts of a fused linear layer: A side by side, B block-diagonal."""
    linear, rank = items[0][0].linear, settings.rank
    a = torch.cat([a for _, a, _ in items]).t()
    b = torch.zeros(rank * len(items), linear.num_out)
    for i, (part, _, part_b) in enumerate(items):
        b[i * rank : (i + 1) * rank, part.start : part.end] = part_b.t() * settings.scale
    return Factors(
        a=a.to(device=device, dtype=dtype).contiguous(),
        b=b.to(device=device, dtype=dtype).contiguous(),
    )


def _norm(pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> float:
    """Frobenius norm of all `scale * B A` together. |BA|^2 = sum(B^T B * A A^T), so no product is formed."""
    squared = sum(float(((b.t() @ b) * (a @ a.t())).sum(dtype=torch.float64)) for a, b in pairs.values())
    return scale * math.sqrt(max(squared, 0.0))
