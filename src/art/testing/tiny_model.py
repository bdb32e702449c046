"""Build a tiny model on disk (tokenizer, random weights, warm start) in the usual format of transformers.

It has the Qwen3 architecture with about 0.1 M parameters, drawn from a seed.

    build_tiny_model("models/tiny", task="tic_tac_toe", seed=0)
    AutoModelForCausalLM.from_pretrained("models/tiny")

The warm start is supervised fine-tuning of all weights on scripted conversations, in this process. It teaches the model
the format, and to read what it is shown. Reinforcement learning then teaches skill. A batch is one prefix tree, as in
the trainer, so shared system prompts, tools and openings are computed once. The loss is the mean over the tokens of all
answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from art.errors import ConfigError, ContextLengthError
from art.protocol.samples import TrainingSample
from art.task import TINY_MODEL_FILE, Conversation, Task, TaskDefaults, draw_conversations, get_task
from art.task.names import TinyForm
from art.testing.tiny_tokenizer import END_OF_TURN, PAD_TOKEN, make_tokenizer, render
from art.trainer.tree import SamplePath, build_tree, check_sample
from art.trainer.tree_attention import ATTENTION_NAME, make_layout, register_attention

logger = logging.getLogger(__name__)

HIDDEN = 64
HEAD_DIM = 16
VLLM_HEAD_DIM = 32
"""The smallest head size that vLLM's attention kernels support. Half as many heads keep the number of parameters."""
NUM_CONVERSATIONS = 3000
MIN_CONTEXT = 16
MIN_READS = 0.1
"""A warning is logged below this, see `measure_reads`. Small games in which reinforcement learning failed had 0.02 to
0.05; games in which it worked had 0.38 and more."""
Progress = Callable[[int, int, float], None]
"""Function that is called with the number of steps done, the number of all steps, and the loss."""

# Chosen on two games whose answers depend on an observation (nim, a hidden word), with and without tool calls. Fewer
# conversations teach the format, but not to read the observation.
BATCH_SIZE = 32
"""Number of conversations per step."""
LEARNING_RATE = 2.5e-3
"""Learning rate of AdamW, for embeddings and norms."""
MATRIX_LEARNING_RATE = 0.02
"""Learning rate of Muon, for the matrices of the layers."""
WARM_UP, COOL_DOWN = 0.03, 0.5
"""Shares of the steps, at the beginning and at the end, in which the learning rates rise and fall."""
NUM_PROBED = 32
"""Number of answers on which it is measured whether the model reads what it was shown."""
_ASSISTANT_HEAD = "<|im_start|>assistant\n"
_EMPTY_REASONING = "<think>\n\n</think>\n\n"


def create_model(tokenizer: Any, *, seed: int, head_dim: int = HEAD_DIM, max_context: int = 1024) -> Any:
    """Create a `Qwen3ForCausalLM` in float32 with random weights for a tokenizer.

    The wide initialisation matters: with the usual 0.02, a model this small spends most of its warm start on a plateau.
    The base of the rotary embedding matters too: conversations are a few hundred tokens long, and with a base of 10,000
    most of the eight frequencies would be equal at neighbouring positions.
    """
    pad, end = tokenizer.convert_tokens_to_ids([PAD_TOKEN, END_OF_TURN])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN // head_dim,
        num_key_value_heads=HIDDEN // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=[end, pad], pad_token_id=pad
    )
    return model


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
    if path.exists() and not (path / TINY_MODEL_FILE).exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists and is not a tiny model; choose another path")
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
    warm_start(model, tokenizer, texts, num_steps=num_steps, seed=seed, on_progress=on_progress)
    reads = measure_reads(model, tokenizer, conversations, seed=seed) if num_steps else None
    if needs_reading and reads is not None and reads < MIN_READS:
        logger.warning(
            "the tiny model's answers hardly depend on what it was shown (%.2f nats per answer, below %g). That is "
            "fine if the best answer is always the same. Otherwise training will find little to improve: use a higher "
            "`play_skill`, more `warm_start_steps`, shorter messages, or one sign for each thing that matters",
            *(reads, MIN_READS),
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(partial)
    # The head is tied to the embedding. `save_pretrained` of the model would show a progress bar.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    task_form = None if form is None else form.model_dump(mode="json")
    calls_tools = any(conversation.tools for conversation in conversations)
    manifest = {"seed": seed, "warm_start_steps": num_steps, "reads": reads, "tools": calls_tools, "task": task_form}
    (partial / TINY_MODEL_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    return path


def warm_start(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    num_steps: int,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> None:
    """Train `model` in place on the answers in `texts`, in one thread. Equal arguments give equal weights.

    Args:
        texts: conversations as the chat template writes them.

    Raises:
        ContextLengthError: a conversation is longer than the model's context.
    """
    paths = _tokenize(tokenizer, texts, max_length=model.config.max_position_embeddings)
    matrices = [param for param in model.model.layers.parameters() if param.ndim == 2]
    matrix_ids = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in matrix_ids]
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = ((Muon(matrices, lr=0.0), MATRIX_LEARNING_RATE), (adam, LEARNING_RATE))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with _tree_attention(model):
        for step in range(num_steps):
            chosen = torch.randint(len(paths), (BATCH_SIZE,), generator=generator).tolist()
            loss = -_answer_logprobs(model, [paths[i] for i in chosen]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # The rates rise linearly, stay, and fall linearly to nearly 0.
            rise = (step + 1) / max(1, math.ceil(WARM_UP * num_steps))
            fall = (num_steps - step) / max(1, math.ceil(COOL_DOWN * num_steps))
            for optimizer, learning_rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * min(1.0, rise, fall)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if on_progress is not None:
                on_progress(step + 1, num_steps, loss.item())
    model.eval()


def mean_answer_logprob(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Return the mean log-prob of the last answer of each conversation, in nats per answer."""
    paths = _tokenize(tokenizer, texts, max_length=model.config.max_position_embeddings, last_only=True)
    with torch.no_grad(), _tree_attention(model):
        return float(_answer_logprobs(model, paths).sum() / len(paths))


def measure_reads(model: Any, tokenizer: Any, conversations: Sequence[Conversation], *, seed: int) -> float | None:
    """Measure how much the model's answers depend on what it was shown, in nats per answer.

        conversation   user "board A"  assistant "7"  user "board B"  assistant "3"
        swapped        user "board A"  assistant "7"  user "board C"  assistant "3"
        difference     log p("3" | conversation) - log p("3" | swapped)     mean over answers

    The observation of an answer is the last user or tool message before it. The other one is from the same turn of
    another conversation and of the most similar length, so that it differs in content and not in kind. A policy that
    ignores its observations gives both the same probability, and reinforcement learning has nothing to improve.
    Returns `None` if the play never shows different things in the same turn.
    """
    rng = random.Random(seed)
    answers = []  # the messages up to an answer, the index of its observation, its turn and role, and the tools
    shown: dict[tuple[int, str], dict[str, None]] = defaultdict(dict)
    for conversation in rng.sample(list(conversations), min(len(conversations), 4 * NUM_PROBED)):
        messages: list[Any] = list(conversation.messages)
        place = None
        for end, message in enumerate(messages):
            if message["role"] in ("user", "tool") and isinstance(message.get("content"), str):
                place = end
            elif message["role"] == "assistant" and place is not None:
                turn = sum(earlier["role"] == "assistant" for earlier in messages[:place])
                slot = turn, messages[place]["role"]
                shown[slot][messages[place]["content"]] = None
                answers.append((messages[: end + 1], place, slot, conversation.tools))
    pairs: list[list[str]] = []
    for messages, place, slot, tools in rng.sample(answers, len(answers)):
        own = messages[place]["content"]
        others = [(abs(len(text) - len(own)), rng.random(), text) for text in shown[slot] if text != own]
        if others and len(pairs) < NUM_PROBED:
            swapped = [*messages[:place], {**messages[place], "content": min(others)[2]}, *messages[place + 1 :]]
            pairs.append([render(Conversation(messages=turns, tools=tools)) for turns in (messages, swapped)])
    if not pairs:
        return None
    as_shown, as_swapped = (mean_answer_logprob(model, tokenizer, texts) for texts in zip(*pairs, strict=True))
    return as_shown - as_swapped


def _answer_logprobs(model: Any, paths: Sequence[SamplePath]) -> Tensor:
    """Log-probs [N] of all answer tokens of `paths`."""
    tree = build_tree(paths)
    layout = make_layout(tree, device=torch.device("cpu"), kernel="blocks")
    hidden = model.model(
        input_ids=layout.token_ids[None], position_ids=layout.positions[None], use_cache=False, tree_layout=layout
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[torch.from_numpy(tree.targets.queries)])
    return -torch.nn.functional.cross_entropy(logits, torch.from_numpy(tree.targets.token_ids), reduction="none")


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


def _tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int, last_only: bool = False) -> list[SamplePath]:
    """Tokenise conversations to paths that train on all answers, or on the last ones, with their end-of-turn tokens."""
    sampled = []
    for text in texts:  # without the empty thinking block that the template writes into the last turn
        context, start, answer = text.rpartition(_ASSISTANT_HEAD)
        sampled.append((context + start + answer.removeprefix(_EMPTY_REASONING)).removesuffix("\n"))
    encoded = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    longest = max(map(len, encoded))
    if longest > max_length:
        problem = f"a warm-start conversation has {longest} tokens, but the tiny model's context is {max_length}"
        raise ContextLengthError(f"{problem}; shorten messages, or raise `tiny_context` in the task's defaults")
    head = tokenizer.encode(_ASSISTANT_HEAD, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    paths = []
    for number, tokens in enumerate(encoded):
        mask = [False] * len(tokens)
        answers = [at + len(head) for at in range(len(tokens)) if tokens[at : at + len(head)] == head]
        for first in answers[-1:] if last_only else answers:
            last = tokens.index(end, first)
            mask[first : last + 1] = [True] * (last + 1 - first)
        zeros = [0.0] * len(tokens)
        sample = TrainingSample(
            sample_id=str(number), rollout_id=str(number), token_ids=tokens, loss_mask=mask, sampling_logprobs=zeros,
            advantages=zeros, component="sft",
        )  # fmt: skip
        paths.append(check_sample(sample, vocab_size=len(tokenizer)))
    return [path for path in paths if path is not None]


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, which brings all singular values near 1. From the publication."""
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed by the type checker
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon): momentum with orthogonalised updates.

    A warm start has to teach a two-layer model to look back at what it was shown. That takes about 600 steps with Muon,
    and 1,000 with AdamW. `torch.optim.Muon` computes the same update one matrix at a time in bfloat16, which takes a
    quarter of a training step on a CPU. Here matrices of equal shape form one batch, in float32.
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        """
        Args:
            params: matrices of hidden layers. Embeddings, heads and vectors need another optimiser.
            lr: spectral norm of the change of a matrix in one step. For a matrix that is taller than wide, it is
                multiplied by the root of height over width.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(tuple(param.shape), []).append(param)
            for params in by_shape.values():
                smoothed = []  # gradients averaged over steps, with Nesterov's look-ahead
                for param in params:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 1 - group["momentum"])
                    smoothed.append(param.grad.lerp(mean, group["momentum"]))
                update = orthogonalize(torch.stack(smoothed))
                scale = max(1.0, params[0].shape[0] / params[0].shape[1]) ** 0.5
                for param, change in zip(params, update, strict=True):
                    param.sub_(change, alpha=group["lr"] * scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Set all singular values of matrices [N, R, C] to about 1 (0.7 to 1.2), with the singular vectors unchanged."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x
