"""Grammars on vLLM: proved once when the engine starts, and watched in every answer.

vLLM masks logits by llguidance itself (backend `guidance`), in its own release and with its own tokenizer. What it
samples is trainable only if ART's masks are the same, so ART asks for a few tokens under a trial grammar, replays them,
and compares the alternatives and log-probs with unconstrained ones. A server that fails gets no grammars.
"""

from __future__ import annotations

import asyncio
import logging
import math

from art.engine import EngineInfo, GenerateRequest, TokenChunk, only_chunk
from art.engines.vllm.command import Installation
from art.engines.vllm.replica import Replica
from art.errors import ArtError, ConfigError, OverloadedError
from art.kernels.grammar import VERSION, Matcher, Vocabulary, allowed_ids, load_vocabulary

logger = logging.getLogger(__name__)

TRIAL = (
    'start: %json {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string", '
    '"pattern": "^/[/x]{1,3}$"}, "c": {"type": "string", "maxLength": 3}}, "required": ["a", "b", "c"], '
    '"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'
)
"""The second string is one that releases of llguidance differ in: 1.7 may write a slash as an escape."""
_TRIAL_TOKENS = 32
_NUM_TOP = 20
"""Alternatives to compare per token. By default, a server that ART has not started reports no more than this."""
_NUM_COMPARED = 3
_TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest difference in nats. A token that vLLM computes twice, in other batches, differs by up to half of it."""


def vocabulary_for(model: str, vocab_size: int, installation: Installation | None) -> Vocabulary | None:
    """What grammars need on ART's side, or `None` with a line in the log.

    Args:
        installation: the vLLM that will sample; `None` if it runs already.
    """
    release = VERSION.split(".")[:2]
    if installation is not None and (installation.llguidance or "").split(".")[:2] != release:
        logger.warning(
            "answers cannot be made to match a grammar: vLLM's environment has llguidance %s and ART's has %s, which "
            "may allow other tokens; install the same release in both (vLLM 0.32 takes `llguidance>=1.7,<1.8`)",
            *(installation.llguidance, VERSION),
        )
        return None
    return load_vocabulary(model, vocab_size)


async def samples_as_replayed(replica: Replica, model: str, vocabulary: Vocabulary, info: EngineInfo) -> bool:
    """Whether the server draws from what ART's masks allow. If not, the log says why."""
    try:
        await _prove(replica, model, vocabulary, _TOLERANCE.get(info.dtype, 0.3))
        return True
    except ArtError as error:
        logger.warning(
            "answers cannot be made to match a grammar: the vLLM server at %s does not sample as ART replays: %s. It "
            "needs a tokenizer, --structured-outputs-config.backend=guidance, and llguidance %s like ART",
            *(replica.url, error, ".".join(VERSION.split(".")[:2])),
        )
        return False


async def _prove(replica: Replica, model: str, vocabulary: Vocabulary, tolerance: float) -> None:
    """Raises ArtError: the server refuses the trial grammar, or draws from another distribution."""
    stops = (vocabulary.end_token_id,)
    trial = GenerateRequest(
        request_id="trial", adapter=None, prompt_token_ids=[0, 0], max_tokens=_TRIAL_TOKENS, stop_token_ids=stops,
        seed=1, grammar=TRIAL, num_top_logprobs=_NUM_TOP,
    )  # fmt: skip
    answer = await only_chunk(replica.generate(trial, model, stream=False))
    replay = vocabulary.replay(TRIAL, stops, answer.token_ids)
    if replay.num_matched < len(answer.token_ids):
        raise ConfigError(f"token {replay.num_matched} of a trial answer does not match its grammar")
    places = zip(answer.token_ids, answer.logprobs, answer.top_logprobs, replay.index.tolist(), strict=True)
    for i, (token, logprob, top, number) in enumerate(places):
        allowed = set(allowed_ids(replay.masks[number], vocabulary.vocab_size).tolist())
        reported = dict(top) | {token: logprob}
        if not reported.keys() <= allowed or (len(allowed) < _NUM_TOP and reported.keys() != allowed):
            raise ConfigError(f"at token {i} of a trial answer other tokens are allowed: {sorted(reported)[:5]}")
        await _compare(replica, model, trial.prompt_token_ids + answer.token_ids[:i], reported, tolerance)


async def _compare(
    replica: Replica, model: str, prefix: list[int], constrained: dict[int, float], tolerance: float
) -> None:
    """Check that a grammar adds the same to the log-prob of each token: minus the log of the mass of what it allows."""
    tokens = sorted(constrained, key=lambda token: -constrained[token])[:_NUM_COMPARED]
    paths = await asyncio.gather(*(replica.score([*prefix, token], model) for token in tokens))
    gaps = [constrained[token] - path[-1] for token, path in zip(tokens, paths, strict=True)]
    is_wrong = max(gaps) - min(gaps) > tolerance or min(gaps) < -tolerance
    if is_wrong or (len(constrained) == 1 and abs(constrained[tokens[0]]) > 1e-6):
        problem = f"log-probs under a grammar differ from unconstrained ones by {min(gaps):.3g} to {max(gaps):.3g} nats"
        raise ConfigError(f"{problem}, expected one and the same positive number up to {tolerance:g}")


async def matcher_for(vocabulary: Vocabulary, request: GenerateRequest) -> Matcher | None:
    """Compile the grammar of a request, if it has one, to follow its answer.

    Raises:
        InvalidRequestError: the grammar is not valid.
        OverloadedError: the answer was interrupted in the middle, where vLLM cannot continue.
    """
    if request.grammar is None:
        return None
    if request.first_index:
        raise OverloadedError("vLLM ended inside an answer that must match a grammar, and cannot go on; ask again")
    return await asyncio.to_thread(vocabulary.matcher, request.grammar, request.stop_token_ids)


def follow(matcher: Matcher, chunk: TokenChunk) -> None:
    """Follow an answer by its next tokens, which `InvalidRequestError` refuses if they do not match the grammar.

    vLLM goes on with end tokens where its grammar has failed.
    """
    matcher.resume(chunk.token_ids)
    if not all(map(math.isfinite, chunk.logprobs)):
        raise ArtError("vLLM gave a token under a grammar no finite log-prob")
