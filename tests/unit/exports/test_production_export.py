"""The export for production servers: files, scale, commands, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from art.engines.vllm.command import LORA_RANKS
from art.errors import ConfigError
from art.exports import formats, production
from art.protocol.calls import Export
from art.storage import checkpoints
from tests.unit.exports.test_exports import nothing, write_adapter

PEFT = {"r": 12, "lora_alpha": 24, "target_modules": ["q_proj"], "base_model_name_or_path": "Qwen/Qwen3-0.6B"}


def to_vllm(checkpoint: Path, target: Path, **more: object) -> Export:
    call = Export(
        source=checkpoint, target=target, base_model="Qwen/Qwen3-0.6B", format="vllm-lora", llama_cpp=None,
        model_name="search/agent@promoted", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    formats.export(call, nothing)
    return call


def test_the_folder_has_the_adapter_and_the_commands(tmp_path: Path) -> None:
    checkpoint = write_adapter(tmp_path / "0040", **PEFT)
    call = to_vllm(checkpoint, tmp_path / "out")
    described = formats.describe(call)
    assert described["files"] == ["README.md", *sorted(checkpoints.ADAPTER_FILES)]
    assert described["commands"] == {
        "vllm": "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 16 --lora-modules "
        '"search/agent@promoted=$PWD"',
        "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --enable-lora --lora-paths "
        '"search/agent@promoted=$PWD"',
    }
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(command in text for command in described["commands"].values())  # type: ignore[attr-defined]
    assert "chat_template_kwargs" not in text
    weights = checkpoints.ADAPTER_WEIGHTS
    assert (tmp_path / "out" / weights).read_bytes() == (checkpoint / weights).read_bytes()


def test_the_scale_of_a_rslora_is_plain(tmp_path: Path) -> None:
    checkpoint = write_adapter(tmp_path / "0040", **PEFT | {"use_rslora": True})
    to_vllm(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / checkpoints.ADAPTER_CONFIG).read_text())
    assert config["use_rslora"] is False
    assert config["lora_alpha"] / config["r"] == pytest.approx(24 / math.sqrt(12))


def test_arguments_of_the_template_are_told(tmp_path: Path) -> None:
    checkpoint = write_adapter(tmp_path / "0040", **PEFT)
    to_vllm(checkpoint, tmp_path / "out", template_kwargs={"enable_thinking": False})
    text = (tmp_path / "out" / "README.md").read_text()
    assert """extra_body={"chat_template_kwargs": {'enable_thinking': False}}""" in text


def test_a_rank_that_no_server_takes_is_refused(tmp_path: Path) -> None:
    assert production.LORA_RANKS[1:] == LORA_RANKS
    checkpoint = write_adapter(tmp_path / "0040", **PEFT | {"r": 1024})
    with pytest.raises(ConfigError, match="up to rank 512, and this one has 1024; export `merged`"):
        to_vllm(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
