"""A LoRA on the frozen base model: matrices injected by peft and stored in its format."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art.config import LoraConfig
from art.errors import ConfigError
from art.storage import checkpoints
from art.trainer.policy.base_model import FrozenModel, run_backbone
from art.trainer.policy.policy import Policy, named_views
from art.trainer.tensor_files import dump_named, read_named
from art.trainer.tree_attention import TreeLayout

_ADAPTER = "default"
_EXPERT_LAYERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate"})
"""Names by which peft finds the experts and the router of a mixture."""
_CHOOSERS = frozenset({"router", "indexer"})
"""Modules that choose experts or keys. A choice has no gradient, and engines adapt none of their layers."""


class LoraPolicy(Policy):
    """A policy made of the frozen base model and one trained LoRA adapter. `tensors` has the names of PEFT files."""

    config: LoraConfig
    weights_file = checkpoints.ADAPTER_WEIGHTS

    def __init__(self, base: FrozenModel, config: LoraConfig) -> None:
        self.base = base
        self.config = config
        self._peft_model = _inject(base, config)
        self._layers = _find_layers(base, self._peft_model)
        self._scale = config.scale
        parameters = {
            name.replace(f".{_ADAPTER}.", "."): parameter
            for name, parameter in self._peft_model.named_parameters()
            if "lora_" in name
        }
        grads = self._allocate(parameters)
        for name, parameter in parameters.items():
            parameter.data, parameter.grad = self.tensors[name], grads[name]
        self.reset()

    # -- weights --

    def reset(self) -> None:
        """Set A to Kaiming-uniform numbers of the configured seed and B to 0: the adapter changes nothing."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, tensor in self.tensors.items():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(tensor.shape[1])
                tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))
            else:
                tensor.zero_()

    def files(self) -> dict[str, checkpoints.Content]:
        """Return the files of the adapter by name, in the format of peft."""
        return {
            checkpoints.ADAPTER_WEIGHTS: dump_named(self.tensors),
            checkpoints.ADAPTER_CONFIG: self.adapter_config(),
        }

    def load(self, file: Path) -> None:
        for name, tensor in read_named(file, self.tensors, "adapter"):
            self.tensors[name].copy_(tensor)

    def adapter_config(self) -> bytes:
        """Return the content of `adapter_config.json`."""
        values = self._peft_model.peft_config[_ADAPTER].to_dict()
        values["base_model_name_or_path"] = self.base.name
        values["target_modules"] = sorted(values["target_modules"])
        values["inference_mode"] = True

        def as_json(value: Any) -> Any:  # of sets and enums
            return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))

        return json.dumps(values, indent=1, sort_keys=True, default=as_json).encode()

    def norm(self) -> float:
        return self._norm_of_products(self._factors(self.tensors).values())

    def change_norm(self, before: Tensor) -> float:
        """Return the Frobenius norm of the change of all scale * B A since `values` were `before` [P].

        B A - B' A' = (B - B') A + B' (A - A') is the product of [B - B', B'] and [A; A - A']. This form does not
        subtract large numbers that are almost equal.
        """
        old = self._factors(named_views(before, self.tensors))
        return self._norm_of_products(
            (torch.cat([a, a - old[key][0]]), torch.cat([b - old[key][1], old[key][1]], dim=1))
            for key, (a, b) in self._factors(self.tensors).items()
        )

    def _factors(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """A [r, in] and B [out, r] of every adapted layer, from tensors that are named as in `tensors`."""
        return {key: (tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]) for key in self._layers}

    def _norm_of_products(self, factors: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Frobenius norm of all scale * B A together. |B A|^2 = trace(A A^T B^T B), so no product is formed."""
        total = 0.0
        for a, b in factors:
            total += float(((a @ a.T) * (b.T @ b)).sum())
        return self._scale * math.sqrt(max(total, 0.0))

    # -- forward and backward --

    def hidden_states(self, layout: TreeLayout) -> Tensor:
        return run_backbone(self.base, layout)

    def base_hidden_states(self, layout: TreeLayout) -> Tensor:
        """Compute the hidden states with all adapters switched off."""
        from art.trainer.policy.linear import LoraLinear

        ours = [layer for layer in self._layers.values() if isinstance(layer, LoraLinear)]
        others = self._peft_model.base_model if len(ours) < len(self._layers) else None
        for layer in ours:
            layer.is_off = True
        if others is not None:  # such as layers with quantised weights
            others.disable_adapter_layers()
        try:
            return run_backbone(self.base, layout)
        finally:
            for layer in ours:
                layer.is_off = False
            if others is not None:
                others.enable_adapter_layers()

    @contextlib.contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        self.grads.zero_()
        yield

    def remove(self) -> None:
        self._peft_model.unload()


def _inject(base: FrozenModel, config: LoraConfig) -> Any:
    import peft

    from art.trainer.policy.linear import LoraLinear  # imports peft

    decoder = _decoder_name(base)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_target_modules(base, config, decoder),
        # Training on text gives no gradient to modules outside of the text decoder.
        exclude_modules=None if decoder is None else rf"(?!{re.escape(decoder)}\.).*",
        lora_dropout=0.0,
        bias="none",
    )
    settings._register_custom_module({torch.nn.Linear: LoraLinear})  # peft's documented way to add a layer class
    try:
        return peft.get_peft_model(base.model, settings)
    except ValueError as error:
        linear = {n.rpartition(".")[2] for n, m in base.model.named_modules() if isinstance(m, torch.nn.Linear)}
        raise ConfigError(
            f"cannot add a LoRA to {base.name!r} with target_modules={config.target_modules}: {error}. Its linear "
            f"layers are called {', '.join(sorted(linear))}",
            param="target_modules",
        ) from error


def _target_modules(base: FrozenModel, config: LoraConfig, decoder: str | None) -> str | list[str]:
    """The `target_modules` to pass to peft, of a model whose text decoder is called `decoder` (`_decoder_name`).

    For mixtures of experts peft applies "all-linear", and the usual names of experts' layers, to the experts' stacked
    weights and the router. Engines cannot serve such adapters. So those names are left out, and only the attention is
    adapted.
    """
    if config.target_modules is not None:
        return list(config.target_modules)
    stacked = any(".experts." in name and p.dim() > 2 for name, p in base.model.named_parameters())
    if not stacked and decoder is None:
        return "all-linear"
    linear = {
        name.rpartition(".")[2]
        for name, module in base.model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.weight is not base.head.weight
        and name.startswith(decoder or "")
        and not _CHOOSERS & set(name.split("."))
    }
    return sorted(linear - _EXPERT_LAYERS if stacked else linear)


def _decoder_name(base: FrozenModel) -> str | None:
    """Name of the text decoder in a model that also reads images or sound; `None` if the model is nothing else."""
    model: Any = base.model
    decoder = model.get_decoder()
    return None if decoder is base.backbone else next(n for n, module in model.named_modules() if module is decoder)


def _find_layers(base: FrozenModel, peft_model: Any) -> dict[str, Any]:
    """The adapted layers, by their name in PEFT files. One that engines do not adapt is a `ConfigError`."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = {n: m for n, m in peft_model.named_modules() if isinstance(m, LoraLayer)}
    for name, layer in layers.items():
        place, problem = repr(name.removeprefix("base_model.model.")), None
        if isinstance(layer, ParamWrapper):
            problem = f"the stacked weights of {place}, which engines cannot adapt; name layers of the attention only"
        elif isinstance(layer.base_layer, torch.nn.Embedding) or layer.base_layer.weight is base.head.weight:
            problem = f"{place}: the embedding and the language-model head are never trained; name linear layers only"
        if problem is not None:
            peft_model.unload()
            raise ConfigError(f"target_modules selects {problem}", param="target_modules")
    return layers
