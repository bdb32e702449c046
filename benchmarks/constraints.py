"""What answers drawn under constraints cost the trainer, at a large vocabulary.

From hidden states [N, 1024] and a frozen head of 151,648 rows to the log-probs of the same N targets, and back:

    free         drawn from the whole vocabulary
    grammar      tool calls of eight fields under their JSON schema, replayed by llguidance
    top_k        each token drawn from 50 kept tokens of its own
    top_p        each token drawn from 20,000 kept tokens of its own: masks that nothing shares

The replay runs before the step. Its speed is that of one thread.

    python -m benchmarks constraints --quick
    python -m benchmarks constraints --constrained-targets 1024
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample
from art.trainer.logprobs import Head, TargetRows, group_by_row, target_logprobs
from art.trainer.step.replay import Replayer
from art.trainer.tree import SamplePath, build_tree, check_sample
from benchmarks.report import Cell, Result
from benchmarks.timing import Timing, alternate, main_clock, median, ratio

HIDDEN = 1024
_VOCAB, _QUICK_VOCAB = 151_648, 8192
_TARGETS, _QUICK_TARGETS = 1024, 128
_END = "<|im_end|>"
_FREE = "free"
_KEPT = {"top_k": 50, "top_p": 20_000}
_FIELDS = ("city", "street", "name", "reason", "count", "price", "urgent", "kind")
_SCHEMA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in _FIELDS[:4]},
        "count": {"type": "integer"},
        "price": {"type": "number"},
        "urgent": {"type": "boolean"},
        "kind": {"enum": ["buy", "sell", "hold"]},
    },
    "required": list(_FIELDS),
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_GRAMMAR = f"start: %json {json.dumps(_SCHEMA)}"


@dataclass(frozen=True, slots=True)
class Way:
    """The same targets under one kind of constraint."""

    rows: TargetRows
    num_masks: int
    num_few: int
    """Number of rows that are computed from few rows of the head."""
    replay_tokens_per_s: float | None


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--constrained-targets", type=int, help="targets to compute (default: 1024)")


def run(args: argparse.Namespace) -> Result:
    vocab_size = _QUICK_VOCAB if args.quick else _VOCAB
    num_targets = args.constrained_targets or (_QUICK_TARGETS if args.quick else _TARGETS)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        _save_tokenizer(Path(folder), vocab_size)
        samples, ways = _ways(Path(folder), vocab_size, num_targets, device)
    timings = _measure(ways, vocab_size, args)
    clock = main_clock(args.device)
    total = sum(sum(sample.loss_mask) for sample in samples)
    return Result(
        summary=f"{total:,} targets at a vocabulary of {vocab_size:,}, hidden size {HIDDEN}, float32 on {args.device}, "
        "with the gradient of the hidden states.",
        rows=[_row(name, way, timings, clock) for name, way in ways.items()],
        notes=[
            "rows: rows of logits; targets that were the only possible token need none",
            "gathered: rows over few tokens, computed from rows of the head that are gathered first",
            "time ratio: by free, round by round; below 1 is faster than without constraints",
            "replay: sampled tokens per second of one thread, duplicates of masks removed; not in the time of the step",
        ],
    )


def _ways(
    model: Path, vocab_size: int, num_targets: int, device: torch.device
) -> tuple[list[TrainingSample], dict[str, Way]]:
    samples = _samples(Tokenizer.from_file(str(model / "tokenizer.json")), num_targets)
    drawn = {
        _FREE: [replace(sample, constraints=[]) for sample in samples],
        "grammar": samples,
        **{name: _with_kept(samples, min(size, vocab_size // 2), vocab_size) for name, size in _KEPT.items()},
    }
    return samples, {name: _prepare(each, model, vocab_size, device) for name, each in drawn.items()}


def _row(name: str, way: Way, timings: dict[str, list[Timing]], clock: Any) -> dict[str, Cell]:
    return {
        "drawn": name,
        "rows": len(way.rows.queries),
        "gathered": way.num_few,
        "masks": way.num_masks,
        "seconds": median(timings[name], clock),
        "time ratio, CPU": ratio(timings[name], timings[_FREE], "cpu_s"),
        "time ratio, wall": ratio(timings[name], timings[_FREE], "wall_s"),
        "replay, tokens/s": "-" if way.replay_tokens_per_s is None else round(way.replay_tokens_per_s),
    }


def _measure(ways: dict[str, Way], vocab_size: int, args: argparse.Namespace) -> dict[str, list[Timing]]:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocab_size, HIDDEN, generator=generator) * 0.05).to(args.device)
    size = 1 + max(int(way.rows.queries.max()) for way in ways.values())
    hidden = torch.randn(size, HIDDEN, generator=generator).to(args.device)

    def work(way: Way) -> Callable[[int], object]:
        def once(number: int) -> None:
            leaf = hidden.detach().requires_grad_()
            target_logprobs(leaf, Head(weight, None), way.rows)[0].sum().backward()

        return once

    contenders = {name: work(way) for name, way in ways.items()}
    return alternate(contenders, repeats=args.repeats, device=args.device, label="constraints")


def _prepare(samples: Sequence[TrainingSample], model: Path, vocab_size: int, device: torch.device) -> Way:
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size))]
    replayer = Replayer(str(model), vocab_size)
    replayer.replay(paths[:1])  # loads the tokenizer and compiles the grammar
    started = time.process_time()
    replayed = replayer.replay(paths)[0]
    seconds = time.process_time() - started
    assert len(replayed) == len(paths), "a sample does not match its own constraint"
    rows = group_by_row(build_tree(replayed).targets, device)
    masks = rows.masks
    return Way(
        rows=rows,
        num_masks=len(_table(replayed)),
        num_few=0 if masks is None else len(rows.queries) - masks.num_tiled,
        replay_tokens_per_s=sum(len(path.query_positions) for path in paths) / seconds if masks is not None else None,
    )


def _table(paths: Sequence[SamplePath]) -> Sequence[object]:
    return next((path.mask_table for path in paths if path.mask_table), ())


# -- samples --


def _samples(tokenizer: Tokenizer, num_targets: int) -> list[TrainingSample]:
    """Tool calls, each after a token of its own, with `num_targets` tokens or a few more."""
    rng = random.Random(0)
    end = tokenizer.token_to_id(_END)
    samples: list[TrainingSample] = []
    total = 0
    while total < num_targets:
        answer = [*tokenizer.encode(_tool_call(rng)).ids, end]
        size = len(answer)
        constraint = Constraint(grammar=_GRAMMAR, stop_token_ids=[end])
        samples.append(
            TrainingSample(
                sample_id=str(len(samples)),
                rollout_id=str(len(samples)),
                token_ids=[len(samples), *answer],
                loss_mask=[False] + [True] * size,
                sampling_logprobs=[0.0] * (size + 1),
                advantages=[0.0] * (size + 1),
                constraints=[ConstrainedSpan(start=1, num_tokens=size, constraint=constraint)],
            )
        )
        total += size
    return samples


def _tool_call(rng: random.Random) -> str:
    def text() -> str:
        return " ".join(rng.choice(dir(str) + dir(argparse)) for _ in range(rng.randrange(1, 6)))

    values = [*(text() for _ in range(4)), rng.randrange(1000), rng.randrange(10_000) / 100, rng.random() < 0.5]
    return json.dumps(
        dict(zip(_FIELDS, [*values, rng.choice(["buy", "sell", "hold"])], strict=True)), separators=(",", ":")
    )


def _with_kept(samples: Sequence[TrainingSample], size: int, vocab_size: int) -> list[TrainingSample]:
    """The samples with random kept tokens in place of their grammar."""
    rng = np.random.default_rng(1)

    def constraint(span: ConstrainedSpan, sample: TrainingSample) -> Constraint:
        tokens = sample.token_ids[span.start : span.start + span.num_tokens]
        kept = [np.union1d(rng.choice(vocab_size, size - 1, replace=False), [token]) for token in tokens]
        return Constraint(kept=[ids.tolist() for ids in kept])

    return [
        replace(sample, constraints=[replace(span, constraint=constraint(span, sample)) for span in sample.constraints])
        for sample in samples
    ]


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE of `vocab_size` tokens: the beginnings of the words of Python's own sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    words: Counter[str] = Counter()
    for file in files if vocab_size == _VOCAB else files[:200]:
        words.update(re.findall(" ?[A-Za-z]+", file.read_text(encoding="utf-8", errors="replace")))
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges: list[tuple[str, str]] = []
    for word, _ in words.most_common():
        letters = word.replace(" ", space)
        for length in range(2, len(letters) + 1):
            if letters[:length] not in tokens and len(tokens) < vocab_size - 1:
                tokens[letters[:length]] = None
                merges.append((letters[: length - 1], letters[length - 1]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END)])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["constraints", *sys.argv[1:]])
