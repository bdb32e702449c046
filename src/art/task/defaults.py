"""Default settings for training on a task, and for its tiny model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from art.config import ScheduleConfig

LEARNING_RATE = 1e-5
"""Default learning rate of a LoRA adapter on a pretrained model."""
TINY_LEARNING_RATE = 3e-3
"""Default learning rate of a LoRA adapter on a tiny model, such as `art tiny-model` makes."""
TINY_TOOL_LEARNING_RATE = 2e-3
"""Default learning rate for a tiny model that calls tools. Larger steps can break calls of several arguments."""
TINY_MODEL_FILE = "tiny_model.json"
"""File that marks the folder of a tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Default settings for training on a task, and for its tiny model. A task of your own can keep them all."""

    learning_rate: float | None = None
    """`None` means 1e-5 for a pretrained model, 3e-3 for a tiny one, and 2e-3 for a tiny one that calls tools."""
    num_steps: int = 30
    """Number of training steps of a run."""
    groups_per_step: int = 16
    """Number of groups (scenarios) per training step."""
    rollouts_per_group: int = 8
    """Number of rollouts of each scenario."""
    num_minibatches: int = 4
    """Number of optimiser updates per training step."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning-rate schedule. `linear` and `cosine` fall from `learning_rate` to nearly 0 over the run."""
    warmup_steps: int = 0
    """Number of first steps in which the learning rate rises. In a short run it rises in half of the steps at most."""
    play_skill: float = 0.5
    """Mean skill, from 0 to 1, of the scripted play for a tiny model's warm start; see `Task.play`."""
    warm_start_steps: int = 600
    """Optimiser steps of a tiny model's warm start, each on 32 conversations of play. With half as many, the model may
    learn the format without reading what it is shown, and reinforcement learning then has nothing to improve."""
    tiny_vocab_size: int = 384
    """Largest vocabulary of a tiny model: 265 tokens for bytes and tags, the rest for the task's own words."""
    tiny_context: int = 1024
    """Context of a tiny model in tokens. Descriptions of many tools need more."""

    def for_base_model(self, base_model: str) -> TaskDefaults:
        """Return the defaults with the learning rate for this base model, unless `learning_rate` is set."""
        if self.learning_rate is not None:
            return self
        if not is_tiny_model(base_model):
            return replace(self, learning_rate=LEARNING_RATE)
        record = json.loads((Path(base_model).expanduser() / TINY_MODEL_FILE).read_bytes())
        return replace(self, learning_rate=TINY_TOOL_LEARNING_RATE if record.get("tools") else TINY_LEARNING_RATE)

    def rate_schedule(self, num_steps: int) -> float | ScheduleConfig:
        """Return the learning rate, by step if it changes, in a run of `num_steps`."""
        peak = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        if self.schedule == "constant" and not self.warmup_steps:
            return peak
        total_steps = None if self.schedule == "constant" else num_steps
        warmup_steps = min(self.warmup_steps, num_steps // 2)
        return ScheduleConfig(type=self.schedule, peak=peak, warmup_steps=warmup_steps, total_steps=total_steps)


def is_tiny_model(base_model: str) -> bool:
    """Whether `base_model` is the folder of a tiny model."""
    return (Path(base_model).expanduser() / TINY_MODEL_FILE).is_file()
