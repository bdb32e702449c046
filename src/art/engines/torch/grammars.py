"""Grammars of requests: compiled in threads while the engine goes on, then applied to the logits of each step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from art.engine import GenerateRequest
from art.engines.torch.scheduler import Request
from art.errors import ArtError, InvalidRequestError
from art.kernels.grammar import Mask, Matcher, Vocabulary, allowed_bits

_NUM_THREADS = 2
"""Grammars that compile at a time. llguidance limits the work of each to a tenth of a second."""


class Grammars:
    """The requests whose grammar is being compiled, and the buffer of masks of those that sample."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compiling: dict[Request, Future[Matcher]] = {}
        self._masks: Mask = np.zeros((0, vocabulary.num_words), dtype=np.uint32)
        """Rows for the constrained requests of a step, reused."""

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def attach_or_compile(self, request: Request) -> bool:
        """Give the request its matcher at once where its grammar is known, else begin to compile it.

        Returns:
            whether it has its matcher.

        Raises:
            InvalidRequestError: the request has no stop token, or its grammar is too long.
        """
        params = request.params
        assert params.grammar is not None
        if params.first_index == 0:
            request.matcher = self._vocabulary.cached(params.grammar, params.stop_token_ids)
        if request.matcher is None:
            self._compiling[request] = self._threads.submit(_matcher, self._vocabulary, params)
        return request.matcher is not None

    def forget(self, request: Request) -> bool:
        """Stop compiling for a request. False if it is not being compiled for."""
        future = self._compiling.pop(request, None)
        if future is not None:
            future.cancel()
        return future is not None

    def take_compiled(self, wait_s: float = 0.0) -> list[tuple[Request, ArtError | None]]:
        """Requests whose matcher is ready, or whose grammar is at fault. Waits up to `wait_s` for the first of them."""
        if wait_s:
            wait(self._compiling.values(), timeout=wait_s, return_when=FIRST_COMPLETED)
        ended: list[tuple[Request, ArtError | None]] = []
        for request, future in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request]
            error = future.exception()
            if error is None:
                request.matcher = future.result()
            elif not isinstance(error, ArtError):  # a defect of llguidance must not end the requests of others
                error = ArtError(f"the grammar of the answer cannot be compiled: {error!r}")
            ended.append((request, error))
        return ended

    def restrict(self, requests: Sequence[Request], logits: Tensor) -> dict[int, ArtError]:
        """Set the logits [B, V] that the grammars of `requests` [B] do not allow to minus infinity, in place.

        On a GPU the masks are filled while the forward pass is still running. Returns why a row has no mask, by row.
        """
        rows = [i for i, request in enumerate(requests) if request.matcher is not None]
        if len(self._masks) < len(rows):
            self._masks = np.zeros((len(rows), self._vocabulary.num_words), dtype=np.uint32)
        errors: dict[int, ArtError] = {}
        for row, mask in zip(rows, self._masks, strict=False):
            matcher = requests[row].matcher
            assert matcher is not None
            try:
                matcher.fill(mask)
            except InvalidRequestError as error:
                errors[row] = error
        forbid(logits, rows, self._masks[: len(rows)])
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


def _matcher(vocabulary: Vocabulary, params: GenerateRequest) -> Matcher:
    """A matcher at the place where the request goes on: after the tokens that were drawn already."""
    assert params.grammar is not None
    matcher = vocabulary.matcher(params.grammar, params.stop_token_ids)
    matcher.resume(params.prompt_token_ids[len(params.prompt_token_ids) - params.first_index :])
    return matcher
