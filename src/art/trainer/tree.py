"""The prefix tree of a batch: tokens that several samples share are computed once. And which samples share a tree.

All samples are token paths. Sorted by their tokens, neighbours share the longest prefixes. Appending the new part of
each path to those before gives the tree in depth-first order. Three integers per token then describe the layout:

    samples       A = 5 6 7 8      B = 5 6 9      C = 5 6 7 3 3
    sorted        C, A, B          tokens shared with the path before: 0, 3, 2
    token_ids     5 6 7 3 3 8 9
    positions     0 1 2 3 4 3 2
    subtree_end   7 7 6 5 5 6 7

    query q attends key k   iff   k <= q < subtree_end[k]

The targets are a flat list. Each is read at the token before it, its query. Equal tokens of several samples merge, but
every sample keeps its own target. Tokens after a sample's last query have no effect and are not laid out.

A tree that is larger than the token budget of a micro-batch is cut between two paths of its depth-first order, and each
part repeats the path from the root. So a micro-batch is a set of samples that `build_tree` lays out. Small trees are
packed together by best fit, and the micro-batches of an update are dealt to the processes by their number of tokens.

Layouts are numpy arrays; this module does not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.errors import TrajectoryError
from art.protocol.samples import COMPONENTS, TrainingSample

# Names of streams, the log-probs that a target has beside its sampler's, and of the models that they come from. The
# stream of another checkpoint is named by its step, as text.
POLICY = "policy"
"""Source of log-probs: the policy that is trained, before the step's first update."""
BASE = "base"
"""Source of log-probs: the base model. Also the name of the stream with its log-probs."""
ANCHOR = "anchor"
"""Stream: the policy's log-probs at the start of the step."""
SAMPLED_BASE = "sampled_base"
"""Stream: the log-probs of the base model for some of the samples, NaN for the rest."""
TEACHER = "teacher"
"""Stream: the log-probs of the model that a distillation loss learns from."""
SAMPLER = "sampler"
"""Stream: log-probs under the checkpoint that sampled each token, for some of the stale samples, NaN for the rest."""

_FEW = 4096
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
    """Ids if `size` is at most `_FEW`, else bits."""

    @classmethod
    def from_ids(cls, ids: NDArray[np.int32], vocab_size: int) -> VocabularyMask:
        """`ids` are ascending, without duplicates, and below `vocab_size`."""
        if len(ids) <= _FEW:
            return cls(len(ids), vocab_size, ids.tobytes())
        return cls(len(ids), vocab_size, _pack(ids, vocab_size).tobytes())

    @classmethod
    def from_bits(cls, bits: bytes, vocab_size: int) -> VocabularyMask:
        """`bits` may be longer than the vocabulary, e.g. whole words."""
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=vocab_size)
        return cls.from_ids(np.flatnonzero(flags).astype(np.int32), vocab_size)

    @property
    def bits(self) -> NDArray[np.uint8]:
        """[ceil(vocab_size / 8)]"""
        if self.size <= _FEW:
            return _pack(np.frombuffer(self.data, dtype=np.int32), self.vocab_size)
        return np.frombuffer(self.data, dtype=np.uint8)

    def among(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids that are part of the mask, in the same order."""
        if self.size <= _FEW:
            own = np.frombuffer(self.data, dtype=np.int32)
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
    tokens: NDArray[np.uint32]  # [T] the sample's tokens up to the last query, which are laid out
    query_positions: IntArray  # [N] index into `token_ids` at which each target is read
    target_token_ids: IntArray  # [N]
    sampling_logprobs: FloatArray  # [N]
    advantages: FloatArray  # [N]
    streams: dict[str, FloatArray] = field(default_factory=dict)
    """More log-probs [N] of the targets, by name: a teacher's, or those that `art.trainer.step.plans` added."""
    masks: IntArray | None = None  # [N] index into `mask_table`, -1 for the whole vocabulary; `None`: all are -1
    mask_table: Sequence[VocabularyMask] = ()
    """Masks of all samples of a step. They share one table."""
    rank: int = 0
    """Place among the paths that were checked together, sorted by their tokens, then their sample ids."""
    shared: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Number of leading tokens that each of these paths, by rank, shares with the one before it."""
    refusal: str = ""
    """Why the sample is not trained: its constraint does not allow a token that it has. Empty otherwise."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to the last query, which are laid out."""
        return len(self.tokens)

    @property
    def token_ids(self) -> IntArray:  # [T]
        """Tokens up to the last query. The array is made at each call: all of them together may not fit into memory."""
        return self.tokens.astype(np.int64)

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


def sum_shares(paths: Sequence[SamplePath]) -> NDArray[np.float64]:
    """Sum the shares of an update's samples by component: what the loss of each is divided by."""
    totals = np.zeros(len(COMPONENTS))
    for path in paths:
        totals[COMPONENTS.index(path.sample.component)] += path.share
    return totals


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
class PrefixTree:
    """The prefix tree of a batch of samples: a depth-first layout of T tokens."""

    token_ids: IntArray  # [T]
    positions: IntArray  # [T] depth of the token in its own sequence
    subtree_end: IntArray  # [T] end of the token's subtree in the layout
    targets: Targets

    def __len__(self) -> int:
        return len(self.token_ids)


def check_samples(samples: Sequence[TrainingSample], *, vocab_size: int) -> list[SamplePath]:
    """Validate samples and convert those with a target to arrays. They are sorted once for all of them.

    Raises:
        TrajectoryError: what `check_sample` raises.
    """
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size)) is not None]
    return _ranked(paths)


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
    _check_answers(sample, int(positions[0]))
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
        streams[TEACHER] = teacher[positions]
    return SamplePath(
        sample=sample,
        tokens=np.asarray(sample.token_ids, dtype=np.uint32)[: positions[-1]],
        query_positions=positions - 1,
        target_token_ids=token_ids[positions],
        sampling_logprobs=logprobs,
        advantages=advantages,
        streams=streams,
    )


def _ranked(paths: Sequence[SamplePath]) -> list[SamplePath]:
    """Note of each path its rank among them, and how many tokens neighbours share."""
    keys = [(path.tokens.astype(">u4").tobytes(), path.sample.sample_id) for path in paths]  # bytes sort as numbers do
    order = sorted(range(len(paths)), key=keys.__getitem__)
    shared = np.zeros(len(paths), dtype=np.int64)
    for rank in range(1, len(order)):
        one, other = paths[order[rank - 1]], paths[order[rank]]
        size = min(one.num_tokens, other.num_tokens)
        differing = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
        shared[rank] = differing[0] if len(differing) else size
    ranks = np.argsort(order).tolist()
    return [replace(path, rank=rank, shared=shared) for path, rank in zip(paths, ranks, strict=True)]


def _check_answers(sample: TrainingSample, first_target: int) -> None:
    """Refuse policy versions and constraints that do not fit the tokens."""
    starts = [start for start, _ in sample.versions]
    if starts and (starts[0] > first_target or starts != sorted(starts)):
        raise TrajectoryError(
            f"sample {sample.sample_id!r} has policy versions from the tokens {starts} on; expected ascending numbers, "
            f"the first at most {first_target}, the first token that is trained"
        )
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
    shared = paths[0].shared
    ranks = np.asarray([path.rank for path in paths])
    if any(path.shared is not shared for path in paths) or len(set(ranks.tolist())) < len(ranks):
        paths = _ranked(paths)  # they were not checked together, or one is there twice
        shared, ranks = paths[0].shared, np.asarray([path.rank for path in paths])
    order = np.argsort(ranks)
    # Two paths share the minimum of what the neighbours between them share.
    depths = [0, *np.minimum.reduceat(np.append(shared, 0), ranks[order] + 1)[:-1].tolist()]
    if not branches:
        before = [0, *(paths[index].num_tokens for index in order[:-1])]
        depths = [depth if depth == length else 0 for depth, length in zip(depths, before, strict=True)]
    return order.tolist(), depths


def build_tree(paths: Sequence[SamplePath], *, branches: bool = True) -> PrefixTree:
    """Lay out `paths` (at least one) as a tree. Targets refer to samples by their index in `paths`.

    With `branches=False` the layout is one whole sequence after another, which each begin at position 0: a path that
    leaves another one repeats what they share.
    """
    order, shared = sort_paths(paths, branches=branches)
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    complete: list[tuple[IntArray, int]] = []  # layout indices, and where their subtrees end
    path: IntArray = np.zeros(0, dtype=np.int64)  # layout indices of the current path, from the root
    queries = [path] * len(paths)
    size = 0
    for index, depth in zip(order, shared, strict=True):
        ids = paths[index].token_ids
        # Paths are sorted, so a path that is fully shared equals the one before it and adds no tokens.
        if depth < len(ids):
            # What the path before had below the fork is complete: no later path extends it, so its subtrees end here.
            complete.append((path[depth:], size))
            start, size = size, size + len(ids) - depth
            tokens.append(ids[depth:])
            positions.append(np.arange(depth, len(ids)))
            path = np.concatenate([path[:depth], np.arange(start, size)])
        queries[index] = path[paths[index].query_positions]
    complete.append((path, size))
    subtree_end = np.empty(size, dtype=np.int64)
    for indices, end in complete:
        subtree_end[indices] = end
    return PrefixTree(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        subtree_end=subtree_end,
        targets=_collect_targets(paths, queries),
    )


def _collect_targets(paths: Sequence[SamplePath], queries: Sequence[IntArray]) -> Targets:
    counts = [len(path.query_positions) for path in paths]

    def spread(values: Sequence[float], dtype: Any = np.float32) -> NDArray[Any]:
        return np.repeat(np.asarray(values, dtype=dtype), counts)

    absent = [np.zeros(count, dtype=np.float32) for count in counts]
    return Targets(
        queries=np.concatenate(queries),
        token_ids=np.concatenate([path.target_token_ids for path in paths]),
        sampling_logprobs=np.concatenate([path.sampling_logprobs for path in paths]),
        advantages=np.concatenate([path.advantages for path in paths]),
        weights=spread([path.sample.weight for path in paths]),
        # Greedy samples carry the log-probs of the unscaled distribution (see `art.engine`).
        temperatures=spread([path.sample.temperature or 1.0 for path in paths]),
        samples=spread(range(len(paths)), np.int64),
        components=spread([COMPONENTS.index(path.sample.component) for path in paths], np.int8),
        streams={
            name: np.concatenate([path.streams.get(name, zeros) for path, zeros in zip(paths, absent, strict=True)])
            for name in sorted({name for path in paths for name in path.streams})
        },
        masks=np.concatenate(
            [
                np.full(count, -1) if path.masks is None else path.masks
                for path, count in zip(paths, counts, strict=True)
            ]
        ),
        mask_table=next((path.mask_table for path in paths if path.mask_table), ()),
    )


# -- packing --

_CUT_WINDOW = 0.25
"""Share of a full part that may be given up to cut where neighbouring paths share least, e.g. between two groups."""
_PRECISION = 0.02
"""Relative precision of the search for the best token budget."""


def pack(paths: Sequence[SamplePath], *, max_tokens: int, branches: bool = True) -> list[list[int]]:
    """Split `paths` into micro-batches of at most `max_tokens` tree tokens; returns indices into `paths` for each.

    A path that is longer than `max_tokens` gets a micro-batch of its own. The result depends only on the tokens and ids
    of the samples, not on their order. `branches` is that of `build_tree`, which lays out the micro-batches.
    """
    order, shared = sort_paths(paths, branches=branches)
    lengths = [paths[index].num_tokens for index in order]
    pieces: list[tuple[int, list[int]]] = []  # tree tokens, ranks in `order`
    starts = [rank for rank, depth in enumerate(shared) if depth == 0]  # a path that shares nothing starts a tree
    for first, last in zip(starts, [*starts[1:], len(shared)], strict=True):
        pieces.extend(_cut(first, last, lengths, shared, max_tokens))
    # Best fit: the largest piece first, each into the fullest bin that still has room for it.
    pieces.sort(key=lambda piece: -piece[0])
    bins: list[tuple[int, list[int]]] = []
    for size, ranks in pieces:
        fitting = [i for i, (used, _) in enumerate(bins) if used + size <= max_tokens]
        if fitting:
            best = max(fitting, key=lambda i: bins[i][0])
            bins[best] = (bins[best][0] + size, bins[best][1] + ranks)
        else:
            bins.append((size, ranks))
    return [[order[rank] for rank in ranks] for _, ranks in bins]


def _cut(
    first: int, last: int, lengths: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[tuple[int, list[int]]]:
    """Cut the tree of ranks `[first, last)` into parts within the budget: (tree tokens, ranks) each."""
    parts = []
    while first < last:
        # Take paths while they fit. The first one brings its whole length, each later one what it does not share with
        # the path before it: `sizes[n]` are the tree tokens of n + 1 paths.
        sizes = [lengths[first]]
        while first + len(sizes) < last:
            rank = first + len(sizes)
            size = sizes[-1] + lengths[rank] - shared[rank]
            if size > max_tokens:
                break
            sizes.append(size)
        end = first + len(sizes)
        if end < last:
            # A cut costs what the next path shares with the last one, for it is laid out again. So give up to a quarter
            # of the part for a cheaper cut.
            candidates = [e for e in range(first + 1, end + 1) if sizes[e - first - 1] >= (1 - _CUT_WINDOW) * sizes[-1]]
            end = min(candidates, key=lambda e: (shared[e], -e))
        parts.append((sizes[end - first - 1], list(range(first, end))))
        first = end
    return parts


def pack_shares(
    paths: Sequence[SamplePath], *, max_tokens: int, num_shares: int, branches: bool = True
) -> list[list[list[int]]]:
    """Split `paths` into micro-batches for `num_shares` processes. Return indices into `paths`, by process.

    Tries several token budgets up to `max_tokens` and takes the one with the smallest largest share. A smaller budget
    spreads the work more evenly, but cuts more trees, and each part of a tree repeats its prefix. The result is the
    same in every process, because it depends only on tokens and ids. `branches` is that of `build_tree`.
    """

    def sizes_of(packed: Sequence[list[int]]) -> list[int]:
        return [count_tree_tokens([paths[index] for index in indices], branches=branches) for indices in packed]

    packings = [pack(paths, max_tokens=max_tokens, branches=branches)]
    if num_shares == 1:
        return packings
    # Search for the smallest budget that needs no more rounds of micro-batches than `max_tokens` does.
    most = num_shares * math.ceil(len(packings[0]) / num_shares)
    sizes = sizes_of(packings[0])
    low, high = math.ceil(sum(sizes) / most), min(max_tokens, max(sizes))
    while high - low > 1 + low * _PRECISION:
        budget = (low + high) // 2
        packings.append(pack(paths, max_tokens=budget, branches=branches))
        if len(packings[-1]) <= most:
            high = budget
        else:
            low = budget
    dealt = []
    for packed in packings:
        sizes = sizes_of(packed)
        shares = deal(sizes, num_shares)
        largest = max(sum(sizes[number] for number in share) for share in shares)
        dealt.append((largest, len(packed), [[packed[number] for number in share] for share in shares]))
    return min(dealt, key=lambda one: one[:2])[2]


def deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deal items of `sizes` to shares: the largest item first, each to the share with the smallest sum so far.

    Returns ascending indices into `sizes` for each share. Sums differ by at most the largest item, and the largest sum
    is at most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing anomalies").
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return [sorted(share) for share in shares]


def count_tree_tokens(paths: Sequence[SamplePath], *, branches: bool = True) -> int:
    """Count the tokens in the prefix tree of `paths` without building the tree."""
    _, shared = sort_paths(paths, branches=branches)
    return sum(path.num_tokens for path in paths) - sum(shared)


def group_by_rollout(paths: Sequence[SamplePath]) -> list[list[SamplePath]]:
    """Collect the samples of each rollout, in the order in which rollouts first appear."""
    return _collect(paths, [path.sample.rollout_id for path in paths])


def group_samples(paths: Sequence[SamplePath]) -> list[list[SamplePath]]:
    """Collect the samples of each group, in the order in which groups first appear.

    A rollout without a `group_id` is a group of its own.
    """
    samples = [path.sample for path in paths]
    return _collect(paths, [(sample.group_id, sample.group_id or sample.rollout_id) for sample in samples])


def _collect(paths: Sequence[SamplePath], keys: Sequence[Hashable]) -> list[list[SamplePath]]:
    collected: dict[Hashable, list[SamplePath]] = {}
    for path, key in zip(paths, keys, strict=True):
        collected.setdefault(key, []).append(path)
    return list(collected.values())
