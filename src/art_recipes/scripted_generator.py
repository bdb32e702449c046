"""A scripted generator of scenarios: an OpenAI-compatible server with faults on demand.

with ScriptedGenerator(inputs=["What is 2 + 2?", ...], faults=["429", "duplicates"]) as generator:
    await generate_inputs("do sums", 8, "openai/generator", generator_base_url=generator.base_url)
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from art.testing.scripted_server import Reply, ScriptedRole, completion
from art_recipes.scenarios.written import without_twins, word_list

GeneratorFault = Literal["429", "500", "401", "slow", "no_schema", "not_json", "cut_short", "duplicates"]
"""HTTP errors, a late answer, and answers that the client must ask again for."""

_COUNT = re.compile(r"^Write exactly (\d+) ", re.MULTILINE)
_JOB = re.compile(r"^The job: (.*)$", re.MULTILINE)
_KNOWN = re.compile(r"^- (.*)$", re.MULTILINE)


@dataclass(slots=True)
class ScriptedGenerator(ScriptedRole[GeneratorFault]):
    """A fake language model that writes scenarios, as an OpenAI-compatible server inside a `with` statement."""

    inputs: Sequence[str] | None = None
    """The inputs to answer with, in order and repeated. `None` composes texts for the job or the tools of a request."""
    system_prompt: str = "Do the job."
    standards: Sequence[str] = ("The answer is right.",)
    _next: int = 0
    known_faults: ClassVar[tuple[str, ...]] = get_args(GeneratorFault)
    random_faults: ClassVar[tuple[GeneratorFault, ...]] = ("429", "500", "not_json", "cut_short", "duplicates")

    def reply(self, body: dict[str, Any], fault: GeneratorFault | None, rng: random.Random) -> Reply:
        content = self.write(body, fault)
        text = "Here are some ideas: first, ..." if fault == "not_json" else json.dumps(content)
        return completion(body, {"content": text[: len(text) // 2] if fault == "cut_short" else text})

    def write(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        """Write what a request asks for: the texts of a task, or scenarios."""
        question = body["messages"][1]["content"]
        if (count := _COUNT.search(question)) is None:
            job = _JOB.search(question) if self.inputs is None else None
            prompt = self.system_prompt if job is None else f"Your job: {job[1]}"
            return {"system_prompt": prompt, "standards": list(self.standards)}
        number, known = int(count[1]), _KNOWN.findall(question)
        if fault == "duplicates":
            texts = [f"{text.upper()}!" for text in (known or (self.inputs or ["The same"])[:1])] * number
        else:
            pool = self._pool(question, number, len(known))
            texts = [pool[i] for i in without_twins(pool, known)][:number]
        name = "task" if '"task"' in body["messages"][0]["content"] else "input"
        return {"scenarios": [{name: text, "difficulty": 1 + i % 5} for i, text in enumerate(texts)]}

    def _pool(self, question: str, count: int, num_known: int) -> list[str]:
        """Texts to choose from, beginning where the previous request ended."""
        with self._lock:
            start, self._next = self._next, self._next + count
        if self.inputs is not None:
            return [self.inputs[(start + i) % len(self.inputs)] for i in range(len(self.inputs))]
        job, tools = _JOB.search(question), tools_in(question)
        endless = compose_tasks(tools, start) if tools else compose_inputs(job[1] if job else question, start)
        return list(itertools.islice(endless, 2 * (count + num_known)))


_SMALL_WORDS = frozenset(
    word_list(
        "a about all also an and are as at be by can do each for from has have how if in into is it its of on one or "
        "our out say so that the their them then they this to up us use what when which who will with you your"
    )
)
_QUESTIONS = (
    "What would you do about {0} and {1}?", "Does {0} come before {1}?", "Please sort out {0} first.",
    "Is there a rule for {0}?", "I keep confusing {0} with {1}.", "Explain {0} in one line.",
    "Which matters more, {0} or {1}?", "Who decides on {0} here?", "Could {0} be wrong?",
    "Give me an example of {0}.", "Tell me if {0} changes anything.", "Where should {0} go?",
    "How long does {0} take?", "Why not simply skip {0}?", "Count {0} as urgent, please.",
    "Compare {0} and {1} for us.", "Start from {0}, then check {1}.",
)  # fmt: skip
_WORDS = (
    "amber", "birch", "cobalt", "delta", "ember", "fjord", "granite", "harbor", "indigo", "juniper", "kelp", "lagoon",
    "maple", "nickel", "onyx", "pearl", "quartz", "raven", "saffron", "thistle", "umber", "velvet", "walnut", "zephyr",
)  # fmt: skip
_REQUESTS = (
    "Call {0} with {1}.", "I need {0} for {1}.", "Please try {0}; take {1}.", "Find out by {0} what there is for {1}.",
    "Look at {1} with the help of {0}.", "{0}, please, and choose {1}.", "Somebody asked about {1}: check it with {0}.",
    "Run {0} once, given {1}.", "For our records use {0} on {1}.", "What comes back from {0} when one enters {1}?",
    "First {0}, and the values are {1}.",
)  # fmt: skip
_ENDINGS = (
    "Then tell me the result.", "Sum it up in a sentence.", "Report numbers only.", "If it fails, say why.",
    "Answer yes or no: did it work?", "Then stop.", "Name the first thing that you see.",
)  # fmt: skip


def compose_inputs(description: str, start: int = 0) -> Iterator[str]:
    """Yield endless inputs for an assistant whose job is `description`, from number `start`. They are deterministic."""
    words = [word for word in dict.fromkeys(word_list(description)) if word not in _SMALL_WORDS and len(word) > 2]
    rng = random.Random(description)
    questions = rng.sample(_QUESTIONS, len(_QUESTIONS))
    topics = [words[i : i + 2] for i in range(0, len(words) - 1)] or [[*words, "this", "that"][:2]]
    for i in itertools.count(start):
        question = questions[i % len(questions)].format(*topics[i % len(topics)])
        yield f"{question} It concerns {', '.join(random.Random(f'{description}/{i}').sample(_WORDS, 6))}."


def compose_tasks(tools: list[dict[str, Any]], start: int = 0) -> Iterator[str]:
    """Yield endless tasks, from number `start`, each for one of the tools with arguments that its schema allows."""
    for i in itertools.count(start):
        tool = tools[i % len(tools)]
        properties = (tool.get("parameters") or {}).get("properties") or {}
        values = [f"{name} {json.dumps(_value(kind, i + at))}" for at, (name, kind) in enumerate(properties.items())]
        request = _REQUESTS[i % len(_REQUESTS)].format(tool["name"], " and ".join(values) or "no values")
        yield f"{request} {_ENDINGS[i % len(_ENDINGS)]}"


def tools_in(prompt: str) -> list[dict[str, Any]]:
    """Read the tools from a prompt that asks for scenarios of an MCP server. Other prompts have none."""
    try:
        server, _ = json.JSONDecoder().raw_decode(prompt)
    except ValueError:
        return []
    return list(server.get("tools", [])) if isinstance(server, dict) else []


def _value(schema: Any, index: int) -> Any:
    """A value that a JSON schema allows."""
    schema = schema if isinstance(schema, dict) else {}
    if schema.get("enum"):
        return schema["enum"][index % len(schema["enum"])]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return max(schema.get("minimum", 1), 1) + index % 9
    if kind == "boolean":
        return index % 2 == 0
    if kind == "array":
        return [_value(schema.get("items"), index)]
    return _WORDS[index % len(_WORDS)]
