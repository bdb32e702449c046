"""The warm start of a tiny model: supervised fine-tuning of all weights on scripted conversations, in this process.

It teaches the model the format, and to read what it is shown. Reinforcement learning then teaches skill. A batch is
one prefix tree, as in the trainer, so shared system prompts, tools and openings are computed once. The loss is the mean
over the tokens of all answers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from art.errors import ContextLengthError
from art.protocol.samples import TrainingSample
from art.testing.tiny.muon import Muon
from art.testing.tiny.tokenizer import END_OF_TURN
from art.trainer.attention.tree_attention import ATTENTION_NAME, make_layout, register_attention
from art.trainer.tree.tree import SamplePath, build_tree, check_sample

Progress = Callable[[int, int, float], None]
"""Function that is called with the number of steps done, the number of all steps, and the loss."""

_ASSISTANT_HEAD = "<|im_start|>assistant\n"
_EMPTY_REASONING = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Settings of a warm start.

    The defaults were chosen on two games whose answers depend on an observation (nim, a hidden word), with and without
    tool calls. Fewer conversations teach the format, but not to read the observation.
    """

    num_steps: int = 600
    batch_size: int = 32
    """Number of conversations per step."""
    learning_rate: float = 2.5e-3
    """Learning rate of AdamW, for embeddings and norms."""
    matrix_learning_rate: float = 0.02
    """Learning rate of Muon, for the matrices of the layers."""
    warm_up: float = 0.03
    """Share of the steps, at the beginning, in which the learning rates rise."""
    cool_down: float = 0.5
    """Share of the steps, at the end, in which the learning rates fall."""
    max_grad_norm: float = 1.0
    seed: int = 0


def warm_start(
    model: Any, tokenizer: Any, texts: Sequence[str], config: WarmStartConfig, *, on_progress: Progress | None = None
) -> None:
    """Train `model` in place on the answers in `texts`, in one thread. Equal arguments give equal weights.

    Args:
        texts: conversations as the chat template writes them.

    Raises:
        ContextLengthError: a conversation is longer than the model's context.
    """
    paths = _tokenize(tokenizer, texts, max_length=model.config.max_position_embeddings)
    optimizers = _make_optimizers(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    model.train()
    with _tree_attention(model):
        for step in range(config.num_steps):
            chosen = torch.randint(len(paths), (config.batch_size,), generator=generator).tolist()
            loss = -_answer_logprobs(model, [paths[i] for i in chosen]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for optimizer, learning_rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * _schedule(step, config)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if on_progress is not None:
                on_progress(step + 1, config.num_steps, loss.item())
    model.eval()


def mean_answer_logprob(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Return the mean log-prob of the last answer of each conversation, in nats per answer."""
    paths = _tokenize(tokenizer, texts, max_length=model.config.max_position_embeddings, last_only=True)
    with torch.no_grad(), _tree_attention(model):
        return float(_answer_logprobs(model, paths).sum() / len(paths))


def _answer_logprobs(model: Any, paths: Sequence[SamplePath]) -> Tensor:
    """Log-probs [N] of all answer tokens of `paths`."""
    tree = build_tree(paths)
    layout = make_layout(tree, device=torch.device("cpu"), kernel="chains")
    hidden = model.model(
        input_ids=layout.token_ids[None], position_ids=layout.positions[None], use_cache=False, tree_layout=layout
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[torch.from_numpy(tree.targets.queries)])
    return -torch.nn.functional.cross_entropy(logits, torch.from_numpy(tree.targets.token_ids), reduction="none")


def _make_optimizers(model: Any, config: WarmStartConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimisers with their peak learning rates."""
    matrices = [param for param in model.model.layers.parameters() if param.ndim == 2]
    matrix_ids = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in matrix_ids]
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [(Muon(matrices, lr=0.0), config.matrix_learning_rate), (adam, config.learning_rate)]


@contextlib.contextmanager
def _tree_attention(model: Any) -> Iterator[None]:
    """Compute trees with `model` in the block, in one thread.

    Matrices this small gain nothing from a second thread, and lose much if another process uses its core.
    """
    register_attention()
    attention, num_threads = model.config._attn_implementation, torch.get_num_threads()
    model.set_attn_implementation(ATTENTION_NAME)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        torch.set_num_threads(num_threads)


def _schedule(step: int, config: WarmStartConfig) -> float:
    """Factor of the learning rates at a step: a linear rise, a plateau of 1, and a linear fall to nearly 0."""
    rise = (step + 1) / max(1, math.ceil(config.warm_up * config.num_steps))
    fall = (config.num_steps - step) / max(1, math.ceil(config.cool_down * config.num_steps))
    return min(1.0, rise, fall)


def _tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int, last_only: bool = False) -> list[SamplePath]:
    """Tokenise conversations to paths that train on all answers, or on the last ones, with their end-of-turn tokens."""
    encoded = tokenizer([_as_sampled(text) for text in texts], add_special_tokens=False)["input_ids"]
    longest = max(map(len, encoded))
    if longest > max_length:
        raise ContextLengthError(
            f"a warm-start conversation has {longest} tokens, but the tiny model's context is {max_length}; "
            "shorten the task's messages, or raise `tiny_context` in its defaults"
        )
    head = tokenizer.encode(_ASSISTANT_HEAD, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    paths = []
    for number, tokens in enumerate(encoded):
        mask = [False] * len(tokens)
        for start, stop in _assistant_spans(tokens, head, end)[-1 if last_only else 0 :]:
            mask[start:stop] = [True] * (stop - start)
        zeros = [0.0] * len(tokens)
        sample = TrainingSample(
            sample_id=str(number), rollout_id=str(number), token_ids=tokens, loss_mask=mask, sampling_logprobs=zeros,
            advantages=zeros, component="sft",
        )  # fmt: skip
        paths.append(check_sample(sample, vocab_size=len(tokenizer)))
    return [path for path in paths if path is not None]


def _as_sampled(text: str) -> str:
    """Remove the empty thinking block that the template writes into the last turn, since no prompt contains it."""
    context, head, answer = text.rpartition(_ASSISTANT_HEAD)
    return (context + head + answer.removeprefix(_EMPTY_REASONING)).removesuffix("\n")


def _assistant_spans(tokens: list[int], head: list[int], end: int) -> list[tuple[int, int]]:
    """Index ranges of the assistant's answers, including their end-of-turn tokens.

    Example: with head [1, 5] and end 2, the tokens [1, 7, 9, 2, 1, 5, 8, 2] have the range (6, 8).
    """
    starts = [at + len(head) for at in range(len(tokens)) if tokens[at : at + len(head)] == head]
    return [(start, tokens.index(end, start) + 1) for start in starts]
