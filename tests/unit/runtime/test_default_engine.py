"""Which engine serves a model whose settings name none."""

from __future__ import annotations

from typing import Any

import pytest

import art.runtime.placement
from art.config import EngineConfig, ModelSettings, TrainerConfig, VllmConfig
from art.engines.vllm.command import Installation
from art.errors import ConfigError
from art.protocol.training import RegisterRequest
from art.runtime.placement import Devices, Gpu, is_slow, with_engine

GPU = Devices(gpus=(Gpu(name="a GPU", memory_bytes=2**36, selector="0"),), has_mps=False, memory_bytes=2**36)
CPU = Devices(gpus=(), has_mps=False, memory_bytes=2**36)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is installed: `device` of vLLM's build, or an `error`."""
    installed: dict[str, Any] = {"device": "cuda", "error": None}

    def find_installation(python: str) -> Installation:
        if installed["error"] is not None:
            raise installed["error"]
        return Installation(python, "0.32.0", "2.13.0", installed["device"])

    monkeypatch.setattr(art.runtime.placement, "find_installation", find_installation)
    monkeypatch.setenv("ART_VLLM_PYTHON", "python")
    return installed


def chosen(settings: ModelSettings, devices: Devices = GPU) -> str:
    wire = RegisterRequest(project="p", name="m", base_model="b", settings=settings).model_dump_json()
    found = with_engine(RegisterRequest.model_validate_json(wire).settings, devices)
    stored = ModelSettings.model_validate_json(found.model_dump_json())  # the choice is kept with the model
    assert with_engine(stored, CPU) == stored == found
    return found.engine.kind


def test_vllm_is_the_default_where_it_runs(vllm: dict[str, Any]) -> None:
    assert chosen(ModelSettings()) == "vllm"
    assert chosen(ModelSettings(trainer=TrainerConfig(num_threads=1))) == "vllm"
    assert chosen(ModelSettings(), CPU) == "torch"
    vllm["device"] = "cpu"
    assert chosen(ModelSettings()) == "torch"


def test_settings_that_name_an_engine_keep_it(vllm: dict[str, Any]) -> None:
    assert chosen(ModelSettings(engine=EngineConfig())) == "torch"
    assert chosen(ModelSettings(engine=VllmConfig()), CPU) == "vllm"


def test_what_vllm_cannot_do_is_left_to_the_embedded_engine(
    vllm: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(ModelSettings(lora=None)) == "torch"
    assert chosen(ModelSettings(trainer=TrainerConfig(quantization="nf4"))) == "torch"
    vllm["error"] = ConfigError("vLLM 0.32.0 is built for torch 2.13")
    assert chosen(ModelSettings()) == "torch"
    assert "built for torch 2.13" in caplog.text


def test_the_embedded_engine_is_slow_on_a_gpu() -> None:
    assert is_slow(ModelSettings(), "cuda")
    assert not is_slow(ModelSettings(), "cpu")
    assert not is_slow(ModelSettings(engine=VllmConfig()), "cuda")
