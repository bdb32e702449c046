"""Train with the two servers without a pretrained model, a real judge or an account.

    art tiny-model tiny/inventory --task practice:Inventory     makes a model of 0.1 M parameters that knows the tools
    python practice.py inventory --port 8010                    serves a scripted generator and judge

The tiny model is made for one server and can do nothing else: it was trained on conversations of beginners, who know
the form of every call but often take the wrong product or read the wrong line. The judge looks for evidence in the
transcript: the right call, its result, and an answer with that result.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from jobs import DeskJob, calendar_jobs, inventory_jobs

from art.mcp import GeneratedScenario, McpTask
from art.task import Conversation, TaskDefaults
from art.testing.judge import ScriptedJudge
from art.testing.scripted_server import Reply, ScriptedServer, completion
from art_recipes.mcp.rollout import SYSTEM
from art_recipes.scenarios.written import without_twins
from art_tasks.desks.calendar_jobs import Calendar as CalendarTask
from art_tasks.desks.inventory_jobs import Inventory as InventoryTask
from art_tasks.desks.server_task import (
    ANSWER_SKILL,
    CALL_SKILL,
    WITH_TOOLS,
    LocalServer,
    read_transcript,
    returned,
    said,
    says,
)

HERE = Path(__file__).parent


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

    def __init__(self, folder: str, jobs: list[DeskJob], local: LocalServer) -> None:
        self.folder, self.jobs, self.local = folder, jobs, local
        scenarios = [GeneratedScenario(job.task, job.difficulty) for job in jobs]
        path = str(HERE / folder / "server.py")
        super().__init__([sys.executable, path], train=scenarios[::2], held_out=scenarios[1::2])

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Alternate play and drills. A tiny model has to learn to copy, and a whole rollout shows little copying."""
        return [self._play(rng) if i % 2 else self._drill(rng) for i in range(count)]

    def _play(self, rng: random.Random) -> Conversation:
        """Make a rollout of a beginner."""
        job = rng.choice(self.jobs)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": job.task}]
        call = job.call if rng.random() < CALL_SKILL else rng.choice(job.slips)
        with self.local.states.fresh():
            result = self.local.call(*call)
        messages += [said(call), returned(result)]
        answer = job.answer(result) if rng.random() < ANSWER_SKILL else job.mistaken(result)
        messages.append(said(("complete_task", {"summary": answer})))
        return Conversation(messages=messages, tools=self.local.tool_schemas if rng.random() < WITH_TOOLS else None)

    def _drill(self, rng: random.Random) -> Conversation:
        """Make short exchanges: a task and its call, sometimes with the result and the answer."""
        messages: list[Any] = []
        for job in rng.sample(self.jobs, 3):
            messages.append({"role": "user", "content": job.task})
            messages.append(said(job.call))
            if rng.random() < 0.5:
                with self.local.states.fresh():
                    result = self.local.call(*job.call)
                messages += [returned(result), said(("complete_task", {"summary": job.answer(result)}))]
        return Conversation(messages=messages)

    def grade(self, trajectory: dict[str, Any]) -> tuple[float, str]:
        """Score a rollout by its transcript, with an explanation."""
        messages = [*trajectory.get("context", []), *trajectory["messages"]]
        task = next((message["content"] for message in messages if message["role"] == "user"), "")
        job = next((job for job in self.jobs if job.task == task), None)
        if job is None:
            return 0.5, "The script does not know this task."
        return grade_transcript(job, messages)

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


def grade_transcript(job: DeskJob, messages: Iterable[dict[str, Any]]) -> tuple[float, str]:
    """Score a rollout from 0 to 1 by its transcript alone, as a judge sees it, with an explanation."""
    transcript = read_transcript(messages)
    done = [result for call, result in transcript.calls if call == job.call and not result.startswith("Error")]
    errors = sum(result.startswith("Error") for _, result in transcript.calls)
    useful = [call for call, result in transcript.calls if call in job.calls and not result.startswith("Error")]
    others = len(transcript.calls) - len(useful) - errors
    summary = transcript.summary
    is_right = bool(done) and says(summary, job.answer(done[0]))
    score = 0.05 + 0.45 * bool(done) + 0.4 * is_right + 0.1 * (summary is not None)
    score -= 0.1 * errors + 0.15 * others
    name, arguments = job.call
    words = [f"It called {name} as the task asks." if done else f"It never called {name} with {arguments}."]
    if summary is None:
        words.append("It did not answer.")
    else:
        words.append(f"Its answer {summary!r} {'has the result' if is_right else 'is not what the task asks for'}.")
    words += [f"{errors} calls failed."] * bool(errors) + [f"{others} calls did not help."] * bool(others)
    return min(max(round(score, 2), 0.0), 1.0), " ".join(words)


class Inventory(Practice):
    name: ClassVar[str] = "inventory"

    def __init__(self) -> None:
        super().__init__("inventory", inventory_jobs(), InventoryTask.server)


class Calendar(Practice):
    name: ClassVar[str] = "calendar"
    num_to_train: ClassVar[int] = 25

    def __init__(self) -> None:
        super().__init__("calendar", calendar_jobs(), CalendarTask.server)


PRACTICES = {"inventory": Inventory, "calendar": Calendar}


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
