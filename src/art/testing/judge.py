"""A scripted judge: an OpenAI-compatible server on a free port of this machine, with faults on demand.

    with ScriptedJudge(lambda trajectory: 1.0 if "win" in str(trajectory) else 0.0, faults=["429", "missing"]) as judge:
        await ruler_score_group(group, "openai/judge", {"base_url": judge.base_url, "api_key": "none"})

`art.testing.judge` has grades for any task, and `art judge serve` runs this judge as a command. The judge is as
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

from art.testing.scripted_server import Reply, ScriptedRole, completion

Fault = Literal["429", "500", "401", "slow", "no_schema", "not_json", "cut_short", "missing"]
"""An HTTP error or late answer, no support of `response_format`, or an answer that is of no use: it is no JSON, cut
short, or lacks a trajectory."""

INSTRUCTION = re.compile(r"the score of (\S+) must be ([\d.]+)", re.IGNORECASE)
"""Pattern of an instruction that the judge obeys if it is outside the evidence: for one trajectory or for `all`."""
_EVIDENCE = re.compile(r"^BEGIN EVIDENCE (\S+)$\n(.*?)\n^END EVIDENCE \1$", re.DOTALL | re.MULTILINE)


@dataclass(slots=True)
class ScriptedJudge(ScriptedRole[Fault]):
    """A fake LLM judge that scores trajectories by a function, as a server inside a `with` statement."""

    grade: Grade
    """Returns the true score of a trajectory `{"id": ..., "messages": [...], ...}`, optionally with an explanation.
    Messages that all trajectories share are in `context`."""
    position_bias: float = 0.0
    """Bias by position: added to the score of the first trajectory, subtracted from the last, linear in between."""
    noise: float = 0.0
    """Standard deviation of a normal error of each score."""
    known_faults: ClassVar[tuple[str, ...]] = get_args(Fault)
    random_faults: ClassVar[tuple[Fault, ...]] = ("429", "500", "not_json", "cut_short", "missing")

    def reply(self, body: dict[str, Any], fault: Fault | None, rng: random.Random) -> Reply:
        rows = self.rows(body, rng)
        text = json.dumps({"scores": rows[1:] if fault == "missing" else rows})
        if fault == "not_json":
            text = "All of them did well."
        return completion(body, {"content": text[: len(text) // 2] if fault == "cut_short" else text})

    def misjudge(self, true: float, position: int, count: int, rng: random.Random) -> float:
        """Return the score, 0 to 1, that the judge gives a trajectory of this true score.

        Args:
            position: place among the `count` trajectories that are shown, from 0.
        """
        lean = 1 - 2 * position / (count - 1) if count > 1 else 0.0
        return min(max(true + self.position_bias * lean + rng.gauss(0, self.noise), 0.0), 1.0)

    def rows(self, body: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
        """Return the judge's row for each trajectory that a request shows, in the order in which they are shown."""
        trajectories, instructions = read_prompt(body["messages"][1]["content"])
        orders = dict(INSTRUCTION.findall(instructions))
        if "all" in orders:
            orders |= {trajectory["id"]: orders["all"] for trajectory in trajectories}
        rows = []
        for position, trajectory in enumerate(trajectories):
            graded = self.grade(trajectory)
            true, explanation = graded if isinstance(graded, tuple) else (graded, "as the script says")
            identity, score = trajectory["id"], self.misjudge(true, position, len(trajectories), rng)
            score = float(orders.get(identity, score))
            rows.append({"trajectory_id": identity, "explanation": explanation, "score": score})
        return rows


def read_prompt(prompt: str) -> tuple[list[dict[str, Any]], str]:
    """Split a judge's prompt into its trajectories and the text around them."""
    evidence = _EVIDENCE.search(prompt)
    assert evidence is not None, "a judge is asked about evidence"
    document = json.loads(evidence[2])
    shared = {key: value for key, value in document.items() if key != "trajectories"}
    return [shared | trajectory for trajectory in document["trajectories"]], prompt.replace(evidence[0], "")


Score = float | tuple[float, str]
Grade = Callable[[dict[str, Any]], Score]


def transcript(trajectory: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all messages of a trajectory in a judge's prompt: those shared by all trajectories, then its own."""
    return [*trajectory.get("context", []), *trajectory["messages"]]


def grade_messages(score: Callable[[list[dict[str, Any]]], Score]) -> Grade:
    """Make a function that grades trajectories from one that scores messages, e.g. `task.score_messages`."""
    return lambda trajectory: score(transcript(trajectory))


def grade_conduct(trajectory: dict[str, Any]) -> Score:
    """Grade a rollout of any task: it should end with an answer, without failed calls, in few words.

    The score is 0.6 for an end that the agent chose, minus 0.1 for each tool result that begins with "Error" (at most
    three), plus up to 0.4 for brevity: 0.2 at 100 characters.
    """
    messages = transcript(trajectory)
    answers = [message for message in messages if message["role"] == "assistant"]
    calls = [call["function"] for message in answers for call in message.get("tool_calls") or ()]
    ended = bool(answers) and messages[-1] is answers[-1] and bool(str(answers[-1].get("content") or "").strip())
    ended = ended or any(call["name"] == "complete_task" for call in calls)
    errors = sum(str(m.get("content")).startswith("Error") for m in messages if m["role"] == "tool")
    size = sum(len(str(message.get("content") or "")) for message in answers)
    size += sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    score = 0.6 * ended - 0.1 * min(errors, 3) + 0.4 / (1 + size / 100)
    words = "It ends with an answer" if ended else "It has no end"
    return min(max(score, 0.0), 1.0), f"{words}, after {errors} failed calls and {size} characters."
