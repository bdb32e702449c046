"""The optimiser updates of a step, one after the other, on the checkpoint in memory."""

from __future__ import annotations

from itertools import chain

from art.config import OptimizerConfig
from art.trainer.resident import Loaded
from art.trainer.step.micro_batcher import MicroBatcher
from art.trainer.step.progress import Progress
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient


def run_updates(
    loaded: Loaded, updates: list[Update], optimizer: OptimizerConfig, batcher: MicroBatcher, progress: Progress
) -> StepRecord:
    """Change the weights of `loaded` by all of `updates`; return what was observed meanwhile.

    Raises:
        TrainingError: a loss or a gradient is not finite, too many samples do not come from the policy, a single sample
            does not fit into memory, or an attention kernel is wrong on this machine.
    """
    record = StepRecord()
    batches = [batcher.split(update.paths) for update in updates]
    batcher.check_kernels(list(chain.from_iterable(batches)), updates[0].paths)
    progress.expect(sum(map(len, batches)))
    for number, update in enumerate(updates):
        fitting = compute_gradient(loaded.policy, update, batches[number], record, progress, batcher.team)
        if fitting is not None:  # memory ran out: cut the remaining updates again, into smaller micro-batches
            batcher.shrink(fitting)
            batches[number + 1 :] = [batcher.split(later.paths) for later in updates[number + 1 :]]
        loaded.identity = None  # what is in memory is not a checkpoint until the next one is written
        record.grad_norms.append(loaded.optimizer.update(update.learning_rate, optimizer))
    return record
