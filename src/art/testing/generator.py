"""A scripted generator of scenarios: an OpenAI-compatible server with faults on demand.

with ScriptedGenerator(inputs=["What is 2 + 2?", ...], faults=["429", "duplicates"]) as generator:
    await generate_inputs("do sums", 8, "openai/generator", generator_base_url=generator.base_url)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from art.scenarios.words import without_twins
from art.testing.composing import compose_inputs, compose_tasks, tools_in
from art.testing.scripted_server import Reply, ScriptedRole, completion

Fault = Literal[
    "429", "500", "401", "slow",  # HTTP errors, and a late answer
    "refusal", "refused_in_words", "not_json", "cut_short", "empty",  # unusable: the client must ask again
    "duplicates", "no_difficulty", "no_text",  # rows that are unusable
    "too_few", "too_many", "fenced", "bare_list", "quoted",  # deviations that the client must accept
    "no_schema",  # the server does not support `response_format`
]  # fmt: skip

_COUNT = re.compile(r"^Write exactly (\d+) ", re.MULTILINE)
_JOB = re.compile(r"^The job: (.*)$", re.MULTILINE)
_KNOWN = re.compile(r"^- (.*)$", re.MULTILINE)
_SORRY = "I'm sorry, but I can't help with that."


@dataclass(slots=True)
class ScriptedGenerator(ScriptedRole[Fault]):
    """A fake language model that writes scenarios, as an OpenAI-compatible server inside a `with` statement."""

    inputs: Sequence[str] | None = None
    """The inputs to answer with, in order and repeated. `None` composes texts for the job or the tools of a request."""
    system_prompt: str = "Do the job."
    standards: Sequence[str] = ("The answer is right.",)
    _next: int = 0
    known_faults: ClassVar[tuple[str, ...]] = get_args(Fault)
    random_faults: ClassVar[tuple[Fault, ...]] = ("429", "500", "not_json", "cut_short", "duplicates")

    def answer(self, body: dict[str, Any]) -> Reply:
        """Return HTTP status and body of the answer to a request with `body`."""
        with self._lock:
            fault = self._take_fault(body)
        if (failed := self._fail(fault, body)) is not None:
            return failed
        if fault == "refusal":
            return completion(body, {"content": None, "refusal": _SORRY})
        question = body["messages"][1]["content"]
        count = _COUNT.search(question)
        if count is None:
            content: dict[str, Any] = {"system_prompt": self.system_prompt, "standards": list(self.standards)}
            if self.inputs is None and (job := _JOB.search(question)):
                content["system_prompt"] = f"Your job: {job[1]}"
        else:
            content = {"scenarios": self._rows(int(count[1]), body, _KNOWN.findall(question), fault)}
        return completion(body, {"content": _with_fault(content, fault)})

    def _rows(self, count: int, body: dict[str, Any], known: list[str], fault: Fault | None) -> list[dict[str, Any]]:
        if fault == "duplicates":
            texts = [f"{text.upper()}!" for text in (known or (self.inputs or ["The same"])[:1])] * count
        else:
            count = {"too_few": max(1, count // 3), "too_many": count + 5}.get(fault or "", count)
            pool = self._pool(body["messages"][1]["content"], count, len(known))
            texts = [pool[i] for i in without_twins(pool, known)][:count]
        name = "task" if '"task"' in body["messages"][0]["content"] else "input"
        if fault == "no_text":
            texts = ["  "] * len(texts)
        levels: list[Any] = [0 if fault == "no_difficulty" else 1 + i % 5 for i in range(len(texts))]
        levels = [str(level) for level in levels] if fault == "quoted" else levels
        return [{name: text, "difficulty": level} for text, level in zip(texts, levels, strict=True)]

    def _pool(self, question: str, count: int, num_known: int) -> list[str]:
        """Texts to choose from, beginning where the previous request ended."""
        with self._lock:
            start, self._next = self._next, self._next + count
        if self.inputs is not None:
            return [self.inputs[(start + i) % len(self.inputs)] for i in range(len(self.inputs))]
        job, tools = _JOB.search(question), tools_in(question)
        endless = compose_tasks(tools, start) if tools else compose_inputs(job[1] if job else question, start)
        return list(itertools.islice(endless, 2 * (count + num_known)))


def _with_fault(content: dict[str, Any], fault: Fault | None) -> str:
    text = json.dumps(content)
    if fault == "bare_list" and "scenarios" in content:
        return json.dumps(content["scenarios"])
    return {
        "refused_in_words": _SORRY,
        "not_json": "Here are some ideas: first, ...",
        "cut_short": text[: len(text) // 2],
        "empty": "",
        "fenced": f"Let me think {{about}} it.\n```json\n{text}\n```\nAnything else?",
    }.get(fault or "", text)
