"""The unit of a memory forecast: one named amount of memory, and sums of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from art.config import Dtype

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30

Owner = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True)
class Part:
    """Memory that one process needs for one thing, such as the gradients of the trainer."""

    owner: Owner
    name: str
    size_bytes: int
    grows_with_tokens: bool = False
    """Whether it grows with the tokens of a micro-batch."""
    is_optional: bool = False
    """Whether the process goes without it where memory is short, and is slower then."""
    remedy: str | None = None
    """What makes this part smaller."""

    def __str__(self) -> str:
        return f"{self.owner} {self.name} {self.size_bytes / GIB:.1f} GiB"


def total(parts: Iterable[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def resolve_dtype(dtype: Dtype, device: str) -> str:
    """Return the type of weights that engine and trainer choose for "auto" on a device ("cpu", "cuda", "mps")."""
    return dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
