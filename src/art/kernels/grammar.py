"""Answers that match a grammar: which tokens may come next, in the engine and again in the trainer.

    Vocabulary.load(model, vocab_size)                  once per base model: a second at 151,000 tokens
        .matcher(grammar, stop_token_ids) -> Matcher    per answer: milliseconds for a new grammar, then microseconds
            .fill(mask)  .advance(token)                per token: the mask before it, then the token
        .replay(grammar, stop_token_ids, tokens)        all masks of a recorded answer, for the trainer

A mask has one bit per token: bit `t % 32` of word `t // 32` is 1 where token t may be drawn. Masks follow from the
text, the stop tokens and the tokens before, so a replay gives the bits that the engine sampled under.

A grammar is Lark text of llguidance. `with_end` puts the stop tokens after it, so that engines and trainer agree on how
an answer ends, whatever the tokenizer calls its end. No torch here.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from art.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]
"""Allowed tokens: [ceil(vocab_size / 32)], or [M, ...] for several."""

VERSION = importlib.metadata.version("llguidance")
"""Recorded with each answer: another version may read a grammar in another way."""
MAX_GRAMMAR_CHARS = 256 * 1024
"""Longest text of a grammar."""
MAX_CACHED = 128
"""Compiled grammars that are kept, per base model."""
_MAX_COMPLAINT = 600
"""Characters of llguidance's explanation that an error repeats; the text may contain the whole grammar."""
_TOKENIZER_FILE = "tokenizer.json"


def with_end(grammar: str, stop_token_ids: Iterable[int]) -> str:
    """The text that is really compiled: `grammar`, then exactly one of the stop tokens.

    Example:
        with_end('start: "yes" | "no"', (2,))
        # start: answer <[2]>
        # answer: %lark {
        # start: "yes" | "no"
        # }
    """
    ends = ",".join(map(str, sorted(set(stop_token_ids))))
    return f"start: answer <[{ends}]>\nanswer: %lark {{\n{grammar}\n}}\n"


@dataclass(frozen=True, slots=True)
class Replay:
    """The masks of a recorded answer of N tokens."""

    masks: Mask  # [M, words] distinct masks, in the order of their first use
    index: npt.NDArray[np.int32]  # [num_matched] row of `masks` that each token was drawn under
    num_matched: int
    """Number of leading tokens that their masks allow: N, unless the answer does not match the grammar."""


def num_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask."""
    return -(-vocab_size // 32)


def allowed_bits(masks: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """One boolean per token: [..., vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def allowed_ids(mask: Mask, vocab_size: int) -> npt.NDArray[np.int64]:
    """Ids of the allowed tokens, ascending."""
    return np.flatnonzero(allowed_bits(mask, vocab_size))


class Matcher:
    """The state of one answer: what was drawn so far, and thus what may come next."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.num_tokens = 0
        """Number of tokens that were drawn so far."""

    def fill(self, mask: Mask) -> None:
        """Write the mask of the next token into `mask` [words], a contiguous row of any uint32 buffer.

        Releases the GIL meanwhile.

        Raises:
            InvalidRequestError: the grammar became too complex at this token, or no token can follow.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise self.failed()
        if not mask.any():
            raise self.failed("no token of the vocabulary can follow")

    def advance(self, token_id: int) -> bool:
        """Note that `token_id` was drawn. False if it cannot be part of the answer; the matcher is then of no use.

        This also happens with a token of the mask, where the vocabulary lacks what the grammar asks for.
        """
        if not self._matcher.consume_token(token_id):
            return False
        self.num_tokens += 1
        return True

    def resume(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were drawn earlier.

        Raises:
            InvalidRequestError: they do not match the grammar.
        """
        for token_id in token_ids:
            if not self.advance(token_id):
                raise self.failed()

    def failed(self, problem: str | None = None) -> InvalidRequestError:
        """The error after `advance` has returned False, or after another `problem`."""
        problem = _shortened(self._matcher.get_error() if problem is None else problem)
        text = f"the grammar of the answer cannot be continued at token {self.num_tokens}: {problem}"
        return InvalidRequestError(f"{text}; ask for a simpler form", param="grammar")


class Vocabulary:
    """The tokens of a base model as grammars see them, with the grammars compiled for them. Threads may share it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, *, patience: int = 1) -> None:
        """
        Args:
            tokenizer_json: content of the model's `tokenizer.json`.
            vocab_size: width of the model's logits. Ids without a token are never allowed.
            patience: factor of llguidance's limits on work. The trainer takes more than engines, so that it replays
                whatever they have sampled.

        Raises:
            ConfigError: llguidance cannot read the tokenizer, or it has more tokens than the logits.
        """
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size)
        except Exception as error:  # llguidance raises ValueError, and a panic of its own kind
            raise ConfigError(f"grammars cannot use this tokenizer of {vocab_size} tokens: {error}") from error
        if self._tokenizer.vocab_size != vocab_size:
            count = self._tokenizer.vocab_size
            raise ConfigError(f"the tokenizer has {count} tokens, but the model's logits only {vocab_size}")
        self.vocab_size = vocab_size
        self.end_token_id: int = self._tokenizer.eos_token
        """What the tokenizer calls its end. Answers end at the stop tokens of their request."""
        self.num_words = num_words(vocab_size)
        self._limits = LLParserLimits(
            initial_lexer_fuel=1_000_000 * patience,
            step_lexer_fuel=200_000 * patience,
            step_max_items=50_000 * patience,
            max_items_in_row=2_000 * patience,
            max_lexer_states=50_000 * patience,  # 2 kB each
            verbose_errors=False,
        )
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model: str, vocab_size: int, *, patience: int = 1) -> Vocabulary:
        """Read the tokenizer of a base model, a folder or a hub id.

        Raises:
            ConfigError: the model has no `tokenizer.json`, or llguidance cannot use it.
        """
        path = Path(model) / _TOKENIZER_FILE
        try:
            if not Path(model).is_dir():
                from huggingface_hub import hf_hub_download

                path = Path(hf_hub_download(model, _TOKENIZER_FILE))
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # errors of huggingface_hub are subclasses
            raise ConfigError(f"{model} has no readable {_TOKENIZER_FILE}, which grammars need: {error}") from error
        return cls(text, vocab_size, patience=patience)

    def matcher(self, grammar: str, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of an answer. A grammar that was used before is copied instead of compiled.

        Raises:
            InvalidRequestError: the grammar is not valid or too large, or there is no stop token to end the answer.
        """
        stops = [token_id for token_id in stop_token_ids if 0 <= token_id < self.vocab_size]
        problem = ""
        if not stops:
            problem = f"a grammar needs at least one stop token of the vocabulary to end it, got {list(stop_token_ids)}"
        elif len(grammar) > MAX_GRAMMAR_CHARS:
            problem = f"a grammar may have at most {MAX_GRAMMAR_CHARS:,} characters, got {len(grammar):,}"
        if problem:
            raise InvalidRequestError(problem, param="grammar")
        text = with_end(grammar, stops)
        with self._lock:
            compiled = self._compiled.get(text)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)  # releases the GIL
            if compiled.is_error():
                complaint = _shortened(compiled.get_error())
                raise InvalidRequestError(f"the grammar of the answer is not valid: {complaint}", param="grammar")
        with self._lock:
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self.vocab_size)

    def replay(self, grammar: str, stop_token_ids: Sequence[int], token_ids: Sequence[int]) -> Replay:
        """The masks that the tokens of an answer were drawn under. The answer may be cut off anywhere.

        A token that its mask does not allow ends the replay, see `Replay.num_matched`.

        Raises:
            InvalidRequestError: see `matcher` and `Matcher.fill`.
        """
        matcher = self.matcher(grammar, stop_token_ids)
        mask = np.zeros(self.num_words, dtype=np.uint32)
        numbers: dict[bytes, int] = {}  # few masks of an answer differ: 20 to 90 in 500 tokens of JSON
        index: list[int] = []
        for token_id in token_ids:
            matcher.fill(mask)
            if not 0 <= token_id < self.vocab_size or not mask[token_id >> 5] >> np.uint32(token_id & 31) & 1:
                break
            if not matcher.advance(token_id):
                break
            index.append(numbers.setdefault(mask.tobytes(), len(numbers)))
        masks = np.frombuffer(b"".join(numbers), dtype=np.uint32).reshape(len(numbers), self.num_words)
        return Replay(masks, np.array(index, dtype=np.int32), len(index))


def load_vocabulary(model: str, vocab_size: int) -> Vocabulary | None:
    """What an engine needs for grammars of a base model; `None`, with a line in the log, if the model lacks it."""
    try:
        return Vocabulary.load(model, vocab_size)
    except ConfigError as error:
        logger.warning("answers cannot be made to match a grammar: %s", error)
        return None


def _shortened(problem: str) -> str:
    text = " ".join(problem.split())
    return text if len(text) <= _MAX_COMPLAINT else text[:_MAX_COMPLAINT] + " ..."
