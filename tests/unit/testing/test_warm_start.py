"""The warm start of a tiny model: its loss, its optimiser, and whether the model looks at what it is shown."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from art.cli.main import main
from art.errors import ConfigError, ContextLengthError
from art.task import LEARNING_RATE, TINY_LEARNING_RATE, Conversation, Task, TaskDefaults, draw_conversations
from art.testing.tiny_model import BATCH_SIZE, build_tiny_model, create_model, make_tokenizer, render, warm_start

ECHO_TOOL: Any = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}


class Echo(Task):
    """Say the digit that was shown; a player without skill says any."""

    name = "echo"
    description = "say the digit again"
    defaults = TaskDefaults(warm_start_steps=60)

    def scenarios(self, split: Any, *, seed: int, count: int) -> list[Any]:
        return [self.scenario(split, seed, i, {}) for i in range(count)]

    async def rollout(self, model: Any, scenario: Any, *, rollout_index: int = 0, step: int | None = None) -> Any:
        raise NotImplementedError

    def play(self, rng: random.Random, skill: float) -> Conversation:
        shown = rng.randrange(10)
        answer = shown if rng.random() < skill else rng.randrange(10)
        return Conversation(
            messages=[{"role": "user", "content": str(shown)}, {"role": "assistant", "content": str(answer)}]
        )


def play_texts(count: int = 40) -> tuple[list[Conversation], list[str]]:
    play = draw_conversations(Echo(), seed=0, count=count, skill=1.0)
    return play, [render(conversation) for conversation in play]


def test_the_loss_is_that_of_the_answers_alone() -> None:
    """The prefix tree gives what the model's own forward pass gives over each conversation."""
    play, texts = play_texts()
    tokenizer = make_tokenizer(play, texts, vocab_size=300, max_length=64)
    model = create_model(tokenizer, seed=0, max_context=64)
    losses: list[float] = []
    chosen = torch.randint(len(play), (BATCH_SIZE,), generator=torch.Generator().manual_seed(0)).tolist()
    logprobs = []
    for conversation in (play[i] for i in chosen):
        prompt = tokenizer.apply_chat_template(conversation.messages[:-1], tokenize=False, add_generation_prompt=True)
        answer = str(dict(conversation.messages[-1])["content"]) + "<|im_end|>"
        ids = torch.tensor([tokenizer.encode(prompt + answer, add_special_tokens=False)])
        with torch.no_grad():
            rows = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        logprobs += rows.gather(1, ids[0, 1:, None])[-2:, 0].tolist()
    warm_start(model, tokenizer, texts, num_steps=1, on_progress=lambda done, total, loss: losses.append(loss))
    assert losses == [pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-4)]


def test_the_same_seed_gives_the_same_weights() -> None:
    play, texts = play_texts()
    tokenizer = make_tokenizer(play, texts, vocab_size=300, max_length=64)
    models = [create_model(tokenizer, seed=0, max_context=64) for _ in range(2)]
    for model in models:
        warm_start(model, tokenizer, texts, num_steps=3)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["model.norm.weight"], create_model(tokenizer, seed=0).state_dict()["model.norm.weight"]
    )


def test_a_conversation_that_does_not_fit_is_refused() -> None:
    play, texts = play_texts(2)
    tokenizer = make_tokenizer(play, texts, vocab_size=300, max_length=8)
    model = create_model(tokenizer, seed=0, max_context=8)
    with pytest.raises(ContextLengthError, match="tiny_context"):
        warm_start(model, tokenizer, texts, num_steps=1)


def test_the_context_of_a_tiny_model_can_be_chosen(tmp_path: Path) -> None:
    command = ["tiny-model", str(tmp_path / "tiny"), "--task", "yes_no_maybe", "--warm-start-steps", "0"]
    assert main([*command, "--context", "4096"]) == 0
    assert json.loads((tmp_path / "tiny/config.json").read_text())["max_position_embeddings"] == 4096
    assert main([*command, "--context", "3"]) != 0


def test_a_tiny_model_learns_to_look(tmp_path: Path) -> None:
    """After a warm start on perfect play, the digit that was shown is the likeliest answer."""
    build_tiny_model(tmp_path / "good", task=Echo(), play_skill=1.0)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "good")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "good")
    for digit in "0123456789":
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": digit}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        with torch.no_grad():
            assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == digit


def test_players_differ_in_skill_around_the_mean() -> None:
    drawn: list[float] = []

    class Watched(Echo):
        def play(self, rng: random.Random, skill: float) -> Conversation:
            drawn.append(skill)
            return super().play(rng, skill)

    draw_conversations(Watched(), seed=0, count=400)
    assert min(drawn) < 0.05
    assert max(drawn) > 0.95
    drawn.clear()
    draw_conversations(Watched(), seed=0, count=400, skill=0.8)
    assert 0.6 <= min(drawn) < 0.65
    assert 0.95 < max(drawn) <= 1.0


def test_a_skill_that_cannot_be_followed_is_refused() -> None:
    class Own(Echo):
        def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
            return [self.play(rng, 1.0) for _ in range(count)]

    with pytest.raises(ConfigError, match=r"from 0 to 1, got 1\.5"):
        draw_conversations(Echo(), seed=0, count=1, skill=1.5)
    with pytest.raises(ConfigError, match=r"implement `play\(rng, skill\)`"):
        draw_conversations(Own(), seed=0, count=1, skill=0.5)
    assert len(draw_conversations(Own(), seed=0, count=3)) == 3


def test_a_tiny_model_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "tiny", task=Echo(), warm_start_steps=0)
    defaults = TaskDefaults()
    assert defaults.for_base_model(str(tmp_path / "tiny")).learning_rate == TINY_LEARNING_RATE
    assert defaults.for_base_model("Qwen/Qwen3-0.6B").learning_rate == LEARNING_RATE
    called = Conversation(messages=draw_conversations(Echo(), seed=0, count=1)[0].messages, tools=[ECHO_TOOL])
    build_tiny_model(tmp_path / "caller", conversations=[called], warm_start_steps=0)
    assert defaults.for_base_model(str(tmp_path / "caller")).learning_rate == 2e-3
    chosen = TaskDefaults(learning_rate=1e-4)
    assert chosen.for_base_model(str(tmp_path / "tiny")).learning_rate == 1e-4
