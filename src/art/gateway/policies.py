"""Model names, and the interface through which the gateway asks for the policy that answers a request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from art.config import SamplingConfig
from art.engine import ServedEngine
from art.errors import NotFoundError
from art.gateway.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRef:
    """Everything that is needed to sample from one step (checkpoint) of one model."""

    project: str
    name: str
    policy_version: int
    """Step of the weights. 0 also means the base model without an adapter: step 0 does not change its weights."""
    engine: ServedEngine
    adapter: str | None
    """Name of the adapter to sample with; `None` for the base model."""
    renderer: Renderer
    max_context: int
    """Largest number of tokens of prompt and completion together."""
    longest_context: int | None = None
    """Largest `max_context` that the model allows; `None` if that is unknown."""
    sampling: SamplingConfig | None = None
    """How the model is sampled, whatever requests ask for; `None`: as they ask."""

    @property
    def context(self) -> str:
        """The limit of the context for errors, with where it comes from."""
        if self.longest_context is None or self.max_context < self.longest_context:
            model = "" if self.longest_context is None else f"; the model itself allows {self.longest_context}"
            default = "which is at most 32768 unless you set it"
            return f"`max_context` of {self.max_context} tokens (a setting of the model's engine, {default}{model})"
        return f"the model's own context of {self.max_context} tokens (`max_position_embeddings` of its config.json)"


class ModelResolver(Protocol):
    """Finds the policy for a model name among the registered models."""

    def resolve_ready(self, model: str) -> PolicyRef | None:
        """Return the policy if it can be sampled from right now. Called for each request, so it should be as cheap as a
        dictionary look-up."""
        ...

    def is_ready(self, policy: PolicyRef) -> bool:
        """Whether the policy can be sampled from right now."""
        ...

    async def resolve(self, model: str) -> PolicyRef:
        """Return the policy once it can be sampled from: wait for a checkpoint or an adapter to be loaded. Raises
        `NotFoundError` if there is no such model or step."""
        ...


@dataclass(frozen=True, slots=True)
class ModelName:
    """The parts of a model name in a request: `project/name` or `name`, then nothing, `@step` or `@promoted`."""

    project: str | None
    name: str
    step: int | Literal["promoted"] | None
    """"promoted" is the step that the model's owner has promoted, whichever it is at the time of the request."""


_MODEL_NAME = re.compile(r"(?:([^/@]+)/)?([^/@]+)(?:@(?:(\d{1,9})|(promoted)))?")


def parse_model_name(model: str) -> ModelName:
    """Split a model name into its parts. No model can have a name that has none of the known forms."""
    match = _MODEL_NAME.fullmatch(model)
    if match is None:
        form = "write 'project/name' or 'name', and '@step' or '@promoted' after it for one of its checkpoints"
        raise NotFoundError(f"there is no model {model!r}: {form}", param="model")
    project, name, step, promoted = match.groups()
    return ModelName(project, name, cast("Literal['promoted'] | None", promoted) if step is None else int(step))


def find_model(model: ModelName, registered: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return the registered `(project, name)` that a model name means. No model may have the name, or models of several
    projects the bare name: both are a `NotFoundError`."""
    known = sorted(registered)
    matches = [key for key in known if key[1] == model.name and model.project in (None, key[0])]
    if len(matches) == 1:
        return matches[0]
    asked = model.name if model.project is None else f"{model.project}/{model.name}"
    if matches:
        candidates = ", ".join("/".join(key) for key in matches)
        raise NotFoundError(f"model {asked!r} is in several projects; use one of {candidates}", param="model")
    names = ", ".join("/".join(key) for key in known[:20]) or "none"
    raise NotFoundError(f"there is no model {asked!r}; registered models: {names}", param="model")
