"""Choose how a step checkpoints its layers, by a forecast of the memory that their activations take.

With `gradient_checkpointing="auto"` on CUDA, the least recomputation is chosen whose activations fit into the free
memory for the largest micro-batch of the step. Elsewhere "auto" keeps all activations.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from art.config import TrainerConfig
from art.memory.shape import ALL_TARGETS, Checkpointing, LayerShape, activation_bytes
from art.trainer.machine.distributed import Team
from art.trainer.machine.memory import allocatable_bytes
from art.trainer.policy.layers import configured_mode, set_checkpointing
from art.trainer.policy.policy import Policy
from art.trainer.tree.tree import SamplePath

_log = logging.getLogger(__name__)

MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the fastest to the one that takes least memory."""

_USABLE = 0.8
"""Share of the free memory that activations may take. The rest is for gradients inside a layer, the head and the
attention's workspace, and for what the allocator cannot use."""


def prepare_checkpointing(
    policy: Policy, config: TrainerConfig, paths: Sequence[SamplePath], *, max_tokens: int, team: Team
) -> dict[str, float]:
    """Set how the layers of `policy` checkpoint in a step on `paths`, the same way in all processes of `team`.

    Returns:
        Metrics: the position of the mode in `MODES`, and the forecast of the bytes of activations; 0 if there is none.
    """
    lengths = [len(path.token_ids) for path in paths]
    num_tokens = max(max(lengths), min(max_tokens, sum(lengths)))
    forecasts = forecast_activations(policy, num_tokens)
    mode = configured_mode(config)
    if mode is None:
        mode = "none"
        if policy.base.device.type == "cuda":
            mode = choose_mode(forecasts, num_tokens, allocatable_bytes(policy.base.device))
        mode = MODES[max(map(MODES.index, team.gather(mode)))]
        set_checkpointing(policy.trained_model, mode)
    return {
        "throughput/checkpointing": float(MODES.index(mode)),
        "throughput/activations_forecast_bytes": float(forecasts.get(mode, 0)),
    }


def choose_mode(forecasts: dict[Checkpointing, int], num_tokens: int, free_bytes: int) -> Checkpointing:
    """Choose the first of `MODES` whose activations fit into `free_bytes`, and log which and why."""
    if not forecasts:
        _log.warning("gradient checkpointing: full, since the shape of this model's layers is unknown")
        return "full"
    mode = next((mode for mode in MODES if forecasts[mode] <= _USABLE * free_bytes), MODES[-1])
    listed = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in forecasts.items())
    _log.info(
        "gradient checkpointing: %s; expected activations of %d tokens: %s; %d %% of %.1f GiB free memory are for them",
        *(mode, num_tokens, listed, 100 * _USABLE, free_bytes / 2**30),
    )
    return mode


def forecast_activations(policy: Policy, num_tokens: int) -> dict[Checkpointing, int]:
    """Forecast the bytes of activations of a micro-batch in each mode; empty if the layers have an unknown shape."""
    model: Any = policy.base.model
    lora = policy.config
    config = model.config.get_text_config()
    try:
        shape = LayerShape.from_config(config.to_dict())
    except KeyError:
        return {}
    return {
        mode: activation_bytes(
            shape,
            num_layers=config.num_hidden_layers,
            num_tokens=num_tokens,
            dtype=str(policy.base.head.weight.dtype).removeprefix("torch."),
            rank=None if lora is None else lora.rank,
            targets=ALL_TARGETS if lora is None or lora.target_modules is None else lora.target_modules,
            checkpointing=mode,
        )
        for mode in MODES
    }
