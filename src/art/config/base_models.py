"""Short names of base models, for those who do not know the hub's spelling by heart."""

from __future__ import annotations

import difflib
from pathlib import Path

from art.errors import ConfigError

SHORT_NAMES: dict[str, str] = {
    **{f"qwen-2.5-{size}": f"Qwen/Qwen2.5-{size.upper()}-Instruct"
       for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")},
    **{f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}"
       for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
    "qwen3-4b-instruct": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-30b-a3b-instruct": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "gpt-oss-20b": "openai/gpt-oss-20b",
}  # fmt: skip
"""The chat version of each, since agents talk."""


def resolve_base_model(name: str) -> str:
    """The hub id of a short name; hub ids and folders stay as they are.

    Raises:
        ConfigError: a single word that is neither.
    """
    known = SHORT_NAMES.get(name.lower())
    if known is not None and not Path(name).is_dir():
        return known
    if "/" in name or Path(name).is_dir():
        return name
    near = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"short names are {', '.join(SHORT_NAMES)}"
    raise ConfigError(
        f"there is no base model {name!r}: expected a hub id such as {SHORT_NAMES['qwen3-0.6b']!r}, the folder of a "
        f"model, or a short name; {hint}",
        param="base_model",
    )


def is_local(base_model: str) -> bool:
    """Whether it names files of the server rather than a hub id (`owner/name`)."""
    return base_model.count("/") != 1 or base_model[0] in "./~" or "\\" in base_model or Path(base_model).exists()
