"""The `Task` class: scenarios, a rollout with its reward, and defaults for training. `tasks/` has ready tasks.

    class Capitals(Task):
        name = "capitals"
        description = "name the capital of a country"
        headline_metric = "correct"

        def scenarios(self, split, *, seed, count):
            return [self.scenario(split, seed, i, {"country": "France", "capital": "Paris"}) for i in range(count)]

        async def rollout(self, model, scenario, *, rollout_index=0, step=None):
            ...

    register_task(Capitals())            # `get_task("capitals")` now returns it; the CLI takes `my_module:Capitals`

A rollout that fails because of the policy (an illegal move, a truncated answer) gets a reward. A rollout that fails for
any other reason (the server or a tool is down) raises an error, and never gets a reward of 0.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.config import ScheduleConfig
from art.errors import ConfigError, ContextLengthError, InvalidRequestError
from art.storage.layout import validate_name
from art.trajectory import Trajectory
from art.utils.attributes import describe_failure, load_attribute

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art.messages import Messages, Tools
    from art.model import Model

Split = Literal["train", "val", "test"]

LEARNING_RATE = 1e-5
"""Default learning rate of a LoRA adapter on a pretrained model."""
TINY_LEARNING_RATE = 3e-3
"""Default learning rate of a LoRA adapter on a tiny model, such as `art tiny-model` makes."""
TINY_MODEL_FILE = "tiny_model.json"
"""File that marks the folder of a tiny model."""

_BUILT_IN = {
    "search_emails": "art.tasks.search_emails:SearchEmails",
    "tic_tac_toe": "art.tasks.tic_tac_toe:TicTacToe",
    "yes_no_maybe": "art.tasks.yes_no_maybe:YesNoMaybe",
}
_registered: dict[str, Task] = {}


class Scenario(BaseModel):
    """One task input. All randomness of a rollout follows from `seed` and the rollout's index in its group."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Unique among the scenarios of a task. The same scenario has the same id in every run."""
    seed: int
    """Seed of the scenario's randomness, e.g. of an opponent's moves and of sampling."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """What the rollout needs to know, in values that JSON can hold."""


Cut = Literal["cut_short", "context_full"]
"""Why a rollout ended inside a turn: the answer was longer than allowed, or the conversation filled the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation for the warm start of a tiny model, in a task's format. It ends with an assistant message."""

    messages: Messages
    tools: Tools | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Default settings for training on a task, and for its tiny model. A task of your own can keep them all."""

    learning_rate: float | None = None
    """`None` means 3e-3 for a tiny model and 1e-5 for a pretrained one. At 5e-3, tiny models forget longer formats such
    as tool calls."""
    num_steps: int = 30
    """Number of training steps of a run."""
    groups_per_step: int = 16
    """Number of groups (scenarios) per training step."""
    rollouts_per_group: int = 8
    """Number of rollouts of each scenario."""
    num_minibatches: int = 4
    """Number of optimiser updates per training step."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning-rate schedule. `linear` and `cosine` fall from `learning_rate` to nearly 0 over the run."""
    warmup_steps: int = 0
    """Number of first steps in which the learning rate rises."""
    play_skill: float = 0.5
    """Mean skill, from 0 to 1, of the scripted play for a tiny model's warm start; see `Task.play`."""
    warm_start_steps: int = 600
    """Optimiser steps of a tiny model's warm start, each on 32 conversations of play. With half as many, the model may
    learn the format without reading what it is shown, and reinforcement learning then has nothing to improve."""
    tiny_vocab_size: int = 384
    """Largest vocabulary of a tiny model: 265 tokens for bytes and tags, the rest for the task's own words."""
    tiny_context: int = 1024
    """Context of a tiny model in tokens. Descriptions of many tools need more."""

    def for_base_model(self, base_model: str) -> TaskDefaults:
        """Return the defaults with the learning rate for this base model, unless `learning_rate` is set."""
        if self.learning_rate is not None:
            return self
        is_tiny = (Path(base_model).expanduser() / TINY_MODEL_FILE).is_file()
        return replace(self, learning_rate=TINY_LEARNING_RATE if is_tiny else LEARNING_RATE)

    def rate_schedule(self, num_steps: int) -> float | ScheduleConfig:
        """Return the learning rate, by step if it changes, in a run of `num_steps`."""
        peak = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        if self.schedule == "constant" and not self.warmup_steps:
            return peak
        total_steps = None if self.schedule == "constant" else num_steps
        return ScheduleConfig(type=self.schedule, peak=peak, warmup_steps=self.warmup_steps, total_steps=total_steps)


class Task(ABC):
    """Base class of tasks: what a policy learns to do. One instance runs many rollouts at once, so it holds no state of
    a single one."""

    name: ClassVar[str]
    """Name in commands, and of the default project: letters, digits, `.`, `_` and `-`."""
    description: ClassVar[str]
    """What the policy learns to do, in a few words."""
    headline_metric: ClassVar[str] = "reward"
    """The trajectory metric that tells people how good a policy is, if possible 0 or 1 per rollout; or `reward`."""
    defaults: ClassVar[TaskDefaults] = TaskDefaults()
    needs_reading: ClassVar[bool] = True
    """Whether the best answer depends on what the policy is shown. If so, a warm start warns of a tiny model whose
    answers do not depend on it."""

    @abstractmethod
    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Return `count` scenarios, the same for the same arguments. No scenario may be in two splits.

        A held-out split with fewer scenarios returns all of them.
        """

    @abstractmethod
    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Run the policy on a scenario once, and set the trajectory's `reward` and `metrics`.

        Args:
            rollout_index: index of the rollout in its group. Rollouts of one group must use different random numbers.
            step: checkpoint to sample from; `None` is the newest.
        """

    def prompt_scenario(self, prompt: str) -> Scenario:
        """Make a scenario in which the user says `prompt`.

        Raises:
            ConfigError: the task has no user message, e.g. in a game.
        """
        raise ConfigError(f"task {self.name!r} does not take a prompt; leave it out, or implement `prompt_scenario`")

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make one conversation of scripted play in the format of a rollout, for the warm start of a tiny model.

        Args:
            skill: probability that a move is good; otherwise it is any legal move. What a good move is must depend on
                what the player has been shown, or the model learns the format without reading. Play without mistakes
                would leave nothing to learn.

        Raises:
            ConfigError: the task has no scripted play.
        """
        raise ConfigError(
            f"task {self.name!r} has no scripted play for the warm start of a tiny model; implement `play`, or train "
            "a pretrained base model"
        )

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Make `count` conversations of `play`, by players of different skill around `defaults.play_skill`.

        A task may override this in place of `play`, e.g. to add exercises that are not whole rollouts.
        """
        return _play(self, rng, count, self.defaults.play_skill)

    def score_messages(self, messages: list[dict[str, Any]]) -> float | tuple[float, str]:
        """Score a rollout from 0 to 1 by its messages alone, optionally with an explanation.

        `art judge serve --task` answers with these scores, so training with a judge can be tried without a judge model.

        Raises:
            ConfigError: the task does not implement this.
        """
        raise ConfigError(
            f"task {self.name!r} cannot score a rollout by its messages; implement `score_messages(messages)`, which "
            "returns 0 to 1"
        )

    def render_trajectory(self, trajectory: Trajectory) -> str:
        """Format a rollout for people to read."""
        return "\n".join([*describe_messages(trajectory.messages()), f"reward: {trajectory.reward:g}"])

    def scenario(self, split: Split, seed: int, index: int, inputs: dict[str, Any]) -> Scenario:
        """Make scenario `index` of a split, with its own id and seed."""
        scenario_id = f"{self.name}/{split}/{seed}/{index}"
        return Scenario(id=scenario_id, seed=derive_seed(scenario_id), inputs=inputs)


def describe_messages(messages: Iterable[Any]) -> list[str]:
    """Format messages as lines for people to read, with role and content, and tool calls below."""
    lines = []
    for message in messages:
        lines.append(f"{message['role']}: {message.get('content') or ''}".rstrip())
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        lines += [f"  {function['name']} {function['arguments']}" for function in calls]
    return lines


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2^63) from all parts and their order. It is the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def register_task(task: Task) -> Task:
    """Make a task available by its name, and return it.

    Raises:
        ConfigError: the argument is not a task, or another task has the name.
    """
    if not isinstance(task, Task):
        hint = "; pass an instance: register_task(MyTask())" if isinstance(task, type) else ""
        raise ConfigError(f"`register_task` takes a Task, got {task!r}{hint}")
    known = _registered.get(task.name)
    if task.name in _BUILT_IN or (known is not None and type(known) is not type(task)):
        raise ConfigError(f"there is already a task named {task.name!r}; give yours another `name`")
    _registered[task.name] = task
    return task


def list_tasks() -> list[str]:
    return sorted({*_BUILT_IN, *_registered})


def get_task(name: str) -> Task:
    """Return a task by its registered name, or from `module:attribute` or `path/to/file.py:attribute`.

    Raises:
        ConfigError: there is no such task, or it cannot be used.
    """
    if name in _registered:
        return _registered[name]
    path = _BUILT_IN.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"no task is named {name!r}; there are {', '.join(list_tasks())}. Name a task of your own as "
            "`module:attribute`, or call `register_task` first"
        )
    task = load_attribute(path, "task")
    if isinstance(task, type) and issubclass(task, Task):
        task = _instance(path, task)
    if not isinstance(task, Task):
        raise ConfigError(f"task {path!r}: expected a Task or a subclass of it, got {task!r}")
    if missing := [field for field in ("name", "description") if not isinstance(getattr(task, field, None), str)]:
        example = f'`{missing[0]} = "{path.rpartition(":")[2].lower()}"`'
        raise ConfigError(
            f"task {path!r}: class {type(task).__name__} has no string {' and '.join(missing)}; add e.g. {example}"
        )
    try:
        validate_name(task.name, param="name")
    except InvalidRequestError as error:  # the name becomes part of the names of models and files
        raise ConfigError(f"task {path!r}: its {error}") from error
    return task


def _instance(path: str, task: type[Task]) -> Task:
    if missing := sorted(task.__abstractmethods__):
        raise ConfigError(f"task {path!r}: class {task.__name__} does not implement {', '.join(missing)}")
    try:
        return task()
    except Exception as error:
        raise ConfigError(
            f"task {path!r}: {task.__name__}() failed{describe_failure(error)}. If the class needs arguments, make an "
            "instance in the module and give the instance's name"
        ) from error


def draw_scenarios(task: Task, split: Split, *, seed: int, count: int) -> list[Scenario]:
    """Draw scenarios of a task by `task.scenarios(...)`, and check what it returns.

    Raises:
        ConfigError: the result is not a list of scenarios, has too few for training, or none for a held-out split.
    """
    result = task.scenarios(split, seed=seed, count=count)
    scenarios = list(result) if isinstance(result, Iterable) else []
    call = f"task {task.name!r}: scenarios({split!r}, seed={seed}, count={count})"
    if wrong := [item for item in scenarios if not isinstance(item, Scenario)]:
        raise ConfigError(f"{call} must return a list of `Scenario`, e.g. from `self.scenario(...)`; got {wrong[0]!r}")
    fewest = count if split == "train" else min(count, 1)
    if not fewest <= len(scenarios) <= count:
        raise ConfigError(
            f"{call} returned {len(scenarios)} scenarios, expected {count}. If there are not that many to train on, "
            "repeat some"
        )
    return scenarios


def _play(task: Task, rng: random.Random, count: int, mean_skill: float) -> list[Conversation]:
    """Make conversations of `task.play`, with skills drawn uniformly from the widest interval around the mean.

    A model that has seen weak and strong players can be moved towards the strong ones by reinforcement learning.
    """
    spread = min(mean_skill, 1 - mean_skill)
    return [task.play(rng, rng.uniform(mean_skill - spread, mean_skill + spread)) for _ in range(count)]


def draw_conversations(task: Task, *, seed: int, count: int, skill: float | None = None) -> list[Conversation]:
    """Draw scripted play of a task by `task.warm_start_conversations(...)`, and check what it returns.

    Args:
        skill: mean skill of the play, from 0 to 1; `None` takes the task's own.

    Raises:
        ConfigError: the task has no scripted play, the result is not a list of conversations that end with an answer,
            or the task does not let the skill be set.
    """
    if skill is not None and not 0 <= skill <= 1:
        raise ConfigError(f"the skill of play must be from 0 to 1, got {skill}")
    if skill is not None and type(task).warm_start_conversations is not Task.warm_start_conversations:
        raise ConfigError(
            f"task {task.name!r} overrides `warm_start_conversations`, so its skill cannot be set; implement "
            "`play(rng, skill)` instead"
        )
    rng = random.Random(seed)
    result = task.warm_start_conversations(rng, count) if skill is None else _play(task, rng, count, skill)
    conversations = list(result) if isinstance(result, Iterable) else []
    call = f"task {task.name!r}: warm_start_conversations(rng, {count})"
    if len(conversations) != count:
        raise ConfigError(f"{call} returned {len(conversations)} conversations, expected {count}")
    for conversation in conversations:
        if not isinstance(conversation, Conversation):
            raise ConfigError(f"{call} must return a list of `Conversation`; got {conversation!r}")
        if not conversation.messages or conversation.messages[-1]["role"] != "assistant":
            raise ConfigError(f"{call}: a conversation must end with an assistant message; got {conversation!r}")
    return conversations


async def sample_answer(
    model: Model[Any, Any], trajectory: Trajectory, *, step: int | None = None, **request: Any
) -> Choice:
    """Ask the policy for one answer to the trajectory's messages, append it and return it.

    Args:
        request: further arguments of the request: `temperature`, `seed`, `max_completion_tokens`, ...
    """
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=trajectory.messages(), **request
    )
    choice: Choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    return choice


async def take_turn(
    model: Model[Any, Any], trajectory: Trajectory, *, step: int | None = None, **request: Any
) -> list[Any] | Cut:
    """Ask the policy for one answer, with the trajectory's tools, append it, and count it in the metric `num_turns`.

    Returns:
        The answer's tool calls, or the reason why the rollout ended in this turn: `cut_short` (the answer was too long)
        or `context_full`. If already the first prompt is too long for the context, the error is raised.
    """
    num_turns = trajectory.metrics.get("num_turns", 0)
    try:
        choice = await sample_answer(model, trajectory, step=step, tools=trajectory.tools or [], **request)
    except Exception as error:
        if getattr(error, "code", None) == ContextLengthError.code and num_turns:
            return "context_full"
        raise
    trajectory.metrics["num_turns"] = num_turns + 1
    return "cut_short" if choice.finish_reason == "length" else list(choice.message.tool_calls or ())
