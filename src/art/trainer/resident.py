"""Load, replace and write the checkpoint in the trainer's memory.

Base model, trained weights, optimiser moments and random generator together are exactly one checkpoint. Each call of
the trainer names the checkpoint that it continues from. What is in memory is replaced, unless it *is* that checkpoint.
So a trainer that died, or failed half-way through a step, needs no repair.
"""

from __future__ import annotations

import base64
import collections
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from art.config import LoraConfig, TrainerConfig
from art.errors import ConflictError
from art.protocol.samples import StepResult
from art.storage import checkpoints
from art.storage.checkpoints import CheckpointState
from art.trainer.distributed import Team
from art.trainer.policy.base_model import FrozenModel
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.proof import measure_probe
from art.trainer.step.optimizer import Optimizer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """The checkpoint in the trainer's memory: trained weights, optimiser and the number of the step."""

    policy: Policy
    optimizer: Optimizer
    step: int
    identity: str | None
    """Identifies the checkpoint on disk that equals this one; `None` if there is none, e.g. during a step."""


class Resident:
    """Holds at most one checkpoint in memory, and loads, replaces and writes it."""

    def __init__(self, base: FrozenModel, config: TrainerConfig, team: Team) -> None:
        self._base = base
        self._config = config
        self._team = team
        self._loaded: Loaded | None = None

    def start_fresh(self, lora: LoraConfig | None) -> Loaded:
        """Replace what is in memory by step 0: a new adapter, or the base weights if `lora` is `None`."""
        if self._loaded is not None and self._loaded.policy.config == lora:
            loaded = self._loaded
            loaded.policy.reset()
            loaded.optimizer.reset()
            loaded.step, loaded.identity = 0, None
            return loaded
        if self._loaded is not None:
            self._loaded.policy.remove()
            self._loaded = None
        policy: Policy = FullPolicy(self._base) if lora is None else LoraPolicy(self._base, lora)
        self._loaded = Loaded(policy, Optimizer(policy, self._team), step=0, identity=None)
        return self._loaded

    def load(self, path: Path) -> Loaded:
        """Bring the checkpoint `path` into memory. Files are read only if it is not there already.

        Raises:
            ConflictError: the checkpoint belongs to another base model.
            AdapterError, StorageError, CorruptCheckpointError: its files are unreadable, damaged or do not fit.
        """
        # What is in memory is the checkpoint only if it is so in every process: one may have failed half-way.
        identity = checkpoints.identify(path) if self._team.rank == 0 else None
        held = self._loaded.identity if self._loaded is not None else None
        answers = self._team.gather((identity, held))
        identity = answers[0][0]
        if self._loaded is not None and all(held == identity for _, held in answers):
            return self._loaded
        checkpoints.verify(path)
        state = checkpoints.read_state(path)
        if state.base_model != self._base.name:
            raise ConflictError(f"checkpoint {path} is of base model {state.base_model!r}, not {self._base.name!r}")
        loaded = self.start_fresh(None if state.lora is None else LoraConfig.model_validate(state.lora))
        loaded.policy.load(path / loaded.policy.weights_file)
        if checkpoints.has_moments(path):
            loaded.optimizer.load(path / checkpoints.OPTIMIZER, state.num_updates)
        else:
            _log.warning("the optimiser's moments of step %d were removed: it starts again without them", state.step)
        # The step that follows then draws what it would have drawn had this process made the checkpoint itself.
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))
        loaded.step, loaded.identity = state.step, identity
        self._team.gather(None)  # nobody trains before all processes have read it
        _log.info("continuing from step %d at %s", loaded.step, path)
        return loaded

    def write(
        self,
        path: Path,
        loaded: Loaded,
        probe_tokens: list[int],
        *,
        job_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write `loaded` to the folder `path`. The first process of the team writes, the others wait.

        Args:
            probe_tokens: token path whose log-probs are stored, for the engine to reproduce.
            job_id, config, metrics: how the checkpoint was made; nothing for step 0.
        """
        lora = loaded.policy.config
        state = CheckpointState(
            step=loaded.step,
            job_id=job_id,
            base_model=self._base.name,
            lora=None if lora is None else lora.model_dump(mode="json"),
            config=dict(config or {}),
            num_updates=loaded.optimizer.num_updates,
            rng=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            metrics=dict(metrics or {}),
        )
        probe = measure_probe(loaded.policy, probe_tokens)
        moments = loaded.optimizer.stream()

        def write() -> str:
            files: dict[str, checkpoints.Content] = {
                checkpoints.OPTIMIZER: moments,
                checkpoints.STATE: state.model_dump_json().encode(),
                checkpoints.PROBE: probe.model_dump_json().encode(),
            }
            try:
                return checkpoints.write_checkpoint(path, loaded.policy.files() | files)
            finally:
                collections.deque(moments, maxlen=0)  # others take part in every piece, even where writing fails

        def send_parts() -> None:
            collections.deque(moments, maxlen=0)  # the other processes run their own stream to its end

        loaded.identity = self._team.from_first(write, meanwhile=send_parts)


def recorded_state(path: Path) -> CheckpointState | None:
    """Verify the checkpoint in folder `path` and read its state; `None` if the folder does not exist."""
    if not path.exists():
        return None
    checkpoints.verify(path)
    return checkpoints.read_state(path)


def recorded_result(path: Path, job_id: str) -> StepResult | None:
    """Read the result that job `job_id` wrote to checkpoint `path` in an earlier attempt, if there was one.

    Raises:
        ConflictError: another job wrote the checkpoint.
    """
    state = recorded_state(path)
    if state is None:
        return None
    if state.job_id != job_id:
        raise ConflictError(
            f"checkpoint {path} exists already, made by job {state.job_id!r}; job {job_id!r} must write another step"
        )
    return StepResult(step=state.step, metrics=state.metrics)
