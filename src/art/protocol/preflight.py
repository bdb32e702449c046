"""Wire types of the preflight: the checks before a training, and their results."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.protocol.training import Wire, WireGroup

CheckStatus = Literal["ok", "warning", "failure"]


class MemoryPart(Wire):
    """Memory that engine or trainer needs of one device for one thing, such as the optimiser's moments."""

    where: str
    """The device, e.g. `cuda:0 (NVIDIA H100)`, or `this machine` for main memory."""
    owner: Literal["engine", "trainer"]
    name: str
    size_bytes: int


class CheckResult(Wire):
    """Result of one check of what training a model needs."""

    name: str
    status: CheckStatus
    found: str
    """What the check saw, in plain words."""
    remedy: str | None = None
    """What the user can do about a problem; `None` if there is none."""
    measured: dict[str, float] = {}
    memory: list[MemoryPart] = []
    """The parts of a memory forecast; empty for other checks."""


class PreflightRequest(Wire):
    quick: bool = True
    """Check versions, devices, disk space and chat format, which takes about a second."""
    trial: bool = True
    """Run a step in the trainer process on one sequence of random tokens."""
    trial_tokens: int | None = Field(default=None, ge=2)
    """Length in tokens of the sequence of the trial; `None` means the longest that the engine takes."""
    groups: list[WireGroup] = []
    """Rollouts that this server sampled. A trial step runs on them, and a check measures whether their answers depend
    on what the model was shown."""


class PreflightReport(Wire):
    checks: list[CheckResult]
