"""The formats of an export.

peft       the adapter, for `peft.PeftModel.from_pretrained` and vLLM's `--lora-modules`
merged     a whole Hugging Face model, for transformers, `vllm serve` and other readers of that format
gguf       the merged model for llama.cpp, made by llama.cpp's converter
gguf-lora  the adapter for llama.cpp (`--lora`), made by llama.cpp's converter
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from art.errors import ConfigError, ProcessError
from art.exports.folder import OnBytes, copy_files, new_folder
from art.exports.merge import merge
from art.storage import checkpoints

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
LLAMA_CPP = "ART_LLAMA_CPP"
"""Environment variable that names a checkout of llama.cpp."""


def export(
    checkpoint: Path, base_model: str, form: str, target: Path, llama_cpp: str | None, on_bytes: OnBytes
) -> None:
    """Export a checkpoint in the format `form` as the folder `target`, with a manifest.

    Args:
        base_model: folder or hub id of the model that the checkpoint was trained from.
        llama_cpp: a checkout of llama.cpp; `None` uses `ART_LLAMA_CPP`, or converters on the PATH.

    Raises:
        ConfigError: this checkpoint has no such export, or a program that the export needs is missing.
        ProcessError: llama.cpp's converter failed.
    """
    if checkpoints.is_full(checkpoint) and form in ("peft", "gguf-lora"):
        raise ConfigError(
            f"{form!r} is an adapter, but this model was trained as a whole; export it as 'merged' or 'gguf'"
        )
    checkpoints.verify(checkpoint)
    base = checkpoint if checkpoints.is_full(checkpoint) else base_folder(base_model)
    with new_folder(target, manifest=True) as folder:
        if form == "peft":
            copy_files(checkpoint, folder, list(checkpoints.ADAPTER_FILES), on_bytes)
        elif form == "merged":
            merge(checkpoint, base, folder, on_bytes)
        elif form == "gguf":
            converter = find_converter("convert_hf_to_gguf.py", llama_cpp)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".merged-") as merged:
                merge(checkpoint, base, Path(merged), on_bytes)
                _convert(converter, [merged, "--outfile", str(folder / "model.gguf")])
        elif form == "gguf-lora":
            converter = find_converter("convert_lora_to_gguf.py", llama_cpp)
            options = ["--base", str(base), "--outfile", str(folder / "adapter.gguf")]
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".adapter-") as plain:
                copy_files(checkpoint, Path(plain), list(checkpoints.ADAPTER_FILES), on_bytes)
                _write_plain_scale(Path(plain) / checkpoints.ADAPTER_CONFIG)
                _convert(converter, [plain, *options])
        else:
            raise ConfigError(f"there is no export format {form!r}; there are peft, merged, gguf and gguf-lora")


def merge_adapter(adapter: Path, base_model: str, target: Path, on_bytes: OnBytes) -> None:
    """Merge a base model with its LoRA adapter as the folder `target`. The adapter's tokenizer is used if it has one.

    Raises:
        ConfigError: the base model is missing, or the adapter does not fit it.
    """
    base = base_folder(base_model)
    with new_folder(target, manifest=True) as folder:
        merge(adapter, base, folder, on_bytes)
        for name in _TOKENIZER:
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, folder / name)


def base_folder(base_model: str) -> Path:
    """Return the folder with the files of a base model. Files of a hub id that the cache lacks are downloaded.

    Raises:
        ConfigError: the hub does not have the model, or cannot be reached.
    """
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    try:
        return Path(snapshot_download(base_model, allow_patterns=patterns))
    except Exception as error:  # the hub's errors have no narrower class in common
        raise ConfigError(f"cannot find the files of base model {base_model!r}: {error}") from error


def find_converter(name: str, llama_cpp: str | None) -> Path:
    """Find one of llama.cpp's converter scripts.

    Raises:
        ConfigError: it is neither in a checkout of llama.cpp nor on the PATH.
    """
    for folder in (llama_cpp, os.environ.get(LLAMA_CPP)):
        if folder:
            if (Path(folder) / name).is_file():
                return Path(folder) / name
            raise ConfigError(f"{folder} has no {name}; expected a checkout of llama.cpp")
    if converter := shutil.which(name):
        return Path(converter)
    raise ConfigError(
        f"this needs {name} of llama.cpp, which the package gguf does not bring: clone "
        "https://github.com/ggml-org/llama.cpp, install its requirements, and set `llama_cpp` in the server's "
        f"configuration, or the variable {LLAMA_CPP}, to the folder"
    )


def _write_plain_scale(file: Path) -> None:
    """Write the scale of a rsLoRA as an alpha that is divided by the rank: llama.cpp knows no other scale."""
    config = json.loads(file.read_bytes())
    if config.get("use_rslora"):
        config |= {"lora_alpha": config["lora_alpha"] * math.sqrt(config["r"]), "use_rslora": False}
        file.write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")


def _convert(converter: Path, arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(converter), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-15:])
        error = ProcessError(f"{converter.name} failed with status {done.returncode}; its last lines:\n{last}")
        error.transient = False
        raise error


def describe(folder: Path) -> dict[str, object]:
    """Return the file names of an export and their size in all, for the status of its job."""
    files = checkpoints.list_files(folder)
    return {"files": sorted(files), "size_bytes": sum(entry.size for entry in files.values())}
