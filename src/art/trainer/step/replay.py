"""Replay of constraints: from what tokens each sampled token was drawn.

    grammar and sampled tokens --kernels.grammar--> masks
    masks and recorded kept tokens --> what both allow --> `masks` and `mask_table` of the paths

A grammar is replayed with the installed version of llguidance, whatever version sampled the answer: where the masks
differ, the log-probs differ, and the gate `mismatch` judges them as always. A sample with a token that its constraint
does not allow is refused as a whole, and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from art.errors import ConfigError, InvalidRequestError
from art.protocol.samples import ConstrainedSpan
from art.trainer.distributed import ALONE, Team
from art.trainer.tree import IntArray, SamplePath, VocabularyMask

if TYPE_CHECKING:
    from art.kernels.grammar import Vocabulary

_log = logging.getLogger(__name__)

_PATIENCE = 10
"""Factor of the engine's limits on a grammar's work: what an engine could sample must not be too much here."""

_Places: TypeAlias = tuple[list[VocabularyMask], IntArray]
"""Distinct masks, and for each token of a span the index of its mask, -1 for the whole vocabulary."""


class Replayer:
    """Replays the constraints of samples of one base model. It lives as long as the trainer."""

    def __init__(self, base_model: str, vocab_size: int, team: Team = ALONE) -> None:
        self._base_model = base_model
        self._vocab_size = vocab_size
        self._team = team
        self._vocabulary: Vocabulary | None = None

    def replay(self, paths: list[SamplePath]) -> tuple[list[SamplePath], dict[str, float]]:
        """Add masks to `paths`, or a `refusal`. The processes of a team share the work, and all get the same result.

        Returns:
            The paths, and metrics; none where no sample has a constraint.

        Raises:
            ConfigError: a sample has a grammar, and llguidance or the model's `tokenizer.json` is missing.
        """
        spans = [(path, span) for path in paths for span in path.sample.constraints if _num_needed(path, span)]
        if not spans:
            return paths, {}
        started = time.perf_counter()
        if self._vocabulary is None and any(span.constraint.grammar is not None for _, span in spans):
            try:
                from art.kernels.grammar import Vocabulary
            except ImportError as error:
                raise ConfigError(
                    f"samples with a grammar need llguidance, which cannot be imported ({error}); install it with "
                    "`pip install 'agent-reinforcement-trainer[local]'`"
                ) from error
            self._vocabulary = Vocabulary.load(self._base_model, self._vocab_size, patience=_PATIENCE)
        own = spans[self._team.rank :: self._team.size]
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            gathered = self._team.gather(list(pool.map(lambda one: self._replay_span(*one), own)))
        replayed = [gathered[n % self._team.size][n // self._team.size] for n in range(len(spans))]
        paths, metrics = _collect(paths, spans, replayed)
        return paths, metrics | {"time/step_replay_s": time.perf_counter() - started}

    def _replay_span(self, path: SamplePath, span: ConstrainedSpan) -> _Places | str:
        """The masks of a span, or why its sample is refused."""
        tokens, constraint = (
            list(path.sample.token_ids[span.start : span.start + _num_needed(path, span)]),
            span.constraint,
        )
        masks, index = list[VocabularyMask](), np.full(len(tokens), -1, dtype=np.int64)
        if constraint.grammar is not None:
            assert self._vocabulary is not None
            try:
                replay = self._vocabulary.replay(constraint.grammar, constraint.stop_token_ids, tokens)
            except InvalidRequestError as error:
                return error.message
            masks = [VocabularyMask.from_bits(mask.tobytes(), self._vocab_size) for mask in replay.masks]
            index = replay.index.astype(np.int64)  # of the leading tokens that match
            if len(index) < len(tokens):
                return f"its grammar does not allow token id {tokens[len(index)]}, number {len(index)} of the answer"
        if constraint.kept is None:
            return masks, index
        # A token with kept tokens was drawn from what both the grammar and these allow.
        numbers = {mask: number for number, mask in enumerate(masks)}
        for place, (token, number) in enumerate(zip(tokens, index.tolist(), strict=True)):
            if not constraint.kept[place]:  # nothing was left out here
                continue
            ids = np.asarray(constraint.kept[place], dtype=np.int32)
            if ids[0] < 0 or ids[-1] >= self._vocab_size or (np.diff(ids) <= 0).any():
                return f"the kept tokens of token {place} of the answer are not ascending ids of the vocabulary"
            mask = VocabularyMask.from_ids(ids if number < 0 else masks[number].among(ids), self._vocab_size)
            if token not in mask:
                return f"its kept tokens do not allow token id {token}, number {place} of the answer"
            index[place] = numbers.setdefault(mask, len(numbers))
        return list(numbers), index


def _num_needed(path: SamplePath, span: ConstrainedSpan) -> int:
    """Number of the span's tokens up to its last target."""
    targets = path.query_positions + 1 - span.start
    targets = targets[(targets >= 0) & (targets < span.num_tokens)]
    return int(targets[-1]) + 1 if len(targets) else 0


def _collect(
    paths: list[SamplePath], spans: Sequence[tuple[SamplePath, ConstrainedSpan]], replayed: Sequence[_Places | str]
) -> tuple[list[SamplePath], dict[str, float]]:
    """Merge the masks of all spans into one table, and mark refused samples."""
    numbers: dict[VocabularyMask, int] = {}
    by_path: dict[int, IntArray] = {}
    refused: dict[int, str] = {}
    for (path, span), places in zip(spans, replayed, strict=True):
        if isinstance(places, str):
            refused.setdefault(id(path), places)
            continue
        masks, index = places
        merged = np.asarray([*(numbers.setdefault(mask, len(numbers)) for mask in masks), -1], dtype=np.int64)
        # Write the masks of the span (-1: none, which `merged` ends with) to its tokens, and read them at the targets.
        everywhere = np.full(len(path.sample.token_ids), -1, dtype=np.int64)
        everywhere[span.start : span.start + len(index)] = merged[index]
        own = by_path.setdefault(id(path), np.full(len(path.query_positions), -1, dtype=np.int64))
        np.maximum(own, everywhere[path.query_positions + 1], out=own)
    table = list(numbers)
    marked = []
    for path in paths:
        if (reason := refused.get(id(path))) is not None:
            path = replace(path, refusal=f"sample {path.sample.sample_id!r}: {reason}")
        elif id(path) in by_path:
            path = replace(path, masks=by_path[id(path)], mask_table=table)
        marked.append(path)
    left_out = [path for path in marked if path.refusal]
    if left_out:
        _log.warning(
            "%d samples do not match their constraints and are left out; %s", len(left_out), left_out[0].refusal
        )
    used = [path.masks for path in marked if path.masks is not None]
    forced = np.asarray([*(mask.size == 1 for mask in table), False])
    return marked, {
        "data/step_constrained_tokens": float(sum(int((masks >= 0).sum()) for masks in used)),
        "data/step_forced_tokens": float(sum(int(forced[masks].sum()) for masks in used)),
        "offpolicy/constraint_refused_tokens": float(sum(len(path.query_positions) for path in left_out)),
    }
