"""Short names of base models, and checks of the folders that may be given instead."""

from __future__ import annotations

import re
from pathlib import Path

from art.config.base import check_no_userinfo
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
"""Hub ids of chat models by their short names."""
HUB_ID_PATTERN = r"^(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}$"
"""Ids of the Hugging Face hub: `owner/name`, or a name alone."""
_EXPECTED = "a hub id such as 'Qwen/Qwen3-0.6B', the folder of a model, or a short name"
ADAPTER_CONFIG = "adapter_config.json"


def resolve_base_model(name: str) -> str:
    """Replace a short name by its hub id; hub ids and folders are returned unchanged. Raises `ConfigError` if the name
    is empty, or cannot be one of these."""
    _check_not_empty(name)
    problem = None
    if "://" in name:
        check_no_userinfo(name, "base_model")
        problem = "is an address"
    elif not name.isprintable():
        problem = "has a character that cannot be printed"
    elif looks_like_path(name) or Path(name).is_dir():
        return name
    elif "/" not in name:
        if known := SHORT_NAMES.get(name.lower()):
            return known
        import difflib  # not needed where names are right

        near = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"short names are {', '.join(SHORT_NAMES)}"
        raise ConfigError(f"there is no base model {name!r}: expected {_EXPECTED}; {hint}", param="base_model")
    elif re.search(HUB_ID_PATTERN, name) is None or re.search(r"\.\.|--|\.git$|[.-](?:/|$)", name):
        problem = (
            f": there is no folder of this name ({Path(name).absolute()}), and no hub id looks like that: an owner and "
            "a name of letters, digits, '.', '_' and '-'"
        )
    if problem is not None:
        words = problem if problem.startswith(":") else f" {problem}"
        raise ConfigError(f"base model {name!r}{words}; expected {_EXPECTED}", param="base_model")
    return name


def is_local(base_model: str) -> bool:
    """Whether a base model is a folder of the server rather than a hub id (`owner/name`)."""
    return "/" not in base_model or looks_like_path(base_model) or Path(base_model).exists()


def looks_like_path(base_model: str) -> bool:
    """Whether a base model cannot be a hub id: `./x`, `/x`, `~/x`, `x/`, `x/y/z`."""
    has_no_owner = base_model.startswith((".", "/", "~")) or base_model.endswith("/") or base_model.count("/") > 1
    return has_no_owner or "\\" in base_model


def find_folder(base_model: str) -> Path | None:
    """The folder that a base model names, after a check of its files; `None` for a hub id. Raises `ConfigError` if it
    is a path to something else; the message says which files are missing."""
    _check_not_empty(base_model)
    folder = Path(base_model).expanduser()
    if not folder.is_dir():
        if not looks_like_path(base_model):
            return None
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"base model {base_model!r}: {folder.absolute()} {what}; expected {_EXPECTED}", param="base_model"
        )
    names = {entry.name for entry in folder.iterdir()}
    if ADAPTER_CONFIG in names:
        raise ConfigError(
            f"base model {base_model!r} has a LoRA adapter ({ADAPTER_CONFIG}). Merge it into its model first, with "
            "peft's `merge_and_unload`, and give the folder of the merged model with its tokenizer; of one that ART "
            "has trained, `art checkpoints export MODEL merged` makes it",
            param="base_model",
        )
    has_weights = any(name.startswith("model") and name.endswith(".safetensors") for name in names)
    if "config.json" not in names or not has_weights:
        missing = "model*.safetensors" if "config.json" in names else "config.json"
        problem = f"base model {base_model!r} has no {missing}, which the folder of a model needs"
        raise ConfigError(f"{problem}; give the folder that has these files", param="base_model")
    return folder


def _check_not_empty(base_model: str) -> None:
    if not base_model.strip():
        raise ConfigError(f"`base_model` is empty ({base_model!r}); expected {_EXPECTED}", param="base_model")
