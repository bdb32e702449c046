"""What grammars cost: compiling one, its mask for each token, replaying an answer, and the engine without any.

The vocabularies are byte-level BPE made from the words of Python's standard library, of 151,643 learned tokens (like
Qwen's) and of 2,000. Answers are drawn at random from what the grammar allows, with the same seeds everywhere.

    python -m benchmarks grammar
    python -m benchmarks grammar --quick
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from art.config import EngineConfig
from art.engine import GenerateRequest
from art.engines.torch.base_model import load_model
from art.engines.torch.embedded import TorchEngine, forbid
from art.kernels.grammar import Vocabulary, allowed_ids
from benchmarks.in_process import drain
from benchmarks.models import QUICK_MODELS, ModelFiles, choose_dtype, model_files
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import alternate, main_clock, ratio

T = TypeVar("T")

MODEL = "1.2 M"
SIZES = (151_643, 2_000)
_QUICK_SIZES = (2_000,)
_ADDED = ("<|end|>", "<tool_call>", "</tool_call>")
_MAX_TOKENS = 300
_WORD = re.compile(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+")
_ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "maxLength": 60}, "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["small", "large", "other"]}, "price": {"type": "number"}, "paid": {"type": "boolean"},
        "place": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
    },
}  # fmt: skip
_EIGHT_FIELDS = json.dumps(_ORDER | {"required": [*_ORDER["properties"]], "additionalProperties": False})  # type: ignore[misc]
_ARGUMENTS = '{"type":"object","properties":{"city":{"type":"string","maxLength":60}},"required":["city"]}'
GRAMMARS = {
    "tool call": f'start: <tool_call> "\\n{{\\"name\\": \\"weather\\", \\"arguments\\": " args "}}\\n" </tool_call>\n'
    f"args: %json {_ARGUMENTS}",
    "8 fields": f"start: %json {_EIGHT_FIELDS}",
    "words": "start: /([a-z]{1,12} ){5,60}[a-z]+/",
}


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    rows: list[dict[str, Cell]] = []
    for size in _QUICK_SIZES if args.quick else SIZES:
        tokenizer = make_tokenizer(size)
        text = tokenizer.to_str()
        rows += [_measure(text, tokenizer.get_vocab_size(), name, args.repeats) for name in GRAMMARS]
    with model_files(next(iter(QUICK_MODELS)) if args.quick else MODEL, args.device) as files:
        overheads = _overheads(files, args)
    return Result(
        summary="CPU time of one thread, median of the rounds with their range. Masks and replays are of llguidance.",
        rows=rows,
        notes=[
            "load: reading the tokenizer; once per base model",
            "mask: filling and advancing, per token; apply: setting a row of float32 logits to minus infinity",
            *[f"{name}: {value}" for name, value in overheads.items()],
        ],
    )


def make_tokenizer(num_learned: int) -> Tokenizer:
    """A byte-level BPE whose words are the most frequent ones of the standard library, letter by letter."""
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs: list[tuple[str, str]] = []
    for word in _frequent_words():
        letters = "".join(piece for piece, _ in characters.pre_tokenize_str(word))
        for end in range(2, len(letters) + 1):
            if len(vocab) >= num_learned:
                break
            if letters[:end] not in vocab:
                vocab[letters[:end]] = len(vocab)
                pairs.append((letters[: end - 1], letters[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = characters
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in _ADDED])
    return tokenizer


def _frequent_words() -> list[str]:
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            counts.update(_WORD.findall(path.read_text(encoding="utf-8", errors="ignore")))
    return [word for word, _ in counts.most_common()]


def _measure(tokenizer: str, vocab_size: int, name: str, repeats: int) -> dict[str, Cell]:
    """One row: a grammar on a vocabulary. CPU time, so that other work on the machine counts little."""
    end = vocab_size - len(_ADDED)
    loads, compiles, masks, applies, replays = [], [], [], [], []
    for seed in range(repeats):
        load_s, vocabulary = _timed(lambda: Vocabulary(tokenizer, vocab_size))
        vocabulary.matcher("start: /a/", (end,))  # the first grammar of a process takes longer
        compile_s, _ = _timed(lambda v=vocabulary: v.matcher(GRAMMARS[name], (end,)))
        answer, mask_s = _draw(vocabulary, name, end, seed)
        replay_s, replay = _timed(lambda v=vocabulary, a=answer: v.replay(GRAMMARS[name], (end,), a))
        assert replay.num_matched == len(answer)
        logits = torch.randn(1, vocab_size)
        rows = replay.masks[replay.index[:100]]
        apply_s, _ = _timed(lambda x=logits, r=rows: [forbid(x, [0], row[None]) for row in r])
        loads.append(1e3 * load_s)
        compiles.append(1e3 * compile_s)
        masks.append(1e6 * mask_s)
        applies.append(1e6 * apply_s / len(rows))
        replays.append(len(answer) / replay_s)
    return {
        "tokens": vocab_size,
        "grammar": name,
        "load, ms": Spread.of(loads),
        "compile, ms": Spread.of(compiles),
        "mask, us": Spread.of(masks),
        "apply, us": Spread.of(applies),
        "replay, tokens/s": Spread.of(replays),
    }


def _draw(vocabulary: Vocabulary, name: str, end: int, seed: int) -> tuple[list[int], float]:
    """A random answer, and the seconds of its masks per token."""
    rng = np.random.default_rng(seed)
    matcher = vocabulary.matcher(GRAMMARS[name], (end,))
    mask = np.zeros(vocabulary.num_words, dtype=np.uint32)
    answer: list[int] = []
    spent = 0.0
    while len(answer) < _MAX_TOKENS and end not in answer:
        fill_s, _ = _timed(lambda: matcher.fill(mask))
        answer.append(int(rng.choice(allowed_ids(mask, vocabulary.vocab_size))))
        advance_s, _ = _timed(lambda: matcher.advance(answer[-1]))
        spent += fill_s + advance_s
    return answer, spent / len(answer)


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def _overheads(files: ModelFiles, args: argparse.Namespace) -> dict[str, Spread]:
    """Time of an engine by that of one that was loaded without grammars, for as many tokens."""
    dtype = choose_dtype(args)
    config = EngineConfig.model_validate({"device": args.device, "dtype": dtype, "max_context": 512, "num_threads": 1})
    tokenizer = make_tokenizer(min(files.vocab_size, SIZES[-1]) - len(_ADDED))
    vocabulary = Vocabulary(tokenizer.to_str(), files.vocab_size)
    end = tokenizer.token_to_id(_ADDED[0])
    with torch.inference_mode():
        plain, able = (TorchEngine(load_model(str(files.base), config), config, v) for v in (None, vocabulary))
    ways: dict[str, tuple[TorchEngine, str | None]] = {
        "neither": (plain, None),
        "able to, none asked": (able, None),
        "with a grammar": (able, r"start: /(?s:.{2000,})/"),
    }
    new_tokens = 8 if args.quick else 64
    timings = alternate(
        {
            name: lambda number, way=way: [None for _ in _sample(*way, number, files, new_tokens, end)]  # type: ignore[misc]
            for name, way in ways.items()
        },
        repeats=args.repeats,
        device=args.device,
        label="engine, 16 requests",
    )
    clock = main_clock(args.device)
    return {
        f"engine of {files.name} parameters, {files.vocab_size:,} tokens, 16 requests, {name}: times its plain "
        f"{clock.removesuffix('_s')} time": ratio(timings[name], timings["neither"], clock)
        for name in list(ways)[1:]
    }


def _sample(
    engine: TorchEngine, grammar: str | None, number: int, files: ModelFiles, new_tokens: int, end: int
) -> Iterator[object]:
    rng = np.random.default_rng(number)
    for i in range(16):
        engine.submit(
            GenerateRequest(
                request_id=str(i), adapter=None, prompt_token_ids=rng.integers(0, files.vocab_size, 50).tolist(),
                max_tokens=new_tokens, stop_token_ids=(end,) if grammar else (), seed=i, grammar=grammar,
            ),
            stream=False,
        )  # fmt: skip
    return drain(engine)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["grammar", *sys.argv[1:]])
