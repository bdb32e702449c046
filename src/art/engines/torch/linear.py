"""Linear layers that serve several adapters in one batch.

Rows of a batch are ordered by adapter, so each adapter has one contiguous run of rows and takes one pair of small
matrix products per layer. Rows in no run use the base weights alone. An adapter that fills whole batches is folded
into a copy of the weights, and then costs nothing.

The adapters come from PEFT's files. Everything that could make one behave differently from how it was trained is
refused: unreadable files, keys that match no layer, shapes that do not fit, and settings that this engine does not
support.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from art.engine import AdapterInfo
from art.errors import AdapterError


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The low-rank update of one linear layer, `x @ a @ b`, including its scale."""

    a: Tensor  # [in, R]
    b: Tensor  # [R, out]


@dataclass(slots=True, eq=False)
class Adapter:
    """Loaded LoRA weights. They never change: loading a name again makes a new `Adapter`."""

    uid: int
    """Number of the adapter, unique in the engine. KV cache entries refer to it. The base model has 0."""
    factors: list[Factors | None]  # by `Linear.index`
    info: AdapterInfo
    num_users: int = 0
    """Number of waiting or running requests that use it."""


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Rows `[start, end)` of a batch, which use one adapter."""

    start: int
    end: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One linear layer of the Hugging Face model, computed as the output columns `[start, end)` of `linear`."""

    linear: Linear
    start: int
    end: int


class Linear:
    """A linear layer `y = x W^T + bias` plus the adapters of the rows. It may be several layers, fused side by side."""

    __slots__ = ("_folded", "bias", "index", "num_in", "num_out", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias
        self.index = index
        self.num_out, self.num_in = weight.shape
        self._folded = weight

    def __call__(self, x: Tensor, runs: list[AdapterRun] | None, residual: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], plus `residual` [N, out]. `runs` is `None` if all rows use the folded adapter."""
        weight = self._folded if runs is None else self.weight
        if residual is not None and self.bias is None:
            y = torch.addmm(residual, x, weight.t())
        else:
            y = F.linear(x, weight, self.bias)
            y = y if residual is None else y.add_(residual)
        if runs is not None:
            add_adapters(x, y, runs, self.index)
        return y

    def fold(self, factors: Factors | None) -> None:
        """Store W + (a b)^T in addition to W, for batches of this one adapter. Without `factors` it is W itself."""
        self._folded = self.weight if factors is None else torch.addmm(self.weight, factors.b.T, factors.a.T)


_FOLDED_AFTER = 3
"""Consecutive batches that an adapter must fill alone before it is folded, so that alternating adapters are not."""
_MAX_FOLDED_BYTES = 1 << 30
"""Largest copy to keep, in bytes. Above it the adapter's share of the work is too small to matter."""


class Folding:
    """Adds the adapter that fills whole batches to a copy of the weights of `linears`: then it costs nothing per token.

    Agents in training sample with one adapter most of the time, and its low-rank products take a fifth to a third of
    the time of a small layer. Batches with several adapters use the low-rank factors.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        weights = [linear.weight for linear in linears]
        # Only in float32: 16-bit weights would round the small update away.
        exact = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        self._linears = linears if exact and sum(weight.nbytes for weight in weights) <= _MAX_FOLDED_BYTES else []
        self._folded_uid: int | None = None
        self._last_uid: int | None = None
        self._num_steps = 0

    def covers(self, runs: list[AdapterRun], num_rows: int) -> bool:
        """Return whether all `num_rows` rows of a batch use the folded adapter. This call may fold it first."""
        if not self._linears or len(runs) != 1 or runs[0].end - runs[0].start != num_rows:
            self._last_uid = None
            return False
        adapter = runs[0].adapter
        if adapter.uid == self._folded_uid:
            return True
        self._num_steps = self._num_steps + 1 if adapter.uid == self._last_uid else 1
        self._last_uid = adapter.uid
        if self._num_steps < _FOLDED_AFTER:
            return False
        for linear in self._linears:
            linear.fold(adapter.factors[linear.index])
        self._folded_uid = adapter.uid
        return True


def add_adapters(x: Tensor, y: Tensor, runs: list[AdapterRun], index: int) -> None:
    """Add the low-rank update of each run to its rows of `y` [N, out], in place."""
    for run in runs:
        factors = run.adapter.factors[index]
        if factors is not None:
            rows = slice(run.start, run.end)
            y[rows].addmm_(x[rows] @ factors.a, factors.b)


@dataclass(slots=True)
class RunContext:
    """The runs of the current batch, shared by all `HfLinear` layers of a model."""

    runs: list[AdapterRun] = field(default_factory=list)
    head_runs: list[AdapterRun] = field(default_factory=list)
    num_rows: int | None = None
    """Number of rows of a trial batch. `None` outside of a trial: layers then do not record what they see."""


class HfLinear(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Replaces an `nn.Linear` inside a Hugging Face model. It reads the runs from `context`."""

    def __init__(self, base: nn.Linear, index: int, context: RunContext, *, is_head: bool) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.index = index
        self.sees_all_rows = False
        """Whether the input had one row per token of the batch. Set by a trial forward pass."""
        self._context = context
        self._is_head = is_head

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        context = self._context
        if context.num_rows is not None:
            self.sees_all_rows = x.numel() // x.shape[-1] == context.num_rows
        runs = context.head_runs if self._is_head else context.runs
        if runs:
            add_adapters(x.reshape(-1, self.in_features), y.view(-1, self.out_features), runs, self.index)
        return y


# -- PEFT LoRA files (`adapter_config.json` and `adapter_model.safetensors`), read without peft --

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Settings that describe how the adapter was trained, not what it computes.
_DESCRIPTIVE = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("init_lora_weights", "loftq_config", "eva_config", "lora_ga_config", "ensure_weight_tying"),
        *("megatron_core", "qalora_group_size", "runtime_config"),
    }
)
_COMPUTED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias"})
# Other initialisations (PiSSA, OLoRA, CorDA, LoftQ ...) also change the base weights.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "lora_ga")


def read_adapter(
    name: str, path: Path, parts: Mapping[str, LinearPart], num_linears: int
) -> tuple[list[Factors | None], AdapterInfo]:
    """Read the LoRA adapter in folder `path`. Return its factors by `Linear.index` (`None` if a layer has none).

    Args:
        parts: the linear layers that adapters may change, by Hugging Face module name.

    Raises:
        AdapterError: a file is unreadable, or does not fit the base model or this engine. Names the file and the key.
    """
    file = path / CONFIG_FILE
    try:
        rank, scale = _read_settings(file)
        file = path / WEIGHTS_FILE
        pairs = _read_pairs(file, parts, rank)
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {file}: {error.message}") from error.__cause__
    by_linear: dict[int, list[str]] = {}
    for module in sorted(pairs):
        by_linear.setdefault(parts[module].linear.index, []).append(module)
    factors: list[Factors | None] = [None] * num_linears
    for index, modules in by_linear.items():
        # Join the factors of all parts of a fused layer: A side by side, B block-diagonal and scaled.
        fused_a = torch.cat([pairs[module][0] for module in modules]).t()
        fused_b = torch.zeros(rank * len(modules), parts[modules[0]].linear.num_out)
        for i, module in enumerate(modules):
            columns = slice(parts[module].start, parts[module].end)
            fused_b[i * rank : (i + 1) * rank, columns] = pairs[module][1].t() * scale
        weight = parts[modules[0]].linear.weight
        held = (x.to(device=weight.device, dtype=weight.dtype).contiguous() for x in (fused_a, fused_b))
        factors[index] = Factors(*held)
    # The norm is that of all `a @ b` together, as they are held in memory: rounded, fused and scaled. No product is
    # formed, since |a b|^2 = sum(a^T a * b b^T). The sum is made on the CPU: MPS has no float64.
    changes = [(pair.a.float(), pair.b.float()) for pair in factors if pair is not None]
    squared = sum(float(((a.t() @ a) * (b @ b.t())).cpu().sum(dtype=torch.float64)) for a, b in changes)
    norm = math.sqrt(max(squared, 0.0))
    return factors, AdapterInfo(name=name, num_layers=len(pairs), rank=rank, norm=norm)


def _read_settings(file: Path) -> tuple[int, float]:
    """Rank and scale of the adapter."""
    try:
        config: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"cannot be read ({error}); save the adapter with peft's save_pretrained") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError("`peft_type` must be 'LORA'; other adapter kinds are not served")
    for key, value in config.items():
        if value and key not in _DESCRIPTIVE and key not in _COMPUTED:
            raise AdapterError(f"`{key}` is {value!r}, which the embedded engine does not support; train without it")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"`bias` is {config['bias']!r}; only 'none' is supported")
    if (init := config.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise AdapterError(f"`init_lora_weights` is {init!r}, which changes the base weights; convert it to plain LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"`r` must be a positive integer, got {rank!r}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"`lora_alpha` must be a finite number, got {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_pairs(file: Path, parts: Mapping[str, LinearPart], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Map module names to (A [r, in], B [out, r]). Every key must belong to a pair, and have the shape of its layer."""
    try:
        weights: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"cannot be read, it is missing or corrupted ({error})") from error
    factors: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in weights.items():
        match = _KEY.fullmatch(key)
        if match is None or match["module"] not in parts:
            unknown.append(key)
        else:
            factors.setdefault(match["module"], {})[match["factor"]] = tensor
    if not factors:
        usual = f"base_model.model.{next(iter(parts), '<none>')}.lora_A.weight"
        problem = f"its first key is {next(iter(weights), None)!r}, expected were keys like {usual!r}"
        raise AdapterError(f"matches no layer of the base model: {problem}; was it trained on another model?")
    if unknown:
        problem = f"{len(unknown)} of {len(weights)} keys match no adaptable linear layer of the base model"
        raise AdapterError(f"{problem}: {', '.join(map(repr, sorted(unknown)[:3]))}; they would be ignored")
    for module, pair in factors.items():
        part = parts[module]
        for factor, size in (("A", [rank, part.linear.num_in]), ("B", [part.end - part.start, rank])):
            key = f"base_model.model.{module}.lora_{factor}.weight"
            if factor not in pair:
                raise AdapterError(f"{key!r} is missing, but the other matrix of the pair is there")
            if (shape := list(pair[factor].shape)) != size:
                problem = f"{key!r} has shape {shape}, expected {size} for rank {rank}"
                raise AdapterError(f"{problem}; was it trained on another model?")
            if not bool(torch.isfinite(pair[factor]).all()):
                raise AdapterError(f"{key!r} holds NaN or infinite values")
    return {module: (pair["A"].float(), pair["B"].float()) for module, pair in factors.items()}
