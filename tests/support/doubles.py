"""Finds the places of ART that compute in float64, which Apple's MPS does not have."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FindDoubles(TorchDispatchMode):
    """While it is entered, notes each function of ART in which torch makes a float64 tensor, as `module.function`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            self.places.add(_place())
        return result


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("art."):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
