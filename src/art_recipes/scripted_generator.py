"""A scripted generator of scenarios: an OpenAI-compatible server with faults on demand.

with ScriptedGenerator(inputs=["What is 2 + 2?", ...], faults=["429", "duplicates"]) as generator:
    await generate_inputs("do sums", 8, "openai/generator", generator_base_url=generator.base_url)
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from art.testing.scripted_server import Reply, ScriptedRole, completion
from art_recipes.scenarios.written import without_twins

GeneratorFault = Literal["429", "500", "401", "slow", "no_schema", "not_json", "cut_short", "duplicates"]
"""HTTP errors, a late answer, and answers that the client must ask again for."""

_COUNT = re.compile(r"^Write exactly (\d+) ", re.MULTILINE)
_KNOWN = re.compile(r"^- (.*)$", re.MULTILINE)


@dataclass(slots=True)
class ScriptedGenerator(ScriptedRole[GeneratorFault]):
    """A fake language model that writes scenarios, as an OpenAI-compatible server inside a `with` statement."""

    inputs: Sequence[str] = ()
    """The inputs to answer with, in order and repeated."""
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
            return {"system_prompt": self.system_prompt, "standards": list(self.standards)}
        number, known = int(count[1]), _KNOWN.findall(question)
        if fault == "duplicates":
            texts = [f"{text.upper()}!" for text in (known or self.inputs[:1])] * number
        else:
            with self._lock:  # a request begins where the one before it ended
                start, self._next = self._next, self._next + number
            pool = [self.inputs[(start + i) % len(self.inputs)] for i in range(len(self.inputs))]
            texts = [pool[i] for i in without_twins(pool, known)][:number]
        name = "task" if '"task"' in body["messages"][0]["content"] else "input"
        return {"scenarios": [{name: text, "difficulty": 1 + i % 5} for i, text in enumerate(texts)]}
