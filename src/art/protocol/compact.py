"""Samples of a training call in little memory, and as a file between the server and the trainer's processes.

A step may have 20 million tokens in its samples, of which a few hundred thousand are targets. `SpanValues` is a mask or
stream that is 0 outside of some spans, and looks like a list.

The file is one of arrays (safetensors), in which numbers keep all their bits:

    header               ids, components, grammars (each once) and constraints, as JSON
    tokens               the tokens of all samples, one sample after the other
    spans                where targets are (`loss_mask`): begin and end, one sample after the other
    sampling_logprobs    one number per target; likewise `advantages` and `teacher_logprobs`
    weight share ...     one number per sample
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from art.errors import InvalidRequestError
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample

TokenArray = NDArray[np.uint32]
IntArray = NDArray[np.int64]


class SpanValues(Sequence[Any]):
    """A sequence of `size` values that are 0 (or False) outside of some spans. It equals a list of the same numbers,
    and its slices are lists.

    Example: size 8, spans [[3, 5], [6, 8]], values [a, a, b, b] is 0 0 0 a a 0 b b.
    """

    __slots__ = ("size", "spans", "values")
    __hash__ = None  # type: ignore[assignment]  # like a list

    def __init__(self, size: int, spans: IntArray, values: NDArray[Any]) -> None:
        """`spans` [K, 2] are begin and end of each span, ascending, and `values` [N] what is inside, span by span."""
        self.size, self.spans, self.values = size, spans, values

    @classmethod
    def whole(cls, values: NDArray[Any]) -> SpanValues:
        """Make a sequence of these values, such as the tokens of a sample."""
        return cls(len(values), np.asarray([[0, len(values)]], dtype=np.int64), values)

    def __len__(self) -> int:
        return self.size

    def array(self) -> NDArray[Any]:
        """Make an array of the whole sequence. Nothing keeps it."""
        if len(self.values) == self.size:
            return self.values
        whole = np.zeros(self.size, dtype=self.values.dtype)
        done = 0
        for start, end in self.spans.tolist():
            whole[start:end] = self.values[done : done + end - start]
            done += end - start
        return whole

    def __getitem__(self, index: Any) -> Any:
        return self.array()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and self.array().tolist() == list(other)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole = self.array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"SpanValues({list(self)})"


def spans_of(mask: Sequence[bool]) -> IntArray:
    """Find the runs of true values: begin and end of each, [K, 2].

    Example: [False, True, True, False, True] gives [[1, 3], [4, 5]].
    """
    if isinstance(mask, SpanValues) and mask.values.all():
        return mask.spans
    edges = np.diff(np.concatenate([[False], np.asarray(mask, dtype=np.bool_), [False]]).astype(np.int8))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1)


# -- sets of token ids, as text for frames and databases --

_LEVEL = 1
"""How hard zlib tries. Level 9 saves a tenth and takes ten times as long."""


def pack_token_sets(sets: list[list[int]]) -> str:
    """Encode sets of token ids, each ascending: their sizes, then their differences, compressed, as base64.

    A set may hold half the vocabulary, and an answer has a set per token. Differences are small where a set is large: a
    set of 10 takes about 60 characters, one of 70,000 about 60,000.

    Example: [[3, 5], []] is the compressed form of 2, 2, 0, 3, 2.
    """
    steps = [np.diff(np.asarray(ids, dtype="<i4"), prepend=np.int32(0)) for ids in sets]
    numbers = np.concatenate([[len(sets), *map(len, sets)], *steps]).astype("<i4")
    return base64.b64encode(zlib.compress(numbers.tobytes(), _LEVEL)).decode("ascii")


def unpack_token_sets(text: str) -> list[list[int]]:
    """Decode what `pack_token_sets` made. Raises `ValueError` if `text` is something else."""
    try:
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype="<i4")
    except zlib.error as error:
        raise ValueError(f"token sets cannot be decoded: {error}") from error
    num_sets = int(numbers[0]) if len(numbers) else -1
    sizes = numbers[1 : 1 + max(num_sets, 0)]
    if num_sets < 0 or len(sizes) != num_sets or len(numbers) != 1 + num_sets + sizes.sum() or (sizes < 0).any():
        raise ValueError(f"token sets cannot be decoded: {len(numbers)} numbers do not fit {num_sets} sets")
    steps = np.split(numbers[1 + num_sets :], np.cumsum(sizes))[:-1]
    return [np.cumsum(own).tolist() for own in steps]


# -- the file --

_STREAMS = ("sampling_logprobs", "advantages", "teacher_logprobs")
_NUMBERS = {"weight": np.float64, "share": np.float64, "temperature": np.float64, "policy_version": np.int64}
_SAMPLE_NAMES = ("sample_id", "rollout_id", "group_id", "component")


def write_samples(path: Path, samples: Sequence[TrainingSample]) -> None:
    """Write samples to the file `path`. What their streams have outside of the loss mask is left out. Raises
    `InvalidRequestError` if a token is not a number from 0 to 2**32 - 1, or a stream is not as long as the tokens, and
    `OSError` if the file cannot be written."""
    spans = [spans_of(sample.loss_mask) for sample in samples]
    tokens = [_tokens(sample) for sample in samples]
    arrays: dict[str, NDArray[Any]] = {"tokens": np.concatenate([*tokens, np.zeros(0, dtype=np.uint32)])}
    arrays["num_tokens"] = np.asarray([len(one) for one in tokens], dtype=np.int64)
    for name, dtype in _NUMBERS.items():
        numbers = [getattr(sample, name) for sample in samples]
        arrays[name] = np.asarray([np.nan if number is None else number for number in numbers], dtype=dtype)
    arrays["spans"] = np.concatenate([*spans, np.zeros((0, 2), dtype=np.int64)])
    arrays["num_spans"] = np.asarray([len(one) for one in spans], dtype=np.int64)
    for name in _STREAMS:
        values = [_at_targets(sample, name, own) for sample, own in zip(samples, spans, strict=True)]
        arrays[name] = np.concatenate([*values, np.zeros(0)])
    arrays["header"] = np.frombuffer(orjson.dumps(_header(samples)), dtype=np.uint8)
    path.write_bytes(save(arrays))  # `save_file` reports a full disk as an error of its own


def _tokens(sample: TrainingSample) -> TokenArray:
    tokens = np.asarray(sample.token_ids)
    if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 2**32):
        problem = f"sample {sample.sample_id!r} has a token that is no token id; expected numbers from 0 to 2**32 - 1"
        raise InvalidRequestError(problem)
    return tokens.astype(np.uint32)


def _at_targets(sample: TrainingSample, name: str, spans: IntArray) -> NDArray[np.float64]:
    """Return the values of a stream at the targets of its sample; nothing for a stream that it does not have."""
    stream = getattr(sample, name)
    if stream is None:
        return np.zeros(0)
    if isinstance(stream, SpanValues) and stream.spans is spans:
        return stream.values
    for what, one in ((name, stream), ("loss_mask", sample.loss_mask)):
        if len(one) != len(sample.token_ids):
            counts = f"{len(one)} values in `{what}` for {len(sample.token_ids)} tokens"
            raise InvalidRequestError(f"sample {sample.sample_id!r} has {counts}; give one per token")
    values = np.asarray(stream, dtype=np.float64)
    return np.concatenate([values[start:end] for start, end in spans.tolist()] or [np.zeros(0)])


def _header(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    grammars: dict[str, int] = {}

    def body(number: int, span: ConstrainedSpan) -> list[Any]:
        constraint, text = span.constraint, span.constraint.grammar
        index = None if text is None else grammars.setdefault(text, len(grammars))
        kept = None if constraint.kept is None else pack_token_sets(constraint.kept)
        return [number, span.start, span.num_tokens, index, constraint.stop_token_ids, kept]

    constraints = [body(number, span) for number, sample in enumerate(samples) for span in sample.constraints]
    return {
        "names": [[getattr(sample, name) for name in _SAMPLE_NAMES] for sample in samples],
        "taught": [sample.teacher_logprobs is not None for sample in samples],
        "grammars": list(grammars),
        "constraints": constraints,
        "versions": [[number, sample.versions] for number, sample in enumerate(samples) if sample.versions],
    }


def read_samples(path: Path) -> list[TrainingSample]:
    """Read what `write_samples` wrote. Tokens and streams of the samples are views of the file's arrays. Raises
    `InvalidRequestError` if the file is missing or damaged."""
    try:
        arrays = load_file(path)
        header = orjson.loads(arrays["header"].tobytes())
        return _samples_in(arrays, header) if header["names"] else []
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(f"the file of training samples {path} cannot be read: {problem}") from error


def _samples_in(arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> list[TrainingSample]:
    tokens = _cut(arrays["tokens"], arrays["num_tokens"])
    spans = _cut(arrays["spans"], arrays["num_spans"])
    counts = [int((own[:, 1] - own[:, 0]).sum()) for own in spans]
    true = np.ones(max(counts), dtype=np.bool_)
    streams = {name: _cut(arrays[name], counts) for name in _STREAMS[:2]}
    taught: list[bool] = header["taught"]
    teachers = _cut(arrays["teacher_logprobs"], np.multiply(counts, taught))
    columns = {name: arrays[name].tolist() for name in _NUMBERS}
    versions = dict(header["versions"])
    constraints: list[list[ConstrainedSpan]] = [[] for _ in header["names"]]
    for number, start, num_tokens, grammar, stop_token_ids, kept in header["constraints"]:
        constraint = Constraint(
            grammar=None if grammar is None else header["grammars"][grammar],
            stop_token_ids=stop_token_ids,
            kept=None if kept is None else unpack_token_sets(kept),
        )
        constraints[number].append(ConstrainedSpan(start=start, num_tokens=num_tokens, constraint=constraint))
    samples = []
    for number, names in enumerate(header["names"]):
        own, size = spans[number], len(tokens[number])
        values: dict[str, Any] = {name: column[number] for name, column in columns.items()}
        values |= {name: SpanValues(size, own, parts[number]) for name, parts in streams.items()}
        values |= {} if not np.isnan(values["share"]) else {"share": None}
        sample = TrainingSample(
            **dict(zip(_SAMPLE_NAMES, names, strict=True)), **values, token_ids=SpanValues.whole(tokens[number]),
            loss_mask=SpanValues(size, own, true[: counts[number]]),
            teacher_logprobs=SpanValues(size, own, teachers[number]) if taught[number] else None,
            versions=[(start, step) for start, step in versions.get(number, [])], constraints=constraints[number],
        )  # fmt: skip
        samples.append(sample)
    return samples


def _cut(values: NDArray[Any], counts: Sequence[int] | NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(counts)[:-1])
