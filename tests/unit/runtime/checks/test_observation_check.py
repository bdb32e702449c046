"""Answers are scored after their own observation and after another one; what that says of the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer
from art.gateway.policies import PolicyRef
from art.gateway.record.recorder import Exchange
from art.runtime.checks.trial import MAX_ANSWERS, check_observations
from tests.support.gateway import make_tokenizer
from tests.support.recorded_exchanges import FIRST

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


class Engine:
    """Gives each token -1 nat, and the last ones -1 - `blind` where the prompt does not show what the answer names."""

    def __init__(self, renderer: Renderer, loss: float) -> None:
        self._renderer, self._loss = renderer, loss
        self.scored: list[str] = []

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        assert adapter == "p/m@0"
        text = self._renderer.tokenizer.decode(token_ids)
        self.scored.append(text)
        answer = text.rstrip()[-1]
        shown = text.rfind(f"see {answer}") >= 0
        return [-1.0] * (len(token_ids) - 2) + [-1.0 if shown else -1.0 - self._loss]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(make_tokenizer(tmp_path_factory.mktemp("renderer") / "model"))


def policy(renderer: Renderer, loss: float, max_context: int = 4000) -> tuple[PolicyRef, Engine]:
    engine: Any = Engine(renderer, loss)
    ref = PolicyRef(
        project="p", name="m", policy_version=0, engine=engine, adapter="p/m@0", renderer=renderer,
        max_context=max_context,
    )  # fmt: skip
    return ref, engine


def exchange(renderer: Renderer, name: str, shown: str, *, tool: bool = False) -> Exchange:
    """An answer that names the last letter that was shown."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go" if tool else f"see {shown}"}]
    if tool:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"see {shown}"},
        ]
    completion = renderer.tokenizer.encode(shown)
    message = {"role": "assistant", "content": shown}
    return replace(
        FIRST, id=name, completion_token_ids=completion, request_messages=messages, message=message,
        tools=TOOLS if tool else None,
    )  # fmt: skip


@pytest.mark.parametrize("tool", [False, True])
@pytest.mark.parametrize(("loss", "status"), [(2.0, "ok"), (0.11, "ok"), (0.09, "warning"), (0.0, "warning")])
async def test_what_answers_lose_by_another_observation_is_measured(
    renderer: Renderer, loss: float, status: str, tool: bool
) -> None:
    ref, engine = policy(renderer, loss)
    rollouts = [exchange(renderer, f"e{i}", letter, tool=tool) for i, letter in enumerate("ABCD")]
    check = await check_observations(ref, rollouts)
    assert check.status == status
    assert check.measured["reads"] == pytest.approx(loss)
    assert check.measured["num_answers"] == 4
    assert (check.remedy is None) == (status == "ok")
    assert ("do not depend" in check.found) == (status == "warning")
    assert len(engine.scored) == 8
    originals = [text for text in engine.scored if text.count(f"see {text.rstrip()[-1]}")]
    assert len(originals) == 4  # the other four show another letter than they answer


async def test_what_cannot_be_measured_is_not_called_ok(renderer: Renderer) -> None:
    ref, engine = policy(renderer, 2.0)
    same = [exchange(renderer, f"e{i}", "A") for i in range(4)]
    for exchanges in (same, []):
        check = await check_observations(ref, exchanges)
        assert (check.status, check.measured) == ("warning", {})
        assert "not measured" in check.found
        assert check.remedy is not None
    short, _ = policy(renderer, 2.0, max_context=3)
    different = [exchange(renderer, f"e{i}", letter) for i, letter in enumerate("ABCD")]
    assert "not measured" in (await check_observations(short, different)).found
    assert engine.scored == []


async def test_so_many_answers_are_scored_at_most(renderer: Renderer) -> None:
    ref, engine = policy(renderer, 2.0)
    many = [exchange(renderer, f"e{i}", "ABCDEFGH"[i % 8]) for i in range(MAX_ANSWERS + 20)]
    check = await check_observations(ref, many)
    assert check.measured["num_answers"] == MAX_ANSWERS
    assert len(engine.scored) == 2 * MAX_ANSWERS
