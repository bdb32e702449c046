"""Micro-batches: the samples of one forward pass. They are cut smaller when memory runs out.

Training and measuring both use a `MicroBatcher`, which splits samples by a token budget, and `run_fitting`, which runs
the micro-batches and cuts them until they fit into memory.

The attention kernel of a micro-batch follows from its size and the device:

    up to 256 tokens             dense
    more, on the CPU             blocks
    above 1,024 tokens on CUDA   flex, if it can be compiled
    else                         dense

A model that runs one sequence at a time keeps its own attention. FlexAttention is compiled, so it is compared with the
reference before anything is trained with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from art.errors import TrainingError
from art.kernels.base_model import head_dims, layer_settings
from art.trainer.distributed import ALONE, Team
from art.trainer.logprobs import TargetRows, group_by_row, target_logprobs
from art.trainer.memory import is_out_of_memory, release_memory
from art.trainer.policy.base_model import FrozenModel
from art.trainer.tree import FloatArray, SamplePath, Targets, build_tree, pack, pack_shares
from art.trainer.tree_attention import (
    KERNELS,
    AttentionFormula,
    KernelName,
    TreeLayout,
    make_layout,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""Function that is called with (micro-batches done, micro-batches in total), both of this process only."""


class StepProgress:
    """Counts finished micro-batches of a step and reports them. Passes that only measure are reported as (0, 1)."""

    def __init__(self, report: OnProgress | None = None) -> None:
        self._report = report
        self._num_done = self._num_expected = 0

    def expect(self, num_micro_batches: int) -> None:
        """Begin to count, once the number of micro-batches that train is known."""
        self._num_expected = num_micro_batches

    def tick(self) -> None:
        """Count and report one micro-batch. An update that starts again on smaller ones may do more than expected."""
        self._num_done = min(self._num_done + 1, self._num_expected)
        if self._report is not None:
            self._report(self._num_done, self._num_expected or 1)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward pass, laid out as a prefix tree on the model's device."""

    paths: list[SamplePath]
    layout: TreeLayout
    targets: Targets
    rows: TargetRows


def make_micro_batch(paths: list[SamplePath], base: FrozenModel) -> MicroBatch:
    """Lay out the prefix tree of `paths` on the device of `base`."""
    tree = build_tree(paths, branches=not base.one_by_one)
    return MicroBatch(
        paths=paths,
        layout=make_layout(tree, device=base.device, kernel=choose_kernel(base, len(tree))),
        targets=tree.targets,
        rows=group_by_row(tree.targets, base.device),
    )


def target_logprobs_in_order(
    micro_batch: MicroBatch, base: FrozenModel, hidden_states: Callable[[TreeLayout], Tensor]
) -> FloatArray:
    """Compute the log-probs [N] of a micro-batch's targets, in the order of `micro_batch.targets`.

    `hidden_states` computes the final hidden states [T, H] of a layout, under the policy or the base model.
    """
    rows = micro_batch.rows
    by_row, _ = target_logprobs(hidden_states(micro_batch.layout), base.head, rows)
    logprobs: FloatArray = rows.spread(by_row).numpy()
    return logprobs


def split_micro_batches(
    paths: list[SamplePath], base: FrozenModel, *, max_tokens: int, team: Team = ALONE
) -> list[MicroBatch]:
    """Make the micro-batches of this process, of at most `max_tokens` tree tokens each. A longer path gets its own."""
    branches = not base.one_by_one
    shares = pack_shares(paths, max_tokens=max_tokens, num_shares=team.size, branches=branches)
    return [make_micro_batch([paths[index] for index in part], base) for part in shares[team.rank]]


class MicroBatcher:
    """Makes the micro-batches of this process. It lives as long as the trainer.

    It remembers how many tokens fit into memory.
    """

    def __init__(self, base: FrozenModel, *, max_tokens: int, team: Team = ALONE) -> None:
        self.base = base
        self.team = team
        self.max_tokens = max_tokens
        """Largest number of tokens in a micro-batch. It shrinks to what fits when memory runs out."""
        self._has_shrunk = False

    def split(self, paths: list[SamplePath]) -> list[MicroBatch]:
        return split_micro_batches(paths, self.base, max_tokens=self.budget(paths), team=self.team)

    def budget(self, paths: Sequence[SamplePath]) -> int:
        """Largest number of tokens in a micro-batch of these samples.

        A prefix that fills more than half of `max_tokens`, as the system prompt of a coding agent does, comes on top:
        else hardly two samples would have room beside each other, and each would compute it again. Each sample is at
        least as long as the prefix, so memory has to hold one in any case.
        """
        longest = max((int(path.shared.max()) for path in paths), default=0)
        return self.max_tokens + (longest if 2 * longest > self.max_tokens and not self._has_shrunk else 0)

    def shrink(self, fitting: int | None) -> None:
        """Make no micro-batches above `fitting` tokens from now on; `None` changes nothing."""
        if fitting is not None:
            self.max_tokens, self._has_shrunk = min(self.max_tokens, fitting), True


def count_idle_passes(micro_batches: list[MicroBatch], base: FrozenModel, team: Team) -> int:
    """Count the empty passes that this process must add so that all processes run a sharded model equally often."""
    return max(team.gather(len(micro_batches))) - len(micro_batches) if base.is_sharded else 0


def idle_layout(device: torch.device) -> TreeLayout:
    """Make a layout of one token, for an empty pass while another process computes one more micro-batch."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return TreeLayout(token_ids=token, positions=token, subtree_end=token + 1, kernel="dense")


def run_fitting(
    micro_batches: list[MicroBatch], run: Callable[[Iterator[MicroBatch]], T], base: FrozenModel
) -> tuple[T, int | None]:
    """Call `run` on the micro-batches. If memory runs out, call it again on smaller ones with the same samples.

    `run` must start from zero each time. With sharded weights the error is raised instead, since processes in lockstep
    cannot start again one by one.

    Returns:
        The result of `run`, and the token limit of the micro-batches that fitted; `None` if memory did not run out.

    Raises:
        TrainingError: a single sample does not fit into memory.
    """

    def one_by_one(micro_batches: list[MicroBatch], current: list[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            current[:] = [micro_batch]
            yield micro_batch
            micro_batch.layout.derived.clear()  # masks are large and not needed again

    fitting = None
    while True:
        current: list[MicroBatch] = []
        try:
            return run(one_by_one(micro_batches, current)), fitting
        except RuntimeError as error:
            if base.is_sharded or not current or not is_out_of_memory(error):
                raise
            if len(current[0].paths) == 1:
                path = current[0].paths[0]
                raise TrainingError(
                    f"sample {path.sample.sample_id!r}, of {path.num_tokens} tokens, does not fit into memory even "
                    "alone; set `gradient_checkpointing`, use dtype bfloat16 or a smaller base model, or leave out "
                    "trajectories of this length"
                ) from error
        num_tokens = current[0].layout.num_tokens
        current[0].layout.derived.clear()
        release_memory()  # not in the `except` block, where the error still holds the tensors
        # The samples of finished micro-batches run again too: one gradient is summed over all of them from zero.
        fitting = max(1, num_tokens // 2)
        _log.warning("%d tokens do not fit into memory: starting again with micro-batches of %d", num_tokens, fitting)
        paths = [path for micro_batch in micro_batches for path in micro_batch.paths]
        parts = pack(paths, max_tokens=fitting, branches=not base.one_by_one)
        micro_batches = [make_micro_batch([paths[index] for index in part], base) for part in parts]


# -- the attention kernel of a layout --


_DENSE_UP_TO = 256
"""Up to about two blocks of queries, a single call computes few scores in vain."""
_DENSE_ON_CUDA_UP_TO = 1024
"""Small layouts are fast with any kernel there, and not worth compiling one."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest allowed error, as a share of the largest number. Rounding stays well below; a wrong key gives about 1."""
_NUM_COMPLETIONS = 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a model that an attention kernel depends on."""

    num_heads: int
    num_groups: int
    """Number of heads of keys and values."""
    size: int
    value_size: int
    """Size of a value. In multi-head latent attention (DeepSeek, Kimi) it is smaller than the size of a key."""
    dtype: torch.dtype
    device: torch.device
    has_sinks: bool = False

    @classmethod
    def of(cls, base: FrozenModel) -> HeadShape:
        model: Any = base.model
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        sizes = head_dims(model.config)
        size = value_size = max(sizes)
        if getattr(config, "qk_nope_head_dim", None) is not None:
            size, value_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return cls(
            num_heads=num_heads,
            num_groups=layer_settings(model.config, "num_key_value_heads")[sizes.index(size)] or num_heads,
            size=size,
            value_size=value_size,
            dtype=base.head.weight.dtype,
            device=base.device,
            has_sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        )

    def random_inputs(self, num_tokens: int) -> list[torch.Tensor]:
        """Make query [1, H, T, D], key [1, G, T, D], value [1, G, T, E] and maybe sinks [H] from one fixed seed.

        Heads of a token lie side by side in memory, as models have them, so that flex is not compiled once more.
        """
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        rows = [(self.num_heads, self.size), (self.num_groups, self.size), (self.num_groups, self.value_size)]
        inputs = [make(1, num_tokens, count, size).transpose(1, 2) for count, size in rows]
        return [*inputs, make(self.num_heads)] if self.has_sinks else inputs


def choose_kernel(base: FrozenModel, num_tokens: int) -> KernelName:
    """Choose the attention kernel for a layout of `num_tokens` tokens."""
    if base.one_by_one:
        return "own"
    if num_tokens <= _DENSE_UP_TO:
        return "dense"
    if base.device.type == "cuda" and num_tokens > _DENSE_ON_CUDA_UP_TO:
        return "flex" if can_run_flex(HeadShape.of(base)) else "dense"
    return "blocks" if base.device.type == "cpu" else "dense"


@cache
def can_run_flex(heads: HeadShape) -> bool:
    """Whether FlexAttention can be compiled here, which takes seconds at the first call, and computes what it should.

    Raises:
        TrainingError: torch.compile is turned off, or compiled flex too often, or outputs and gradients differ from
            those of the dense reference by more than rounding.
    """
    try:
        with torch.enable_grad():
            expected, computed = (_run(name, heads, _DENSE_ON_CUDA_UP_TO) for name in ("dense", "flex"))
            _run("flex", heads, 2 * _DENSE_ON_CUDA_UP_TO)  # a second length, so that any length is compiled for
    except TrainingError:
        raise
    except Exception as error:  # from a compiler: Triton, a C compiler or support for this head size is missing
        _log.warning("FlexAttention cannot run here, so memory grows with the square of a layout: %r", error)
        return False
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), expected, computed, strict=False):
        difference = float((one - other).abs().max() / one.abs().max())
        if not difference <= _TOLERANCE.get(heads.dtype, 5e-2):
            raise TrainingError(
                f"FlexAttention is wrong on this machine: its {name} differs from the reference by {difference:.2g} of "
                "the largest value. Nothing was trained; please report torch's version and the device"
            )
    return True


def _run(kernel: KernelName, heads: HeadShape, num_tokens: int) -> list[Tensor]:
    """Output of a kernel for random numbers, and the gradients of all inputs, in float32."""
    layout = example_layout(num_tokens, heads.device)
    leaves = [x.requires_grad_() for x in heads.random_inputs(len(layout.token_ids))]
    query, key, value, *sinks = leaves
    formula = AttentionFormula(heads.size**-0.5, sinks=sinks[0] if sinks else None)
    out = KERNELS[kernel](query, key, value, layout, formula)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, weights)
    return [x.detach().float() for x in (out, *gradients)]


def example_layout(num_tokens: int, device: torch.device) -> TreeLayout:
    """Make a layout of about `num_tokens` tokens: half of them a shared prompt, the other half its completions."""
    answer = max(1, num_tokens // (2 * _NUM_COMPLETIONS))
    prompt = max(1, num_tokens - answer * _NUM_COMPLETIONS)
    ends = prompt + answer * np.arange(1, _NUM_COMPLETIONS + 1)
    completion = prompt + np.arange(answer)
    positions = torch.from_numpy(np.concatenate([np.arange(prompt), np.tile(completion, _NUM_COMPLETIONS)])).to(device)
    subtree_end = np.concatenate([np.full(prompt, ends[-1]), np.repeat(ends, answer)])
    return TreeLayout(
        token_ids=positions,
        positions=positions,
        subtree_end=torch.from_numpy(subtree_end).to(device),
        kernel="dense",
    )
