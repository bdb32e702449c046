"""End a training when a step has a finding that the user named, and keep the checkpoint from before it if asked to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from art.errors import ConfigError
from art.metrics.findings import RULES
from art.model import TrainableModel


@dataclass(frozen=True, slots=True)
class Fork:
    """Name and project of a model that a checkpoint is copied to."""

    name: str
    project: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reactions:
    """Names of findings that end a training; `docs/metrics.md` lists them.

    Raises:
        ConfigError: there is no finding of a name.
    """

    stop_on: Collection[str] = ()
    """The training ends at the checkpoint of the step with the finding."""
    rollback_on: Collection[str] = ()
    """The training ends too. The newest checkpoint from before that step becomes the model `<name>-before-<step>`."""

    def __post_init__(self) -> None:
        check_findings(self.stop_on)
        check_findings(self.rollback_on)

    async def end(self, model: TrainableModel[Any, Any], metrics: Mapping[str, float], checkpoint: int) -> str | None:
        """Say why the training of `model` ends after the step that made `checkpoint`; `None` if it goes on.

        A rollback copies the earlier checkpoint, with its optimiser, before this returns.
        """
        names = [name for name in RULES if metrics.get(f"findings/{name}")]
        for name in names:
            if name in self.rollback_on:
                fork = Fork(f"{model.name}-before-{checkpoint}", model.project)
                step = await model.backend().checkpoints.fork(fork, model, not_after_step=checkpoint - 1)
                return (
                    f"{_describe(name)}. Checkpoint {step} from before it is the model {fork.name!r} now: train that "
                    "one with a lower learning rate"
                )
        stopping = next((name for name in names if name in self.stop_on), None)
        return None if stopping is None else f"{_describe(stopping)}. {RULES[stopping].advice}"


def check_findings(names: Collection[str]) -> None:
    """Check that there is a finding of each name.

    Raises:
        ConfigError: there is none; the message lists all findings.
    """
    if unknown := [name for name in names if name not in RULES]:
        raise ConfigError(f"there is no finding {', '.join(map(repr, unknown))}; there are {', '.join(RULES)}")


def _describe(name: str) -> str:
    return f"the step has the finding {name!r}: {RULES[name].meaning}"
