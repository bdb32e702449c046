"""Build a tiny model on disk (tokenizer, random weights, warm start) in the usual format of transformers.

It has the Qwen3 architecture with about 0.1 M parameters, drawn from a seed.

    build_tiny_model("models/tiny", task="tic_tac_toe", seed=0)
    AutoModelForCausalLM.from_pretrained("models/tiny")

The warm start is supervised fine-tuning of all weights on scripted conversations, in this process. It teaches the model
the format, and to read what it is shown. Reinforcement learning then teaches skill. A batch is one prefix tree, as in
the trainer, so shared system prompts, tools and openings are computed once. The loss is the mean over the tokens of all
answers.

The tokenizer has a few hundred tokens, made for the conversations. A token is a byte, a whole word or a fixed phrase,
never a part of a word. Anything that a tiny model has to tell apart is the same single token everywhere, and fixed text
is short:

    digits, marks, single letters   always one token, so a cell of a board is the same token everywhere
    words                           one token, unless the assistant has to spell them (see `_spelled_words`)
    phrases                         one token for a line of a system prompt or tool description, and for each fixed
                                    part of a tool call: a call is about ten tokens, half of them arguments

Any text can be encoded, since all bytes are in the vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from art.errors import ConfigError, ContextLengthError
from art.gateway.tokenizer import ChatTemplate
from art.protocol.samples import TrainingSample
from art.task import TINY_MODEL_FILE, Conversation, Task, TaskDefaults, draw_conversations, get_task
from art.task.names import TinyForm
from art.trainer.tree import SamplePath, build_tree, check_sample
from art.trainer.tree_attention import ATTENTION_NAME, make_layout, register_attention

HIDDEN = 64
HEAD_DIM = 16
VLLM_HEAD_DIM = 32
"""The smallest head size that vLLM's attention kernels support. Half as many heads keep the number of parameters."""
NUM_CONVERSATIONS = 3000
MIN_CONTEXT = 16
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
_ASSISTANT_HEAD = "<|im_start|>assistant\n"
_EMPTY_REASONING = "<think>\n\n</think>\n\n"

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
    defaults, form = TaskDefaults(), None
    if conversations is None:
        source = task if isinstance(task, Task) else get_task(task or "tic_tac_toe")
        conversations = draw_conversations(source, seed=seed, count=NUM_CONVERSATIONS, skill=play_skill)
        defaults, form = source.defaults, TinyForm.of_task(source)
    elif play_skill is not None:
        raise ConfigError("`play_skill` applies to a task's play, not to `conversations`; leave it out")
    num_steps = defaults.warm_start_steps if warm_start_steps is None else warm_start_steps
    texts = [render(conversation) for conversation in conversations]
    context = defaults.tiny_context if context is None else context
    tokenizer = make_tokenizer(conversations, texts, vocab_size=defaults.tiny_vocab_size, max_length=context)
    model = create_model(tokenizer, seed=seed, head_dim=head_dim, max_context=context)
    warm_start(model, tokenizer, texts, num_steps=num_steps, seed=seed, on_progress=on_progress)
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
    manifest = {"seed": seed, "warm_start_steps": num_steps, "tools": calls_tools, "task": task_form}
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
    # Muon teaches a two-layer model in about 600 steps to look back at what it was shown. AdamW takes 1,000.
    muon = torch.optim.Muon(matrices, lr=0.0, momentum=0.95, weight_decay=0.0)
    optimizers = ((muon, MATRIX_LEARNING_RATE), (adam, LEARNING_RATE))
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


def _tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> list[SamplePath]:
    """Tokenise conversations to paths that train on all answers, with their end-of-turn tokens."""
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
        for first in answers:
            last = tokens.index(end, first)
            mask[first : last + 1] = [True] * (last + 1 - first)
        zeros = [0.0] * len(tokens)
        sample = TrainingSample(
            sample_id=str(number), rollout_id=str(number), token_ids=tokens, loss_mask=mask, sampling_logprobs=zeros,
            advantages=zeros, component="sft",
        )  # fmt: skip
        paths.append(check_sample(sample, vocab_size=len(tokenizer)))
    return [path for path in paths if path is not None]


# -- the tokenizer --


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
