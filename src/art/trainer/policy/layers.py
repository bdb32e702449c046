"""What is done to the decoder layers of a Hugging Face causal LM: found, compiled, split over processes, checkpointed.

A layer that is checkpointed computes again in the backward pass what it does not keep:

    none         nothing
    selective    all of a layer but its attention (`art.trainer.attention.kept_attention`)
    full         all of a layer

With `gradient_checkpointing="auto"` on CUDA, the least recomputation is chosen whose activations fit into the free
memory for the largest micro-batch of the step, by a forecast. Elsewhere "auto" keeps all activations.

Layers that are split (`shard_base`, torch's FSDP2, for models that do not fit one device) are gathered when they run,
forward and backward, and freed afterwards. The adapter is not sharded: it is injected later, and `fully_shard` manages
only what exists when it is called. Embedding, final norm and head stay whole, because the head is read outside of the
model's forward pass. Gathering needs every process, so all processes must run the model equally often.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ConfigError
from art.memory.shape import ALL_TARGETS, Checkpointing, LayerShape, activation_bytes
from art.trainer.attention.kept_attention import keep_attention
from art.trainer.attention.tree_attention import ATTENTION_NAME, attend
from art.trainer.machine.memory import allocatable_bytes
from art.trainer.tree.tree import SamplePath

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team
    from art.trainer.policy.base_model import BaseModel
    from art.trainer.policy.policy import Policy


def decoder_layers(model: Any, *, option: str) -> list[Any]:
    """Return the modules that `model` names as its decoder layers.

    Args:
        option: name of the setting that needs the layers, for the error.

    Raises:
        ConfigError: the model names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers; set `{option}` to false", param=option
        )
    return layers


def compile_layers(base: BaseModel) -> None:
    """Compile each decoder layer of `base` for layouts of any length. Compilation happens on the first pass.

    Attention is not compiled: its kernels read the layout, which changes each time. Flex compiles itself.

    Raises:
        ConfigError: torch.compile does not work here, or the model does not name its decoder layers.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(base.model, option="compile_layers")
    try:
        torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(8, device=base.device))
    except Exception as error:  # may be anything: no C++ compiler, no Triton, no headers
        raise ConfigError(
            f"torch.compile does not work here ({type(error).__name__}: {error}); it needs a C++ compiler, and on CUDA "
            "also Triton. Set `compile_layers` to false",
            param="compile_layers",
        ) from error
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))
    for layer in layers:
        layer.compile(dynamic=True)


def shard_layers(model: Any, device: torch.device) -> None:
    """Split the decoder layers of a Hugging Face causal LM over all processes, and move them to `device`.

    Raises:
        ConfigError: the model does not name its decoder layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = decoder_layers(model, option="shard_base")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(model.parameters())
    for layer in layers:
        whole -= set(layer.parameters())
        fully_shard(layer, mesh=mesh)
    backbone = getattr(model, model.base_model_prefix)
    fully_shard(backbone, mesh=mesh, ignored_params=whole)  # the root, which overlaps gathering with computing


def configured_mode(config: TrainerConfig) -> Checkpointing | None:
    """Return the configured way of checkpointing; `None` if it is to be chosen."""
    chosen = config.gradient_checkpointing
    return None if chosen == "auto" else "selective" if chosen == "selective" else "full" if chosen else "none"


def set_checkpointing(model: Any, mode: Checkpointing) -> None:
    """Make a Hugging Face causal LM keep, or compute again, the activations of its layers.

    Layers checkpoint in training mode only. Dropout stays off, since the engine has none.

    Raises:
        ConfigError: the model has no layers that can be checkpointed.
    """
    model.train(mode != "none")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    if mode == "none":
        if model.supports_gradient_checkpointing:
            _call(model, "disable")
        return
    options = {"use_reentrant": False} | ({"context_fn": keep_attention} if mode == "selective" else {})
    try:
        _call(model, "enable", options)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} cannot checkpoint its layers ({error}); set `gradient_checkpointing` to false",
            param="gradient_checkpointing",
        ) from error


def _call(model: Any, what: str, *args: Any) -> None:
    newer = getattr(model, f"activation_checkpointing_{what}", None)  # the name in transformers 5.20 and later
    (newer or getattr(model, f"gradient_checkpointing_{what}"))(*args)


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
