"""Makes a tiny model on disk: tokenizer, random weights, warm start, in a form that every tool can load.

build_tiny_model("models/tiny", task="tic_tac_toe", seed=0)
AutoModelForCausalLM.from_pretrained("models/tiny")
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from art.errors import ConfigError
from art.task import Conversation, Task, TaskDefaults, draw_conversations, get_task
from art.testing.tiny.model import HEAD_DIM, VLLM_HEAD_DIM, create_model, save_model
from art.testing.tiny.tokenizer import make_tokenizer, render
from art.testing.tiny.warm_start import Progress, WarmStartConfig, warm_start

NUM_CONVERSATIONS = 3000
_MANIFEST = "tiny_model.json"


def build_tiny_model(
    path: str | Path,
    *,
    task: str | Task | None = None,
    conversations: Sequence[Conversation] | None = None,
    seed: int = 0,
    warm_start_steps: int | None = None,
    head_dim: int = HEAD_DIM,
    on_progress: Progress | None = None,
) -> Path:
    """Write a tiny model to the folder `path` and return the path. The same arguments give the same weights.

    Args:
        task: Whose synthetic play to learn the format from; by default `tic_tac_toe`.
        conversations: The play itself, instead of a task.
        warm_start_steps: `None` takes the task's own number; 0 leaves the weights random.
        head_dim: Of the attention; 16, or 32 for a model that vLLM can serve.
        on_progress: Called after each warm-start step with (done, total, loss).

    Raises:
        ConfigError: both a task and conversations are given, or `path` holds something else than a tiny model, or
            an unknown `head_dim`.
    """
    path = Path(path)
    _check_replaceable(path)
    if head_dim not in (HEAD_DIM, VLLM_HEAD_DIM):
        raise ConfigError(f"`head_dim` must be {HEAD_DIM} or {VLLM_HEAD_DIM}, got {head_dim}")
    if task is not None and conversations is not None:
        raise ConfigError("`build_tiny_model` takes a `task` or `conversations`, got both")
    defaults = TaskDefaults(learning_rate=1e-5, num_steps=1)
    if conversations is None:
        source = task if isinstance(task, Task) else get_task(task or "tic_tac_toe")
        conversations, defaults = (
            draw_conversations(source, seed=seed, count=NUM_CONVERSATIONS),
            source.defaults,
        )
    num_steps = defaults.warm_start_steps if warm_start_steps is None else warm_start_steps
    texts = [render(conversation) for conversation in conversations]
    tokenizer = make_tokenizer(
        conversations, texts, vocab_size=defaults.tiny_vocab_size, max_length=defaults.tiny_context
    )
    model = create_model(tokenizer, seed=seed, head_dim=head_dim, max_context=defaults.tiny_context)
    warm_start(model, tokenizer, texts, WarmStartConfig(num_steps=num_steps, seed=seed), on_progress=on_progress)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_model(model, partial)
    tokenizer.save_pretrained(partial)
    (partial / _MANIFEST).write_text(json.dumps({"seed": seed, "warm_start_steps": num_steps}) + "\n", encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    return path


def _check_replaceable(path: Path) -> None:
    """Only an empty folder or an earlier tiny model is written over."""
    if path.exists() and not (path / _MANIFEST).exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists and is no tiny model; give another path")
