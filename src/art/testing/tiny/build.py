"""Build a tiny model on disk (tokenizer, random weights, warm start) in the usual format of transformers.

build_tiny_model("models/tiny", task="tic_tac_toe", seed=0)
AutoModelForCausalLM.from_pretrained("models/tiny")
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.metrics.observations import MIN_READS, split_at_answers, swap_observations
from art.task import TINY_MODEL_FILE, Conversation, Task, TaskDefaults, draw_conversations, get_task
from art.task.tiny_form import TinyForm
from art.testing.tiny.model import HEAD_DIM, VLLM_HEAD_DIM, create_model, save_model
from art.testing.tiny.tokenizer import make_tokenizer, render
from art.testing.tiny.warm_start import Progress, WarmStartConfig, mean_answer_logprob, warm_start

logger = logging.getLogger(__name__)

NUM_CONVERSATIONS = 3000
MIN_CONTEXT = 16
NUM_PROBED = 32
"""Number of answers on which it is measured whether the model reads what it was shown."""


def build_tiny_model(
    path: str | Path,
    *,
    task: str | Task | None = None,
    conversations: Sequence[Conversation] | None = None,
    seed: int = 0,
    play_skill: float | None = None,
    warm_start_steps: int | None = None,
    head_dim: int = HEAD_DIM,
    context: int | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Write a tiny model to the folder `path` and return the path. The same arguments give the same weights.

    Args:
        task: task whose scripted play teaches the format; by default `tic_tac_toe`.
        conversations: conversations to learn from, instead of a task's play.
        play_skill: mean skill of the task's play, see `Task.play`; `None` takes the task's own.
        warm_start_steps: number of warm-start steps; `None` takes the task's own, 0 leaves the weights random.
        head_dim: size of an attention head: 16, or 32 for a model that vLLM can serve.
        context: longest prompt and answer together, in tokens; `None` takes the task's own. A server serves at most
            32,768 of them, unless `max_context` of the engine's settings says more.
        on_progress: called after each warm-start step with (done, total, loss).

    Raises:
        ConfigError: both a task and conversations are given, `path` contains something other than a tiny model,
            `head_dim` is unknown, `context` is below 16, or the task's `play_skill` cannot be set.
    """
    path = Path(path)
    _check_replaceable(path)
    if head_dim not in (HEAD_DIM, VLLM_HEAD_DIM):
        raise ConfigError(f"`head_dim` must be {HEAD_DIM} or {VLLM_HEAD_DIM}, got {head_dim}")
    if context is not None and context < MIN_CONTEXT:
        raise ConfigError(f"`context` must be a number of tokens, at least {MIN_CONTEXT}, got {context}")
    if task is not None and conversations is not None:
        raise ConfigError("`build_tiny_model` takes either `task` or `conversations`, got both")
    defaults, needs_reading, form = TaskDefaults(), True, None
    if conversations is None:
        source = task if isinstance(task, Task) else get_task(task or "tic_tac_toe")
        conversations = draw_conversations(source, seed=seed, count=NUM_CONVERSATIONS, skill=play_skill)
        defaults, needs_reading, form = source.defaults, source.needs_reading, TinyForm.of_task(source)
    elif play_skill is not None:
        raise ConfigError("`play_skill` applies to a task's play, not to `conversations`; leave it out")
    num_steps = defaults.warm_start_steps if warm_start_steps is None else warm_start_steps
    texts = [render(conversation) for conversation in conversations]
    context = defaults.tiny_context if context is None else context
    tokenizer = make_tokenizer(conversations, texts, vocab_size=defaults.tiny_vocab_size, max_length=context)
    model = create_model(tokenizer, seed=seed, head_dim=head_dim, max_context=context)
    warm_start(model, tokenizer, texts, WarmStartConfig(num_steps=num_steps, seed=seed), on_progress=on_progress)
    reads = _measure_reads(model, tokenizer, conversations, seed, warns=needs_reading) if num_steps else None
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_model(model, partial)
    tokenizer.save_pretrained(partial)
    task_form = None if form is None else form.model_dump(mode="json")
    calls_tools = any(conversation.tools for conversation in conversations)
    manifest = {"seed": seed, "warm_start_steps": num_steps, "reads": reads, "tools": calls_tools, "task": task_form}
    (partial / TINY_MODEL_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    return path


def _measure_reads(
    model: Any, tokenizer: Any, conversations: Sequence[Conversation], seed: int, *, warns: bool
) -> float | None:
    """Measure how much the model's answers depend on what it was shown, in nats per answer.

    See `art.metrics.observations`. Returns `None` if the play never shows different things at the same place. A value
    near 0 is logged, if `warns`: either right answers do not depend on what is shown, or the model has not learnt to
    read it.
    """
    rng = random.Random(seed)
    probed = [
        (turns, conversation.tools)
        for conversation in rng.sample(list(conversations), min(len(conversations), 4 * NUM_PROBED))
        for turns in split_at_answers(conversation.messages)
    ]
    swaps = swap_observations([turns for turns, _ in probed], rng)
    swaps = rng.sample(swaps, min(len(swaps), NUM_PROBED))
    if not swaps:
        return None
    means = []
    for messages in ([swap.messages for swap in swaps], [swap.swapped for swap in swaps]):
        texts = [
            render(Conversation(messages=turns, tools=probed[swap.index][1]))
            for swap, turns in zip(swaps, messages, strict=True)
        ]
        means.append(mean_answer_logprob(model, tokenizer, texts))
    reads = means[0] - means[1]
    if warns and reads < MIN_READS:
        logger.warning(
            "the tiny model's answers hardly depend on what it was shown (%.2f nats per answer, below %g). That is "
            "fine if the best answer is always the same. Otherwise training will find little to improve: use a higher "
            "`play_skill`, more `warm_start_steps`, shorter messages, or one sign for each thing that matters",
            reads, MIN_READS,
        )  # fmt: skip
    return reads


def _check_replaceable(path: Path) -> None:
    """Check that `path` does not exist, is an empty folder, or is an earlier tiny model."""
    if path.exists() and not (path / TINY_MODEL_FILE).exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists and is not a tiny model; choose another path")
