"""The scripted model of the suite. It says what a model would say to each client, under the grammar that the client asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from art.config import RenderConfig
from art.engine import GenerateRequest
from art.gateway.renderer import load_renderer
from art.kernels.grammar import Vocabulary
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import Bench, open_bench

MAX_CONTEXT = 131_072
"""Some libraries write long prompts, and the tokens of the test's tokenizer are short."""
ANSWER = "it is there"
PLACE = {"shelf": "b", "row": 2}

Turn = list[str]
"""What the model may say. It says the first of these that the grammar of the request allows."""


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def fields(**texts: str) -> str:
    """An answer in the text format of DSPy, which does not use tool calls by itself."""
    parts = [f"[[ ## {name} ## ]]\n{text}\n" for name, text in {**texts, "completed": ""}.items()]
    return "\n".join(parts)


def three_turns(look: str, fail: str) -> list[Turn]:
    """Text beside a call and an answer, a call that fails, and a call after reasoning where the grammar has room for it."""
    again = [f"<think>\nAgain.\n</think>\n\n{look}", look]
    return [["I look.\n" + look, look], [ANSWER], [fail], ["it is lost"], again, [ANSWER]]


def commands(tool: str, argument: str) -> list[Turn]:
    """The three turns of a coding agent, whose tool runs commands."""
    look, fail = (call(tool, **{argument: command}) for command in ("echo value of a b", "echo no broken; false"))
    return three_turns(look, fail)


TURNS: Mapping[str, list[Turn]] = {
    "tools": [[call("look_up", key="a b")], [ANSWER]],
    "turns": three_turns(call("look_up", key="a b"), call("look_up", key="broken")),
    "structured": [[json.dumps(PLACE), *(call(name, **PLACE) for name in ("Place", "PartialPlace", "final_result"))]],
}
"""Turns of a task, unless `TURNS_OF` has others for the client. Streamed tasks have those of the task that is not."""


TURNS_OF: Mapping[tuple[str, str], list[Turn]] = {
    ("instructor", "tools"): [
        [call("LookUp", key="a b"), call("PartialLookUp", key="a b")],
        [call("Answer", text=ANSWER), call("PartialAnswer", text=ANSWER)],
    ],
    ("smolagents", "tools"): [[call("look_up", key="a b")], [call("final_answer", answer=ANSWER)]],
    ("smolagents", "structured"): [[json.dumps({"thought": "I know.", "code": f"final_answer({PLACE})"})]],
    ("dspy", "tools"): [
        [fields(next_thought="I look it up.", next_tool_name="look_up", next_tool_args='{"key": "a b"}')],
        [fields(next_thought="I know it now.", next_tool_name="finish", next_tool_args="{}")],
        [fields(reasoning="It was looked up.", answer=ANSWER)],
    ],
    ("dspy", "structured"): [[json.dumps({"place": PLACE})]],
    ("claude-code", "tools"): [[call("Bash", command="echo value of a b")], [ANSWER]],
    ("claude-code", "turns"): commands("Bash", "command"),
    ("codex", "tools"): [[call("exec_command", cmd="echo value of a b")], [ANSWER]],
    ("codex", "turns"): commands("exec_command", "cmd"),
}


def turns_of(name: str, task: str) -> list[Turn]:
    """The turns of a client's task."""
    kind = "structured" if task.startswith("structured") else "turns" if task == "turns" else "tools"
    return TURNS_OF.get((name, kind), TURNS[kind])


class ScriptedModel(FakeEngine):
    """An engine that gives each request the next turn of `turns`."""

    def __init__(self, tokenizer: Path) -> None:
        self._renderer = load_renderer(tokenizer)
        loaded = self._renderer.tokenizer
        super().__init__(
            vocab_size=loaded.vocab_size,
            max_context=MAX_CONTEXT,
            tokenizer_json=loaded.backend.to_str(),
            script=self.say,
        )
        self._vocabulary = Vocabulary(loaded.backend.to_str(), loaded.vocab_size)
        self.turns: list[Turn] = []

    def say(self, request: GenerateRequest) -> list[int]:
        """The next turn's first text that the grammar of the request allows."""
        assert self.turns, "the client asked more often than the script has turns"
        turn = self.turns.pop(0)
        end = self._renderer.stop_token_ids[0]
        for text in turn:
            token_ids = [*self._renderer.tokenizer.encode(text, add_special_tokens=False), end]
            if self._allows(request, token_ids):
                return token_ids
        raise AssertionError(f"the grammar allows none of {turn}: {request.grammar}")

    def _allows(self, request: GenerateRequest, token_ids: list[int]) -> bool:
        if request.grammar is None:
            return True
        matched = self._vocabulary.replay(request.grammar, request.stop_token_ids, token_ids).num_matched
        return matched == len(token_ids)


@asynccontextmanager
async def open_scripted_bench(directory: Path, tokenizer: Path) -> AsyncGenerator[Bench, None]:
    """A gateway whose engine is a `ScriptedModel`."""
    config = RenderConfig(chat_template_kwargs={"enable_thinking": False})
    engine = ScriptedModel(tokenizer)
    async with open_bench(directory, tokenizer, config=config, max_context=MAX_CONTEXT, engine=engine) as bench:
        bench.resolver.policy = replace(bench.resolver.policy, adapter=None)
        yield bench
