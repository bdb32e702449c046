"""The module from which older code imports dictionaries of settings: `art.dev.InternalModelConfig` and others."""

from art.compat.settings import EngineArgs, InitArgs, InternalModelConfig, PeftArgs, TrainerArgs
from art.compat.settings import TrainOptions as TrainConfig
from art.compat.settings import TrainSFTOptions as TrainSFTConfig

__all__ = ["EngineArgs", "InitArgs", "InternalModelConfig", "PeftArgs", "TrainConfig", "TrainSFTConfig", "TrainerArgs"]
