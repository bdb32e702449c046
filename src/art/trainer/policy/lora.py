"""A LoRA on the frozen base model: matrices injected by peft and stored in its format.

An adapted linear layer, y = x W^T + bias + scale * (x A^T) B^T, is one autograd function. peft's own layer keeps a
float32 copy of x for each adapted layer, and adds the adapter with four more passes over the output and three over its
gradient. Here A and B are float32 and are rounded to the dtype of x for the products, as an engine rounds them. Their
gradients are sums over tokens in float32. What is kept for the backward pass is x A^T and x itself, which layers with
the same input share. The input of an MLP's last layer is not kept (`LoraLinear.gated`). A layer of any kind is used as
it is, e.g. one with 4-bit weights; then the low-rank products are a function of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import peft
import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn.functional import linear

from art.config import LoraConfig
from art.errors import ConfigError
from art.storage import checkpoints
from art.trainer.policy.base_model import FrozenModel, gated_input, run_backbone
from art.trainer.policy.policy import Policy
from art.trainer.tensor_files import read_named, stream_named
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
            checkpoints.ADAPTER_WEIGHTS: b"".join(stream_named(self.tensors)),
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
        total = 0.0
        for name in self._layers:
            a, b = self.tensors[f"{name}.lora_A.weight"], self.tensors[f"{name}.lora_B.weight"]  # [r, in], [out, r]
            total += float(((a @ a.T) * (b.T @ b)).sum())  # |B A|^2 = trace(A A^T B^T B), without the product
        return self.config.scale * math.sqrt(max(total, 0.0))

    # -- forward and backward --

    def hidden_states(self, layout: TreeLayout) -> Tensor:
        return run_backbone(self.base, layout)

    def base_hidden_states(self, layout: TreeLayout) -> Tensor:
        """Compute the hidden states with all adapters switched off."""
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


# -- adapted layers --

Activation: TypeAlias = Callable[[Tensor], Tensor]

_CHUNK = 1024
"""Tokens whose numbers are converted to float32 at a time, where a product cannot return float32."""


class LoraLinear(PeftLinear):  # type: ignore[misc]  # peft is not followed by the type checker
    """A linear layer with a LoRA adapter, used like peft's layer but with less memory and faster passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_off = False
        """Whether the layer runs without its adapter. Peft's own switch visits each layer's parts, which takes long."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_off:
            out: Tensor = self.base_layer(x)
            return out
        if self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        base, (a, b, scale) = self.base_layer, self._factors()
        if not self.is_plain:
            return _LowRankSum.apply(base(x), x, a, b, scale)
        return _AdaptedProduct.apply(x, None, a, b, base.weight, base.bias, scale, None)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Apply the layer to `activation(gate) * up`, and compute that product again for the backward pass."""
        if self.is_off or self.disable_adapters or not self.is_plain:
            return self(gated_input(gate, up, activation))
        base, (a, b, scale) = self.base_layer, self._factors()
        return _AdaptedProduct.apply(gate, up, a, b, base.weight, base.bias, scale, activation)

    @property
    def is_plain(self) -> bool:
        """Whether the adapted layer is a product with a weight, not a quantised or otherwise special layer."""
        return type(self.base_layer) is torch.nn.Linear

    def _factors(self) -> tuple[Tensor, Tensor, float]:
        """Return A [r, in], B [out, r] and the scale of their product."""
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute [..., out] from x [..., in], A [r, in], B [out, r] and the frozen W [out, in].

    With `up` [..., in] the input is activation(x) * up. Then x and up are kept, and the input is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        a: Tensor,
        b: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        activation: Activation | None,
    ) -> Tensor:
        whole = x if up is None or activation is None else activation(x) * up
        rows = whole.flatten(0, -2)
        out = linear(rows, weight, bias)
        inner = rows @ a.T.to(x.dtype)  # [N, r]
        out.addmm_(inner, b.T.to(x.dtype), alpha=scale)
        ctx.save_for_backward(x, up, inner, a, b, weight)
        ctx.scale, ctx.activation = scale, activation
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, inner, a, b, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_inner, grad_b = _grad_inner(grad, b, ctx.scale), _grad_b(grad, inner.T, ctx.scale)
        leaves: tuple[Tensor, ...] = (x,)
        whole = x
        if up is not None:
            with torch.enable_grad():
                leaves = x.detach().requires_grad_(), up.detach().requires_grad_()
                whole = ctx.activation(leaves[0]) * leaves[1]
        grad_a = _sum_over_tokens(grad_inner, whole.detach().flatten(0, -2))
        grad_x = grad_up = None
        if any(ctx.needs_input_grad[:2]):
            grad_x = (grad @ weight).addmm_(grad_inner.T, a.to(x.dtype)).view(x.shape)
            if up is not None:
                grad_x, grad_up = torch.autograd.grad(whole, leaves, grad_x)
        return grad_x, grad_up, grad_a, grad_b, None, None, None, None


class _LowRankSum(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute out + scale * (x A^T) B^T from out [..., out], x [..., in], A [r, in] and B [out, r]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        inner = x.flatten(0, -2) @ a.T.to(x.dtype)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale = scale
        return torch.addmm(out.flatten(0, -2), inner, b.T.to(x.dtype), alpha=scale).view(out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_inner = _grad_inner(grad, b, ctx.scale)
        grad_a, grad_b = _sum_over_tokens(grad_inner, x.flatten(0, -2)), _grad_b(grad, inner.T, ctx.scale)
        grad_x = (grad_inner.T @ a.to(x.dtype)).view(x.shape) if ctx.needs_input_grad[1] else None
        return grads[0], grad_x, grad_a, grad_b, None


# These orders of factors are fast at every rank. The transposed ones take four times as long at rank 8 (measured at 256
# to 2,048 columns), and the same time at rank 16.


def _grad_inner(grad: Tensor, b: Tensor, scale: float) -> Tensor:
    """Gradient [r, N] of (x A^T)^T from the gradient [N, out] of the output, in its dtype."""
    return (b.T.to(grad.dtype).contiguous() @ grad.T).mul_(scale)


def _grad_b(grad: Tensor, inner: Tensor, scale: float) -> Tensor:
    """Float32 gradient [out, r] of B. `inner` [r, N] is (x A^T)^T."""
    return _sum_over_tokens(inner.contiguous(), grad).mul_(scale).T


def _sum_over_tokens(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [r, N] by [N, k] of the same dtype. The sums over N tokens are computed and returned in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    total = left.new_zeros(len(left), right.shape[1], dtype=torch.float32)
    for part, rows in zip(left.split(_CHUNK, dim=1), right.split(_CHUNK), strict=True):
        total.addmm_(part.float(), rows.float())
    return total
