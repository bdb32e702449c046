"""A byte-level BPE tokenizer of a few hundred tokens, trained on a task's own text.

Digits, punctuation, line breaks and capitals that start no word never merge, so that a cell or a mark on a board is the
same token wherever it stands; only words do. Any text can be encoded, since all bytes are in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Structure of the conversation: left out when decoding with `skip_special_tokens`."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Parts of an answer, as in Qwen3: one token each, but kept when decoding."""
PAD_TOKEN = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
_WORDS_OR_SINGLE_CHARACTERS = r" ?\p{Lu}?\p{Ll}+|[\s\S]"
# Text that every conversation holds, whatever the task: the words of the template.
_TEMPLATE_WORDS = ["system\n", "user\n", "assistant\n"] * 100


def chat_template() -> str:
    return files(__package__).joinpath("template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> Any:
    """A `PreTrainedTokenizerFast` with ART's ChatML template.

    Args:
        texts: Message contents of the task.
        vocab_size: At least 265: the bytes and the special tokens; the rest becomes merges of frequent words.
        max_length: Context of the model, in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS_OR_SINGLE_CHARACTERS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_TEMPLATE_WORDS, *texts], trainer)
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
