"""The synchronous core of the embedded engine.

    submit / submit_score / cancel                        at any time between steps
    step():  schedule -> build_batch -> decoder.logits -> [grammars] -> sample -> outputs        one forward pass

This module does not use asyncio, processes or messages. `art.worker.engine_child` drives it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.config import EngineConfig, Quantization
from art.config.processes import PREFILL_TOKENS
from art.engine import AdapterInfo, EngineInfo, FinishReason, GenerateRequest, TokenChunk, check_request, check_score
from art.engines.torch.base_model import LoadedModel, kv_budget, load_model
from art.engines.torch.kv_cache import KVCache
from art.engines.torch.linear import Adapter, Factors, read_adapter
from art.engines.torch.sampler import sample, token_logprobs, uniforms
from art.engines.torch.scheduler import Request, ScheduledTokens, Scheduler, build_batch
from art.errors import ArtError, ConflictError, InvalidRequestError, NotFoundError
from art.kernels.grammar import Mask, Matcher, Vocabulary, allowed_bits, load_vocabulary, num_words
from art.kernels.process import default_num_threads

_ROWS_PER_RUNNING = 8
"""Rows of the cache, in use or idle, per request that may run."""
_MAX_SCORE_LOGITS = 1 << 25
"""Most logits to compute for one scoring request in one step."""


@dataclass(frozen=True, slots=True)
class Output:
    """A result of a request. Exactly one of `chunk`, `logprobs` and `error` is set."""

    request_id: str
    chunk: TokenChunk | None = None
    logprobs: list[float] | None = None
    """The result of a scoring request, which has ended."""
    error: ArtError | None = None
    """The error with which the request has ended."""


class TorchEngine:
    """The embedded engine: samples from one base model and any number of adapters by continuous batching."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        vocabulary: Vocabulary | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """
        Args:
            prefill_tokens: most work on prompts in one step.
            vocabulary: what grammars need; without it requests with a grammar are refused.
        """
        self._model = model
        self._config = config
        self._info = replace(model.info, grammars=vocabulary is not None, reports_kept=True)
        self.vocabulary = vocabulary
        cache = KVCache(
            model.kv_shapes,
            max_context=model.info.max_context,
            budget=kv_budget(model, config),
            max_rows=_ROWS_PER_RUNNING * config.max_running,
            dtype=model.dtype,
            device=model.info.device,
        )
        self._scheduler = Scheduler(
            cache,
            max_running=config.max_running,
            prefill_tokens=prefill_tokens,
            score_tokens=max(16, _MAX_SCORE_LOGITS // model.info.vocab_size),
        )
        self._requests: dict[str, Request] = {}
        self._adapters: dict[str, Adapter] = {}
        self._leaving: list[tuple[Adapter, Callable[[], None] | None]] = []
        self._uids = itertools.count(1)
        self._counters = dict.fromkeys(("generated_tokens", "prefill_tokens", "cached_tokens", "steps", "step_s"), 0.0)

    @classmethod
    def load(
        cls,
        model: str,
        config: EngineConfig,
        quantization: Quantization = "none",
        *,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> TorchEngine:
        """Load the base model `model`, a folder or a hub id.

        Raises:
            ConfigError: the model cannot be served, or a setting does not fit it.
        """
        torch.set_num_threads(config.num_threads or default_num_threads())
        with torch.inference_mode():
            loaded = load_model(model, config, quantization=quantization)
            return cls(loaded, config, load_vocabulary(model, loaded.info.vocab_size), prefill_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def info(self) -> EngineInfo:
        return self._info

    def stats(self) -> dict[str, float]:
        scheduler = self._scheduler
        return {
            "running": float(len(scheduler.running)),
            "waiting": float(len(scheduler.waiting)),
            "adapters": float(len(self._adapters)),
            "preemptions": float(scheduler.num_preemptions),
            **self._counters,
            **scheduler.cache.stats(),
        }

    def submit(self, params: GenerateRequest, *, stream: bool) -> None:
        """Queue a completion. Later calls of `step` return its tokens.

        Raises:
            InvalidRequestError, ContextLengthError: the request does not fit the model.
            NotFoundError, ConflictError: unknown adapter; request id in use.
        """
        check_request(params, self._info)
        max_new = min(params.max_tokens, self._info.max_context - len(params.prompt_token_ids))
        self._enqueue(params, stream=stream, max_new=max_new)

    def submit_score(self, request_id: str, token_ids: list[int], adapter: str | None) -> None:
        """Queue a request for the log-probs of `token_ids[1:]`: one `Output` has them. Raises as `submit`."""
        check_score(token_ids, self._info)
        params = GenerateRequest(
            request_id=request_id, adapter=adapter, prompt_token_ids=token_ids, max_tokens=1, stop_token_ids=(), seed=0
        )
        self._enqueue(params, scores=True)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot at once. Unknown ids are ignored: the request may just have ended."""
        if (request := self._requests.get(request_id)) is not None:
            self._end(request)

    def abort_all(self, error: ArtError) -> list[Output]:
        """End every request with `error`, and wipe their slots, whose content may be wrong."""
        outputs = [Output(request_id, error=error) for request_id in self._requests]
        for request in list(self._requests.values()):
            self._end(request, wipe=True)
        return outputs

    def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        """Load the adapter in folder `path` from PEFT LoRA files.

        If `name` is in use, later requests get the new weights and running ones keep theirs.

        Raises:
            AdapterError: a file is unreadable, or does not fit the base model or this engine.
        """
        factors, info = read_adapter(name, path, self._model.decoder.parts, self._model.decoder.num_linears)
        self.unload_adapter(name)
        self._adapters[name] = Adapter(uid=next(self._uids), factors=factors, info=info)
        return info

    def serve_as(self, name: str, info: AdapterInfo) -> None:
        """Let requests use `name` for the model's own weights, like an adapter that changes no layer."""
        no_factors: list[Factors | None] = [None] * self._model.decoder.num_linears
        self._adapters[name] = Adapter(uid=next(self._uids), factors=no_factors, info=info)

    def unload_adapter(self, name: str, on_done: Callable[[], None] | None = None) -> None:
        """Refuse new requests for `name`. `on_done` is called when its last request has ended, possibly at once."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._leaving.append((adapter, on_done))
            self._let_go()
        elif on_done is not None:
            on_done()

    def step(self) -> list[Output]:
        """Run one forward pass and return its results. After an unexpected exception, call `abort_all`."""
        started = time.perf_counter()
        work = self._scheduler.schedule()
        if not work:
            if self._requests:
                raise RuntimeError(f"nothing can be scheduled though {len(self._requests)} requests wait")
            return []
        with torch.inference_mode():
            batch = build_batch(work, self._info.device, self._model.dtype)
            outputs = self._advance(work, self._model.decoder.logits(batch))
        self._counters["steps"] += 1
        self._counters["step_s"] += time.perf_counter() - started
        return outputs

    def _advance(self, work: list[ScheduledTokens], logits: Tensor) -> list[Output]:
        """Count the computed tokens, sample for requests that are computed to their end, and end finished ones."""
        outputs: list[Output] = []
        samples: list[Request] = []
        rows: list[int] = []
        row = 0
        for item in work:
            request = item.request
            if request.num_sampled == 0:
                self._counters["prefill_tokens"] += item.num_tokens
            if request.scores:
                first = request.num_computed + 1
                targets = request.params.prompt_token_ids[first : first + item.num_tokens]
                scored = logits[row : row + item.num_tokens]
                request.logprobs += token_logprobs(scored, torch.tensor(targets, device=logits.device))
                if item.reaches_end:
                    finite = all(map(math.isfinite, request.logprobs))
                    self._end(request, wipe=not finite)
                    result = Output(request.params.request_id, logprobs=request.logprobs)
                    outputs.append(result if finite else self._not_finite(request))
                row += item.num_tokens
            elif item.reaches_end:
                samples.append(request)
                rows.append(row)
                row += 1
            request.num_computed += item.num_tokens
        if samples:
            outputs += self._sample(samples, logits if len(rows) == row else logits[rows])
        return outputs

    def _sample(self, requests: list[Request], logits: Tensor) -> list[Output]:
        """Draw the next token of each request from its row of `logits` [len(requests), V]."""
        params = [request.params for request in requests]
        indices = [p.first_index + r.num_sampled for p, r in zip(params, requests, strict=True)]
        errors = _restrict(requests, logits)
        drawn = sample(
            logits,
            uniforms=uniforms([p.seed for p in params], indices),
            temperatures=[p.temperature for p in params],
            cuts=[request.cut for request in requests],
            num_top_logprobs=[p.num_top_logprobs for p in params],
        )
        self._counters["generated_tokens"] += len(requests)
        now = time.perf_counter()
        outputs = []
        for i, (request, token, logprob) in enumerate(zip(requests, drawn.token_ids, drawn.logprobs, strict=True)):
            if i not in errors and not math.isfinite(logprob):
                self._end(request, wipe=True)
                outputs.append(self._not_finite(request))
                continue
            if i not in errors and request.matcher is not None and not request.matcher.advance(token):
                errors[i] = request.matcher.failed()
            if i in errors:
                self._end(request)
                outputs.append(Output(request.params.request_id, error=errors[i]))
                continue
            if request.first_token_at is None:
                request.first_token_at = now
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if drawn.top_logprobs is not None and request.params.num_top_logprobs:
                request.top_logprobs.append(drawn.top_logprobs[i])
            if request.cut is not None:
                request.kept.append(drawn.kept.get(i, []))
            reason: FinishReason | None = "length" if request.num_sampled >= request.max_new else None
            if token in request.params.stop_token_ids:
                reason = "stop"
            if reason is not None or (request.stream and now - request.sent_at >= request.params.chunk_every_s):
                outputs.append(_emit(request, reason, now))
            if reason is not None:
                self._counters["cached_tokens"] += request.num_cached or 0
                self._end(request)
        return outputs

    def _end(self, request: Request, *, wipe: bool = False) -> None:
        del self._requests[request.params.request_id]
        self._scheduler.remove(request, wipe=wipe)
        if request.adapter is not None:
            request.adapter.num_users -= 1
            if self._leaving:
                self._let_go()

    def _let_go(self) -> None:
        """Forget unloaded adapters that no request uses any more, and free their slots in the cache."""
        gone = [entry for entry in self._leaving if entry[0].num_users == 0]
        self._leaving = [entry for entry in self._leaving if entry[0].num_users > 0]
        for adapter, on_done in gone:
            self._scheduler.cache.forget(adapter.uid)
            if on_done is not None:
                on_done()

    def _enqueue(self, params: GenerateRequest, **fields: Any) -> None:
        name, request_id = params.adapter, params.request_id
        if name is not None and name not in self._adapters:
            loaded = ", ".join(map(repr, self._adapters)) or "none"
            raise NotFoundError(f"adapter {name!r} is not loaded (loaded: {loaded})", param="model")
        request = Request(params, None if name is None else self._adapters[name], **fields)
        if request_id in self._requests:
            raise ConflictError(f"request id {request_id!r} is already in use", param="request_id")
        if self.vocabulary is not None:
            request.matcher = _matcher_for(self.vocabulary, params)
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        if request.adapter is not None:
            request.adapter.num_users += 1

    @staticmethod
    def _not_finite(request: Request) -> Output:
        name = request.params.adapter
        weights = f"adapter {name!r}" if name is not None else "the base model"
        problem = f"{weights} gave NaN or infinite logits at token {len(request.token_ids)} of the sequence"
        reason = "its weights are broken, or overflow in this dtype (float32 has more range)"
        return Output(request.params.request_id, error=ArtError(f"{problem}; {reason}"))


def _emit(request: Request, reason: FinishReason | None, now: float) -> Output:
    """Output with the tokens that were not sent yet."""
    first, request.num_sent = request.num_sent, request.num_sampled
    request.sent_at = now
    kept = request.kept[first:]
    chunk = TokenChunk(
        token_ids=request.token_ids[request.num_prompt + first :],
        logprobs=request.logprobs[first:],
        top_logprobs=request.top_logprobs[first:],
        kept=kept if any(kept) else [],
        finish_reason=reason,
        num_cached_tokens=(request.num_cached or 0) if reason is not None else 0,
        timings=request.timings(None if reason is None else now) if reason is not None or first == 0 else None,
    )
    return Output(request.params.request_id, chunk=chunk)


def _matcher_for(vocabulary: Vocabulary, params: GenerateRequest) -> Matcher | None:
    """The matcher of a request with a grammar, at the place where it goes on: after the tokens that were drawn already.

    Raises:
        InvalidRequestError: the grammar is not valid, or the request has no stop token.
        ArtError: llguidance failed.
    """
    if params.grammar is None:
        return None
    try:
        matcher = vocabulary.matcher(params.grammar, params.stop_token_ids)
        matcher.resume(params.prompt_token_ids[len(params.prompt_token_ids) - params.first_index :])
    except ArtError:
        raise
    except BaseException as error:  # Rust's panics are no `Exception`; a defect must not end the requests of others
        raise ArtError(f"the grammar of the answer cannot be compiled: {error!r}") from error
    return matcher


def _restrict(requests: Sequence[Request], logits: Tensor) -> dict[int, ArtError]:
    """Set the logits [B, V] that the grammars of `requests` [B] do not allow to minus infinity, in place.

    On a GPU the masks are filled while the forward pass is still running. Returns why a row has no mask, by row.
    """
    matchers = {i: request.matcher for i, request in enumerate(requests) if request.matcher is not None}
    errors: dict[int, ArtError] = {}
    if not matchers:
        return errors
    masks = np.zeros((len(matchers), num_words(logits.shape[1])), dtype=np.uint32)
    for mask, (row, matcher) in zip(masks, matchers.items(), strict=True):
        try:
            matcher.fill(mask)
        except InvalidRequestError as error:
            errors[row] = error
    forbid(logits, list(matchers), masks)
    return errors


def forbid(logits: Tensor, rows: list[int], masks: Mask) -> None:
    """Set the logits that `masks` [R, words] do not allow in `rows` [R] of `logits` [B, V] to minus infinity."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        for row, mask in zip(rows, masks, strict=True):
            logits[row].masked_fill_(torch.from_numpy(allowed_bits(~mask, vocab_size)), -torch.inf)
        return
    words = torch.from_numpy(masks.view(np.int32)).to(logits.device)  # 32 times smaller than what it becomes there
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(bits.flatten(1)[:, :vocab_size] == 0, -torch.inf)
