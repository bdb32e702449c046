"""The formats of an export.

peft       the adapter, for `peft.PeftModel.from_pretrained`
vllm-lora  the adapter with the commands to serve it, for production servers of vLLM and SGLang
merged     a whole Hugging Face model, for transformers, `vllm serve` and other readers of that format
gguf       the merged model for llama.cpp, made by llama.cpp's converter
gguf-lora  the adapter for llama.cpp (`--lora`), made by llama.cpp's converter
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from art.errors import ConfigError, ProcessError
from art.exports.folder import OnBytes, copy_files, new_folder
from art.exports.merge import merge, write_plain_scale
from art.exports.production import serve_commands, write_for_production
from art.protocol.calls import Export
from art.storage import checkpoints

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
LLAMA_CPP = "ART_LLAMA_CPP"
"""Environment variable that names a checkout of llama.cpp."""


def export(call: Export, on_bytes: OnBytes) -> None:
    """Export a checkpoint in the format of `call` as its folder `target`, with a manifest.

    Raises:
        ConfigError: this checkpoint has no such export, or a program that the export needs is missing.
        ProcessError: llama.cpp's converter failed.
    """
    checkpoint, base_model, form, llama_cpp = call.source, call.base_model, call.format, call.llama_cpp
    if checkpoints.is_full(checkpoint) and form in ("peft", "vllm-lora", "gguf-lora"):
        raise ConfigError(
            f"{form!r} is an adapter, but this model was trained as a whole; export it as 'merged' or 'gguf'"
        )
    checkpoints.verify(checkpoint)
    needs_base = form in ("merged", "gguf", "gguf-lora") and not checkpoints.is_full(checkpoint)
    base = base_folder(base_model) if needs_base else checkpoint
    with new_folder(call.target, manifest=True) as folder:
        if form == "peft":
            copy_files(checkpoint, folder, list(checkpoints.ADAPTER_FILES), on_bytes)
        elif form == "vllm-lora":
            write_for_production(
                checkpoint, folder, base_model=base_model, name=call.model_name, template_kwargs=call.template_kwargs,
                on_bytes=on_bytes,
            )  # fmt: skip
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
                write_plain_scale(Path(plain) / checkpoints.ADAPTER_CONFIG)
                _convert(converter, [plain, *options])
        else:
            raise ConfigError(f"no export format {form!r}; there are peft, vllm-lora, merged, gguf and gguf-lora")


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


def _convert(converter: Path, arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(converter), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-15:])
        error = ProcessError(f"{converter.name} failed with status {done.returncode}; its last lines:\n{last}")
        error.transient = False
        raise error


def describe(call: Export) -> dict[str, object]:
    """Return the file names of an export, their size in all, and the commands that serve it, for the job's status."""
    files = checkpoints.list_files(call.target)
    result: dict[str, object] = {"files": sorted(files), "size_bytes": sum(entry.size for entry in files.values())}
    if call.format == "vllm-lora":
        result["commands"] = serve_commands(call.target, call.base_model, call.model_name, call.template_kwargs)
    return result
