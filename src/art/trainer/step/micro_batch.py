"""Micro-batches: the samples of one forward pass. They are cut smaller when memory runs out.

Training and measuring both use a `MicroBatcher`, which splits samples by a token budget, and `run_fitting`, which runs
the micro-batches and cuts them until they fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from art.errors import TrainingError
from art.trainer.distributed import ALONE, Team
from art.trainer.logprobs import TargetRows, group_by_row
from art.trainer.memory import is_out_of_memory, release_memory
from art.trainer.policy.base_model import FrozenModel
from art.trainer.step.kernel_choice import check_kernel, choose_kernel
from art.trainer.tree import SamplePath, Targets, build_tree, pack, pack_shares
from art.trainer.tree_attention import KernelName, TreeLayout, make_layout

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


def split_micro_batches(
    paths: list[SamplePath], base: FrozenModel, *, max_tokens: int, team: Team = ALONE
) -> list[MicroBatch]:
    """Make the micro-batches of this process, of at most `max_tokens` tree tokens each. A longer path gets its own."""
    branches = not base.one_by_one
    shares = pack_shares(paths, max_tokens=max_tokens, num_shares=team.size, branches=branches)
    return [make_micro_batch([paths[index] for index in part], base) for part in shares[team.rank]]


class MicroBatcher:
    """Makes the micro-batches of this process. It lives as long as the trainer.

    It remembers how many tokens fit into memory, and which attention kernels have been checked on this device.
    """

    def __init__(self, base: FrozenModel, *, max_tokens: int, team: Team = ALONE) -> None:
        self.base = base
        self.team = team
        self.max_tokens = max_tokens
        """Largest number of tokens in a micro-batch. It shrinks to what fits when memory runs out."""
        self._checked_kernels: set[KernelName] = set()

    def split(self, paths: list[SamplePath]) -> list[MicroBatch]:
        return split_micro_batches(paths, self.base, max_tokens=self.max_tokens, team=self.team)

    def shrink(self, fitting: int | None) -> None:
        """Make no micro-batches above `fitting` tokens from now on; `None` changes nothing."""
        if fitting is not None:
            self.max_tokens = min(self.max_tokens, fitting)

    def check_kernels(self, micro_batches: Sequence[MicroBatch], paths: Sequence[SamplePath]) -> None:
        """Compare each attention kernel that is used for the first time with the reference, on some of `paths`."""
        for kernel in {micro_batch.layout.kernel for micro_batch in micro_batches} - self._checked_kernels:
            check_kernel(self.base, kernel, paths)
            self._checked_kernels.add(kernel)


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
