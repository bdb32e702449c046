"""A task: scenarios, a rollout with its reward, and defaults that train it. `tasks/` holds the ready ones.

    class Capitals(Task):
        name = "capitals"
        description = "name the capital of a country"
        headline_metric = "correct"

        def scenarios(self, split, *, seed, count):
            return [self.scenario(split, seed, i, {"country": "France", "capital": "Paris"}) for i in range(count)]

        async def rollout(self, model, scenario, *, rollout_index=0, step=None):
            ...

    register_task(Capitals())            # then found by `get_task("capitals")`, and by `art train my_module:Capitals`

A rollout that the policy spoils (an illegal move, an answer cut short) is scored; one that fails for any other reason
(the server is gone, a tool is down) raises, and is never a reward of 0.
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

from art.errors import ConfigError, ContextLengthError, InvalidRequestError
from art.storage.layout import validate_name
from art.trajectory import Trajectory
from art.utils.attributes import describe_failure, load_attribute

if TYPE_CHECKING:
    from art.messages import Messages, Tools
    from art.model import Model

Split = Literal["train", "val", "test"]

LEARNING_RATE = 1e-5
"""The learning rate of a LoRA on a pretrained model."""
TINY_LEARNING_RATE = 3e-3
"""The learning rate of a LoRA on a tiny model."""
TINY_MODEL_FILE = "tiny_model.json"
"""What the folder of a tiny model has beside a model's usual files."""

_BUILT_IN = {
    "search_emails": "art.tasks.search_emails:SearchEmails",
    "tic_tac_toe": "art.tasks.tic_tac_toe:TicTacToe",
    "yes_no_maybe": "art.tasks.yes_no_maybe:YesNoMaybe",
}
_registered: dict[str, Task] = {}


class Scenario(BaseModel):
    """One task input. Everything that a rollout draws at random follows from `seed` and the rollout's index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Unique among all scenarios of a task, and the same for the same scenario in every run."""
    seed: int
    inputs: dict[str, Any] = Field(default_factory=dict)


Cut = Literal["cut_short", "context_full"]
"""What ends a rollout in the middle of a turn: an answer longer than allowed, a conversation as long as the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A whole conversation that shows a model the format of a task; it ends with an assistant message."""

    messages: Messages
    tools: Tools | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """How a task is trained where nobody says otherwise. A task of one's own can leave all of it as it is."""

    learning_rate: float | None = None
    """`None`: 3e-3 for a tiny model, 1e-5 for a pretrained one. At 5e-3 tiny models forget longer formats, such as that
    of tool calls."""
    num_steps: int = 30
    groups_per_step: int = 16
    rollouts_per_group: int = 8
    num_minibatches: int = 4
    schedule: Literal["constant", "linear"] = "linear"
    """`linear` falls from `learning_rate` to nearly 0 over the run."""
    play_skill: float = 0.5
    """Mean skill, from 0 to 1, of the play that warms a tiny model up; see `Task.play`."""
    warm_start_steps: int = 600
    """Optimiser steps of 32 conversations of play that give a tiny model the format. With half as many it may not learn
    to look at what it is shown, and reinforcement learning then finds nothing to amplify."""
    tiny_vocab_size: int = 384
    """Largest vocabulary of a tiny model: 265 tokens for bytes and tags, the others for the task's own words."""
    tiny_context: int = 1024
    """Tokens that a tiny model can read: the descriptions of many tools need more."""

    def for_base_model(self, base_model: str) -> TaskDefaults:
        """The same with the learning rate of a kind of base model; one that is set stays."""
        if self.learning_rate is not None:
            return self
        is_tiny = (Path(base_model).expanduser() / TINY_MODEL_FILE).is_file()
        return replace(self, learning_rate=TINY_LEARNING_RATE if is_tiny else LEARNING_RATE)

    def learning_rate_at(self, index: int, num_steps: int) -> float:
        """The rate of step `index`, counted from 0, in a run of `num_steps`."""
        learning_rate = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        return learning_rate if self.schedule == "constant" else learning_rate * (num_steps - index) / num_steps


class Task(ABC):
    """What a policy learns. One instance serves many rollouts at once, so it holds no state of a rollout."""

    name: ClassVar[str]
    description: ClassVar[str]
    headline_metric: ClassVar[str] = "reward"
    """The trajectory metric, of 0 or 1 where possible, that tells people how good a policy is; or `reward`."""
    defaults: ClassVar[TaskDefaults] = TaskDefaults()

    @abstractmethod
    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """`count` scenarios: the same for the same arguments, and never in two splits. Of a held-out split that has
        fewer, all of them."""

    @abstractmethod
    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Act once, and score it in the trajectory's `reward` and `metrics`.

        Args:
            rollout_index: Place in its group; rollouts of one group draw different random numbers.
            step: Checkpoint to act with; `None` is the newest.
        """

    def prompt_scenario(self, prompt: str) -> Scenario:
        """A scenario in which the user says `prompt`.

        Raises:
            ConfigError: the user says nothing in this task, e.g. in a game.
        """
        raise ConfigError(f"task {self.name!r} takes no prompt; leave it out, or implement `prompt_scenario`")

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """One conversation of scripted play in the format of a rollout, for the warm start of a tiny model.

        Args:
            skill: Chance, from 0 to 1, that a move is a good one; else it is any legal one. It must depend on what the
                player has been shown, or the model learns the format without looking. Perfect play throughout would
                show neither mistakes nor long conversations, and leave nothing to learn.

        Raises:
            ConfigError: the task has none.
        """
        raise ConfigError(
            f"task {self.name!r} has no synthetic play to warm-start a tiny model with; implement `play`, or train a "
            "pretrained base model instead"
        )

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """`count` conversations of `play`, by players of different skill around `defaults.play_skill`.

        A task may write its own in place of `play`, e.g. to add exercises that are no whole rollouts.
        """
        return _play(self, rng, count, mean_skill=self.defaults.play_skill)

    def score_messages(self, messages: list[dict[str, Any]]) -> float | tuple[float, str]:
        """How well a rollout did, from 0 to 1, by its messages alone; with an explanation if there is one.

        This is what `art judge serve --task` answers, so that training with a judge can be tried without one.

        Raises:
            ConfigError: the task cannot tell.
        """
        raise ConfigError(
            f"task {self.name!r} cannot score a rollout by its messages; implement `score_messages(messages)`, which "
            "returns 0 to 1"
        )

    def render_trajectory(self, trajectory: Trajectory) -> str:
        """One rollout for people to read."""
        return "\n".join([*describe_messages(trajectory.messages()), f"reward: {trajectory.reward:g}"])

    def scenario(self, split: Split, seed: int, index: int, inputs: dict[str, Any]) -> Scenario:
        """Scenario `index` of a seed, with an id and a seed of its own."""
        scenario_id = f"{self.name}/{split}/{seed}/{index}"
        return Scenario(id=scenario_id, seed=derive_seed(scenario_id), inputs=inputs)


def describe_messages(messages: Iterable[Any]) -> list[str]:
    """Lines for people: who said what, and below it the tools that were called."""
    lines = []
    for said in messages:
        lines.append(f"{said['role']}: {said.get('content') or ''}".rstrip())
        calls = [call["function"] for call in said.get("tool_calls") or ()]
        lines += [f"  {function['name']} {function['arguments']}" for function in calls]
    return lines


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on all parts and their order, and is the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def register_task(task: Task) -> Task:
    """Make `task` known by its name.

    Raises:
        ConfigError: it is no task, or another task has the name.
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
    """The task of that name, or the one at `module:attribute` or `path/to/file.py:attribute`: a `Task` or a subclass.

    Raises:
        ConfigError: there is none, or it cannot be used; says why.
    """
    if name in _registered:
        return _registered[name]
    path = _BUILT_IN.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"no task is named {name!r}; there are {', '.join(list_tasks())}. Your own is found as `module:attribute`, "
            "or by name after `register_task`"
        )
    found = load_attribute(path, "task")
    if isinstance(found, type) and issubclass(found, Task):
        found = _instance(path, found)
    if not isinstance(found, Task):
        raise ConfigError(f"task {path!r}: expected a Task or a subclass of it, found {found!r}")
    if missing := [field for field in ("name", "description") if not isinstance(getattr(found, field, None), str)]:
        example = f'`{missing[0]} = "{path.rpartition(":")[2].lower()}"`'
        raise ConfigError(
            f"task {path!r}: class {type(found).__name__} has no text {' and '.join(missing)}; add e.g. {example}"
        )
    try:
        validate_name(found.name, param="name")
    except InvalidRequestError as error:  # it becomes part of the names of models and files
        raise ConfigError(f"task {path!r}: its {error}") from error
    return found


def _instance(path: str, task: type[Task]) -> Task:
    if missing := sorted(task.__abstractmethods__):
        raise ConfigError(f"task {path!r}: class {task.__name__} does not implement {', '.join(missing)}")
    try:
        return task()
    except Exception as error:
        raise ConfigError(
            f"task {path!r}: {task.__name__}() failed{describe_failure(error)}. Where the class needs arguments, make "
            "an instance in the module and name that"
        ) from error


def draw_scenarios(task: Task, split: Split, *, seed: int, count: int) -> list[Scenario]:
    """`task.scenarios(...)`, checked.

    Raises:
        ConfigError: it gave something else than scenarios, fewer to train on than asked for, or none to test with.
    """
    given = task.scenarios(split, seed=seed, count=count)
    scenarios = list(given) if isinstance(given, Iterable) else []
    call = f"task {task.name!r}: scenarios({split!r}, seed={seed}, count={count})"
    if wrong := [item for item in scenarios if not isinstance(item, Scenario)]:
        raise ConfigError(f"{call} must give a list of `Scenario`, e.g. made by `self.scenario(...)`; got {wrong[0]!r}")
    fewest = count if split == "train" else min(count, 1)
    if not fewest <= len(scenarios) <= count:
        raise ConfigError(
            f"{call} gave {len(scenarios)} scenarios; expected {count}. Where there are no more to train on, give some "
            "of them again"
        )
    return scenarios


def _play(task: Task, rng: random.Random, count: int, *, mean_skill: float) -> list[Conversation]:
    """Conversations of `task.play`, each with a skill that is drawn evenly around the mean, as widely as 0 and 1 allow.

    A model that has seen weak and strong players is one that reinforcement learning can move towards the strong ones.
    """
    spread = min(mean_skill, 1 - mean_skill)
    return [task.play(rng, rng.uniform(mean_skill - spread, mean_skill + spread)) for _ in range(count)]


def draw_conversations(task: Task, *, seed: int, count: int, skill: float | None = None) -> list[Conversation]:
    """`task.warm_start_conversations(...)`, checked.

    Args:
        skill: Mean skill of the play, from 0 to 1, in place of the task's own.

    Raises:
        ConfigError: the task has none, gave something else than conversations that end with an answer, or decides
            itself how skilful its play is.
    """
    if skill is not None and not 0 <= skill <= 1:
        raise ConfigError(f"the skill of play must be from 0 to 1, got {skill}")
    if skill is not None and type(task).warm_start_conversations is not Task.warm_start_conversations:
        raise ConfigError(
            f"task {task.name!r} has a `warm_start_conversations` of its own, whose skill cannot be set from outside; "
            "implement `play(rng, skill)` in its place"
        )
    rng = random.Random(seed)
    if skill is None:
        given = task.warm_start_conversations(rng, count)
    else:
        given = _play(task, rng, count, mean_skill=skill)
    play = list(given) if isinstance(given, Iterable) else []
    call = f"task {task.name!r}: warm_start_conversations(rng, {count})"
    if len(play) != count:
        raise ConfigError(f"{call} gave {len(play)} conversations, expected {count}")
    for conversation in play:
        if not isinstance(conversation, Conversation):
            raise ConfigError(f"{call} must give a list of `Conversation`; got {conversation!r}")
        if not conversation.messages or conversation.messages[-1]["role"] != "assistant":
            raise ConfigError(f"{call}: a conversation must end with a message of the assistant; got {conversation!r}")
    return play


async def take_turn(
    model: Model[Any, Any], trajectory: Trajectory, *, step: int | None = None, **request: Any
) -> list[Any] | Cut:
    """One answer of the policy with the trajectory's tools, appended to the trajectory and counted in `num_turns`.

    Args:
        request: further arguments of the request: `temperature`, `seed`, `max_completion_tokens`, ...

    Returns:
        Its tool calls, or what has cut the rollout off. A first prompt that is too long for the context raises: that
        is no fault of the policy's.
    """
    num_turns = trajectory.metrics.get("num_turns", 0)
    try:
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step),
            messages=trajectory.messages(),
            tools=trajectory.tools or [],
            **request,
        )
    except Exception as error:
        if getattr(error, "code", None) == ContextLengthError.code and num_turns:
            return "context_full"
        raise
    choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    trajectory.metrics["num_turns"] = num_turns + 1
    return "cut_short" if choice.finish_reason == "length" else list(choice.message.tool_calls or ())
