"""A byte-level tokenizer of a few hundred tokens, made for a task's own conversations.

A token is a byte, a whole word, or a phrase that never changes; there are no parts of words. What a tiny model has to
tell apart is one token each wherever it appears, and what it need not look into is short:

    digits, marks, single letters   never merge: a cell of a board is the same token everywhere
    words                           one token, unless the assistant has to spell them (see `_spelled_words`)
    phrases                         lines of system prompts and tool descriptions, and the fixed parts of tool calls:
                                    a call is about ten tokens, of which its arguments are half

Any text can be encoded, since all bytes are in the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from art.gateway.format.template import ChatTemplate
from art.task import Conversation

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Structure of the conversation: left out when decoding with `skip_special_tokens`."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Parts of an answer, as in Qwen3: one token each, but kept when decoding."""
PAD_TOKEN = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
_ROLES = ("system", "user", "assistant")
_WORD = r" ?\p{Lu}?\p{Ll}{2,}"
"""One letter is no word: `b` and ` b` would be two tokens for the same letter."""
_SHORTEST_PHRASE = 20
"""Characters of a line that is worth a token of its own."""
_RARE = 0.05
"""Share of the conversations below which a line or an argument gets no token."""
_FIRST_TURN = "<|im_start|>user"
_TAGS = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS))))


def chat_template() -> str:
    return files(__package__).joinpath("template.jinja").read_text(encoding="utf-8")


@cache
def _template() -> ChatTemplate:
    return ChatTemplate({"default": chat_template()}, {}, name="tiny")


def render(conversation: Conversation) -> str:
    """The conversation as the tiny model's chat template writes it."""
    return _template().render(
        list(conversation.messages),  # type: ignore[arg-type]
        list(conversation.tools or ()),  # type: ignore[arg-type]
        add_generation_prompt=False,
    )


def make_tokenizer(
    conversations: Sequence[Conversation], texts: Sequence[str], *, vocab_size: int, max_length: int
) -> Any:
    """A `PreTrainedTokenizerFast` with ART's ChatML template.

    Args:
        texts: The conversations as `render` writes them.
        vocab_size: At most; 265 are bytes and tags, the rest phrases and then words, the most frequent first.
        max_length: Context of the model, in tokens.
    """
    phrases = _find_phrases(conversations, texts)
    split = _splitter(phrases)
    spelled = _spelled_words(conversations, split)
    counts = Counter(piece for text in texts for part in _TAGS.split(text) for piece in split(part))
    words = [word for word, _ in counts.most_common() if len(word) > 1 and word not in spelled]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fixed = [*CONTROL_TOKENS, *sorted(bytes_of.alphabet())]
    room = vocab_size - len(fixed) - len(MARKUP_TOKENS)
    chosen = [bytes_of.pre_tokenize_str(word)[0][0] for word in dict.fromkeys([*_ROLES, *phrases, *words])]
    vocabulary = {token: i for i, token in enumerate([*fixed, *chosen[:room]])}
    # Without merges a piece is one token if it is in the vocabulary as a whole, else its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_split(phrases), bytes_of])
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
    wrapped.chat_template = chat_template()
    return wrapped


def _split(phrases: Sequence[str]) -> Any:
    """Cuts text into phrases, words and single characters; a longer phrase goes before a shorter one."""
    alternatives = [*map(_escape, sorted(phrases, key=lambda phrase: -len(phrase))), _WORD, r"[\s\S]"]
    return pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated")


def _escape(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text)


def _splitter(phrases: Sequence[str]) -> Callable[[str], list[str]]:
    split = _split(phrases)
    return lambda text: [piece for piece, _ in split.pre_tokenize_str(text)] if text else []


def _find_phrases(conversations: Sequence[Conversation], texts: Sequence[str]) -> list[str]:
    """What conversations have in common and the model need not read letter by letter.

    Observations are not looked at: the rows of a board must not become one token here and several there.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        opening = text.partition(_FIRST_TURN)[0]
        lines = {line for part in _TAGS.split(opening) for line in part.split("\n")}
        counts.update(line for line in lines if len(line) >= _SHORTEST_PHRASE)
    for conversation in conversations:
        pieces: set[str] = set()
        for name, arguments in _calls(conversation):
            pieces |= {f'{{"name": "{name}", "arguments": {{', "}}", *(f'"{key}": ' for key in arguments)}
        counts.update(pieces)
    return [phrase for phrase, count in counts.items() if count >= _RARE * len(conversations)]


def _calls(conversation: Conversation) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in conversation.messages:
        said: dict[str, Any] = dict(message)
        for call in said.get("tool_calls") or ():
            function = call["function"]
            arguments = json.loads(function["arguments"])
            yield function["name"], arguments if isinstance(arguments, dict) else {}


def _spelled_words(conversations: Sequence[Conversation], split: Callable[[str], list[str]]) -> set[str]:
    """Words that the assistant says of itself and that vary: the letters of a guess matter, and feedback names them.

    A word that every conversation says is part of the format, and one that was shown before is copied: both stay whole.
    """
    said: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for conversation in conversations:
        shown: set[str] = set()
        here: set[str] = set()
        new: set[str] = set()
        for message in conversation.messages:
            fields: dict[str, Any] = dict(message)
            text = str(fields.get("content") or "") + json.dumps(fields.get("tool_calls") or "")
            words = {word.strip() for word in split(text)}
            if fields["role"] == "assistant":
                here |= words
                new |= words - shown
            shown |= words
        said.update(here)
        own.update(new)
    varied = {word for word, count in own.items() if count > said[word] / 2 and said[word] < len(conversations) / 2}
    return varied | {f" {word}" for word in varied}
