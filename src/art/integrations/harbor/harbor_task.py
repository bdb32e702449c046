"""Task directories of Harbor as a task: an agent with the tools `bash` and `submit`, and the directory's own verifier.

    task = HarborTask("my-tasks")                                  # art train harbor:my-tasks --base-model ...
    trajectory = await task.rollout(model, task.scenarios("train", seed=0, count=1)[0])

Each rollout has a fresh sandbox with the environment's files. When the agent submits or runs out of turns or time, all
its processes are ended, `tests/` is copied to /tests, and `tests/test.sh` writes the reward.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from pydantic import Field

from art.integrations.harbor.sandbox import Limits, Sandbox, check_sandbox, open_sandbox
from art.integrations.harbor.splits import split_names
from art.integrations.harbor.task_folder import TaskFolder, find_folders
from art.integrations.harbor.verifier import verify
from art.task import Player, Scenario, Split, TaskDefaults, TaskOptions, derive_seed, take_turn
from art.task.placed import PlacedTask
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

SYSTEM = (
    "You solve a task on a Linux machine by calling the tool bash. Each call starts in the working directory; files "
    "and background processes stay. There is no network. When the task is done, call submit."
)


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    _tool("bash", "Run a command with bash and see its output", {"command": {"type": "string"}}),
    _tool("submit", "End the task and have it checked", {}),
]


class HarborOptions(TaskOptions):
    """Options of tasks of Harbor."""

    not_in_label: ClassVar[frozenset[str]] = frozenset({"max_sandboxes"})
    max_turns: int = Field(default=30, ge=1)
    """Largest number of answers of the model."""
    command_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which a command is killed. The task's own time limit for the agent holds as well."""
    max_sandboxes: int = Field(default=8, ge=1)
    """Largest number of rollouts at once, each with a sandbox of its own."""
    disk_mb: int = Field(default=512, ge=1)
    """Most MB that a rollout can write, unless the task asks for less. They lie in memory."""
    output_chars: int = Field(default=8000, ge=100)
    """Characters of a command's output that the model sees: the first and the last half."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer of the model."""


class HarborTask(PlacedTask):
    """Trains on task directories of Harbor, without containers: see docs/integrations.md.

    A hash of a task's name decides its split. Metrics: `solved` (1 for a reward of at least 1), `num_turns`,
    `num_commands`, `num_failed_commands`, `malformed_calls`, and each value of `reward.json` as `reward/NAME`.
    `metadata["ending"]` is `submitted`, `no_call`, `out_of_turns`, `out_of_time`, `cut_short` or `context_full`. All
    but the first are the policy's fault; what the agent has done until then is checked and rewarded. The task's time
    limit for the agent counts the time of its commands, not that of the model's server.
    """

    name: ClassVar[str] = "harbor"
    description: ClassVar[str] = "task directories of Harbor, in a sandbox on this machine"
    headline_metric: ClassVar[str] = "solved"
    options_class = HarborOptions
    options: HarborOptions
    rubric: ClassVar[str | None] = (
        "The agent was asked to reach a state of files on a machine. A good rollout looks at what is there first, does "
        "what the instruction asks and no more, checks its result by a command, and then submits. A rollout that does "
        "not submit, claims what its commands do not show, or searches for the tests, is bad."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=50, groups_per_step=8, num_minibatches=1, schedule="constant"
    )

    def __init__(self, directory: str | Path, **options: Any) -> None:
        """
        Args:
            directory: a task directory, or a folder of task directories.

        Raises:
            ConfigError: there is no task, one needs a container, or this machine cannot make a sandbox.
        """
        super().__init__(**options)
        self.folders = {folder.name: folder for folder in find_folders(Path(directory).expanduser())}
        check_sandbox()
        self._splits = split_names(self.folders)
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def place_name(self) -> str:
        """The folder's name, and a hash of its path, since many folders are called `tasks`."""
        path = Path(str(self.place)).expanduser().resolve()
        return f"{path.name}-{derive_seed(str(path)) % 2**32:08x}"

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw tasks of a split: in training at random, none twice before all were drawn; else each once."""
        names = self._splits[split]
        if split != "train":
            return [self.scenario(split, seed, index, {"task": name}) for index, name in enumerate(names[:count])]
        rng = random.Random(derive_seed(self.name, split, seed))
        drawn: list[str] = []
        while len(drawn) < count:
            drawn += rng.sample(names, min(len(names), count - len(drawn)))
        return [self.scenario(split, seed, index, {"task": name}) for index, name in enumerate(drawn)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Let the agent work in a fresh sandbox, and reward what it leaves.

        Raises:
            ToolServerError: the sandbox failed, or the verifier wrote no reward.
        """
        folder = self.folders[scenario.inputs["task"]]
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.options.max_sandboxes))
        trajectory = Trajectory(
            messages_and_choices=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{folder.instruction}\n\nWorking directory: {folder.image.workdir}"},
            ],
            tools=TOOLS,
            metadata={"scenario_id": scenario.id, "task": folder.name},
            metrics={"num_turns": 0, "num_commands": 0, "num_failed_commands": 0, "malformed_calls": 0},
        )  # fmt: skip
        async with gate, open_sandbox(self._limits(folder)) as sandbox:
            await sandbox.put(folder.environment())
            await sandbox.run(f"mkdir -p {shlex.quote(folder.image.workdir)}", timeout_s=10)
            work = _Work(folder, sandbox, self.options)
            ending = await self._work(model, trajectory, work, derive_seed(scenario.seed, rollout_index), step)
            await sandbox.kill_all()
            trajectory.reward, parts = await verify(folder, sandbox)
        trajectory.metrics |= {"solved": float(trajectory.reward >= 1.0), **parts}
        trajectory.metadata |= {"ending": ending, "outcome": "ok" if ending == "submitted" else "policy_fault"}
        return trajectory.finish()

    def _limits(self, folder: TaskFolder) -> Limits:
        disk_mb = min(self.options.disk_mb, folder.storage_mb or self.options.disk_mb)
        return Limits(disk_mb=disk_mb, memory_mb=folder.memory_mb or Limits().memory_mb)

    async def _work(
        self, model: Model[Any, Any], trajectory: Trajectory, work: _Work, seed: int, step: int | None
    ) -> str:
        """Let the agent take turns. Returns how it ended."""
        request: dict[str, Any] = {"temperature": 1.0}
        if self.options.max_completion_tokens is not None:
            request["max_completion_tokens"] = self.options.max_completion_tokens
        for turn in range(self.options.max_turns):
            calls = await take_turn(model, trajectory, step=step, seed=derive_seed(seed, turn), **request)
            if isinstance(calls, str):
                return calls
            if not calls:
                return "no_call"
            for call in calls:
                if call.function.name == "submit":
                    return "submitted"
                answer = {"role": "tool", "tool_call_id": call.id, "content": await work.do(trajectory, call.function)}
                trajectory.messages_and_choices.append(answer)  # type: ignore[arg-type]
                if work.seconds_left <= 0:
                    return "out_of_time"
        return "out_of_turns"

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Play the directory's own solution, by the same tools as the agent."""
        folder = self.folders[scenario.inputs["task"]]
        packed = base64.b64encode(folder.solution()).decode()
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in folder.solution_env.items())
        solve = f"base64 -d <<'END' | tar -xf - -C /\n{packed}\nEND\n{env} bash /solution/solve.sh"
        calls = iter([("bash", {"command": solve}), ("submit", {})])
        return lambda messages, tools: _calling(*next(calls))


def _calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


class _Work:
    """The agent's side of one rollout."""

    def __init__(self, folder: TaskFolder, sandbox: Sandbox, options: HarborOptions) -> None:
        self._folder, self._sandbox, self._options = folder, sandbox, options
        self.seconds_left = folder.agent_timeout_s
        """Time that its commands may still take."""

    async def do(self, trajectory: Trajectory, function: Any) -> str:
        """Run a call of `bash`. Returns what the model is shown."""
        command = _command_in(function)
        if command is None:
            trajectory.metrics["malformed_calls"] += 1
            return 'Error: the tools are bash, with arguments like {"command": "ls"}, and submit, with {}'
        trajectory.metrics["num_commands"] += 1
        seconds = min(self._options.command_timeout, self.seconds_left)
        image, started = self._folder.image, time.monotonic()
        finished = await self._sandbox.run(command, cwd=image.workdir, env=image.env, timeout_s=seconds)
        self.seconds_left -= seconds if finished.timed_out else time.monotonic() - started
        trajectory.metrics["num_failed_commands"] += finished.code != 0
        shown, limit = finished.output.rstrip(), self._options.output_chars
        if len(shown) > limit:
            gap = len(shown) - limit
            shown = f"{shown[: limit // 2]}\n[... {gap} characters left out ...]\n{shown[-(limit // 2) :]}"
        if finished.timed_out:
            return f"{shown}\n[killed after {seconds:.0f} s]".lstrip()
        return f"{shown}\n[exit code {finished.code}]".lstrip() if finished.code else shown or "[no output]"


def _command_in(function: Any) -> str | None:
    try:
        arguments = json.loads(function.arguments)
        command = arguments["command"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return command if function.name == "bash" and isinstance(command, str) and "\0" not in command else None
