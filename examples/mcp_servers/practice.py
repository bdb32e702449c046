"""Train with the two servers without a pretrained model, a real judge or an account.

    art tiny-model tiny/inventory --task practice:Inventory     makes a model of 0.1 M parameters that knows the tools
    python practice.py inventory --port 8010                    serves a scripted generator and judge

The tiny model is made for one server and can do nothing else: it was trained on conversations of beginners, who know
the form of every call but often take the wrong product or read the wrong line. The judge looks for evidence in the
transcript: the right call, its result, and an answer with that result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import functools
import importlib.util
import inspect
import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from jobs import Call, Job, calendar_jobs, inventory_jobs

from art.mcp import GeneratedScenario, McpTask, MCPTool, complete_task_tool
from art.mcp.rollout import SYSTEM
from art.scenarios.words import without_twins
from art.task import Conversation, TaskDefaults
from art.testing.judge import ScriptedJudge
from art.testing.scripted_server import Reply, ScriptedServer, completion

HERE = Path(__file__).parent
CALL_SKILL, ANSWER_SKILL = 0.8, 0.4
"""Probabilities in the scripted play that a call is right, and that the right line of its result is read."""
WITH_TOOLS = 0.2
"""Share of the play that shows the tool descriptions, whose 1400 tokens are ten times the rest of a conversation."""
_numbers = itertools.count()


class Practice(McpTask):
    """The jobs of one server, with scripted play that shows a tiny model the form of the calls."""

    num_to_train: ClassVar[int] = 36
    """Number of training scenarios; 12 more are held out. It is most of the jobs, since a tiny model forgets what
    training never shows, such as a day."""

    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        learning_rate=2e-3,
        num_steps=20,
        groups_per_step=8,
        rollouts_per_group=6,
        num_minibatches=1,
        schedule="constant",
        warm_start_steps=400,
        tiny_vocab_size=512,
        tiny_context=2048,
    )

    def __init__(self, folder: str, jobs: list[Job]) -> None:
        self.folder, self.jobs = folder, jobs
        scenarios = [GeneratedScenario(job.task, job.difficulty) for job in jobs]
        path = str(HERE / folder / "server.py")
        super().__init__([sys.executable, path], train=scenarios[::2], held_out=scenarios[1::2])

    @functools.cached_property
    def module(self) -> Any:
        """The server's module, imported into this process to call its tools directly."""
        spec = importlib.util.spec_from_file_location(f"{self.folder}_server", HERE / self.folder / "server.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module there
        spec.loader.exec_module(module)
        return module

    @functools.cached_property
    def tool_schemas(self) -> list[Any]:
        """The tools in the exact text of a rollout: a tiny model has one token for text that it always saw alike."""
        listed = _finish(self.module.server.list_tools())
        # On the wire the type of a schema comes first.
        schemas = [{"type": "object"} | dict(tool.input_schema) for tool in listed]
        tools = [
            MCPTool(tool.name, tool.description or "", schema) for tool, schema in zip(listed, schemas, strict=True)
        ]
        return [*(tool.to_tool_schema() for tool in tools), complete_task_tool]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its result as the text that a rollout shows to the model."""
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            result = getattr(self.module, name)(**arguments)
            if inspect.iscoroutine(result):
                result = _finish(result)
        except ToolError as error:
            return f"Error: Error executing tool {name}: {error}"
        if isinstance(result, str):
            return result
        if result == []:
            return '{"result": []}'
        return "\n".join(json.dumps(item, indent=2) for item in (result if isinstance(result, list) else [result]))

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Alternate play and drills. A tiny model has to learn to copy, and a whole rollout shows little copying."""
        return [self._play(rng) if i % 2 else self._drill(rng) for i in range(count)]

    def _play(self, rng: random.Random) -> Conversation:
        """Make a rollout of a beginner."""
        self.module.rollout.set(f"practice-{next(_numbers)}")  # a fresh state of the server
        job = rng.choice(self.jobs)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": job.task}]
        call = job.call if rng.random() < CALL_SKILL else rng.choice(job.slips)
        result = self.call(*call)
        messages += [_said(call), _returned(result)]
        answer = job.answer(result) if rng.random() < ANSWER_SKILL else job.mistaken(result)
        messages.append(_said(("complete_task", {"summary": answer})))
        return Conversation(messages=messages, tools=self.tool_schemas if rng.random() < WITH_TOOLS else None)

    def _drill(self, rng: random.Random) -> Conversation:
        """Make short exchanges: a task and its call, sometimes with the result and the answer."""
        messages: list[Any] = []
        for job in rng.sample(self.jobs, 3):
            self.module.rollout.set(f"practice-{next(_numbers)}")
            messages.append({"role": "user", "content": job.task})
            messages.append(_said(job.call))
            if rng.random() < 0.5:
                result = self.call(*job.call)
                messages += [_returned(result), _said(("complete_task", {"summary": job.answer(result)}))]
        return Conversation(messages=messages)

    def grade(self, trajectory: dict[str, Any]) -> tuple[float, str]:
        """Score a rollout by its transcript, with an explanation."""
        messages = [*trajectory.get("context", []), *trajectory["messages"]]
        task = next((message["content"] for message in messages if message["role"] == "user"), "")
        job = next((job for job in self.jobs if job.task == task), None)
        if job is None:
            return 0.5, "The script does not know this task."
        calls, summary = _calls_of(messages)
        results = [result for call, result in calls if call == job.call and not result.startswith("Error")]
        errors = sum(result.startswith("Error") for _, result in calls)
        others = len(calls) - len(results) - errors
        is_right = summary is not None and bool(results) and _says(summary, job.answer(results[0]))
        score = 0.05 + 0.45 * bool(results) + 0.4 * is_right + 0.1 * (summary is not None)
        score -= 0.1 * errors + 0.15 * others
        name, arguments = job.call
        words = [f"It called {name} as the task asks." if results else f"It never called {name} with {arguments}."]
        if summary is None:
            words.append("It did not answer.")
        else:
            words.append(f"Its answer {summary!r} {'has the result' if is_right else 'is not what the task asks for'}.")
        words += [f"{errors} calls failed."] * bool(errors) + [f"{others} calls did not help."] * bool(others)
        return min(max(round(score, 2), 0.0), 1.0), " ".join(words)

    @functools.cached_property
    def judge(self) -> ScriptedJudge:
        return ScriptedJudge(self.grade)

    def reply(self, body: dict[str, Any]) -> Reply:
        """Answer a request for scenarios or for scores."""
        shape = body.get("response_format", {}).get("json_schema", {})
        if shape.get("name") != "scenarios":
            return self.judge.answer(body)
        return completion(body, {"content": json.dumps({"scenarios": self.write(body["messages"][-1]["content"])})})

    def write(self, prompt: str) -> list[dict[str, Any]]:
        """Write scenarios for a prompt of `generate_scenarios`: the number that it asks for, and none that it names."""
        count = re.search(r"Write exactly (\d+) scenarios", prompt)
        known = re.findall(r"^- (.*)$", prompt, re.MULTILINE)
        jobs = random.Random(0).sample(self.jobs, len(self.jobs))
        free = [jobs[index] for index in without_twins((job.task for job in jobs), known)]
        return [{"task": job.task, "difficulty": job.difficulty} for job in free[: int(count[1]) if count else 10]]


class Inventory(Practice):
    name: ClassVar[str] = "inventory"

    def __init__(self) -> None:
        super().__init__("inventory", inventory_jobs())


class Calendar(Practice):
    name: ClassVar[str] = "calendar"
    num_to_train: ClassVar[int] = 25

    def __init__(self) -> None:
        super().__init__("calendar", calendar_jobs())


PRACTICES = {"inventory": Inventory, "calendar": Calendar}


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread and return its result. The caller may already be on an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


def _said(call: Call) -> dict[str, Any]:
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    return {
        "role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]
    }  # fmt: skip


def _returned(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def _calls_of(messages: list[dict[str, Any]]) -> tuple[list[tuple[Call, str]], str | None]:
    """Every tool call with its result, and the summary of `complete_task` if it was called."""
    results = {m["tool_call_id"]: str(m.get("content")) for m in messages if m["role"] == "tool"}
    calls: list[tuple[Call, str]] = []
    summary = None
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        name, text = call["function"]["name"], call["function"]["arguments"]
        arguments: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if name == "complete_task":
            summary = str(arguments.get("summary", "")) if isinstance(arguments, dict) else ""
        else:
            calls.append(((name, arguments), results.get(call["id"], "Error: no result")))
    return calls, summary


def _says(summary: str, answer: str) -> bool:
    """Whether a summary contains the answer as whole words, with little other text."""
    return len(summary) <= len(answer) + 30 and bool(re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", summary))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write scenarios for one of the servers and judge rollouts.")
    parser.add_argument("server", choices=sorted(PRACTICES))
    parser.add_argument("--port", type=int, default=8010)
    args = parser.parse_args()
    practice = PRACTICES[args.server]()
    with ScriptedServer(practice.reply, args.port) as server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"writing and judging at {server.base_url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
