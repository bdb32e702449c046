"""Micro-batches: what one forward pass takes, and smaller ones where memory runs out.

Passes that train and passes that only measure go the same way: `split_micro_batches` deals the samples out under the
token budget, and `run_fitting` runs the micro-batches, cutting them until they fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from art.errors import TrainingError
from art.trainer.attention.kernel_choice import choose_kernel
from art.trainer.attention.tree_attention import TreeLayout, make_layout
from art.trainer.machine.distributed import ALONE, Team
from art.trainer.machine.memory import is_out_of_memory, release_memory
from art.trainer.policy.base_model import BaseModel
from art.trainer.step.logprobs import TargetRows, group_by_row
from art.trainer.tree.deal import pack_shares
from art.trainer.tree.pack import pack
from art.trainer.tree.tree import SamplePath, Targets, build_tree

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    paths: list[SamplePath]
    layout: TreeLayout
    targets: Targets
    rows: TargetRows


def make_micro_batch(paths: list[SamplePath], base: BaseModel) -> MicroBatch:
    """The tree of `paths`, on the device of `base`."""
    tree = build_tree(paths)
    return MicroBatch(
        paths=paths,
        layout=make_layout(tree, device=base.device, kernel=choose_kernel(base, len(tree))),
        targets=tree.targets,
        rows=group_by_row(tree.targets, base.device),
    )


def split_micro_batches(
    paths: list[SamplePath], base: BaseModel, *, max_tokens: int, team: Team = ALONE
) -> list[MicroBatch]:
    """This process's micro-batches of `paths`, at most `max_tokens` long where a single path is."""
    shares = pack_shares(paths, max_tokens=max_tokens, num_shares=team.size)
    return [make_micro_batch([paths[index] for index in part], base) for part in shares[team.rank]]


def count_idle_passes(micro_batches: list[MicroBatch], base: BaseModel, team: Team) -> int:
    """Passes that this process must add: all have to run a model with sharded weights equally often."""
    return max(team.gather(len(micro_batches))) - len(micro_batches) if base.is_sharded else 0


def run_fitting(
    micro_batches: list[MicroBatch], run: Callable[[Iterator[MicroBatch]], T], base: BaseModel
) -> tuple[T, int | None]:
    """What `run` makes of the micro-batches; where memory runs out, of smaller ones with the same samples.

    `run` takes one after the other and begins from nothing each time it is called. Where weights are sharded the
    error is passed on: processes in lockstep cannot start again one by one.

    Returns:
        Its result, and the most tokens in a micro-batch that fitted into memory, if larger ones did not.

    Raises:
        TrainingError: a single sample does not fit into memory.
    """
    fitting = None
    while True:
        current: list[MicroBatch] = []
        try:
            return run(_one_by_one(micro_batches, current)), fitting
        except RuntimeError as error:
            if base.is_sharded or not current or not is_out_of_memory(error):
                raise
            if len(current[0].paths) == 1:
                raise _too_long(current[0].paths[0]) from error
        num_tokens = len(current[0].layout.token_ids)
        current[0].layout.derived.clear()
        release_memory()  # here, since the error held on to the tensors of the failed pass
        fitting = max(1, num_tokens // 2)
        _log.warning("%d tokens at once do not fit into memory: starting again with %d", num_tokens, fitting)
        paths = [path for micro_batch in micro_batches for path in micro_batch.paths]
        parts = pack(paths, max_tokens=fitting)
        micro_batches = [make_micro_batch([paths[index] for index in part], base) for part in parts]


def _one_by_one(micro_batches: list[MicroBatch], current: list[MicroBatch]) -> Iterator[MicroBatch]:
    """`current` holds the one that was given last."""
    for micro_batch in micro_batches:
        current[:] = [micro_batch]
        yield micro_batch
        micro_batch.layout.derived.clear()  # masks are large, and the passes of this layout are over


def _too_long(path: SamplePath) -> TrainingError:
    return TrainingError(
        f"sample {path.sample.sample_id!r}, of {len(path.token_ids)} tokens, does not fit into memory even alone; set "
        "`gradient_checkpointing`, use dtype bfloat16 or a smaller base model, or leave out so long trajectories"
    )
