"""Samples of a training call as a file of arrays (safetensors): the server writes, the trainer's processes read.

    header               ids, components, grammars (each once) and constraints, as JSON
    tokens runs ...      the `TokenLayout` of all samples, and `rank`: the path of each sample in it
    spans                where targets are (`loss_mask`): begin and end, one sample after the other
    sampling_logprobs    one number per target; likewise `advantages` and `teacher_logprobs`
    weight share ...     one number per sample

Numbers keep all their bits. A stream that has values outside of the loss mask is stored whole, `whole` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from art.errors import InvalidRequestError
from art.protocol.compact.layout import lay_out
from art.protocol.compact.sequences import IntArray, SpanValues, spans_of
from art.protocol.compact.token_paths import TokenArray, TokenLayout, TokenPath, sort_ranks
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample
from art.protocol.token_sets import pack_token_sets, unpack_token_sets

FORMAT = 1
STREAMS = ("sampling_logprobs", "advantages", "teacher_logprobs")
_NUMBERS = {"weight": np.float64, "share": np.float64, "temperature": np.float64, "policy_version": np.int64}
_LAYOUT = tuple(field.name for field in fields(TokenLayout))


def write_samples(path: Path, samples: Sequence[TrainingSample]) -> None:
    """Write samples to the file `path`.

    Raises:
        InvalidRequestError: a token is not a number from 0 to 2**32 - 1.
        OSError: the file cannot be written.
    """
    spans = [spans_of(sample.loss_mask) for sample in samples]
    paths = share_layout(samples, spans)
    arrays: dict[str, NDArray[Any]] = {name: getattr(paths[0].layout, name) for name in _LAYOUT} if paths else {}
    arrays["rank"] = np.asarray([path.rank for path in paths], dtype=np.int64)
    for name, dtype in _NUMBERS.items():
        numbers = [getattr(sample, name) for sample in samples]
        arrays[name] = np.asarray([np.nan if number is None else number for number in numbers], dtype=dtype)
    arrays["spans"] = np.concatenate([*spans, np.zeros((0, 2), dtype=np.int64)])
    arrays["num_spans"] = np.asarray([len(one) for one in spans], dtype=np.int64)
    arrays["num_masked"] = np.asarray([len(sample.loss_mask) for sample in samples], dtype=np.int64)
    for name in STREAMS:
        _add_stream(arrays, name, [getattr(sample, name) for sample in samples], spans)
    arrays["header"] = np.frombuffer(orjson.dumps(_header(samples)), dtype=np.uint8)
    path.write_bytes(save(arrays))  # `save_file` reports a full disk as an error of its own


def share_layout(samples: Sequence[TrainingSample], spans: Sequence[IntArray]) -> list[TokenPath]:
    """Return the token paths of samples, whose `spans` hold targets. They are laid out unless they are already."""
    paths = [sample.token_ids for sample in samples if isinstance(sample.token_ids, TokenPath)]
    if paths and len(paths) == len(samples) and sort_ranks(paths) is not None:
        return paths
    return lay_out(
        (_tokens(sample), int(own[-1, 1]) - 1 if len(own) else len(sample.token_ids), sample.sample_id)
        for sample, own in zip(samples, spans, strict=True)
    )


def _tokens(sample: TrainingSample) -> TokenArray:
    if isinstance(sample.token_ids, TokenPath):
        return sample.token_ids.array()
    tokens = np.asarray(sample.token_ids)
    if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 2**32):
        raise InvalidRequestError(
            f"sample {sample.sample_id!r} has a token that is no token id; expected numbers from 0 to 2**32 - 1"
        )
    return tokens.astype(np.uint32)


def _add_stream(
    arrays: dict[str, NDArray[Any]], name: str, streams: Sequence[Sequence[float] | None], spans: Sequence[IntArray]
) -> None:
    """Add a stream of all samples: its values, and for each sample its size (-1 if absent) and whether it is whole."""
    values: list[NDArray[np.float64]] = [np.zeros(0)]
    sizes, whole = [-1 if stream is None else len(stream) for stream in streams], np.zeros(len(streams), dtype=np.bool_)
    for number, (stream, own) in enumerate(zip(streams, spans, strict=True)):
        if isinstance(stream, SpanValues) and stream.spans is own:
            values.append(stream.values)
        elif stream is not None:
            everything = np.asarray(stream, dtype=np.float64)
            inside = SpanValues(len(everything), own, np.ones(int((own[:, 1] - own[:, 0]).sum()), dtype=np.bool_))
            fits = not len(own) or own[-1, 1] <= len(everything)
            mask = inside.array() if fits else np.zeros(len(everything), dtype=np.bool_)
            whole[number] = not fits or bool(everything[~mask].any())
            values.append(everything if whole[number] else everything[mask])
    arrays |= {name: np.concatenate(values), f"{name}.size": np.asarray(sizes, dtype=np.int64), f"{name}.whole": whole}


def _header(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    grammars: dict[str, int] = {}

    def body(number: int, span: ConstrainedSpan) -> list[Any]:
        constraint, text = span.constraint, span.constraint.grammar
        index = None if text is None else grammars.setdefault(text, len(grammars))
        kept = None if constraint.kept is None else pack_token_sets(constraint.kept)
        return [number, span.start, span.num_tokens, index, constraint.stop_token_ids, kept]

    constraints = [body(number, span) for number, sample in enumerate(samples) for span in sample.constraints]
    return {
        "format": FORMAT,
        "names": [[sample.sample_id, sample.rollout_id, sample.group_id, sample.component] for sample in samples],
        "grammars": list(grammars),
        "constraints": constraints,
        "versions": [[number, sample.versions] for number, sample in enumerate(samples) if sample.versions],
    }


def read_samples(path: Path) -> list[TrainingSample]:
    """Read what `write_samples` wrote. Tokens and streams of the samples are views of the file's arrays.

    Raises:
        InvalidRequestError: the file is missing or damaged, or of another version.
    """
    try:
        arrays = load_file(path)
        header = orjson.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, this version reads {FORMAT}")
        return _Reader(arrays, header).samples()
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(f"the file of training samples {path} cannot be read: {problem}") from error


class _Reader:
    def __init__(self, arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> None:
        self._arrays, self._header = arrays, header
        self._names: list[Any] = header["names"]
        spans, last = self._arrays["spans"], np.cumsum(arrays["num_spans"])
        ends = np.cumsum(np.append(0, spans[:, 1] - spans[:, 0]))
        self._num_targets: IntArray = np.diff(ends[last], prepend=0)
        self._ends = {name: np.cumsum(self._counts(name)).tolist() for name in STREAMS}
        self._true = np.ones(int(self._num_targets.max(initial=0)), dtype=np.bool_)

    def _counts(self, name: str) -> IntArray:
        """How many values of a stream each sample has in the file."""
        sizes, whole = self._arrays[f"{name}.size"], self._arrays[f"{name}.whole"]
        return np.where(sizes < 0, 0, np.where(whole, sizes, self._num_targets))

    def samples(self) -> list[TrainingSample]:
        if not self._names:
            return []
        layout = TokenLayout(**{name: self._arrays[name] for name in _LAYOUT})
        columns = [self._arrays[name].tolist() for name in ("rank", "num_masked", *_NUMBERS)]
        streams = [self._stream(name) for name in STREAMS]
        spans, constraints = self._spans(), self._constraints()
        versions = {number: [(start, step) for start, step in own] for number, own in self._header["versions"]}
        counts = self._num_targets.tolist()
        samples = []
        for number, (sample_id, rollout_id, group_id, component) in enumerate(self._names):
            rank, num_masked, weight, share, temperature, policy_version = (column[number] for column in columns)
            own = spans[number]
            logprobs, advantages, teacher = (stream(number, own) for stream in streams)
            samples.append(
                TrainingSample(
                    sample_id=sample_id,
                    rollout_id=rollout_id,
                    group_id=group_id,
                    token_ids=TokenPath(layout, rank),
                    loss_mask=SpanValues(num_masked, own, self._true[: counts[number]]),
                    sampling_logprobs=logprobs,
                    advantages=advantages,
                    weight=weight,
                    share=None if np.isnan(share) else share,
                    temperature=temperature,
                    policy_version=policy_version,
                    versions=versions.get(number, []),
                    component=component,
                    teacher_logprobs=teacher,
                    constraints=constraints[number],
                )
            )
        return samples

    def _stream(self, name: str) -> Any:
        values, ends = self._arrays[name], [0, *self._ends[name]]
        sizes, whole = self._arrays[f"{name}.size"].tolist(), self._arrays[f"{name}.whole"].tolist()

        def of_sample(number: int, spans: IntArray) -> SpanValues | None:
            size = sizes[number]
            if size < 0:
                return None
            everything = np.asarray([[0, size]]) if whole[number] else spans
            return SpanValues(size, everything, values[ends[number] : ends[number + 1]])

        return of_sample

    def _spans(self) -> list[IntArray]:
        return np.split(self._arrays["spans"], np.cumsum(self._arrays["num_spans"])[:-1])

    def _constraints(self) -> list[list[ConstrainedSpan]]:
        by_sample: list[list[ConstrainedSpan]] = [[] for _ in self._names]
        for number, start, num_tokens, grammar, stop_token_ids, kept in self._header["constraints"]:
            constraint = Constraint(
                grammar=None if grammar is None else self._header["grammars"][grammar],
                stop_token_ids=stop_token_ids,
                kept=None if kept is None else unpack_token_sets(kept),
            )
            by_sample[number].append(ConstrainedSpan(start=start, num_tokens=num_tokens, constraint=constraint))
        return by_sample
