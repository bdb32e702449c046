"""Run the MLP of the last decoder layer only where its result is read.

The head reads the final hidden states of the tokens before a learnt one. In the last layer, all other tokens (prompts,
answers of tools) matter as keys and values of its attention, and no longer after that. So its MLP, which treats each
token by itself, leaves them out. Their final hidden states lack the MLP's part, and nobody reads them. Log-probs and
gradients stay the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def skip_unread_tokens(backbone: torch.nn.Module) -> None:
    """Let the last layer's MLP skip the tokens that a layout does not name in `read`.

    Names and parameters of the modules stay as they are. A model without `layers`, or whose last layer has no `mlp`, is
    left alone.
    """
    layers = getattr(backbone, "layers", None)
    last: Any = layers[-1] if isinstance(layers, torch.nn.ModuleList) and len(layers) else None
    mlp: Any = getattr(last, "mlp", None)
    if isinstance(mlp, torch.nn.Module):
        kind: Any = type(mlp)
        mlp.read, mlp.__class__ = None, _skipping(kind)
        last.register_forward_pre_hook(_pass_on, with_kwargs=True)


def _pass_on(layer: Any, args: Any, kwargs: Any) -> None:
    """Tell the MLP before each pass of its layer, also one that is computed again, which tokens are read."""
    layout = kwargs.get("tree_layout")
    layer.mlp.read = None if layout is None else layout.read


@functools.cache
def _skipping(kind: Any) -> type:
    """Make a subclass of an MLP's class that computes only the tokens in `self.read`; the others get 0."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.read is None or args or kwargs or x.shape[:-2] != (1,):
            return kind.forward(self, x, *args, **kwargs)
        out = kind.forward(self, x.index_select(1, self.read))
        if not isinstance(out, Tensor):  # with a router's choices, say, which would be those of some tokens
            self.__class__ = kind
            return self(x)
        return x.new_zeros(x.shape).index_copy(1, self.read, out)

    return type(f"Skipping{kind.__name__}", (kind,), {"forward": forward})
