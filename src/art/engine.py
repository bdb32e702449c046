"""The contract of an engine, which samples completions from a language model: tokens in, tokens out.

An engine knows nothing about messages, templates or tools. It holds one base model and any number of adapters, and
samples from the policy that a request names. A *full checkpoint*, in which all weights were trained, is loaded, named
and unloaded like an adapter. `engines/` has the implementations, and `tests/contract/` the suite that each must pass.

Two promises matter for training:
- `logprobs[i]` is the log-probability under the distribution from which token i was *really* drawn: over what the
  grammar allows, after temperature, top_k, top_p and min_p, in this order. Nothing is recomputed later.
- The random number that draws token i of a `repeatable` request depends only on `(seed, i)`, never on the rest of the
  batch. Resumed after `first_index` tokens, because an engine died, it therefore draws the same tokens. An engine that
  cannot do this says so in `EngineInfo.draws_by_index`. It then draws another sample from the right distribution.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from pydantic import SkipValidation

from art.errors import ContextLengthError, InvalidRequestError

FinishReason = Literal["stop", "length"]
Sender: TypeAlias = tuple[str, str]
"""Who asks: a project, and the id of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to an engine: sample one completion of a prompt.

    Example: continue a prompt of 5 tokens by at most 16 tokens, and end at token 2:
        GenerateRequest(request_id="r1", adapter="games/agent@3", prompt_token_ids=[1, 8, 9, 4, 7], max_tokens=16,
                        stop_token_ids=(2,), seed=7)
    """

    request_id: str
    adapter: str | None
    """Name of the loaded adapter to sample with; `None` for the base model."""
    prompt_token_ids: SkipValidation[list[int]]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Each of these tokens ends the completion and is part of the result."""
    seed: int
    """Seed of the random numbers that draw the tokens, an unsigned 64-bit number."""
    repeatable: bool = True
    """Whether somebody expects the same completion for the same seed. If not, an engine may use other random numbers
    where they are faster."""
    temperature: float = 1.0
    """0 means greedy sampling, with log-probs of the unscaled distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0 means from all."""
    min_p: float = 0.0
    """Draw only tokens at least this many times as likely as the most likely one; 0 means any."""
    grammar: str | None = None
    """Grammar that the whole completion matches, as Lark text of llguidance. Only `stop_token_ids` end a completion,
    and only where the grammar is complete."""
    num_top_logprobs: int = 0
    """Number of most likely tokens to report, with their log-probs, for each sampled token."""
    first_index: int = 0
    """Number of completion tokens that were already drawn and are now the end of `prompt_token_ids`."""
    chunk_every_s: float = 0.0
    """In a streamed answer, the shortest time between two chunks; 0 sends each token when it is sampled. It does not
    change what is sampled."""
    sender: Sender = ("", "")
    """Who asks for seats (`runtime/hosting/gated_engine.py`). Engines compute requests in the order of coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a completion went, in seconds. `None` is what the engine cannot tell, or cannot tell yet."""

    queue_s: float | None = None
    """From the request's arrival until the engine began to compute it."""
    prefill_s: float | None = None
    """From then until its first token was sampled."""
    decode_s: float | None = None
    """From its first token to its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A part of a completion: the tokens sampled since the previous chunk. The last one has a `finish_reason`."""

    token_ids: list[int]  # [N]
    logprobs: list[float]  # [N]
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # [N][num_top_logprobs] best first
    kept: list[list[int]] = field(default_factory=list)
    """[N] Tokens that each token was drawn from, ascending; an empty list where `top_k`, `top_p` and `min_p` left none
    out. Empty as a whole where that is so for every token of the chunk. What a grammar leaves out does not count: it
    follows from the grammar."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were reused; set on the last chunk."""
    timings: Timings | None = None
    """Set on the last chunk, and without `decode_s` on an earlier one by engines that know the rest by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Description of an engine: the model that it serves, its limits, and the promises that it keeps."""

    vocab_size: int
    max_context: int
    """Largest number of tokens of a prompt and its completion together."""
    dtype: str
    device: str
    longest_context: int | None = None
    """Largest `max_context` that the model allows; `None` if the engine does not know it."""
    draws_by_index: bool = True
    """Whether a resumed request draws the same tokens. If not, a seed repeats only whole completions."""
    grammars: bool = False
    """Whether the engine honours `GenerateRequest.grammar`."""
    reports_kept: bool = False
    """Whether the engine honours `top_k` and `min_p`, and reports `TokenChunk.kept`."""
    resumes_grammars: bool = True
    """Whether a request with a grammar can go on after `first_index` tokens."""
    max_running: int | None = None
    """Requests that the engine has chosen to compute at once; `None` where its settings say how many."""
    one_policy: bool = False
    """Whether the engine holds one policy at a time, which replaces the base model. `load_adapter` then waits until no
    request runs, and unloads the previous policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Description of an adapter or full checkpoint that an engine has loaded.

    `num_layers` counts the layers with LoRA weights; for a full checkpoint, its tensors.
    """

    name: str
    num_layers: int
    rank: int
    """Rank of the LoRA matrices; 0 for a full checkpoint."""
    norm: float | None
    """Frobenius norm of the change of the base weights that the engine holds in memory, 0 for a fresh adapter. An
    adapter changes a layer by `scale * B @ A`, a full checkpoint by the difference of the weights in the engine's
    dtype. `None` for an engine that cannot tell; what it does with an adapter is then proved by log-probs alone."""


class Engine(Protocol):
    """Protocol of an engine, which samples from a base model and its adapters. Any method may raise `ProcessError`."""

    async def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        """Yield one completion in chunks: while tokens are sampled if `stream` is set, else one chunk at the end.

        Closing the iterator early cancels the request.

        Raises:
            NotFoundError: the adapter is not loaded.
            ContextLengthError: the prompt leaves no room for a token.
        """

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        """Load the PEFT LoRA files or the full checkpoint in folder `path`, so that requests can name it `name`.

        Raises:
            AdapterError: the files are unreadable, have unknown keys or wrong shapes, or match no layer; or this
                engine serves no full checkpoints.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter once its running requests have ended. Unknown names are not an error."""

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        """Return the `len(token_ids) - 1` log-probs of `token_ids[1:]` given their prefixes, at temperature 1."""

    async def stats(self) -> dict[str, float]:
        """Return counters and gauges: `running`, `waiting`, `generated_tokens`, `prefill_tokens`, ..."""


class ServedEngine(Engine, Protocol):
    """An engine as the gateway asks it."""

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        """Return one completion whole: the chunk that `generate` yields without `stream`.

        Most answers are asked for in this way, which costs the server less. Cancelling the call cancels the request.
        The errors are those of `generate`.
        """


class SleepingEngine(Engine, Protocol):
    """An engine that can free its device's memory for a while, for a trainer that shares the device."""

    async def sleep(self) -> None:
        """Free as much memory as possible, and compute nothing until `wake`.

        No request is refused: running requests pause, new ones wait, and all continue when the engine is awake. Loads
        and unloads wait too. A second call does nothing.
        """

    async def wake(self) -> None:
        """Take the memory back and continue, unless already awake. An engine that fails here must be restarted."""


async def only_chunk(chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
    """Return the one chunk of an answer that is not streamed; an empty one, without a finish reason, if none comes."""
    async with aclosing(chunks):
        async for chunk in chunks:
            return chunk
    return TokenChunk(token_ids=[], logprobs=[])


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Check that the engine described by `info` can serve a request to generate.

    Raises:
        InvalidRequestError: a parameter is out of range, or the engine does not honour it.
        ContextLengthError: the prompt leaves no room for a single new token.
    """
    _check_tokens(request.prompt_token_ids, "prompt_token_ids", info)
    _check_length(len(request.prompt_token_ids), info.max_context - 1, info)
    for param, is_valid, expected in (
        ("max_tokens", request.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= request.temperature < math.inf, "a finite number of at least 0"),
        ("top_p", 0 < request.top_p <= 1, "above 0 and at most 1"),
        ("num_top_logprobs", 0 <= request.num_top_logprobs <= info.vocab_size, f"between 0 and {info.vocab_size}"),
        ("seed", 0 <= request.seed < 2**64, "an unsigned 64-bit integer"),
        ("top_k", request.top_k >= 0, "at least 0"),
        ("min_p", 0 <= request.min_p <= 1, "between 0 and 1"),
        ("chunk_every_s", 0 <= request.chunk_every_s < math.inf, "a finite number of seconds, at least 0"),
        ("first_index", 0 <= request.first_index <= len(request.prompt_token_ids), "the number of tokens drawn so far"),
    ):
        if not is_valid:
            raise InvalidRequestError(f"`{param}` must be {expected}, got {getattr(request, param)!r}", param=param)
    for param, is_honoured in (
        ("grammar", info.grammars or request.grammar is None),
        ("top_k", info.reports_kept or request.top_k == 0),
        ("min_p", info.reports_kept or request.min_p == 0.0),
    ):
        if not is_honoured:
            raise InvalidRequestError(f"this engine does not honour `{param}`; leave it out", param=param)


def _check_tokens(token_ids: list[int], param: str, info: EngineInfo) -> None:
    if not token_ids:
        raise InvalidRequestError(f"`{param}` is empty; the model needs at least one token", param=param)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        bad, last = next(t for t in token_ids if not 0 <= t < info.vocab_size), info.vocab_size - 1
        raise InvalidRequestError(f"`{param}` contains token id {bad}; the vocabulary has ids 0 to {last}", param=param)


def check_score(token_ids: list[int], info: EngineInfo) -> None:
    """Check that the engine described by `info` can compute the log-probs of the sequence `token_ids`.

    Raises:
        InvalidRequestError: there are fewer than 2 tokens, or a token is outside the vocabulary.
        ContextLengthError: there are more tokens than the context holds.
    """
    _check_tokens(token_ids, "token_ids", info)
    if len(token_ids) < 2:
        raise InvalidRequestError(f"`token_ids` needs at least 2 tokens, got {len(token_ids)}", param="token_ids")
    _check_length(len(token_ids), info.max_context, info)


def _check_length(num_tokens: int, limit: int, info: EngineInfo) -> None:
    if num_tokens > limit:
        room = f"at most {limit} fit into the model's context of {info.max_context} tokens together with the completion"
        message = f"the prompt has {num_tokens} tokens, but {room}; shorten the prompt"
        raise ContextLengthError(message, param="messages")
