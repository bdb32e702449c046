"""A small game whose answers have a form: how to drive at a traffic light, by a tool call or as JSON.

    user       red far
    assistant  drive(speed="slow", note="ab")         or  {"action": "slow", "note": "ab"}

The right action pays 1. A note may be long, so that some answers are cut off; these pay 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import art
from art.task import Conversation

RIGHT = {
    ("red", "near"): "stop", ("red", "far"): "slow", ("amber", "near"): "go", ("amber", "far"): "slow",
    ("green", "near"): "go", ("green", "far"): "go",
}  # fmt: skip
SITUATIONS = [*RIGHT]
ACTIONS = ("stop", "slow", "go")
MAX_TOKENS = 26
"""Enough for most of the notes that `play` writes, and too little for some."""
_NOTE = {"type": "string"}
_SKILL = 0.45
_LETTERS = "abc"

Form = Literal["tool", "json"]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _tool(name: str, **properties: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": _object(**properties)}}


TOOLS = [_tool("stop", note=_NOTE), _tool("drive", speed={"enum": ["slow", "go"]}, note=_NOTE)]
SCHEMA = _object(action={"enum": [*ACTIONS]}, note=_NOTE)
REQUESTS: Mapping[Form, dict[str, Any]] = {
    "tool": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "drive", "schema": SCHEMA}}},
}
"""What a request asks of its answer."""


def _user(situation: tuple[str, str]) -> Any:
    return {"role": "user", "content": " ".join(situation)}


def warm_start_conversations(form: Form, seed: int, count: int = 1500) -> list[Conversation]:
    """Play that is right a little more often than by chance, with notes of up to 14 letters."""
    rng = random.Random(seed)
    return [_play(form, rng) for _ in range(count)]


def _play(form: Form, rng: random.Random) -> Conversation:
    situation = rng.choice(SITUATIONS)
    action = RIGHT[situation] if rng.random() < _SKILL else rng.choice(ACTIONS)
    note = "".join(rng.choices(_LETTERS, k=rng.choice([0, 1, 2, 3, 14])))
    answer: Any = {"role": "assistant", "content": json.dumps({"action": action, "note": note})}
    if form == "tool":
        name, speed = ("stop", {}) if action == "stop" else ("drive", {"speed": action})
        function = {"name": name, "arguments": json.dumps({**speed, "note": note})}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c", "function": function}],
        }
    return Conversation(messages=[_user(situation), answer], tools=TOOLS if form == "tool" else None)


@dataclass(frozen=True)
class Played:
    trajectory: art.Trajectory
    action: str | None
    """The action of a finished answer; `None` for an answer that was cut off."""
    num_tokens: int
    text: str
    """The sampled tokens as text."""


async def play(
    model: art.TrainableModel, form: Form | None, situation: tuple[str, str], seed: int, **request: Any
) -> Played:
    """One rollout; without a form, of an answer that may be anything and has no action.

    Raises:
        ValueError, KeyError, AssertionError: a finished answer does not have its form.
    """
    form_of_answer = {} if form is None else REQUESTS[form]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[_user(situation)], max_completion_tokens=MAX_TOKENS, seed=seed, logprobs=True,
        **form_of_answer, **request,
    )  # fmt: skip
    (choice,) = completion.choices
    action = None if form is None or choice.finish_reason == "length" else _action(form, choice)
    trajectory = art.Trajectory(
        messages_and_choices=[_user(situation), choice],
        tools=TOOLS if form == "tool" else None,
        reward=float(action == RIGHT[situation]),
    )
    assert completion.usage is not None
    assert choice.logprobs is not None
    text = "".join(entry.token for entry in choice.logprobs.content or ())
    return Played(trajectory, action, completion.usage.completion_tokens, text)


def _action(form: Form, choice: Any) -> str:
    """The action of an answer that must have the form."""
    if form == "json":
        answer = json.loads(choice.message.content)
        assert choice.finish_reason == "stop"
        assert [*answer] == ["action", "note"]
    else:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert not choice.message.content
        arguments = json.loads(call.function.arguments)
        assert [*arguments] == {"stop": ["note"], "drive": ["speed", "note"]}[call.function.name]
        answer = {"action": "stop", "note": arguments["note"]}
        if call.function.name == "drive":
            assert arguments["speed"] in ("slow", "go")
            answer["action"] = arguments["speed"]
    assert answer["action"] in ACTIONS
    assert isinstance(answer["note"], str)
    return str(answer["action"])
