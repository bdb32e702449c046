"""Keep less for the backward pass: norms and gates are computed again from their inputs, which takes little time.

    norm       keeps its input in the model's dtype. transformers' own code keeps a float32 copy of it
    MLP        down_proj(act(gate_proj(x)) * up_proj(x)) keeps gate and up, and neither act(gate) nor the product

No formula is written down here: the model's own code runs a second time. Outputs are bit for bit those of the model as
it was loaded, and so are gradients in bfloat16; in float32 some of their sums are in another order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class _Recomputed(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Call `function` on tensors, and again in the backward pass. Only the tensors themselves are kept.

    The first `num_arguments` tensors are passed to `function`. The others are parameters that it uses, and get their
    gradients too.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], num_arguments: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.num_arguments = function, num_arguments
        return function(*tensors[:num_arguments])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(needs) if index < ctx.num_arguments else tensor
                for index, (tensor, needs) in enumerate(zip(tensors, needed, strict=True))
            ]
            out = ctx.function(*leaves[: ctx.num_arguments])
        learnt = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
        grads_in = iter(torch.autograd.grad(out, learnt, grads[0]))
        return None, None, *(next(grads_in) if needs else None for needs in needed)


def gated_input(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute `activation(gate) * up`, keeping only the two inputs for the backward pass."""
    return _Recomputed.apply(lambda gate, up: activation(gate) * up, 2, gate, up)


def keep_less(model: torch.nn.Module) -> None:
    """Replace the forward passes of RMS norms and gated MLPs of a Hugging Face model by ones with the same output.

    Names and parameters of the modules stay as they are. MLPs of another form are left alone.
    """
    verdicts: dict[type, bool] = {}
    for module in list(model.modules()):
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm") and kind is not torch.nn.RMSNorm:  # torch's own keeps its input
            module.__class__ = _recomputing_norm(kind)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            if kind not in verdicts:
                verdicts[kind] = _is_gated_mlp(module)
                if not verdicts[kind]:
                    _log.info("%s is not a plain gated MLP; it keeps what transformers keeps", kind.__name__)
            if verdicts[kind]:
                module.__class__ = _gated_mlp(kind)


@functools.cache
def _recomputing_norm(kind: Any) -> type:
    """A subclass of a norm's class that computes it again in the backward pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not torch.is_grad_enabled():  # e.g. a norm with a gate
            return kind.forward(self, *args, **kwargs)
        trained = [parameter for parameter in self.parameters(recurse=False) if parameter.requires_grad]
        return _Recomputed.apply(functools.partial(kind.forward, self), 1, args[0], *trained)

    return type(f"Recomputing{kind.__name__}", (kind,), {"forward": forward})


@functools.cache
def _gated_mlp(kind: Any) -> type:
    """A subclass of an MLP's class that computes the gate again in the backward pass."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _apply_gated_mlp(self, x)

    return type(f"Recomputing{kind.__name__}", (kind,), {"forward": forward})


def _apply_gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    adapted: Any = getattr(down, "gated", None)  # an `LoraLinear`, which does not keep its input either
    out: Tensor = down(gated_input(gate, up, mlp.act_fn)) if adapted is None else adapted(gate, up, mlp.act_fn)
    return out


def _is_gated_mlp(mlp: Any) -> bool:
    """Whether the module computes what `_apply_gated_mlp` does, by its output for usual and large numbers."""
    if not all(isinstance(layer, torch.nn.Linear) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return False
    weight = mlp.down_proj.weight
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
    x = torch.randn(4, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    try:
        with torch.no_grad():
            return all(torch.equal(mlp(x * factor), _apply_gated_mlp(mlp, x * factor)) for factor in (1.0, 10.0))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # takes or returns something else
        return False
