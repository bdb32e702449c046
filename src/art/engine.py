"""The engine contract: tokens in, tokens out.

An engine knows nothing of messages, templates or tools. It holds one base model and any number of adapters, and samples
from the policy that a request names. A *full checkpoint*, all weights of the model trained, is loaded, named and
unloaded like an adapter. `engines/` has the kinds; `tests/contract/` has the suite that each must pass.

Two promises matter for training:
- `logprobs[i]` is the log-probability under the distribution that token i was *really* drawn from, i.e. after
  temperature and top_p. Nothing is recomputed later.
- The random number that draws token i depends on `(seed, i)` only, never on what else is in the batch. A request that
  is resumed after `first_index` tokens (an engine died) therefore draws what it would have drawn. An engine that cannot
  do this says so in `EngineInfo.draws_by_index`; what it draws then is from the right distribution, but another sample.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion to sample.

    Example: a prompt of 5 tokens of which at most 16 more are wanted, ending at token 2:
        GenerateRequest(request_id="r1", adapter="games/agent@3", prompt_token_ids=[1, 8, 9, 4, 7], max_tokens=16,
                        stop_token_ids=(2,), seed=7)
    """

    request_id: str
    adapter: str | None
    """Loaded adapter to sample with, `None` for the base model."""
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends the completion; the token is part of the result."""
    seed: int
    """Unsigned 64-bit."""
    temperature: float = 1.0
    """0 means greedy; log-probs are then those of the unscaled distribution."""
    top_p: float = 1.0
    num_top_logprobs: int = 0
    """How many alternatives to report per token."""
    first_index: int = 0
    """Completion tokens that were already drawn and now stand at the end of `prompt_token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens sampled since the last chunk. The last chunk of a completion has a `finish_reason`."""

    token_ids: list[int]  # [N]
    logprobs: list[float]  # [N]
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # [N][num_top_logprobs] best first
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused, on the last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    vocab_size: int
    max_context: int
    """Prompt plus completion, in tokens."""
    dtype: str
    device: str
    draws_by_index: bool = True
    """Whether a resumed request draws the same tokens; without, the same seed gives the same tokens only from the
    beginning of a completion."""
    one_policy: bool = False
    """Whether it holds one policy at a time, in place of the base model: `load_adapter` waits until no request runs,
    and what was loaded before is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """What loading an adapter found; `num_layers` modules got weights (of a full checkpoint: tensors)."""

    name: str
    num_layers: int
    rank: int
    """0 for a full checkpoint."""
    norm: float
    """Frobenius norm of what it adds to the base weights: of all B @ A products times their scale, or of the
    differences in the engine's dtype; 0 for a fresh one."""


class Engine(Protocol):
    """What the gateway and the publisher need of an engine. Every method may raise `ProcessError`."""

    async def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        """Chunks of one completion: as tokens come with `stream`, else a single one at the end.

        Closing the iterator early cancels the request and frees its slot.

        Raises:
            NotFoundError: the adapter is not loaded.
            ContextLengthError: the prompt leaves no room for a token.
            OverloadedError: the waiting queue is full.
        """
        ...

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        """Load PEFT LoRA files, or a full checkpoint, under `name` while requests run.

        Raises:
            AdapterError: unreadable files, unknown keys, shapes that do not fit, or no layer matched; or this engine
                serves no full checkpoints.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter once its running requests have ended. Unknown names are not an error."""
        ...

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        """Log-probs of `token_ids[1:]` given their prefixes, at temperature 1: length `len(token_ids) - 1`."""
        ...

    async def stats(self) -> dict[str, float]:
        """Counters and gauges: `running`, `waiting`, `generated_tokens`, `prefill_tokens`, `cached_tokens`, ..."""
        ...


class SleepingEngine(Engine, Protocol):
    """An engine that can give its device's memory away for a while, to a trainer that shares the device."""

    async def sleep(self) -> None:
        """Free what can be freed, and compute nothing until `wake`.

        Nobody is refused: requests that run stop where they are, those that come wait, and all of them go on when the
        engine is awake. So do loads and unloads. A second call does nothing.
        """
        ...

    async def wake(self) -> None:
        """Take the memory back and go on; nothing if it is awake, as it is after a new start. One that cannot has to be
        started anew."""
        ...
