"""Copies of checkpoints for other programs and places: formats, merging, hubs and S3-compatible stores.

peft       the adapter, for `peft.PeftModel.from_pretrained`
vllm-lora  the adapter with the commands to serve it, for production servers of vLLM and SGLang
merged     a whole Hugging Face model, for transformers, `vllm serve` and other readers of that format

vLLM and SGLang read the files of peft. The scale of a rsLoRA is written as a plain alpha for them, because SGLang and
llama.cpp know no other. `README.md` in the folder has the commands, and what requests must have. llama.cpp's converters
read the folders of `merged` and `vllm-lora`.

A folder appears complete or not at all: it is filled under a temporary name, given a manifest, then renamed. A store is
laid out as a data directory, `s3://<bucket>/<prefix>/<project>/models/<name>/checkpoints/<step>/<file>`. The manifest
is sent last, so a checkpoint with a manifest is complete. A file that the store already has with the same hash is not
sent again. boto3 finds keys and region by itself (environment, profile, role).
"""

from __future__ import annotations

import json
import math
import shlex
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ConfigError, NotFoundError, StorageError
from art.protocol.calls import Export
from art.protocol.checkpoint_calls import HubTarget, S3Target
from art.storage import checkpoints
from art.storage.atomic import new_directory

OnBytes = Callable[[int, int], None]
"""Called with the number of bytes that are done, and of all bytes."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""
INDEX = "model.safetensors.index.json"
ROWS = 1024
"""Rows of a weight that are changed at once."""
_KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of the base model's other files to copy: configuration, tokenizer, chat template."""
_PREFIXES = (("", ""), ("model.", "model.language_model."), ("model.", "language_model.model."), ("model.", ""))
"""Prefixes (in memory, in the file) of layer names. They differ in some families, such as vision models."""
_PLAIN_ONLY = (
    "only plain LoRA of one rank can be merged here. Merge it with peft's `merge_and_unload`, and use the folder of "
    "the merged model"
)


def copy_files(source: Path, target: Path, names: Sequence[str], on_bytes: OnBytes) -> None:
    """Copy files in pieces, since they may be larger than memory."""
    total, done = sum((source / name).stat().st_size for name in names), 0
    for name in names:
        with (source / name).open("rb") as reader, (target / name).open("wb") as writer:
            while piece := reader.read(16 * 2**20):
                writer.write(piece)
                done += len(piece)
                on_bytes(done, total)


def copy_checkpoint(source: Path, target: Path, on_bytes: OnBytes) -> None:
    """Copy a checkpoint to another folder and verify the copy.

    Raises:
        CorruptCheckpointError: the source is damaged. No copy is left.
    """
    with new_directory(target, replace=True) as folder:
        copy_files(source, folder, [*checkpoints.list_files(source), checkpoints.MANIFEST], on_bytes)
        checkpoints.verify(folder)


def export(call: Export, on_bytes: OnBytes) -> dict[str, object]:
    """Export a checkpoint in the format of `call` as its folder `target`, with a manifest.

    Returns:
        The names of the files, their size in all, and the commands that serve them, for the job's status.

    Raises:
        ConfigError: this checkpoint has no such export.
    """
    checkpoint, form, is_full = call.source, call.format, checkpoints.is_full(call.source)
    if is_full and form != "merged":
        raise ConfigError(f"this model was trained as a whole, and {form!r} is an adapter; export 'merged'")
    checkpoints.verify(checkpoint)
    base = base_folder(call.base_model) if form == "merged" and not is_full else checkpoint
    result: dict[str, object] = {}
    with new_directory(call.target, replace=True) as folder:
        if form == "merged":
            merge(checkpoint, base, folder, on_bytes)
        else:
            copy_files(checkpoint, folder, checkpoints.ADAPTER_FILES, on_bytes)
        if form == "vllm-lora":
            _write_plain_scale(folder / checkpoints.ADAPTER_CONFIG)
            commands = serve_commands(folder, call.base_model, call.model_name, call.template_kwargs)
            (folder / "README.md").write_text(_readme(call, commands), encoding="utf-8")
            result["commands"] = commands
        checkpoints.write_manifest(folder)
    files = checkpoints.list_files(call.target)
    return {"files": sorted(files), "size_bytes": sum(entry.size for entry in files.values()), **result}


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


def _write_plain_scale(file: Path) -> None:
    """Write the scale of a rsLoRA, which models of older versions may be, as an alpha that is divided by the rank."""
    config = json.loads(file.read_bytes())
    if config.get("use_rslora"):
        config |= {"lora_alpha": config["lora_alpha"] * math.sqrt(config["r"]), "use_rslora": False}
        file.write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")


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
    base, place = shlex.quote(base_model), f'"{name}=$PWD"'
    template = f" --default-chat-template-kwargs {shlex.quote(json.dumps(template_kwargs))}" if template_kwargs else ""
    return {
        "vllm": f"vllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules {place} "
        f"--generation-config vllm{template}",
        "sglang": f"python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {place} "
        f"--sampling-defaults openai{template}",
    }


def _readme(call: Export, commands: Mapping[str, str]) -> str:
    name, base_model, extra = call.model_name, call.base_model, ""
    if call.template_kwargs:
        arguments = repr(dict(call.template_kwargs))
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


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a weight is in a safetensors file."""

    file: Path
    dtype: str
    shape: list[int]
    start: int
    """Offset of the first byte in the file."""


def merge(checkpoint: Path, base: Path, target: Path, on_bytes: OnBytes) -> None:
    """Write the whole model of `checkpoint` into the folder `target`: W' = W + alpha / rank * B A for adapted layers.

    Each safetensors file of the base is copied, and the adapted weights are then changed in the copy, some rows at a
    time. The copy keeps the base's names, order and dtypes. Memory holds one block of rows, however large the model is.

    Args:
        base: folder of the adapter's base model. A full checkpoint does not need it.

    Raises:
        ConfigError: the base has no safetensors, or its weights do not fit the adapter.
    """
    if checkpoints.is_full(checkpoint):
        leave = {*checkpoints.COMMON_FILES, checkpoints.MANIFEST}
        copy_files(checkpoint, target, sorted({entry.name for entry in checkpoint.iterdir()} - leave), on_bytes)
        return
    if (base / INDEX).is_file():
        weights = sorted(set(json.loads((base / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        weights = [entry.name for entry in base.glob("model.safetensors")]
    if not weights or any("/" in name for name in weights):
        raise ConfigError(f"{base} has no safetensors weights to merge with; other formats are not read")
    others = sorted(entry.name for entry in base.iterdir() if entry.suffix in _KEPT and entry.is_file())
    copy_files(base, target, weights + others, on_bytes)
    tensors: dict[str, _Tensor] = {}
    for file in (target / name for name in weights):
        with file.open("rb") as reader:
            (length,) = struct.unpack("<Q", reader.read(8))
            head = json.loads(reader.read(length))
        for name, entry in head.items():
            if name != "__metadata__":
                start = 8 + length + entry["data_offsets"][0]
                tensors[name] = _Tensor(file, entry["dtype"], entry["shape"], start)
    factors = _read_factors(checkpoint)
    names = _match(factors, tensors, base)
    for layer, (left, right) in factors.items():
        _add(tensors[names[layer]], names[layer], left, right)


def _read_factors(checkpoint: Path) -> dict[str, tuple[Any, Any]]:
    """The change of each adapted layer as [rows, rank] and [rank, columns] of the base's weight, float32 and scaled."""
    from safetensors.torch import load_file

    config = json.loads((checkpoint / checkpoints.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    other = [key for key in ("rank_pattern", "alpha_pattern", "use_dora") if config.get(key)]
    if (kind := config.get("peft_type") or "LORA") != "LORA" or other:
        raise ConfigError(f"the adapter {checkpoint} is {' with '.join([kind, *other])}; {_PLAIN_ONLY}")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors = load_file(checkpoint / checkpoints.ADAPTER_WEIGHTS)
    if unknown := [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise ConfigError(f"the adapter {checkpoint} has {unknown[0]!r}; {_PLAIN_ONLY}")
    factors = {}
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight")
            a, b = a.float(), scale * tensors[f"{layer}.lora_B.weight"].float()
            # Some bases (GPT-2) store W as [in, out].
            factors[layer.removeprefix("base_model.model.")] = (a.T, b.T) if config.get("fan_in_fan_out") else (b, a)
    return factors


def _match(layers: Mapping[str, Any], tensors: Mapping[str, _Tensor], base: Path) -> dict[str, str]:
    """Map each adapted layer to the name of its weight in the base."""
    for inside, in_file in _PREFIXES:
        names = {layer: f"{in_file}{layer.removeprefix(inside)}.weight" for layer in layers if layer.startswith(inside)}
        if len(names) == len(layers) and all(name in tensors for name in names.values()):
            return names
    missing = next(layer for layer in layers if f"{layer}.weight" not in tensors)
    raise ConfigError(
        f"the adapter changes {missing!r}, which the {len(tensors)} tensors of {base} do not have under this name: the "
        "family stores weights in another form than it computes with. Export `peft`, and use its `merge_and_unload`"
    )


def _add(tensor: _Tensor, name: str, left: Any, right: Any) -> None:
    """Add `left @ right` to a weight in its file."""
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if tensor.shape != [left.shape[0], right.shape[1]] or tensor.dtype not in dtypes:
        problem = f"{name} is {tensor.dtype} {tensor.shape} and its adapter is for {[left.shape[0], right.shape[1]]}"
        raise ConfigError(f"{problem}: the base is quantised, or is not the model that was trained")
    dtype = dtypes[tensor.dtype]
    row_bytes = tensor.shape[1] * dtype.itemsize
    with tensor.file.open("r+b") as file:
        for row in range(0, tensor.shape[0], ROWS):
            delta = left[row : row + ROWS] @ right
            size = delta.shape[0] * row_bytes
            file.seek(tensor.start + row * row_bytes)
            block = bytearray(file.read(size))
            weight = torch.frombuffer(block, dtype=dtype).reshape(delta.shape)
            weight.copy_((weight.double() + delta.double()).to(dtype))
            file.seek(tensor.start + row * row_bytes)
            file.write(block)


def push_to_hub(folder: Path, target: HubTarget, message: str) -> str:
    """Upload a folder as one commit and return its address. The repository is created if it does not exist.

    Raises:
        StorageError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=target.repo_id, folder_path=folder, revision=target.revision, commit_message=message
        )
    except Exception as error:  # the hub's errors, httpx's and bad repository names have no narrower class in common
        raise StorageError(f"cannot push to {target.repo_id!r}: {type(error).__name__}: {error}") from error
    return f"{made}@{commit.oid}"


class S3Store:
    """Sends checkpoints and exports to an S3 bucket, below a prefix, and fetches checkpoints from there."""

    def __init__(self, target: S3Target) -> None:
        """Make the client for the bucket and prefix of `target`.

        Raises:
            ConfigError: boto3 is not installed, or finds no keys.
        """
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise ConfigError("S3 needs `pip install 'agent-reinforcement-trainer[s3]'` on the server") from error
        self._bucket = target.bucket
        self._root = f"{prefix}/" if (prefix := target.prefix.strip("/")) else ""
        self._errors = (BotoCoreError, ClientError)
        try:
            self._client: Any = boto3.client("s3", endpoint_url=target.endpoint_url)
        except self._errors as error:
            raise ConfigError(f"cannot use s3://{target.bucket}: {error}") from error

    def push(self, folder: Path, place: str, on_bytes: OnBytes) -> str:
        """Send a checkpoint or export to `place` below the prefix, and return its address.

        Raises:
            StorageError: the store refused.
        """
        files = checkpoints.list_files(folder)
        total, done = sum(entry.size for entry in files.values()), 0
        for name, entry in files.items():
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=f"{self._root}{place}/{name}")
            except self._errors:  # missing or not readable: send the file
                head = {}
            if head.get("Metadata", {}).get("sha256") != entry.sha256:
                self._put(folder / name, f"{place}/{name}", entry.sha256)
            done += entry.size
            on_bytes(done, total)
        self._put(folder / checkpoints.MANIFEST, f"{place}/{checkpoints.MANIFEST}", "")
        return f"s3://{self._bucket}/{self._root}{place}"

    def steps(self, place: str) -> list[int]:
        """List the steps with a complete checkpoint under the folder `place`, in ascending order."""
        prefix, names = f"{self._root}{place}/", []
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                keys = [entry["Key"].removeprefix(prefix) for entry in page.get("Contents", [])]
                names += [key.split("/")[0] for key in keys if key.endswith(f"/{checkpoints.MANIFEST}")]
        except self._errors as error:
            raise StorageError(f"cannot list s3://{self._bucket}/{prefix}: {error}") from error
        return sorted(int(name) for name in names if name.isdecimal())

    def pull(self, place: str, target: Path, on_bytes: OnBytes) -> None:
        """Fetch the checkpoint at `place` into the folder `target` and verify it.

        Raises:
            NotFoundError: the store has no such checkpoint.
            StorageError: the store refused, or cannot be reached.
            CorruptCheckpointError: the files do not fit their manifest. No `target` is left.
        """
        with new_directory(target, replace=True) as folder:
            self._get(f"{place}/{checkpoints.MANIFEST}", folder / checkpoints.MANIFEST)
            files = checkpoints.list_files(folder)
            total, done = sum(entry.size for entry in files.values()), 0
            for name, entry in files.items():
                if Path(name).name != name:
                    raise StorageError(f"the manifest at {place} names {name!r}, which is not a plain file name")
                self._get(f"{place}/{name}", folder / name)
                done += entry.size
                on_bytes(done, total)
            checkpoints.verify(folder)

    def _put(self, file: Path, place: str, digest: str) -> None:
        key = self._root + place
        try:
            extra = {"ExtraArgs": {"Metadata": {"sha256": digest}}} if digest else {}
            self._client.upload_file(str(file), self._bucket, key, **extra)
        except Exception as error:  # boto3's transfers also raise errors outside botocore's classes
            raise StorageError(f"cannot send {file.name} to s3://{self._bucket}/{key}: {error}") from error

    def _get(self, place: str, file: Path) -> None:
        try:
            self._client.download_file(self._bucket, self._root + place, str(file))
        except self._errors as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                raise NotFoundError(f"there is no s3://{self._bucket}/{self._root}{place}") from error
            raise StorageError(f"cannot fetch s3://{self._bucket}/{self._root}{place}: {error}") from error
