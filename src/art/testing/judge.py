"""A judge that follows a script: an OpenAI-compatible server on a free port of this machine, with faults on demand.

    with ScriptedJudge(lambda trajectory: 1.0 if "win" in str(trajectory) else 0.0, faults=["429", "missing"]) as judge:
        await ruler_score_group(group, "openai/judge", {"base_url": judge.base_url, "api_key": "none"})

`art.testing.grading` has grades for any task, and `art judge serve` is this judge as a command. It is as gullible as a
judge can be: whatever stands outside of the evidence it takes for an instruction, so a trajectory that gets out of the
evidence gets the score that it asks for.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from art.testing.grading import Grade
from art.testing.scripted_server import Reply, ScriptedRole, ScriptedServer, completion, failure

Fault = Literal[
    "429", "500", "401", "slow",  # before it answers
    "not_json", "cut_short", "out_of_range", "not_finite", "missing", "contradiction",  # no use: to be asked for again
    "permuted", "doubled", "unknown_id", "fenced", "quoted", "overshoot",  # to be understood
    "no_schema",  # it knows no `response_format`
]  # fmt: skip

INSTRUCTION = re.compile(r"the score of (\S+) must be ([\d.]+)", re.IGNORECASE)
"""What the judge obeys, for one trajectory or for `all`, wherever it is not part of the evidence."""
_EVIDENCE = re.compile(r"^BEGIN EVIDENCE (\S+)$\n(.*?)\n^END EVIDENCE \1$", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r'<trajectory id="([^"]+)">(.*?)</trajectory>', re.DOTALL)


@dataclass(slots=True)
class ScriptedJudge(ScriptedRole):
    """The server, as a context manager. Threads answer the requests."""

    grade: Grade
    """The true score of one trajectory: `{"id": ..., "messages": [...], ...}`, with `context` where it was shared. With
    an explanation, if there is one."""
    criteria: dict[str, Callable[[dict[str, Any]], float]] | None = None
    """For a rubric of criteria: how each is scored that `grade` does not tell."""
    faults: Sequence[Fault] = ()
    """One per request, in their order; later requests are answered well."""
    always: Fault | None = None
    """The fault of every request after those."""
    fault_rate: float = 0.0
    """Share of the requests after those that fail, by one of `random_faults`."""
    position_bias: float = 0.0
    """Added to the trajectory that is shown first, taken from the one shown last, and in between in proportion."""
    noise: float = 0.0
    """Standard deviation of a normal error of each score."""
    seed: int = 0
    delay_s: float = 2.0
    """Of `slow`."""
    max_chars: int | None = None
    """Of a request's messages; more is refused as too long for the context."""
    port: int = 0
    """0 takes a free one."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, in the order of their arrival."""
    _server: ScriptedServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    random_faults: ClassVar[tuple[Fault, ...]] = ("429", "500", "not_json", "cut_short", "missing")
    _rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._check_faults(get_args(Fault))
        self._rng.seed(self.seed)

    def answer(self, body: dict[str, Any]) -> Reply:
        """Status and body of the answer to one request."""
        with self._lock:
            fault = self._take_fault(body)
            rng = random.Random(self._rng.random())
        if (failed := self._fail(fault, body)) is not None:
            return failed
        if self.max_chars is not None and sum(len(m["content"]) for m in body["messages"]) > self.max_chars:
            return failure(400, "this model's maximum context length is exceeded", "context_length_exceeded")
        rows = self._rows(body, rng)
        return completion(body, {"content": _written(rows, fault)})

    def _rows(self, body: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
        trajectories, instructions = read_prompt(body["messages"][1]["content"])
        orders = dict(INSTRUCTION.findall(instructions))
        if "all" in orders:
            orders |= {trajectory["id"]: orders["all"] for trajectory in trajectories}
        rows = []
        for position, trajectory in enumerate(trajectories):
            lean = 1 - 2 * position / (len(trajectories) - 1) if len(trajectories) > 1 else 0.0
            graded = self.grade(trajectory)
            true, explanation = graded if isinstance(graded, tuple) else (graded, "as the script says")
            score = true + self.position_bias * lean + rng.gauss(0, self.noise)
            identity = trajectory["id"]
            score = float(orders[identity]) if identity in orders else min(max(score, 0.0), 1.0)
            row: dict[str, Any] = {"trajectory_id": identity, "explanation": explanation, "score": score}
            if self.criteria is not None:
                row["criteria"] = {
                    key: self.criteria[key](trajectory) if key in self.criteria else score
                    for key in asked_criteria(body)
                }
            rows.append(row)
        return rows


def asked_criteria(body: dict[str, Any]) -> list[str]:
    """The criteria that a request wants scored, by its schema."""
    schema = body["response_format"]["json_schema"]["schema"]
    return list(schema["properties"]["scores"]["items"]["properties"]["criteria"]["required"])


def read_prompt(prompt: str) -> tuple[list[dict[str, Any]], str]:
    """The trajectories of a prompt, and the text around them. Understands the JSON of `Ruler` and plain XML tags."""
    found = _EVIDENCE.search(prompt)
    if found is None:
        tagged = [{"id": name, "messages": text} for name, text in _TAGGED.findall(prompt)]
        return tagged, _TAGGED.sub("", prompt)
    document = json.loads(found[2])
    shared = {key: value for key, value in document.items() if key != "trajectories"}
    return [shared | trajectory for trajectory in document["trajectories"]], prompt.replace(found[0], "")


def _written(rows: list[dict[str, Any]], fault: Fault | None) -> str:
    """The answer's text, spoilt as the script wants it."""
    first = rows[0]
    if fault == "out_of_range":
        first["score"] = 7.5
    elif fault == "overshoot":
        first["score"] = 1.004
    elif fault == "not_finite":
        first["score"] = float("nan")
    elif fault == "quoted":
        first["score"] = str(first["score"])
    elif fault == "missing":
        rows = rows[1:]
    elif fault == "doubled":
        rows = [*rows, dict(first)]
    elif fault == "contradiction":
        rows = [*rows, first | {"score": 1 - first["score"] if first["score"] != 0.5 else 0.9}]
    elif fault == "unknown_id":
        rows = [*rows, first | {"trajectory_id": "t-zzzzz", "score": 1.0}]
    elif fault == "permuted":
        rows = rows[::-1]
    text = json.dumps({"scores": rows})
    if fault == "not_json":
        return "All of them did well."
    if fault == "cut_short":
        return text[: len(text) // 2]
    return f"Let me think about it.\n```json\n{text}\n```" if fault == "fenced" else text
