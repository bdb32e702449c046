"""The warm start: supervised fine-tuning of all weights on synthetic conversations, in this process.

It teaches the format and the legal answers, and stops there; skill is for reinforcement learning to find. Batches are
drawn at random and the loss is the mean over their target tokens: bucketing by length with a mean per batch would give
the tokens of short conversations too much weight.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from art.errors import ContextLengthError
from art.task import Conversation
from art.testing.tiny.tokenizer import END_OF_TURN

Progress = Callable[[int, int, float], None]
"""Called with steps done, steps in all, and the loss."""

_IGNORED = -100
_ASSISTANT_HEAD = "<|im_start|>assistant\n"
_EMPTY_REASONING = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    num_steps: int = 500
    batch_size: int = 4
    learning_rate: float = 2.5e-3
    warm_up: float = 0.03
    """Share of the steps in which the learning rate rises."""
    cool_down: float = 0.5
    """Share of the steps in which it falls again."""
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """All conversations as one padded table; row i has `lengths[i]` tokens, here N rows of at most T tokens."""

    token_ids: torch.Tensor  # [N, T]
    targets: torch.Tensor  # [N, T] the token itself where an assistant says it, else -100
    lengths: torch.Tensor  # [N]


def warm_start(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    config: WarmStartConfig,
    *,
    on_progress: Progress | None = None,
) -> None:
    """Train `model` in place, in one thread. The same model, conversations and config give the same weights.

    Matrices this small gain nothing from a second thread, and lose much where another process is busy on its core.

    Raises:
        ContextLengthError: a conversation is longer than the model's context.
    """
    rows = _tokenize(tokenizer, conversations, max_length=model.config.max_position_embeddings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(config.seed)
    model.train()
    with _one_thread():
        for step in range(config.num_steps):
            chosen = torch.randint(len(rows.lengths), (config.batch_size,), generator=generator)
            loss = _loss(model, rows, chosen)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * _schedule(step, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if on_progress is not None:
                on_progress(step + 1, config.num_steps, loss.item())
    model.eval()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loss(model: Any, rows: _Rows, chosen: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the batch's target tokens; the head runs on their positions only."""
    length = int(rows.lengths[chosen].max())
    hidden = model.model(input_ids=rows.token_ids[chosen, :length], use_cache=False).last_hidden_state
    targets = rows.targets[chosen, 1:length]
    wanted = targets != _IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][wanted]), targets[wanted])


def _schedule(step: int, config: WarmStartConfig) -> float:
    """Warm-up, a plateau, and a fall to nearly 0, as a factor of the learning rate."""
    rise = (step + 1) / max(1, math.ceil(config.warm_up * config.num_steps))
    fall = (config.num_steps - step) / max(1, math.ceil(config.cool_down * config.num_steps))
    return min(1.0, rise, fall)


def _tokenize(tokenizer: Any, conversations: Sequence[Conversation], *, max_length: int) -> _Rows:
    texts = [_render(tokenizer, conversation) for conversation in conversations]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    longest = max(map(len, encoded))
    if longest > max_length:
        raise ContextLengthError(
            f"a warm-start conversation has {longest} tokens, but the tiny model's context is {max_length}; "
            "make the task's messages shorter"
        )
    token_ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
    targets = torch.full((len(encoded), longest), _IGNORED)
    head = tokenizer.encode(_ASSISTANT_HEAD, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    for row, tokens in enumerate(encoded):
        token_ids[row, : len(tokens)] = torch.tensor(tokens)
        for start, stop in _assistant_spans(tokens, head, end):
            targets[row, start:stop] = token_ids[row, start:stop]
    return _Rows(token_ids, targets, torch.tensor([len(tokens) for tokens in encoded]))


def _render(tokenizer: Any, conversation: Conversation) -> str:
    """The conversation as text, its last turn as the model would say it.

    The template puts an empty thinking block into the last turn, which the generation prompt does not ask for.
    """
    text: str = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    context, head, answer = text.rpartition(_ASSISTANT_HEAD)
    return (context + head + answer.removeprefix(_EMPTY_REASONING)).removesuffix("\n")


def _assistant_spans(tokens: list[int], head: list[int], end: int) -> list[tuple[int, int]]:
    """Where assistants speak, their end-of-turn token included.

    Example: with head [1, 5] and end 2, the tokens [1, 7, 9, 2, 1, 5, 8, 2] have the span (6, 8).
    """
    spans, at = [], 0
    while at < len(tokens):
        if tokens[at : at + len(head)] == head:
            start = at + len(head)
            at = tokens.index(end, start) + 1
            spans.append((start, at))
        else:
            at += 1
    return spans
