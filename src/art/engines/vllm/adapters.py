"""Read PEFT LoRA files before vLLM loads them, and write an adapter of zeros that replaces the base model.

vLLM reports nothing about an adapter that it has loaded, and little about what is wrong with a broken one. So ART reads
the files too. What vLLM really computes is checked later, when its log-probs are compared with the trainer's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from art.engine import AdapterInfo
from art.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

Weights = dict[str, npt.NDArray[Any]]


def read_adapter(name: str, path: Path) -> AdapterInfo:
    """Check the adapter in folder `path` and describe it.

    `norm` is `None`: vLLM cannot report what it holds, and a norm of the file would only repeat the manifest's hash.

    Raises:
        AdapterError: the adapter cannot be used. The message names the file at fault.
    """
    config, weights = _read(name, path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(
            f"adapter {name!r}: {path / CONFIG_FILE}: `r` must be a positive integer and `lora_alpha` a number, got "
            f"{rank!r} and {alpha!r}"
        )
    pairs = _pairs(name, path / WEIGHTS_FILE, weights)
    for module, (a, b) in pairs.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterError(
                f"adapter {name!r}: {path / WEIGHTS_FILE}: {module} has factors of shapes {a.shape} and {b.shape}, "
                f"expected [{rank}, in] and [out, {rank}]"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise AdapterError(f"adapter {name!r}: {path / WEIGHTS_FILE}: {module} contains NaN or infinite values")
    return AdapterInfo(name=name, num_layers=len(pairs), rank=rank, norm=None)


def write_zeros(source: Path, target: Path) -> None:
    """Write a copy of the adapter `source` in which every B is zero, so that it changes no weight.

    Raises:
        AdapterError: `source` cannot be read.
    """
    config, weights = _read("zeros", source)
    target.mkdir(parents=True, exist_ok=True)
    zeroed = {key: np.zeros_like(value) if ".lora_B." in key else value for key, value in weights.items()}
    save_file(zeroed, target / WEIGHTS_FILE)
    (target / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def _read(name: str, path: Path) -> tuple[dict[str, Any], Weights]:
    if not (path / CONFIG_FILE).exists() and (path / "model.safetensors").exists():
        raise AdapterError(
            f"adapter {name!r}: {path} contains a whole model; the vLLM engine serves LoRA adapters. Train LoRA, or "
            "use the embedded engine"
        )
    config_file = file = path / CONFIG_FILE
    try:
        config: Any = json.loads(file.read_bytes())
        file = path / WEIGHTS_FILE
        weights: Weights = load_file(file)
    except (OSError, ValueError, SafetensorError, TypeError) as error:
        raise AdapterError(f"adapter {name!r}: {file} is missing or corrupted ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = "`peft_type` must be 'LORA', the only kind that ART serves by vLLM"
        raise AdapterError(f"adapter {name!r}: {config_file}: {kind}")
    return config, weights


def _pairs(name: str, file: Path, weights: Weights) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Group the weights by module: name -> (A [r, in], B [out, r]). Every key must belong to a pair."""
    pairs: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, value in weights.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"adapter {name!r}: {file}: {key!r} is not a LoRA weight of a linear layer")
        pairs.setdefault(match["module"], {})[match["factor"]] = value.astype(np.float32)
    if not pairs:
        raise AdapterError(f"adapter {name!r}: {file} contains no LoRA weights")
    if halves := sorted(module for module, pair in pairs.items() if len(pair) != 2):
        raise AdapterError(f"adapter {name!r}: {file}: {halves[0]} has only one of lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}
