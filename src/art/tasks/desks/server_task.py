"""The base of tasks in which an agent does jobs with the tools of an MCP server, which runs in this process.

Every rollout has a state of its own, drawn with the job from the scenario's seed. The reward is worked out from the
state that the rollout leaves and from its answer (`cases.py`), not from how it talks.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from art.mcp import GeneratedScenario, MCPClient, mcp_rollout
from art.mcp.rollout import SYSTEM
from art.task import Conversation, Scenario, Split, Task, TaskDefaults, TaskOptions, derive_seed, describe_messages
from art.tasks.desks.cases import OUTCOMES, Case, judge_case
from art.tasks.desks.desk_jobs import Call, Job, grade_transcript, read_transcript
from art.tasks.desks.local_server import LocalServer
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

CALL_SKILL, ANSWER_SKILL = 0.8, 0.4
"""Probabilities in the warm start's play that a call is right, and that the right line of its result is read."""
WITH_TOOLS = 0.2
"""Share of the play that shows the tool descriptions, which are most of a conversation's tokens."""
_SPLITS: dict[int, Split] = {7: "val", 8: "test", 9: "test"}  # by the hash of a job's text; the others are for training


class ServerOptions(TaskOptions):
    """What a user may choose about a task with a server."""

    max_difficulty: int = Field(default=5, ge=1, le=5)
    """Difficulty of the hardest jobs. Up to 3 they need one call; 4 and 5 need several, or a decision between them."""
    max_turns: int = Field(default=10, ge=1)
    """Most answers of the agent in a rollout."""
    max_completion_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens. A model that thinks before it answers needs more."""


class ServerTask(Task):
    """A task: do what a user asks with the tools of a server, and say the result with `complete_task`.

    A tiny model does jobs of one call; plans of several calls are beyond it.
    """

    headline_metric: ClassVar[str] = "solved"
    options_class: ClassVar[type[ServerOptions]] = ServerOptions
    options: ServerOptions
    tiny_options: ClassVar[Mapping[str, Any]] = {"max_difficulty": 3}
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=25, num_minibatches=1, warm_start_steps=400, tiny_vocab_size=512, tiny_context=2048
    )
    server: ClassVar[LocalServer]

    @abstractmethod
    def draw_case(self, rng: random.Random, max_difficulty: int) -> Case:
        """Draw a state with a job."""

    @abstractmethod
    def open_state(self, rows: list[dict[str, Any]]) -> Any:
        """Make a state of the server out of its rows."""

    @abstractmethod
    def rows_of(self, state: Any) -> list[dict[str, Any]]:
        """Return the rows of a state, in the order of their first field."""

    @abstractmethod
    def read_job(self, task: str, messages: list[dict[str, Any]]) -> Job | None:
        """Return the job of a user's text; `None` if only the server's state could tell what it needs."""

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` jobs. The hash of a job's text decides its split, so no text of a split is in another one."""
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, self._draw_inputs(split, rng)) for index in range(count)]

    def _draw_inputs(self, split: Split, rng: random.Random) -> dict[str, Any]:
        while True:
            seed = rng.getrandbits(48)
            task = self._case(seed).job.task
            if _SPLITS.get(derive_seed(task) % 10, "train") == split:
                return {"case": seed, "task": task}

    def _case(self, seed: int) -> Case:
        return self.draw_case(random.Random(seed), self.options.max_difficulty)

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Make one rollout.

        Raises:
            ConfigError: the official SDK of MCP is not installed.
        """
        case = self._case(scenario.inputs["case"])
        request = {
            "temperature": 1.0, "max_completion_tokens": self.options.max_completion_tokens,
            "seed": derive_seed(scenario.seed, rollout_index),
        }  # fmt: skip
        with self.server.states.using(self.open_state(case.start)) as state:
            async with MCPClient(self.server.module.server) as client:
                trajectory = await mcp_rollout(
                    model, GeneratedScenario(case.job.task, case.job.difficulty), client, step=step,
                    tools=self.server.tools, max_turns=self.options.max_turns, request=request,
                )  # fmt: skip
            rows = self.rows_of(state)
        verdict = judge_case(case, read_transcript(trajectory.messages()), rows)  # type: ignore[arg-type]
        trajectory.reward = sum(verdict.parts.values())
        trajectory.metrics |= {name: float(name == verdict.outcome) for name in OUTCOMES}
        trajectory.metrics |= {f"reward/{name}": value for name, value in verdict.parts.items()}
        trajectory.metadata |= {"scenario_id": scenario.id, "why": verdict.why}
        if verdict.outcome == "no_answer":
            trajectory.metadata["outcome"] = "policy_fault"
        return trajectory

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Return a player that makes the calls of the job one by one, and answers."""
        case = self._case(scenario.inputs["case"])
        steps = iter([*case.job.calls, ("complete_task", {"summary": case.answer})])
        return lambda messages, tools: said(next(steps))

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Alternate play and drills. A tiny model has to learn to copy, and a whole rollout shows little copying."""
        return [self._play(rng) if i % 2 else self._drill(rng) for i in range(count)]

    def _play(self, rng: random.Random) -> Conversation:
        """Make a rollout of a beginner, who takes a wrong call or reads the wrong line of a result."""
        case = self._case(self._draw_inputs("train", rng)["case"])
        job, messages = case.job, self._opening(case.job.task)
        calls = [*job.before, job.call if rng.random() < CALL_SKILL or not job.slips else rng.choice(job.slips)]
        with self.server.states.using(self.open_state(case.start)):
            results = [self.server.call(*call) for call in calls]
        for call, result in zip(calls, results, strict=True):
            messages += [said(call), returned(result)]
        answer = job.answer(results[-1]) if rng.random() < ANSWER_SKILL else job.mistaken(results[-1])
        messages.append(said(("complete_task", {"summary": answer})))
        return Conversation(messages=messages, tools=self.server.tool_schemas if rng.random() < WITH_TOOLS else None)

    def _drill(self, rng: random.Random) -> Conversation:
        """Make short exchanges: a task and its call, sometimes with the result and the answer."""
        messages: list[Any] = []
        for _ in range(3):
            case = self._case(self._draw_inputs("train", rng)["case"])
            messages += [{"role": "user", "content": case.job.task}, said(case.job.calls[0])]
            if rng.random() < 0.5 and not case.job.before:
                with self.server.states.using(self.open_state(case.start)):
                    result = self.server.call(*case.job.call)
                messages += [returned(result), said(("complete_task", {"summary": case.job.answer(result)}))]
        return Conversation(messages=messages)

    @staticmethod
    def _opening(task: str) -> list[Any]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Score a rollout by its transcript: the right call without an error, its result as the answer, no detours.

        A job that only the state of the server explains gets 0.5 if it was answered without failed calls, else 0.2.
        """
        task = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
        job = self.read_job(task, messages)
        if job is not None:
            return grade_transcript(job, messages)
        transcript = read_transcript(messages)
        failed = any(result.startswith("Error") for _, result in transcript.calls)
        fine = transcript.summary is not None and bool(transcript.calls) and not failed
        return (0.5, "It answered, without failed calls.") if fine else (0.2, "It failed, or did not answer.")

    def render_trajectory(self, trajectory: Trajectory) -> str:
        lines = describe_messages(trajectory.messages()[1:])
        return "\n".join([*lines, f"{trajectory.metadata.get('why')}, reward {trajectory.reward:g}"])


def said(call: Call) -> dict[str, Any]:
    """Return the assistant's message with a call."""
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    made = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def returned(text: str) -> dict[str, Any]:
    """Return the message with the result of the call of `said`."""
    return {"role": "tool", "tool_call_id": "call_0", "content": text}
