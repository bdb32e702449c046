"""Which policy answers a request: the seam between the gateway and whoever knows the registered models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from art.engine import Engine
from art.errors import NotFoundError
from art.gateway.format.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRef:
    """All that sampling from one step of one model needs."""

    project: str
    name: str
    policy_version: int
    """Step of the weights. 0 also for a base model without adapter: step 0 leaves its weights as they are."""
    engine: Engine
    adapter: str | None
    """Adapter to sample with, `None` for the base model."""
    renderer: Renderer
    max_context: int
    """Prompt plus completion, in tokens."""


class ModelResolver(Protocol):
    """Knows the registered models. `resolve_ready` is called for each request and should be a dictionary look-up."""

    def resolve_ready(self, model: str) -> PolicyRef | None:
        """The policy if it can be sampled from right now."""
        ...

    def is_ready(self, policy: PolicyRef) -> bool:
        """Whether that policy can be sampled from right now."""
        ...

    async def resolve(self, model: str) -> PolicyRef:
        """The policy, after waiting for whatever it needs: a publish to end, an adapter to load.

        Raises:
            NotFoundError: no such model or step.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelName:
    """What a request calls a model: `project/name`, `project/name@step`, `name`, `name@step`."""

    project: str | None
    name: str
    step: int | None


_MODEL_NAME = re.compile(r"(?:([^/@]+)/)?([^/@]+)(?:@(\d{1,9}))?")


def parse_model_name(model: str) -> ModelName:
    """
    Raises:
        NotFoundError: the name has another form, so there cannot be such a model.
    """
    match = _MODEL_NAME.fullmatch(model)
    if match is None:
        raise NotFoundError(
            f"there is no model {model!r}: a model is called 'project/name', 'project/name@step' or 'name'",
            param="model",
        )
    project, name, step = match.groups()
    return ModelName(project, name, None if step is None else int(step))


def find_model(wanted: ModelName, registered: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The registered `(project, name)` that is meant.

    Raises:
        NotFoundError: there is none, or a bare name is taken in several projects.
    """
    known = sorted(registered)
    found = [key for key in known if key[1] == wanted.name and wanted.project in (None, key[0])]
    if len(found) == 1:
        return found[0]
    asked = wanted.name if wanted.project is None else f"{wanted.project}/{wanted.name}"
    if found:
        candidates = ", ".join("/".join(key) for key in found)
        raise NotFoundError(f"model {asked!r} is in several projects; say which: {candidates}", param="model")
    names = ", ".join("/".join(key) for key in known[:20]) or "none"
    raise NotFoundError(f"there is no model {asked!r}; registered are: {names}", param="model")
