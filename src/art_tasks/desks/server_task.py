"""The base of tasks in which an agent does jobs with the tools of an MCP server, which runs in this process.

Every rollout has a state of its own, drawn with the job from the scenario's seed. The reward is worked out from the
state that the rollout leaves and from its answer, not from how it talks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import random
import re
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from art.errors import ConfigError
from art.task import Conversation, Scenario, Split, Task, TaskDefaults, TaskOptions, derive_seed, describe_messages
from art.trajectory import Trajectory
from art_recipes.mcp import GeneratedScenario, MCPClient, MCPTool, complete_task_tool, mcp_rollout
from art_recipes.mcp.client import INSTALL
from art_recipes.mcp.rollout import SYSTEM
from art_tasks.desks.rollout_states import RolloutStates

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player


# -- jobs, and what comes of them --

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
Call = tuple[str, dict[str, Any]]
"""A tool and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskJob:
    """What a user asks of the agent. It says nothing of the server's state, except as right or wrong calls need it."""

    task: str
    difficulty: int
    """From 1 to 5. It is equal for jobs of a kind."""
    call: Call
    """The call that does the job, or the last of those that do."""
    answer: Callable[[str], str]
    """Returns the right answer from the result of `call`."""
    mistaken: Callable[[str], str] = lambda result: "done"
    """Returns the answer of a player who reads the wrong line of the result."""
    slips: tuple[Call, ...] = ()
    """Wrong calls, as a beginner makes them."""
    before: tuple[Call, ...] = ()
    """Calls that come before `call`, e.g. to look something up."""

    @property
    def calls(self) -> tuple[Call, ...]:
        return (*self.before, self.call)


def field_job(
    task: str, difficulty: int, call: Call, field: str, other: str, slips: Iterable[Call], **fields: Any
) -> DeskJob:
    """Make a job whose answer is `field` of the first object that the tool returns. Beginners read `other` instead."""
    return DeskJob(
        task=task, difficulty=difficulty, call=call, slips=tuple(slips), answer=lambda result: field_of(result, field),
        mistaken=lambda result: field_of(result, other), **fields,
    )  # fmt: skip


def planned_job(task: str, difficulty: int, calls: Sequence[Call], answer: str) -> DeskJob:
    """Make a job of several calls whose answer follows from the state, not from the result of the last call."""
    return DeskJob(
        task=task, difficulty=difficulty, before=tuple(calls[:-1]), call=calls[-1], answer=lambda result: answer
    )


def field_of(result: str, name: str) -> str:
    """Return a field of the first object in a tool's result, as text.

    Example: field_of('{"price": 35.5}', "price") is "35.5", and field_of('{"result": []}', "price") is "nothing".
    """
    try:
        first, _ = json.JSONDecoder().raw_decode(result)
    except ValueError:
        return "failed"
    if first == {"result": []}:
        return "nothing"
    return str(first.get(name, "failed")) if isinstance(first, dict) else "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskTranscript:
    """What an agent did: its calls with their results, and what it said with `complete_task`, `None` if it did not."""

    calls: list[tuple[Call, str]]
    summary: str | None


def read_transcript(messages: Iterable[dict[str, Any]]) -> DeskTranscript:
    """Read the calls in a conversation. Arguments that are not JSON are `None`."""
    messages = list(messages)
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
    return DeskTranscript(calls=calls, summary=summary)


def says(summary: str | None, answer: str, *, room: int = 30) -> bool:
    """Whether a summary contains the answer as whole words, with at most `room` characters of other text.

    A whole number may be written with or without decimals: "It is 90" has the answer "90.0". Day and time may be apart.
    """
    return summary is not None and len(summary) <= len(answer) + room and mentions(summary, answer)


def mentions(text: str, answer: str) -> bool:
    """Whether a text of any length contains the answer as whole words."""
    parts = answer.split() if _TIME.fullmatch(answer) else [answer]
    whole = re.compile(r"(\d+)(?:\.0+)?")
    forms = [rf"{number[1]}(?:\.0+)?" if (number := whole.fullmatch(part)) else re.escape(part) for part in parts]
    return all(re.search(rf"(?<![\w.-]){form}(?!\w|\.\d)", text) for form in forms)


OUTCOMES = {"solved": 1.0, "misreported": 0.4, "unsolved": 0.0, "damaged": -0.25, "no_answer": -0.5}
"""Rewards. `solved`: state and answer are right. `misreported`: the change was made, but the answer is wrong.
`unsolved`: nothing was changed, and the job is not done. `damaged`: something was changed that nobody asked for.
`no_answer`: the rollout ended without an answer by `complete_task`."""
LOOKED = 0.1
"""Further reward for an unsolved rollout in which a tool returned the answer, or the job's last call was made."""
DETOUR, MAX_DETOURS = 0.05, 4
"""Cost of a call that failed or was not needed, and how many of them count."""

_ROOM = 120
"""Longest text around an answer, in characters: a sentence or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job, with a state in which it can be done."""

    job: DeskJob
    start: list[dict[str, Any]]
    """The rows of the state that the rollout finds."""
    end: list[dict[str, Any]]
    """The rows that it must leave, in the same order of their first field."""
    answer: str
    """What the agent must say, worked out from the rows and not by the server."""
    changes: bool
    """Whether the job asks for a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """What a rollout did to a case, with the parts of its reward."""

    outcome: str
    parts: dict[str, float]
    why: str


def judge_case(case: Case, transcript: DeskTranscript, rows: list[dict[str, Any]]) -> CaseVerdict:
    """Judge a rollout by the rows that it left, its calls and its answer."""
    results = [(call, result) for call, result in transcript.calls if not result.startswith("Error")]
    looked = any(call == case.job.call or mentions(result, case.answer) for call, result in results)
    num_failed, summary = len(transcript.calls) - len(results), transcript.summary
    is_right = says(summary, case.answer, room=_ROOM) and not _says_more(summary or "", case)
    if summary is None:
        outcome, why = "no_answer", "it gave no answer"
    elif rows == case.end and is_right and (looked or case.changes):
        outcome, why = "solved", f"the state is right, and so is the answer {case.answer}"
    elif rows == case.end and case.changes:
        outcome, why = "misreported", f"the change was made, but the answer is {summary!r}, not {case.answer}"
    elif rows in (case.start, case.end):
        outcome, why = "unsolved", f"nothing came of it; the answer {summary!r} had to be {case.answer}"
        if is_right:
            why = f"the answer {case.answer} is right, but nothing was looked up or changed for it"
    else:
        outcome, why = "damaged", "the state has changes that nobody asked for"
    num_detours = min(max(len(transcript.calls) - len(case.job.calls), num_failed), MAX_DETOURS)
    parts = {
        "outcome": OUTCOMES[outcome], "looked": LOOKED if looked and outcome == "unsolved" else 0.0,
        "detours": 0.0 if outcome == "no_answer" else -DETOUR * num_detours,
    }  # fmt: skip
    return CaseVerdict(outcome=outcome, parts=parts, why=why)


def _says_more(summary: str, case: Case) -> bool:
    """Whether a summary has another number, or another row's value of the field that answers, unless the task names it.

    Otherwise price and stock together would answer both questions, and the names of all categories any question for
    one: an agent that reads neither the question nor the result would be right.
    """

    def numbers(text: str) -> set[str]:
        return {number.removesuffix(".0") for number in re.findall(r"(?<![\w-])\d+(?:[.:-]\d+)*", text)}

    rows = [*case.start, *case.end]
    fields = {field for row in rows for field, value in row.items() if value == case.answer}
    others = {row[field] for row in rows for field in fields} - {case.answer}
    known = f"{case.answer} {case.job.task}"
    return bool(numbers(summary) - numbers(known)) or any(
        mentions(summary, other) and not mentions(known, other) for other in others
    )


# -- the servers --


class LocalServer:
    """One of the servers, loaded into this process. `module` is the name of its module in this folder."""

    def __init__(self, module: str) -> None:
        self._module = module

    @functools.cached_property
    def module(self) -> Any:
        """The server's module.

        Raises:
            ConfigError: the SDK is not installed.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"a task with an MCP server needs the official SDK: {INSTALL}")
        return importlib.import_module(f"art_tasks.desks.{self._module}")

    @property
    def states(self) -> RolloutStates[Any]:
        return self.module.states  # type: ignore[no-any-return]

    @functools.cached_property
    def tools(self) -> list[MCPTool]:
        """The tools in the exact text of a rollout: a tiny model has one token for text that it always saw alike."""
        listed = _result_of(self.module.server.list_tools())
        # On the wire the type of a schema comes first.
        return [
            MCPTool(tool.name, tool.description or "", {"type": "object"} | dict(tool.input_schema)) for tool in listed
        ]

    @functools.cached_property
    def tool_schemas(self) -> list[Any]:
        """The tools of a request: those of the server and `complete_task`."""
        return [*(tool.to_tool_schema() for tool in self.tools), complete_task_tool]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return its result as the text that a rollout shows to the model."""
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            result = getattr(self.module, name)(**arguments)
            if inspect.iscoroutine(result):
                result = _result_of(result)
        except ToolError as error:
            return f"Error: Error executing tool {name}: {error}"
        if isinstance(result, str):
            return result
        if result == []:
            return '{"result": []}'
        items = result if isinstance(result, list) else [result]
        return "\n".join(item if isinstance(item, str) else json.dumps(item, indent=2) for item in items)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop: the caller may be on one."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise RuntimeError("a tool of a local server waited for something")


# -- the task --

CALL_SKILL, ANSWER_SKILL = 0.8, 0.6
"""Probabilities in the warm start's play that a call is right, and that the right line of its result is read."""
WITH_TOOLS = 0.2
"""Share of the play that shows the tool descriptions, which are most of a conversation's tokens."""
_SPLITS: dict[int, Split] = {7: "val", 8: "test", 9: "test"}  # by the hash of a job's text; the others are for training


RUBRIC = (
    "A good rollout does exactly what the user asks about {subject}: it makes the change that was asked for and no "
    "other, {right}, or looks the answer up. It ends with complete_task and a summary that states the result which the "
    "tools returned, such as {result}, in few words. Calls that fail or are not needed make it worse. A wrong change "
    "is worse than no change, an answer that no tool result supports is a guess, and a rollout without complete_task "
    "is worst."
)


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
        job = case.job
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": job.task}]
        calls = [*job.before, job.call if rng.random() < CALL_SKILL or not job.slips else rng.choice(job.slips)]
        with self.server.states.using(self.open_state(case.start)):
            results = [self.server.call(*call) for call in calls]
        for call, result in zip(calls, results, strict=True):
            messages += [said(call), returned(result)]
        answer = job.answer(results[-1]) if rng.random() < ANSWER_SKILL else job.mistaken(results[-1])
        messages.append(said(("complete_task", {"summary": answer})))
        return Conversation(messages=messages, tools=self.server.tool_schemas if rng.random() < WITH_TOOLS else None)

    def _drill(self, rng: random.Random) -> Conversation:
        """Make short exchanges: a task and its call, with the result and the answer unless it needs several calls."""
        messages: list[Any] = []
        for _ in range(2):
            case = self._case(self._draw_inputs("train", rng)["case"])
            messages += [{"role": "user", "content": case.job.task}, said(case.job.calls[0])]
            if not case.job.before:
                with self.server.states.using(self.open_state(case.start)):
                    result = self.server.call(*case.job.call)
                messages += [returned(result), said(("complete_task", {"summary": case.job.answer(result)}))]
        return Conversation(messages=messages)

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
