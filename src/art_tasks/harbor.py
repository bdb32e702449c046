"""Task directories of Harbor as a task: an agent with the tools `bash` and `submit`, and the directory's own verifier.

    task = HarborTask("my-tasks")                                  # art train harbor:my-tasks --base-model ...
    trajectory = await task.rollout(model, task.scenarios("train", seed=0, count=1)[0])

Each rollout has a fresh container of the environment's image. When the agent submits or runs out of turns or time, all
its processes are ended, `tests/` is copied to /tests, and `tests/test.sh` writes the reward.

What a directory holds is in `art_tasks.harbor_folders`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import shlex
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from art.errors import ConfigError, ToolServerError
from art.model import TrainableModel
from art.task import Player, Scenario, Split, TaskDefaults, TaskOptions, derive_seed, take_turn
from art.task.interface import PlacedTask
from art.trajectory import Trajectory
from art_agents.address import MOUNT, open_address
from art_agents.containers import Container, ContainerEngine, Limits
from art_agents.harness import Harness, find_harness
from art_agents.run import run_agent
from art_tasks.harbor_folders import TaskFolder, find_folders

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

FEWEST_BY_HASH = 30
"""Number of tasks from which the last digit of the hash alone decides, so that further tasks move none."""
_TENTHS: dict[int, Split] = {8: "val", 9: "test"}

_LOGS = "/logs/verifier"
_SMALL_CONTEXT = 32_768
"""Tokens that an agent counts on while the engine starts again."""


class HarborOptions(TaskOptions):
    """Options of tasks of Harbor."""

    not_in_label: ClassVar[frozenset[str]] = frozenset({"max_containers", "program"})
    agent: str | None = None
    """A coding agent that does the tasks as it is, such as claude-code or "command:my-agent"; see docs/agents.md. By
    default the model is asked with the tools `bash` and `submit`."""
    train_side_requests: bool = False
    """Whether what the agent asks besides the task, such as a title, belongs to its rollout and is trained."""
    max_turns: int = Field(default=30, ge=1)
    """Largest number of answers of the model."""
    command_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which a command is killed. The task's own time limit for the agent holds as well."""
    max_containers: int = Field(default=8, ge=1)
    """Largest number of rollouts at once, each with a container of its own."""
    program: Literal["podman", "docker"] | None = None
    """What runs containers (default: Podman, or Docker where there is no Podman)."""
    output_chars: int = Field(default=8000, ge=100)
    """Characters of a command's output that the model sees: the first and the last half."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer of the model."""

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        own = ("command_timeout", "output_chars", "max_completion_tokens")
        set_too = [name for name in own if getattr(self, name) != type(self).model_fields[name].default]
        if self.agent is not None and set_too:
            raise ValueError(f"`{set_too[0]}` has no effect on `agent` {self.agent!r}, which decides it: leave it out")
        return self


class HarborTask(PlacedTask):
    """Trains on task directories of Harbor, in containers of this machine: see docs/integrations.md.

    A hash of a task's name decides its split. Metrics: `solved` (1 for a reward of at least 1), `num_turns`,
    `num_commands`, `num_failed_commands`, `malformed_calls`, and each value of `reward.json` as `reward/NAME`.
    `metadata["ending"]` is `submitted`, `no_call`, `out_of_turns`, `out_of_time`, `out_of_disk`, `cut_short`,
    `context_full` or `changed_tools`. All but the first are the policy's fault; what the agent has done until then is
    checked and rewarded, except that `changed_tools` has reward 0 without a check: the agent has replaced programs that
    run it. The task's time limit for the agent counts the time of its commands, not that of the model's server.
    """

    name: ClassVar[str] = "harbor"
    description: ClassVar[str] = "task directories of Harbor, in containers on this machine"
    place_word: ClassVar[str] = "DIR"
    place_help: ClassVar[str] = "a task directory of Harbor, or a folder of them"
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
            ConfigError: there is no task, one cannot be done here, or this machine cannot run containers.
        """
        super().__init__(**options)
        self.folders = {folder.name: folder for folder in find_folders(Path(directory).expanduser())}
        self._engine = ContainerEngine.find(self.options.program)
        self._images: dict[str, str] = {}
        self._splits = split_names(self.folders)
        self._harness = None if self.options.agent is None else find_harness(self.options.agent)
        if self.options.train_side_requests and not (self._harness and self._harness.side_requests):
            raise ConfigError(
                f"`train_side_requests` has no effect on `agent` {self.options.agent!r}, which makes none: leave it out"
            )
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
        """Let the agent work in a fresh container, and reward what it leaves.

        Raises:
            ConfigError: the image cannot be built.
            ToolServerError: the container failed, or the verifier wrote no reward.
        """
        folder = self.folders[scenario.inputs["task"]]
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.options.max_containers))
        async with gate:
            environment, plain = folder.settings.environment, Limits()
            # Rollouts of a task that begin together get the same image from the program's cache.
            image = self._images.get(folder.name) or await self._build(folder)
            self._images[folder.name] = image
            limits = Limits(
                memory_mb=environment.memory_mb or plain.memory_mb, file_mb=environment.storage_mb or plain.file_mb,
                disk_mb=environment.storage_mb or plain.disk_mb, cpus=environment.cpus,
            )  # fmt: skip
            if self._harness is not None:
                return await self._by_agent(self._harness, model, scenario, image, limits, step)
            workdir = environment.workdir or await self._engine.workdir(image)
            trajectory = Trajectory(
                messages_and_choices=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"{folder.instruction}\n\nWorking directory: {workdir}"},
                ],
                tools=TOOLS,
                metadata={"scenario_id": scenario.id, "task": folder.name},
                metrics={"num_turns": 0, "num_commands": 0, "num_failed_commands": 0, "malformed_calls": 0},
            )  # fmt: skip
            async with self._engine.open(image, limits) as container:
                await _prepare(folder, container)
                work = _Work(folder, container, self.options)
                ending = await self._work(model, trajectory, work, derive_seed(scenario.seed, rollout_index), step)
                ending, trajectory.reward, parts = await check(folder, container, ending)
        trajectory.metrics |= {"solved": float(trajectory.reward >= 1.0), **parts}
        trajectory.metadata |= {"ending": ending, "outcome": "ok" if ending == "submitted" else "policy_fault"}
        return trajectory.finish()

    async def _build(self, folder: TaskFolder) -> str:
        """Build the image of a task, with the agent as a layer on it if there is one. Returns its id."""
        environment, seconds = folder.settings.environment, folder.settings.environment.build_timeout_sec
        image = environment.docker_image
        image = image or await self._engine.build(folder.path / "environment", timeout_s=seconds)
        if self._harness is None or self._harness.installer is None:
            return image
        return await self._engine.build_layer(self._harness.dockerfile(image), timeout_s=seconds)

    async def _by_agent(
        self, harness: Harness, model: Model[Any, Any], scenario: Scenario, image: str, limits: Limits, step: int | None
    ) -> Trajectory:
        """Let a coding agent work in a fresh container, and reward what it leaves.

        Raises:
            ConfigError: no ART server answers for the model, so that nothing would record what the agent asks.
        """
        if not isinstance(model, TrainableModel):
            raise ConfigError(f"{harness.name} needs a model whose requests an ART server records, a TrainableModel")
        folder, rollout_id = self.folders[scenario.inputs["task"]], f"{harness.name}-{uuid.uuid4().hex}"
        environment, started = folder.settings.environment, datetime.now(UTC)
        has_side = bool(harness.side_requests) and not self.options.train_side_requests
        rollout_ids = [rollout_id, f"{rollout_id}-side"] if has_side else [rollout_id]
        for name in rollout_ids:
            await model.put_rollout(name, sampling={"temperature": 1.0})
        url, side_url = (model.rollout_base_url(name) for name in (rollout_id, rollout_ids[-1]))
        max_context = (await model.backend().get_status(model)).max_context or _SMALL_CONTEXT
        async with (
            open_address(url, model.inference_api_key or "", self.options.max_turns, side_url=side_url) as address,
            self._engine.open(image, limits, mount=(address.folder, MOUNT)) as container,
        ):
            await _prepare(folder, container)
            run = await run_agent(
                harness, container, address, folder.instruction, model_name=model.get_inference_name(step),
                max_context=max_context, cwd=environment.workdir, env=environment.env,
                timeout_s=folder.settings.agent.timeout_sec,
            )  # fmt: skip
            ending, reward, parts = await check(folder, container, run.ending)
        trajectory = await model.get_rollout(rollout_id)
        trajectory.reward, trajectory.start_time = reward, started
        trajectory.metrics |= {
            "solved": float(reward >= 1.0), "num_turns": address.num_answers, "exit_code": run.code, **parts
        }  # fmt: skip
        trajectory.metadata |= {
            "scenario_id": scenario.id, "task": folder.name, "agent": harness.name, "ending": ending,
            "outcome": "ok" if ending == "finished" else "policy_fault", "printed": run.output,
        }  # fmt: skip
        return trajectory.finish()

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
                if work.container.is_full.is_set():
                    return "out_of_disk"
                if work.seconds_left <= 0:
                    return "out_of_time"
        return "out_of_turns"

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Play the directory's own solution, by the same tools as the agent."""
        folder = self.folders[scenario.inputs["task"]]
        packed = base64.b64encode(folder.solution()).decode()
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in folder.settings.solution.env.items())
        solve = f"base64 -d <<'END' | tar -xf - -C /\n{packed}\nEND\n{env} bash /solution/solve.sh"
        calls = iter([("bash", {"command": solve}), ("submit", {})])
        functions = ({"name": name, "arguments": arguments} for name, arguments in calls)
        return lambda messages, tools: {"tool_calls": [{"function": next(functions)}]}


class _Work:
    """The agent's side of one rollout."""

    def __init__(self, folder: TaskFolder, container: Container, options: HarborOptions) -> None:
        self._folder, self.container, self._options = folder, container, options
        self.seconds_left = folder.settings.agent.timeout_sec
        """Time that its commands may still take."""

    async def do(self, trajectory: Trajectory, function: Any) -> str:
        """Run a call of `bash`. Returns what the model is shown."""
        try:
            command = json.loads(function.arguments)["command"]
        except (ValueError, LookupError, TypeError, RecursionError):
            command = None
        if function.name != "bash" or not isinstance(command, str) or "\0" in command:
            trajectory.metrics["malformed_calls"] += 1
            return 'Error: the tools are bash, with arguments like {"command": "ls"}, and submit, with {}'
        trajectory.metrics["num_commands"] += 1
        seconds = min(self._options.command_timeout, self.seconds_left)
        environment, started = self._folder.settings.environment, time.monotonic()
        finished = await self.container.run(command, cwd=environment.workdir, env=environment.env, timeout_s=seconds)
        self.seconds_left -= seconds if finished.timed_out else time.monotonic() - started
        trajectory.metrics["num_failed_commands"] += finished.code != 0
        shown, limit = finished.output.rstrip(), self._options.output_chars
        if len(shown) > limit:
            gap = len(shown) - limit
            shown = f"{shown[: limit // 2]}\n[... {gap} characters left out ...]\n{shown[-(limit // 2) :]}"
        if finished.timed_out:
            return f"{shown}\n[killed after {seconds:.0f} s]".lstrip()
        return f"{shown}\n[exit code {finished.code}]".lstrip() if finished.code else shown or "[no output]"


async def _prepare(folder: TaskFolder, container: Container) -> None:
    """Put what a plain folder begins with into a fresh container."""
    if folder.is_plain:
        await container.run(f"mkdir -p {shlex.quote(str(folder.settings.environment.workdir))}", timeout_s=30)
        if (files := folder.files()) is not None:
            await container.put(files)


async def check(folder: TaskFolder, container: Container, ending: str) -> tuple[str, float, dict[str, float]]:
    """End all processes of the agent and run the verifier. Returns how the rollout ended, with reward and metrics."""
    await container.kill_all()
    if await container.changed_tools():
        return "changed_tools", 0.0, {}
    return ending, *await verify(folder, container)


async def verify(folder: TaskFolder, container: Container) -> tuple[float, dict[str, float]]:
    """Run the verifier of a task. Returns the reward, and the values of `reward.json` as metrics.

    The check of a plain folder says by its exit code whether the task is done. What it wrote holds only if it is, so
    that a program which it runs cannot write the reward.

    Raises:
        ToolServerError: it wrote no reward, or none that is a number.
    """
    await container.run(f"rm -rf /tests {_LOGS} && mkdir -p {_LOGS}", timeout_s=30)
    await container.put(folder.tests())
    environment, verifier = folder.settings.environment, folder.settings.verifier
    done = await container.run(
        "bash /tests/test.sh", cwd=environment.workdir, env=environment.env | verifier.env,
        timeout_s=verifier.timeout_sec,
    )  # fmt: skip
    read = f"cd {_LOGS} && for f in reward.json reward.txt; do [ -f $f ] && head -c 10000 $f && exit; done; exit 9"
    written = await container.run(read, timeout_s=30)
    how = f"timed out after {verifier.timeout_sec:g} s" if done.timed_out else f"ended with code {done.code}"
    tail = f"tests/test.sh of {folder.path} {how}: {done.output.strip()[-1500:]}"
    if folder.is_plain and (done.code or written.code):
        return float(done.code == 0), {}
    if done.timed_out or written.code:
        raise ToolServerError(f"the verifier wrote no reward to {_LOGS}/reward.txt or reward.json; {tail}")
    try:
        return read_reward(written.output)
    except ValueError as error:
        raise ToolServerError(f"the verifier's reward {written.output[:200]!r} {error}; {tail}") from None


def read_reward(text: str) -> tuple[float, dict[str, float]]:
    """Read the text of `reward.txt` or `reward.json`.

    Example: "1" gives 1.0; {"reward": 0.5, "style": 1} gives 0.5 and metrics `reward/reward`, `reward/style`.

    Raises:
        ValueError: it is no number, or several of which none is named `reward`.
    """
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError("is neither a number nor JSON") from None
    parts = value if isinstance(value, dict) else {"reward": value}
    numbers = {key: float(part) for key, part in parts.items() if isinstance(part, int | float)}
    reward = numbers.get("reward", next(iter(numbers.values())) if len(numbers) == 1 else None)
    if reward is None or len(numbers) < len(parts) or not all(map(math.isfinite, numbers.values())):
        raise ValueError("must be one finite number, or JSON of numbers with one named `reward`")
    return reward, {f"reward/{key}": number for key, number in numbers.items()} if isinstance(value, dict) else {}


def split_names(names: Iterable[str]) -> dict[Split, list[str]]:
    """Divide names into splits, eight tenths for training. Each name is in one.

    With fewer than 30 names, the one with the lowest hash is the test split and the next one the validation split (each
    one tenth, at least one). Two names are for training and test; a single name is for training.
    """
    ordered = sorted(names, key=lambda name: (derive_seed(name), name))
    splits: dict[Split, list[str]] = {"train": [], "val": [], "test": []}
    if len(ordered) >= FEWEST_BY_HASH:
        for name in sorted(ordered):
            splits[_TENTHS.get(derive_seed(name) % 10, "train")].append(name)
        return splits
    num_test = max(len(ordered) // 10, 1) if len(ordered) > 1 else 0
    num_val = num_test if len(ordered) > 2 else 0
    splits["test"], splits["val"] = ordered[:num_test], ordered[num_test : num_test + num_val]
    splits["train"] = sorted(ordered[num_test + num_val :])
    return splits
