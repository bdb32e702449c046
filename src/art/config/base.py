"""What all settings share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "nf4"]
LearningRate = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Base of all settings: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_indices(device: Device, indices: tuple[int, ...]) -> None:
    if indices and device not in ("auto", "cuda"):
        raise ValueError(f'`device_indices` names GPUs, but `device` is "{device}"; leave one of the two out')
    if len(set(indices)) < len(indices) or any(index < 0 for index in indices):
        raise ValueError(f"`device_indices` must be different numbers from 0; got {indices}")
