"""A data directory of an older server, whose models have settings that left since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art.config import EngineConfig, LoraConfig, ModelSettings, TrainerConfig, VllmConfig
from art.runtime.registry import RegisteredModel, Registry
from art.storage.database import Database

DEFAULTS = [
    # Each version wrote every setting down, with its default. These are of two older versions.
    (
        '{"lora":{"rank":16,"alpha":32.0,"use_rslora":false,"target_modules":null,"seed":0},"engine":{"device":"auto",'
        '"device_indices":[],"dtype":"auto","max_context":null,"max_running":64,"max_waiting":4096,"num_threads":null,'
        '"kind":"torch","kv_cache_tokens":null,"prefill_tokens":4096,"quantization":"none"},"trainer":{"device":"auto",'
        '"device_indices":[],"dtype":"auto","max_tokens":16384,"gradient_checkpointing":"auto","compile_layers":false,'
        '"quantization":"none","moment_bits":32,"keep_moments":3,"keep_token_files":500,"num_threads":null,'
        '"num_processes":1,"num_nodes":1,"shard_base":false},"render":{"chat_template_kwargs":{},"keep_reasoning":null}}',
        ModelSettings(engine=EngineConfig()),
    ),
    (
        '{"lora":{"rank":16,"alpha":32.0,"target_modules":null,"seed":0},"engine":{"device":"auto","device_indices":[],'
        '"dtype":"auto","max_context":null,"max_running":64,"max_waiting":4096,"num_threads":null,"kind":"vllm",'
        '"urls":[],"max_loras":4,"weights":"lora","sleep":"auto","flags":{}},"trainer":{"device":"auto",'
        '"device_indices":[],"dtype":"auto","max_tokens":16384,"gradient_checkpointing":false,"compile_layers":false,'
        '"quantization":"none","num_threads":null,"num_processes":1,"shard_base":false},'
        '"render":{"chat_template_kwargs":{},"keep_reasoning":null}}',
        ModelSettings(engine=VllmConfig(max_running=64), trainer=TrainerConfig(gradient_checkpointing=False)),
    ),
]


async def stored(folder: Path, settings: str) -> ModelSettings:
    """What is read of settings that an older server stored."""
    registry = Registry(database := Database(folder / "art.db"))
    await registry.start()
    await registry.save_model(RegisteredModel("p", "m", "b", ModelSettings(), 0))
    await database.run(lambda db: db.execute("UPDATE models SET settings = ?", (settings,)))
    (model,) = await registry.models()
    return model.settings


@pytest.mark.parametrize(("settings", "expected"), DEFAULTS)
async def test_settings_as_older_versions_stored_them(tmp_path: Path, settings: str, expected: ModelSettings) -> None:
    assert await stored(tmp_path, settings) == expected


async def test_stored_settings_are_read_without_what_has_left(tmp_path: Path) -> None:
    older = {
        "lora": {"rank": 16, "alpha": 8.0, "use_rslora": True},
        "engine": {"kind": "torch", "quantization": "nf4", "max_waiting": 9, "max_running": 3},
        "trainer": {"quantization": "nf4", "compile_layers": True, "keep_token_files": 2},
    }
    assert await stored(tmp_path, json.dumps(older)) == ModelSettings(
        lora=LoraConfig(rank=16, alpha=32.0), engine=EngineConfig(max_running=3),
        trainer=TrainerConfig(quantization="nf4"),
    )  # fmt: skip
