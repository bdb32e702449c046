"""The settings of models, training and servers, with their defaults.

An unknown name is an error, and so is a setting that a backend cannot honour.
Sources of the defaults: "LoRA without regret" (rank, all linear layers, learning rate about 10 times that of full
fine-tuning), Dr.GRPO (no division by the standard deviation), prime-rl's DPPO mask (see `art.trainer.losses`).
"""

from typing import TYPE_CHECKING, Any

from art.config.base import Config, Device, Dtype, LearningRate, Quantization
from art.config.losses import (
    CispoConfig,
    CustomLossConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    EntropyConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    LossTerm,
    MismatchConfig,
    Objective,
    PpoConfig,
    ReinforceConfig,
    SapoConfig,
    SftConfig,
)
from art.config.processes import AnyEngineConfig, EngineConfig, EngineSettings, LoraConfig, TrainerConfig, VllmConfig
from art.config.server import LimitsConfig, ModelSettings, PricesConfig, RenderConfig, SamplingConfig, ServerConfig
from art.config.training import OptimizerConfig, ScheduleConfig, TrainConfig, TrainSFTConfig

if TYPE_CHECKING:
    from art.config.pipeline import PipelineConfig

__all__ = [
    "AnyEngineConfig", "CispoConfig", "Config", "CustomLossConfig", "Device", "DistillConfig", "DpoConfig",
    "DppoConfig", "Dtype", "EngineConfig", "EngineSettings", "EntropyConfig", "GspoConfig", "KlConfig", "LearningRate",
    "LimitsConfig", "LoraConfig", "LossConfig", "LossTerm", "MismatchConfig", "ModelSettings", "Objective",
    "OptimizerConfig", "PipelineConfig", "PpoConfig", "PricesConfig", "Quantization", "ReinforceConfig", "RenderConfig",
    "SamplingConfig", "SapoConfig", "ScheduleConfig", "ServerConfig", "SftConfig", "TrainConfig", "TrainSFTConfig",
    "TrainerConfig", "VllmConfig",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "PipelineConfig":  # few programs need it, and `import art` is quicker without
        from art.config.pipeline import PipelineConfig

        return PipelineConfig
    raise AttributeError(f"module 'art.config' has no attribute {name!r}")
