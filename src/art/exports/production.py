"""The export `vllm-lora`: an adapter folder for production servers of vLLM and SGLang, with the commands to serve it.

Both read the files of peft. The scale of a rsLoRA is written as a plain alpha, because SGLang knows no other.
`README.md` in the folder has the commands, and what requests must have.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.exports.folder import OnBytes, copy_files
from art.exports.merge import write_plain_scale
from art.storage import checkpoints

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""
HERE = "$PWD"
"""Folder of the export in its commands, which are run in it."""


def write_for_production(
    checkpoint: Path, folder: Path, *, base_model: str, name: str, template_kwargs: Mapping[str, Any], on_bytes: OnBytes
) -> None:
    """Write the adapter of a checkpoint into `folder`, with a README.

    Args:
        name: name under which the adapter is served: what clients send as `model` to ART too.
        template_kwargs: arguments of the chat template with which the model was trained.
    """
    copy_files(checkpoint, folder, list(checkpoints.ADAPTER_FILES), on_bytes)
    write_plain_scale(folder / checkpoints.ADAPTER_CONFIG)
    commands = serve_commands(folder, base_model, name, template_kwargs)
    (folder / "README.md").write_text(_readme(commands, base_model, name, template_kwargs), encoding="utf-8")


def serve_commands(adapter: Path, base_model: str, name: str, template_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the command that serves the adapter in the current folder, by server.

    Both servers then render chats and sample as ART does: with the model's arguments of the chat template, and at
    temperature 1 where a request has none.

    Args:
        adapter: folder of the adapter, whose rank is read.

    Raises:
        ConfigError: vLLM serves no adapter of this rank.
    """
    rank = int(json.loads((adapter / checkpoints.ADAPTER_CONFIG).read_bytes())["r"])
    if (most := next((one for one in LORA_RANKS if one >= rank), None)) is None:
        raise ConfigError(f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, and this one has {rank}; export `merged`")
    base, place = shlex.quote(base_model), f'"{name}={HERE}"'
    template = f" --default-chat-template-kwargs {shlex.quote(json.dumps(template_kwargs))}" if template_kwargs else ""
    return {
        "vllm": f"vllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules {place} "
        f"--generation-config vllm{template}",
        "sglang": f"python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {place} "
        f"--sampling-defaults openai{template}",
    }


def _readme(commands: Mapping[str, str], base_model: str, name: str, template_kwargs: Mapping[str, Any]) -> str:
    extra = ""
    if template_kwargs:
        arguments = repr(dict(template_kwargs))
        extra = f"""
The model was trained with arguments of its chat template, which the commands set for all requests. Where a server has
no such option, send them with each request, in Python as `extra_body={{"chat_template_kwargs": {arguments}}}`, or
answers are sampled from other prompts than in training.
"""
    return f"""# {name}

A LoRA adapter of `{base_model}`, trained with ART, for vLLM and SGLang. Run one of these in this folder:

    {commands["vllm"]}
    {commands["sglang"]}

Clients ask vLLM for the model `{name}`, as they ask ART: only the base URL changes.

They must ask SGLang for `{base_model}:{name}`. It answers requests for `{name}` alone with the base model, without an
error.

Both servers read tool calls and reasoning only if they are told the form in which the model writes them. Without it,
vLLM refuses requests with tools. For Qwen3, add `--enable-auto-tool-choice --tool-call-parser hermes` (vLLM) or
`--tool-call-parser qwen` (SGLang), and `--reasoning-parser qwen3` if the model thinks.

ART samples at temperature 1 unless a request says otherwise, and the commands make these servers do the same. To follow
the base model's `generation_config.json` instead, leave out `--generation-config vllm` (vLLM) or `--sampling-defaults
openai` (SGLang).

A later export can take the place of this one in vLLM 0.32 without a restart: start it with the variable
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`, and send to `POST /v1/load_lora_adapter`
`{{"lora_name": "{name}", "lora_path": "FOLDER", "load_inplace": true}}`.
The folder must be one that it has not read before.
{extra}"""
