"""Choose the engine of a model whose settings name none: vLLM on an NVIDIA GPU where it is installed, else our own."""

from __future__ import annotations

import logging

from art.config import EngineConfig, ModelSettings, VllmConfig
from art.engines.vllm.command import find_installation, installed_vllm_python
from art.errors import ConfigError
from art.runtime.placement.devices import Devices

logger = logging.getLogger(__name__)

SLOW = (
    "the embedded engine samples on this GPU, many times slower than vLLM: it has no CUDA graphs and no paged attention"
)
FASTER = "install vLLM (docs/engines.md) and use `VllmConfig`"


def with_engine(settings: ModelSettings, devices: Devices, vllm_python: str | None) -> ModelSettings:
    """Return `settings` with the engine that serves them on this machine. One that they name is kept.

    vLLM is left out where it cannot do what the settings ask for: full fine-tuning and a rounded base model.

    Args:
        vllm_python: interpreter of the environment with vLLM; `None` looks in ART_VLLM_PYTHON and in this environment.
    """
    if "engine" in settings.model_fields_set:
        return settings
    can_be_vllm = settings.lora is not None and settings.trainer.quantization == "none"
    if can_be_vllm and devices.gpus and (python := vllm_python or installed_vllm_python()) is not None:
        try:
            installation = find_installation(python)
        except ConfigError as error:
            logger.warning("the embedded engine is used, since vLLM cannot be: %s", error.message)
        else:
            if installation.device == "cuda":
                logger.info("vLLM %s samples; settings with an `engine` choose another", installation.vllm)
                return settings.model_copy(update={"engine": VllmConfig()})
    return settings.model_copy(update={"engine": settings.engine})


def is_slow(settings: ModelSettings, engine_kind: str) -> bool:
    """Whether the embedded engine samples on an NVIDIA GPU."""
    return engine_kind == "cuda" and isinstance(settings.engine, EngineConfig)
