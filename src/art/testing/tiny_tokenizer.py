"""Make a byte-level tokenizer of a few hundred tokens for the conversations of a task.

A token is a byte, a whole word or a fixed phrase, never a part of a word. Anything that a tiny model has to tell apart
is the same single token everywhere, and fixed text is short:

    digits, marks, single letters   always one token, so a cell of a board is the same token everywhere
    words                           one token, unless the assistant has to spell them (see `_spelled_words`)
    phrases                         one token for a line of a system prompt or tool description, and for each fixed
                                    part of a tool call: a call is about ten tokens, half of them arguments

Any text can be encoded, since all bytes are in the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from art.gateway.tokenizer import ChatTemplate
from art.task import Conversation

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens of the conversation's structure. Decoding with `skip_special_tokens` leaves them out."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that are part of an answer, as in Qwen3. Decoding keeps them."""
PAD_TOKEN = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
_ROLES = ("system", "user", "assistant")
_WORD = r" ?\p{Lu}?\p{Ll}{2,}"
"""A word has at least two letters; otherwise `b` and ` b` would be two tokens for the same letter."""
_SHORTEST_PHRASE = 20
"""Smallest number of characters of a line that gets its own token."""
_RARE = 0.05
"""A line or argument that is in a smaller share of the conversations gets no token."""
_FIRST_TURN = "<|im_start|>user"
_TAGS = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS))))


@cache
def _template() -> tuple[str, ChatTemplate]:
    """The chat template of tiny models as text, and ready to use."""
    text = files(__package__).joinpath("tiny_template.jinja").read_text(encoding="utf-8")
    return text, ChatTemplate({"default": text}, {}, name="tiny")


def render(conversation: Conversation) -> str:
    """Render a conversation with the tiny model's chat template."""
    return _template()[1].render(
        list(conversation.messages),  # type: ignore[arg-type]
        list(conversation.tools or ()),  # type: ignore[arg-type]
        add_generation_prompt=False,
    )


def make_tokenizer(
    conversations: Sequence[Conversation], texts: Sequence[str], *, vocab_size: int, max_length: int
) -> Any:
    """Make a `PreTrainedTokenizerFast` with ART's ChatML template.

    Args:
        texts: the conversations as `render` writes them.
        vocab_size: largest number of tokens: 265 for bytes and tags, the rest for phrases and then frequent words.
        max_length: context of the model in tokens.
    """
    phrases = _find_phrases(conversations, texts)
    # Cuts text into phrases, words and single characters. Longer phrases win.
    escaped = [re.sub(r"([^\w\s])", r"\\\1", phrase) for phrase in sorted(phrases, key=lambda phrase: -len(phrase))]
    splitter = pre_tokenizers.Split(Regex("|".join([*escaped, _WORD, r"[\s\S]"])), behavior="isolated")

    def split(text: str) -> list[str]:
        return [piece for piece, _ in splitter.pre_tokenize_str(text)] if text else []

    spelled = _spelled_words(conversations, split)
    counts = Counter(piece for text in texts for part in _TAGS.split(text) for piece in split(part))
    words = [word for word, _ in counts.most_common() if len(word) > 1 and word not in spelled]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fixed = [*CONTROL_TOKENS, *sorted(bytes_of.alphabet())]
    room = vocab_size - len(fixed) - len(MARKUP_TOKENS)
    chosen = [bytes_of.pre_tokenize_str(word)[0][0] for word in dict.fromkeys([*_ROLES, *phrases, *words])]
    vocabulary = {token: i for i, token in enumerate([*fixed, *chosen[:room]])}
    # Without merges, a piece is one token if the vocabulary has the whole piece, otherwise its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    wrapped.chat_template = _template()[0]
    return wrapped


def _find_phrases(conversations: Sequence[Conversation], texts: Sequence[str]) -> list[str]:
    """Find text that many conversations have in common and that the model need not read letter by letter.

    Observations are ignored, so that a row of a board does not become one token in some places and several in others.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        opening = text.partition(_FIRST_TURN)[0]
        lines = {line for part in _TAGS.split(opening) for line in part.split("\n")}
        counts.update(line for line in lines if len(line) >= _SHORTEST_PHRASE)
    for conversation in conversations:
        pieces: set[str] = set()
        messages: list[dict[str, Any]] = [dict(message) for message in conversation.messages]
        for call in (call["function"] for message in messages for call in message.get("tool_calls") or ()):
            arguments = json.loads(call["arguments"])
            keys = arguments if isinstance(arguments, dict) else ()
            pieces |= {f'{{"name": "{call["name"]}", "arguments": {{', "}}", *(f'"{key}": ' for key in keys)}
        counts.update(pieces)
    return [phrase for phrase, count in counts.items() if count >= _RARE * len(conversations)]


def _spelled_words(conversations: Sequence[Conversation], split: Callable[[str], list[str]]) -> set[str]:
    """Find words that the assistant has to spell: those that it invents and that vary, e.g. the guesses in a word game.

    Words that every conversation has are part of the format, and words that were shown before can be copied. Both kinds
    stay whole.
    """
    num_uses: Counter[str] = Counter()
    num_inventions: Counter[str] = Counter()
    for conversation in conversations:
        shown: set[str] = set()
        used: set[str] = set()
        invented: set[str] = set()
        for message in conversation.messages:
            fields: dict[str, Any] = dict(message)
            text = str(fields.get("content") or "") + json.dumps(fields.get("tool_calls") or "")
            words = {word.strip() for word in split(text)}
            if fields["role"] == "assistant":
                used |= words
                invented |= words - shown
            shown |= words
        num_uses.update(used)
        num_inventions.update(invented)
    most = len(conversations) / 2
    varied = {word for word, count in num_inventions.items() if num_uses[word] / 2 < count and num_uses[word] < most}
    return varied | {f" {word}" for word in varied}
