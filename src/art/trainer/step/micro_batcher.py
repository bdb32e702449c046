"""Cutting the samples of updates into micro-batches, with what the trainer has learnt about its device so far."""

from __future__ import annotations

from collections.abc import Sequence

from art.trainer.attention.kernel_check import check_kernel
from art.trainer.attention.tree_attention import KernelName
from art.trainer.machine.distributed import ALONE, Team
from art.trainer.policy.base_model import BaseModel
from art.trainer.step.micro_batch import MicroBatch, split_micro_batches
from art.trainer.tree.tree import SamplePath


class MicroBatcher:
    """Makes the micro-batches of this process. It lives as long as the trainer.

    It remembers how many tokens fit into memory, and which attention kernels have been checked on this device.
    """

    def __init__(self, base: BaseModel, *, max_tokens: int, team: Team = ALONE) -> None:
        self.base = base
        self.team = team
        self.max_tokens = max_tokens
        """Tokens per micro-batch. Shrinks when memory runs out, to what did fit."""
        self._checked_kernels: set[KernelName] = set()

    def split(self, paths: list[SamplePath]) -> list[MicroBatch]:
        return split_micro_batches(paths, self.base, max_tokens=self.max_tokens, team=self.team)

    def shrink(self, fitting: int | None) -> None:
        """Make no micro-batches above `fitting` tokens from now on; `None` changes nothing."""
        if fitting is not None:
            self.max_tokens = min(self.max_tokens, fitting)

    def check_kernels(self, micro_batches: Sequence[MicroBatch], paths: Sequence[SamplePath]) -> None:
        """Compare each attention kernel that is used for the first time with the reference, on some of `paths`.

        Raises:
            TrainingError: a kernel is wrong on this machine.
        """
        for kernel in {micro_batch.layout.kernel for micro_batch in micro_batches} - self._checked_kernels:
            check_kernel(self.base, kernel, paths)
            self._checked_kernels.add(kernel)
