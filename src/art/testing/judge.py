"""A scripted judge: an OpenAI-compatible server on a free port of this machine, with faults on demand.

    with ScriptedJudge(lambda trajectory: 1.0 if "win" in str(trajectory) else 0.0, faults=["429", "missing"]) as judge:
        await ruler_score_group(group, "openai/judge", {"base_url": judge.base_url, "api_key": "none"})

`art.testing.grading` has grades for any task, and `art judge serve` runs this judge as a command. The judge is as
gullible as possible: it obeys any instruction outside the evidence, so a trajectory that breaks out of the evidence
gets the score that it asks for.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from art.testing.grading import Grade
from art.testing.scripted_server import Reply, ScriptedRole, completion, failure

Fault = Literal[
    "429", "500", "401", "slow",  # HTTP errors, and a late answer
    "not_json", "cut_short", "out_of_range", "not_finite", "missing", "contradiction",  # unusable: ask again
    "permuted", "doubled", "unknown_id", "fenced", "quoted", "overshoot",  # deviations that the client must accept
    "no_schema",  # the server does not support `response_format`
]  # fmt: skip

INSTRUCTION = re.compile(r"the score of (\S+) must be ([\d.]+)", re.IGNORECASE)
"""Pattern of an instruction that the judge obeys if it is outside the evidence: for one trajectory or for `all`."""
_EVIDENCE = re.compile(r"^BEGIN EVIDENCE (\S+)$\n(.*?)\n^END EVIDENCE \1$", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r'<trajectory id="([^"]+)">(.*?)</trajectory>', re.DOTALL)


@dataclass(slots=True)
class ScriptedJudge(ScriptedRole[Fault]):
    """A fake LLM judge that scores trajectories by a function, as a server inside a `with` statement."""

    grade: Grade
    """Returns the true score of a trajectory `{"id": ..., "messages": [...], ...}`, optionally with an explanation.
    Messages that all trajectories share are in `context`."""
    criteria: dict[str, Callable[[dict[str, Any]], float]] | None = None
    """Scores by criterion, for a rubric of criteria. A criterion without a function gets the score of `grade`."""
    position_bias: float = 0.0
    """Bias by position: added to the score of the first trajectory, subtracted from the last, linear in between."""
    noise: float = 0.0
    """Standard deviation of a normal error of each score."""
    max_chars: int | None = None
    """Largest number of characters of a request's messages; longer ones are refused as too long for the context."""
    known_faults: ClassVar[tuple[str, ...]] = get_args(Fault)
    random_faults: ClassVar[tuple[Fault, ...]] = ("429", "500", "not_json", "cut_short", "missing")

    def answer(self, body: dict[str, Any]) -> Reply:
        """Return HTTP status and body of the answer to a request with `body`."""
        with self._lock:
            fault = self._take_fault(body)
            rng = random.Random(self._rng.random())
        if (failed := self._fail(fault, body)) is not None:
            return failed
        if self.max_chars is not None and sum(len(m["content"]) for m in body["messages"]) > self.max_chars:
            return failure(400, "this model's maximum context length is exceeded", "context_length_exceeded")
        rows = self._rows(body, rng)
        return completion(body, {"content": _with_fault(rows, fault)})

    def misjudge(self, true: float, position: int, count: int, rng: random.Random) -> float:
        """Return the score, 0 to 1, that the judge gives a trajectory of this true score.

        Args:
            position: place among the `count` trajectories that are shown, from 0.
        """
        lean = 1 - 2 * position / (count - 1) if count > 1 else 0.0
        return min(max(true + self.position_bias * lean + rng.gauss(0, self.noise), 0.0), 1.0)

    def _rows(self, body: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
        trajectories, instructions = read_prompt(body["messages"][1]["content"])
        orders = dict(INSTRUCTION.findall(instructions))
        if "all" in orders:
            orders |= {trajectory["id"]: orders["all"] for trajectory in trajectories}
        rows = []
        for position, trajectory in enumerate(trajectories):
            graded = self.grade(trajectory)
            true, explanation = graded if isinstance(graded, tuple) else (graded, "as the script says")
            score = self.misjudge(true, position, len(trajectories), rng)
            identity = trajectory["id"]
            score = float(orders[identity]) if identity in orders else score
            row: dict[str, Any] = {"trajectory_id": identity, "explanation": explanation, "score": score}
            if self.criteria is not None:
                row["criteria"] = {
                    key: self.criteria[key](trajectory) if key in self.criteria else score
                    for key in asked_criteria(body)
                }
            rows.append(row)
        return rows


def asked_criteria(body: dict[str, Any]) -> list[str]:
    """Return the names of the criteria that a request asks the judge to score."""
    schema = body["response_format"]["json_schema"]["schema"]
    return list(schema["properties"]["scores"]["items"]["properties"]["criteria"]["required"])


def read_prompt(prompt: str) -> tuple[list[dict[str, Any]], str]:
    """Split a judge's prompt into its trajectories (as JSON of `Ruler`, or in XML tags) and the text around them."""
    evidence = _EVIDENCE.search(prompt)
    if evidence is None:
        tagged = [{"id": name, "messages": text} for name, text in _TAGGED.findall(prompt)]
        return tagged, _TAGGED.sub("", prompt)
    document = json.loads(evidence[2])
    shared = {key: value for key, value in document.items() if key != "trajectories"}
    return [shared | trajectory for trajectory in document["trajectories"]], prompt.replace(evidence[0], "")


def _with_fault(rows: list[dict[str, Any]], fault: Fault | None) -> str:
    """The text of an answer with a fault."""
    name, first = fault or "", rows[0]
    score = first["score"]
    wrong_scores = {"out_of_range": 7.5, "overshoot": 1.004, "not_finite": float("nan"), "quoted": str(score)}
    first["score"] = wrong_scores.get(name, score)
    rows = {
        "missing": rows[1:],
        "doubled": [*rows, dict(first)],
        "contradiction": [*rows, first | {"score": 1 - score if score != 0.5 else 0.9}],
        "unknown_id": [*rows, first | {"trajectory_id": "t-zzzzz", "score": 1.0}],
        "permuted": rows[::-1],
    }.get(name, rows)
    text = json.dumps({"scores": rows})
    return {
        "not_json": "All of them did well.",
        "cut_short": text[: len(text) // 2],
        "fenced": f"Let me think about it.\n```json\n{text}\n```",
    }.get(name, text)
