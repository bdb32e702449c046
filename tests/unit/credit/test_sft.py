"""Samples of supervised fine-tuning: which tokens are learnt, and how much space a long conversation takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art.credit.sft import sft_paths, sft_samples
from art.errors import NothingTrainableError
from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer
from art.protocol.chat import normalize_messages
from art.protocol.training import WireHistory, WireTrajectory
from tests.support.gateway import system, user


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> Renderer:
    return load_renderer(tokenizer_dir)


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def talk(num_turns: int) -> list[dict[str, Any]]:
    turns = [[user(f"hello {i}"), said(f"the answer {i}")] for i in range(num_turns)]
    return [system("be brief"), *(message for turn in turns for message in turn)]


def trajectory(*items: list[dict[str, Any]]) -> WireTrajectory:
    return WireTrajectory(histories=[WireHistory(items=one) for one in items])


def expected(items: list[dict[str, Any]], renderer: Renderer) -> set[tuple[tuple[int, ...], int]]:
    """Each learnt token with everything before it, from one rendering per assistant message."""
    messages = normalize_messages(items)
    learnt = set()
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > 0:
            prompt = renderer.render(messages[:i], None)
            completion = renderer.completion(messages[: i + 1], None, prompt) or []
            whole = prompt + completion
            learnt |= {(tuple(whole[:k]), whole[k]) for k in range(len(prompt), len(whole))}
    return learnt


def learnt_of(samples: list[Any]) -> list[tuple[tuple[int, ...], int]]:
    return [
        (tuple(sample.token_ids[:k]), sample.token_ids[k])
        for sample in samples
        for k, is_learnt in enumerate(sample.loss_mask)
        if is_learnt
    ]


def test_the_answers_of_a_conversation_share_one_sample(renderer: Renderer) -> None:
    items = talk(40)
    paths, metrics = sft_paths([trajectory(items)], renderer)
    (sample,) = sft_samples(paths)
    learnt = learnt_of([sample])
    assert set(learnt) == expected(items, renderer)
    assert len(learnt) == len(set(learnt)), "each token is learnt once"
    assert len(sample.token_ids) < 1.1 * len(renderer.render(normalize_messages(items), None))
    assert len(sample.loss_mask) == len(sample.advantages) == len(sample.sampling_logprobs) == len(sample.token_ids)
    assert metrics["ledger/retokenised_messages"] == 40


def test_an_answer_whose_prompt_is_rewritten_begins_another_sample(renderer: Renderer) -> None:
    """The template drops the reasoning of earlier turns, so the later prompt is not what the first answer ended with."""
    items = [user("a"), said("b", reasoning_content="hmm"), user("c"), said("d"), user("e"), said("f")]
    paths, metrics = sft_paths([trajectory(items, talk(2))], renderer)
    samples = sft_samples(paths)
    learnt = learnt_of(samples)
    assert set(learnt) == expected(items, renderer) | expected(talk(2), renderer)
    assert len(learnt) == len(set(learnt))
    assert [sample.sample_id for sample in samples] == [
        "trajectories[0].histories[0].messages[1]",
        "trajectories[0].histories[0].messages[3]",
        "trajectories[0].histories[1].messages[2]",
    ]
    assert {sample.rollout_id for sample in samples} == {"trajectories[0]"}
    assert metrics["ledger/retokenised_messages"] == 5


def test_without_an_answer_there_is_nothing_to_learn(renderer: Renderer) -> None:
    with pytest.raises(NothingTrainableError):
        sft_paths([trajectory([said("first")])], renderer)
