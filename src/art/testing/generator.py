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

from art.scenarios.written import without_twins, word_list
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


_SMALL_WORDS = frozenset(
    word_list(
        "a about all also an and are as at be by can do each for from has have how if in into is it its of on one or "
        "our out say so that the their them then they this to up us use what when which who will with you your"
    )
)
# The lengths of the three lists have no common factor, so a combination repeats only after their product.
_SITUATIONS = (
    "My sister moved to Lisbon in spring.", "We run a small bakery near the harbour.",
    "Yesterday's meeting ended in a row.", "I am new here and slightly lost.", "Our old printer has given up again.",
    "The night train was four hours late.", "Grandfather keeps bees beyond his barn.",
    "It has rained since Tuesday morning.", "My manager wants numbers by noon.", "Two of my students share a laptop.",
    "The museum closes early on Mondays.", "I lost my notebook in a taxi.",
    "They repainted the kitchen bright yellow.", "Somebody left a bicycle in the hallway.",
    "Our football team won at last.", "The doctor said I should walk more.", "A parcel without sender came today.",
    "I have never done anything like it.", "The whole street was dark last night.",
    "Her violin lesson begins at seven.", "We are planning a wedding for June.", "The contract runs out next week.",
    "My phone only charges upside down.", "An uncle of mine repairs clocks.", "There were snails all over the salad.",
    "I work nights at the hospital.", "The dog barks at every postman.", "Prices went up twice this year.",
    "He speaks Danish and some Greek.", "Our lift has been broken for days.", "I found three versions of one file.",
    "The garden fence fell over.", "My train card stopped working.", "She wrote me a very long letter.",
    "We only have paper maps.", "Half of the guests cancelled.",
)  # fmt: skip
_QUESTIONS = (
    "What would you do about {0} and {1}?", "Does {0} come before {1}?", "Please sort out {0} first.",
    "Is there a rule for {0}?", "I keep confusing {0} with {1}.", "Explain {0} in one line.",
    "Which matters more, {0} or {1}?", "Who decides on {0} here?", "Could {0} be wrong?",
    "Give me an example of {0}.", "Tell me if {0} changes anything.", "Where should {0} go?",
    "How long does {0} take?", "Why not simply skip {0}?", "Count {0} as urgent, please.",
    "Compare {0} and {1} for us.", "Start from {0}, then check {1}.",
)  # fmt: skip
_CLOSINGS = (
    "Thanks!", "No hurry.", "A short answer is fine.", "Be honest, please.", "", "I need it today.",
    "My colleague Ada asks too.", "Sorry for the mess.", "You helped us before.", "Best regards, Tom",
    "Ideas welcome.",
)  # fmt: skip
_WORDS = (
    "amber", "birch", "cobalt", "delta", "ember", "fjord", "granite", "harbor", "indigo", "juniper", "kelp", "lagoon",
    "maple", "nickel", "onyx", "pearl", "quartz", "raven", "saffron",
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
    situations, questions, closings = (rng.sample(p, len(p)) for p in (_SITUATIONS, _QUESTIONS, _CLOSINGS))
    topics = [words[i : i + 2] for i in range(0, len(words) - 1)] or [[*words, "this", "that"][:2]]
    for i in itertools.count(start):
        question = questions[i % len(questions)].format(*topics[i % len(topics)])
        yield " ".join([situations[i % len(situations)], question, closings[i % len(closings)]]).strip()


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
