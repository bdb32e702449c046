"""The prefix tree of a batch: tokens that several samples share are computed once.

All samples are token paths. Sorted by their tokens, neighbours share the longest prefixes. Appending the new part of
each path to those before gives the tree in depth-first order. Three integers per token then describe the layout:

    samples       A = 5 6 7 8      B = 5 6 9      C = 5 6 7 3 3
    sorted        C, A, B          tokens shared with the path before: 0, 3, 2
    token_ids     5 6 7 3 3 8 9
    positions     0 1 2 3 4 3 2
    subtree_end   7 7 6 5 5 6 7

    query q attends key k   iff   k <= q < subtree_end[k]

The targets are a flat list. Each is read at the token before it, its query. Equal tokens of several samples merge, but
every sample keeps its own target. Tokens after a sample's last query have no effect and are not laid out. Layouts are
numpy arrays; this module does not need torch.

Parts of the vocabulary that tokens were drawn from. This module does not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from art.errors import TrajectoryError
from art.protocol.compact.layout import lay_out
from art.protocol.compact.token_paths import TokenPath, sort_ranks
from art.protocol.samples import COMPONENTS, TrainingSample

FEW = 4096
"""Most tokens that a mask lists by id. This number of ids takes as much memory as the bits of 131,072 tokens."""


@dataclass(frozen=True, slots=True)
class VocabularyMask:
    """The tokens that could be drawn at one place. Equal masks compare equal, so that a dictionary finds duplicates.

    Example: tokens 1 and 9 of a vocabulary of 12
        few tokens are listed   data = 1, 9 as int32
        many are bits           data = 0b00000010, 0b00000010    bit v % 8 of byte v // 8 is token v
    """

    size: int
    """Number of tokens that could be drawn."""
    vocab_size: int
    data: bytes
    """Ids if `size` is at most `FEW`, else bits."""

    @classmethod
    def from_ids(cls, ids: NDArray[np.int32], vocab_size: int) -> VocabularyMask:
        """`ids` are ascending, without duplicates, and below `vocab_size`."""
        if len(ids) <= FEW:
            return cls(len(ids), vocab_size, ids.tobytes())
        return cls(len(ids), vocab_size, _pack(ids, vocab_size).tobytes())

    @classmethod
    def from_bits(cls, bits: bytes, vocab_size: int) -> VocabularyMask:
        """`bits` may be longer than the vocabulary, e.g. whole words."""
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=vocab_size)
        size = int(np.count_nonzero(flags))
        if size <= FEW:
            return cls(size, vocab_size, np.flatnonzero(flags).astype(np.int32).tobytes())
        return cls(size, vocab_size, np.packbits(flags, bitorder="little").tobytes())

    @property
    def is_few(self) -> bool:
        return self.size <= FEW

    @property
    def ids(self) -> NDArray[np.int32]:
        """[size] Ascending ids of few tokens."""
        return np.frombuffer(self.data, dtype=np.int32)

    @property
    def bits(self) -> NDArray[np.uint8]:
        """[ceil(vocab_size / 8)]"""
        return _pack(self.ids, self.vocab_size) if self.is_few else np.frombuffer(self.data, dtype=np.uint8)

    def among(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids that are part of the mask, in the same order."""
        if self.is_few:
            own = self.ids
            is_part = own[np.searchsorted(own, ids).clip(max=len(own) - 1)] == ids if len(own) else ids < 0
        else:
            is_part = (self.bits[ids >> 3] >> (ids & 7)) & 1 == 1
        part: NDArray[np.int32] = ids[is_part]
        return part

    def __contains__(self, token_id: int) -> bool:
        return len(self.among(np.asarray([token_id], dtype=np.int32))) == 1


def _pack(ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little")


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePath:
    """A checked training sample as arrays: a sequence of tokens with at least one target (a token to train on)."""

    sample: TrainingSample
    tokens: TokenPath
    """The sample's tokens. Its inputs end with the last query."""
    query_positions: IntArray  # [N] index into `token_ids` at which each target is read
    target_token_ids: IntArray  # [N]
    sampling_logprobs: FloatArray  # [N]
    advantages: FloatArray  # [N]
    streams: dict[str, FloatArray] = field(default_factory=dict)
    """More log-probs [N] of the targets, by name: a teacher's, or those that `art.trainer.step.measure` added."""
    masks: IntArray | None = None  # [N] index into `mask_table`, -1 for the whole vocabulary; `None`: all are -1
    mask_table: Sequence[VocabularyMask] = ()
    """Masks of all samples of a step. They share one table."""
    refusal: str = ""
    """Why the sample is not trained: its constraint does not allow a token that it has. Empty otherwise."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to the last query, which are laid out."""
        return self.tokens.num_inputs

    @property
    def token_ids(self) -> IntArray:  # [T]
        """Tokens up to the last query. The array is made at each call: all of them together may not fit into memory."""
        return self.tokens.layout.inputs(self.tokens.rank).astype(np.int64)

    @property
    def policy_versions(self) -> IntArray:  # [N] step of the weights that sampled each target
        sample = self.sample
        if not sample.versions:
            return np.full(len(self.query_positions), sample.policy_version, dtype=np.int64)
        starts, steps = np.asarray(sample.versions, dtype=np.int64).T
        versions: IntArray = steps[np.searchsorted(starts, self.query_positions + 1, side="right") - 1]
        return versions

    @property
    def share(self) -> float:
        """What the sample adds to the number by which the summed loss of its component is divided."""
        if self.sample.share is not None:
            return self.sample.share
        return self.sample.weight * len(self.query_positions)

    def with_stream(self, name: str, values: FloatArray) -> SamplePath:
        return replace(self, streams=self.streams | {name: values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The N targets (trained tokens) of one layout. Several may share a query, the token before them."""

    queries: IntArray  # [N] index into the layout: the token *before* the target
    token_ids: IntArray  # [N] the token to predict there
    sampling_logprobs: FloatArray  # [N]
    advantages: FloatArray  # [N]
    weights: FloatArray  # [N]
    temperatures: FloatArray  # [N]
    samples: IntArray  # [N] index into the samples that the tree was built from
    components: NDArray[np.int8]  # [N] index into `COMPONENTS`
    streams: dict[str, FloatArray]  # [N] each; zeros where a sample lacks one
    masks: IntArray  # [N] index into `mask_table`; -1 where the token was drawn from the whole vocabulary
    mask_table: Sequence[VocabularyMask] = ()

    @property
    def is_rl(self) -> NDArray[np.bool_]:  # [N]
        """Targets of component "rl". The loss of all others is cross-entropy."""
        is_rl: NDArray[np.bool_] = self.components == COMPONENTS.index("rl")
        return is_rl


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A run of the layout without branches: the tokens that one path adds to the paths before it.

    Attention needs only a causal mask here: the queries `[start, end)` see the keys of `path` up to themselves.
    """

    start: int
    end: int
    path: IntArray  # [D] layout indices from the root to token `end - 1`; the last `end - start` are the run itself


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """The prefix tree of a batch of samples: a depth-first layout of T tokens."""

    token_ids: IntArray  # [T]
    positions: IntArray  # [T] depth of the token in its own sequence
    subtree_end: IntArray  # [T] end of the token's subtree in the layout
    chains: list[Chain]
    targets: Targets

    def __len__(self) -> int:
        return len(self.token_ids)


def check_samples(samples: Sequence[TrainingSample], *, vocab_size: int) -> list[SamplePath]:
    """Validate samples and convert those with a target to arrays. Their tokens are laid out once for all of them.

    Raises:
        TrajectoryError: what `check_sample` raises.
    """
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size)) is not None]
    return paths if not paths or sort_ranks([path.tokens for path in paths]) is not None else _with_layout(paths)


def check_sample(sample: TrainingSample, *, vocab_size: int) -> SamplePath | None:
    """Validate `sample` and convert it to arrays. Returns `None` if it has no target.

    Raises:
        TrajectoryError: lengths differ, a token is outside the vocabulary, a number is not finite, a constraint does
            not fit the tokens, or the first token is a target (there is no token before it that could predict it).
    """
    name, length = f"sample {sample.sample_id!r}", len(sample.token_ids)
    lengths = (len(sample.loss_mask), len(sample.sampling_logprobs), len(sample.advantages))
    if length == 0 or lengths != (length,) * 3:
        raise TrajectoryError(
            f"{name} has {length} tokens but {lengths[0]} mask entries, {lengths[1]} sampling log-probs and "
            f"{lengths[2]} advantages; expected equal numbers, and at least one token"
        )
    token_ids = np.asarray(sample.token_ids, dtype=np.int64)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise TrajectoryError(f"{name} has a token outside the model's vocabulary of {vocab_size}")
    numbers = {"weight": sample.weight, "temperature": sample.temperature, "share": sample.share}
    for what, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise TrajectoryError(f"{name} has {what} {value}; it must be finite and >= 0")
    positions = np.flatnonzero(np.asarray(sample.loss_mask, dtype=np.bool_))
    if len(positions) == 0 or sample.weight == 0:
        return None
    if positions[0] == 0:
        raise TrajectoryError(
            f"the loss mask of {name} includes its first token, which no token before it can predict; mask it out"
        )
    _check_constraints(sample)
    _check_versions(sample, int(positions[0]))
    logprobs = np.asarray(sample.sampling_logprobs, dtype=np.float32)[positions]
    advantages = np.asarray(sample.advantages, dtype=np.float32)[positions]
    if not (np.isfinite(logprobs).all() and np.isfinite(advantages).all()):
        raise TrajectoryError(f"{name} has a sampling log-prob or an advantage that is not finite")
    streams: dict[str, FloatArray] = {}
    if sample.teacher_logprobs is not None:
        teacher = np.asarray(sample.teacher_logprobs, dtype=np.float32)
        if teacher.shape != (length,) or not np.isfinite(teacher).all():
            raise TrajectoryError(
                f"{name} has {teacher.size} teacher log-probs for {length} tokens; expected one finite number per token"
            )
        streams["teacher"] = teacher[positions]
    return SamplePath(
        sample=sample,
        tokens=_token_path(sample, token_ids, int(positions[-1])),
        query_positions=positions - 1,
        target_token_ids=token_ids[positions],
        sampling_logprobs=logprobs,
        advantages=advantages,
        streams=streams,
    )


def _token_path(sample: TrainingSample, token_ids: IntArray, num_inputs: int) -> TokenPath:
    known = sample.token_ids
    if isinstance(known, TokenPath) and known.num_inputs == num_inputs:
        return known
    return lay_out([(token_ids.astype(np.uint32), num_inputs, sample.sample_id)])[0]


def _with_layout(paths: Sequence[SamplePath]) -> list[SamplePath]:
    laid_out = lay_out((path.tokens.array(), path.num_tokens, path.sample.sample_id) for path in paths)
    return [replace(path, tokens=tokens) for path, tokens in zip(paths, laid_out, strict=True)]


def _check_versions(sample: TrainingSample, first_target: int) -> None:
    starts = [start for start, _ in sample.versions]
    if starts and (starts[0] > first_target or starts != sorted(starts)):
        raise TrajectoryError(
            f"sample {sample.sample_id!r} has policy versions from the tokens {starts} on; expected ascending numbers, "
            f"the first at most {first_target}, the first token that is trained"
        )


def _check_constraints(sample: TrainingSample) -> None:
    end = 1  # the first token of a sample is no answer
    for span in sorted(sample.constraints, key=lambda span: span.start):
        if span.start < end or span.num_tokens < 1 or span.start + span.num_tokens > len(sample.token_ids):
            raise TrajectoryError(
                f"sample {sample.sample_id!r} has a constraint on {span.num_tokens} tokens from token {span.start} on; "
                f"expected at least one, within the sample's {len(sample.token_ids)} tokens and after token {end - 1}"
            )
        end = span.start + span.num_tokens
        kept = span.constraint.kept
        if kept is not None and len(kept) != span.num_tokens:
            raise TrajectoryError(
                f"sample {sample.sample_id!r} has the kept tokens of {len(kept)} tokens in a constraint on "
                f"{span.num_tokens}; expected one list per token"
            )


def sort_paths(paths: Sequence[SamplePath], *, branches: bool = True) -> tuple[list[int], list[int]]:
    """Sort paths by their tokens. Return their order, and how many tokens each shares with the path before it.

    Equal paths are ordered by sample id, so the layout does not depend on the order of `paths`. With `branches=False`
    a path shares tokens only with a path that it extends: one that leaves the path before it shares none.
    """
    known = sort_ranks([path.tokens for path in paths])
    if known is None:
        known = sort_ranks([path.tokens for path in _with_layout(paths)])
        assert known is not None, "paths that were laid out together have ranks of their own"
    if branches:
        return known
    order, shared = known
    before = [0, *(paths[index].num_tokens for index in order[:-1])]
    return order, [depth if depth == length else 0 for depth, length in zip(shared, before, strict=True)]


def build_tree(paths: Sequence[SamplePath], *, branches: bool = True) -> PrefixTree:
    """Lay out `paths` (at least one) as a tree. Targets refer to samples by their index in `paths`.

    With `branches=False` every chain is a whole sequence: a path that leaves another one repeats what they share.
    """
    order, shared = sort_paths(paths, branches=branches)
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    complete: list[tuple[IntArray, int]] = []  # layout indices, and where their subtrees end
    chains: list[Chain] = []
    path: IntArray = np.zeros(0, dtype=np.int64)  # layout indices of the current path, from the root
    queries = [path] * len(paths)
    size = 0
    for index, depth in zip(order, shared, strict=True):
        ids = paths[index].token_ids
        # Paths are sorted, so a path that is fully shared equals the one before it and adds no tokens.
        if depth < len(ids):
            complete.append((path[depth:], size))
            start, added = size, len(ids) - depth
            size += added
            tokens.append(ids[depth:])
            positions.append(np.arange(depth, len(ids)))
            if 0 < depth == len(path):
                start = chains.pop().start  # the path continues where the last chain ended: extend that chain
            path = np.concatenate([path[:depth], np.arange(size - added, size)])
            chains.append(Chain(start=start, end=size, path=path))
        queries[index] = path[paths[index].query_positions]
    complete.append((path, size))
    subtree_end = np.empty(size, dtype=np.int64)
    for indices, end in complete:
        subtree_end[indices] = end
    return PrefixTree(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        subtree_end=subtree_end,
        chains=chains,
        targets=_collect_targets(paths, queries),
    )


def _collect_targets(paths: Sequence[SamplePath], queries: Sequence[IntArray]) -> Targets:
    counts = [len(path.query_positions) for path in paths]

    def spread(values: list[float]) -> FloatArray:
        return np.repeat(np.asarray(values, dtype=np.float32), counts)

    return Targets(
        queries=np.concatenate(queries),
        token_ids=np.concatenate([path.target_token_ids for path in paths]),
        sampling_logprobs=np.concatenate([path.sampling_logprobs for path in paths]),
        advantages=np.concatenate([path.advantages for path in paths]),
        weights=spread([path.sample.weight for path in paths]),
        # Greedy samples carry the log-probs of the unscaled distribution (see `art.engine`).
        temperatures=spread([path.sample.temperature or 1.0 for path in paths]),
        samples=np.repeat(np.arange(len(paths)), counts),
        components=np.repeat(
            np.asarray([COMPONENTS.index(path.sample.component) for path in paths], dtype=np.int8), counts
        ),
        streams={name: _stream(paths, name) for name in sorted({name for path in paths for name in path.streams})},
        masks=np.concatenate([path.masks if path.masks is not None else _no_masks(path) for path in paths]),
        mask_table=next((path.mask_table for path in paths if path.mask_table), ()),
    )


def _no_masks(path: SamplePath) -> IntArray:
    return np.full(len(path.query_positions), -1, dtype=np.int64)


def _stream(paths: Sequence[SamplePath], name: str) -> FloatArray:
    absent = [np.zeros(len(path.query_positions), dtype=np.float32) for path in paths]
    return np.concatenate([path.streams.get(name, zeros) for path, zeros in zip(paths, absent, strict=True)])
