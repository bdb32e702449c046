"""Exports by themselves, on small made-up checkpoints: numbers of a merge, files, stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from art import exports
from art.errors import ConfigError, CorruptCheckpointError, NotFoundError, StorageError
from art.exports import OnBytes, S3Store, copy_checkpoint
from art.protocol.calls import Export
from art.protocol.checkpoint_calls import S3Target
from art.storage import checkpoints
from art.storage.atomic import new_directory
from tests.support.object_store import BUCKET, open_store

LAYERS = {"model.layers.0.q": (6, 4), "model.layers.1.q": (5, 4)}  # [out, in]
RANK, ALPHA = 2, 6


def nothing(done: int, total: int) -> None:
    pass


def export(source: Path, base: str, form: str, target: Path, on_bytes: OnBytes) -> dict[str, object]:
    return exports.export(Export(source=source, target=target, base_model=base, format=form), on_bytes)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model in two files, one of them in bfloat16."""
    folder = tmp_path / "base"
    folder.mkdir()
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in LAYERS.items()}
    files = {
        "model-1.safetensors": {
            "model.embed.weight": torch.randn(7, 4),
            **{name: w for name, w in weights.items() if ".0." in name},
        },
        "model-2.safetensors": {name: w.bfloat16() for name, w in weights.items() if ".1." in name},
    }
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / exports.INDEX).write_text(json.dumps({"weight_map": index}))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "weights.bin", "README.md"):
        (folder / name).write_text("{}")
    return folder


def write_adapter(path: Path, *, layers: dict[str, tuple[int, int]] = LAYERS, **config: Any) -> Path:
    torch.manual_seed(1)
    tensors = {}
    for name, (rows, columns) in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK)
    settings = {"r": RANK, "lora_alpha": ALPHA, **config}
    state = {
        "step": 7,
        "job_id": "j",
        "base_model": "b",
        "lora": {},
        "config": {},
        "num_updates": 1,
        "rng": "",
        "metrics": {},
    }
    checkpoints.write_checkpoint(
        path,
        {
            checkpoints.ADAPTER_WEIGHTS: save(tensors),
            checkpoints.ADAPTER_CONFIG: json.dumps(settings).encode(),
            checkpoints.OPTIMIZER: b"moments",
            checkpoints.STATE: json.dumps(state).encode(),
            checkpoints.PROBE: b"{}",
        },
    )
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "checkpoints" / "0007")


def expected(base: Path, checkpoint: Path, name: str, scale: float) -> torch.Tensor:
    weight = {**load_file(base / "model-1.safetensors"), **load_file(base / "model-2.safetensors")}[f"{name}.weight"]
    tensors = load_file(checkpoint / checkpoints.ADAPTER_WEIGHTS)
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    return (weight.double() + scale * (b @ a).double()).to(weight.dtype)


@pytest.mark.parametrize("rows", [1, 4, 1024])
@pytest.mark.parametrize(("config", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)])
def test_a_merge_adds_the_adapter_and_touches_nothing_else(
    base: Path, tmp_path: Path, rows: int, config: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "ROWS", rows)
    checkpoint = write_adapter(tmp_path / "0007", **config)
    export(checkpoint, str(base), "merged", tmp_path / "out", nothing)
    checkpoints.verify_files(tmp_path / "out")
    files = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert files == sorted(
        [
            "model-1.safetensors",
            "model-2.safetensors",
            exports.INDEX,
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
        ]
        + [checkpoints.MANIFEST]
    )
    merged = {
        **load_file(tmp_path / "out" / "model-1.safetensors"),
        **load_file(tmp_path / "out" / "model-2.safetensors"),
    }
    for name in LAYERS:
        torch.testing.assert_close(merged[f"{name}.weight"], expected(base, checkpoint, name, scale))
    assert torch.equal(merged["model.embed.weight"], load_file(base / "model-1.safetensors")["model.embed.weight"])


def test_names_of_a_model_that_also_sees(base: Path, tmp_path: Path) -> None:
    tensors = {"model.language_model.layers.0.q.weight": torch.zeros(6, 4), "visual.weight": torch.zeros(3)}
    for entry in base.glob("model*"):
        entry.unlink()
    save_file(tensors, base / "model.safetensors")
    checkpoint = write_adapter(tmp_path / "0007", layers={"model.layers.0.q": (6, 4)})
    export(checkpoint, str(base), "merged", tmp_path / "out", nothing)
    assert load_file(tmp_path / "out" / "model.safetensors")["model.language_model.layers.0.q.weight"].abs().sum() > 0


def test_what_cannot_be_merged_is_said(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    stranger = write_adapter(tmp_path / "0001", layers={"model.layers.9.q": (6, 4)})
    wrong = write_adapter(tmp_path / "0002", layers={"model.layers.0.q": (3, 3)})
    other_kind = write_adapter(tmp_path / "0003", peft_type="IA3")
    many_ranks = write_adapter(tmp_path / "0004", rank_pattern={"q": 1})
    for path, message in (
        (stranger, "'model.layers.9.q'"),
        (wrong, "is not the model that was trained"),
        (other_kind, "is IA3; only plain LoRA"),
        (many_ranks, "is LORA with rank_pattern; only plain LoRA"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(path, str(base), "merged", tmp_path / "out", nothing)
    (base / exports.INDEX).unlink()
    with pytest.raises(ConfigError, match="no safetensors"):
        export(checkpoint, str(base), "merged", tmp_path / "out", nothing)
    (checkpoint / checkpoints.ADAPTER_WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(CorruptCheckpointError):
        export(checkpoint, str(base), "peft", tmp_path / "out", nothing)
    assert not (tmp_path / "out").exists()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")], "nothing half-made is left"


def test_the_adapter_alone(checkpoint: Path, tmp_path: Path, base: Path) -> None:
    for _ in range(2):  # once more takes the place of the first
        described = export(checkpoint, str(base), "peft", tmp_path / "out", nothing)
    assert described["files"] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_copy_is_verified(checkpoint: Path, tmp_path: Path) -> None:
    copy_checkpoint(checkpoint, tmp_path / "copy", nothing)
    assert checkpoints.identify(tmp_path / "copy") == checkpoints.identify(checkpoint)
    (checkpoint / checkpoints.OPTIMIZER).write_bytes(b"xx")
    with pytest.raises(CorruptCheckpointError):
        copy_checkpoint(checkpoint, tmp_path / "second", nothing)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints", "copy"]


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with new_directory(target, replace=True) as folder:
        (folder / "a").write_text("first")

    def fail() -> None:
        with new_directory(target, replace=True) as folder:
            (folder / "a").write_text("second")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert (target / "a").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Target]:
    with open_store(monkeypatch) as url:
        yield S3Target(bucket=BUCKET, prefix="/runs/", endpoint_url=url)


def test_a_store_has_a_checkpoint_once_its_manifest_is_there(
    checkpoint: Path, store: S3Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, sent = S3Store(store), []
    upload = s3._client.upload_file

    def failing(file: str, *args: Any, **options: Any) -> None:
        sent.append(Path(file).name)
        if len(sent) == 3:
            raise OSError("the line is cut")
        upload(file, *args, **options)

    monkeypatch.setattr(s3._client, "upload_file", failing)
    with pytest.raises(StorageError, match="the line is cut"):
        s3.push(checkpoint, "p/0007", nothing)
    assert s3.steps("p") == []
    cut, sent[:] = list(sent), ["", "", ""]
    assert s3.push(checkpoint, "p/0007", nothing) == "s3://team/runs/p/0007"
    assert not set(cut[:2]) & set(sent), "what was sent whole is not sent again"
    assert s3.steps("p") == [7]
    s3.pull("p/0007", tmp_path / "0007", nothing)
    assert checkpoints.identify(tmp_path / "0007") == checkpoints.identify(checkpoint)
    with pytest.raises(NotFoundError, match=r"s3://team/runs/p/0008"):
        s3.pull("p/0008", tmp_path / "0008", nothing)
    with pytest.raises(StorageError, match="cannot list"):
        S3Store(store.model_copy(update={"bucket": "none"})).steps("p")
