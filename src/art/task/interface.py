"""The base class of tasks, and helpers for their rollouts: ask the policy, and show messages to people."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from art.client.rollout_context import derive_seed
from art.errors import ConfigError, ContextLengthError
from art.task.options import TaskDefaults, TaskOptions, label_of, read_options, safe_label
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art.messages import Messages, Tools
    from art.model import Model

Cut = Literal["cut_short", "context_full"]
"""Why a rollout ended inside a turn: the answer was longer than allowed, or the conversation filled the context."""


def describe_messages(messages: Iterable[Any]) -> list[str]:
    """Format messages as lines for people to read, with role and content, and tool calls below."""
    lines = []
    for message in messages:
        lines.append(f"{message['role']}: {message.get('content') or ''}".rstrip())
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        lines += [f"  {function['name']} {function['arguments']}" for function in calls]
    return lines


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


Player = Callable[["Messages", "Tools | None"], dict[str, Any] | Awaitable[dict[str, Any]]]
"""A scripted policy for one rollout: gets the messages and tools of a request, and returns the assistant's message,
such as `{"role": "assistant", "content": "5"}`."""


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
    needs_judge: ClassVar[bool] = False
    """Whether only a judge can tell how good a rollout is, so that the task cannot be trained without one."""
    options_class: ClassVar[type[TaskOptions]] = TaskOptions
    """What a user may choose about the task."""
    options: TaskOptions = TaskOptions()
    """What the user chose. A subclass with options declares its own type: `options: MazeOptions`."""
    tiny_options: ClassVar[Mapping[str, Any]] = {}
    """Options of the smaller form that a tiny model can learn, if it cannot learn the full one. Commands use it for
    tiny models, under the user's own options."""
    rubric: ClassVar[str | None] = None
    """What a good rollout looks like, in prose, for a judge. Used if the user gives no rubric; `None` takes RULER's."""

    def __init__(self, **options: Any) -> None:
        """
        Args:
            **options: fields of `options_class`.

        Raises:
            ConfigError: there is no such option, or a value is not allowed.
        """
        self.options = read_options(getattr(self, "name", type(self).__name__), self.options_class, options)

    @property
    def label(self) -> str:
        """The name, and the options that differ from their defaults, such as `maze-size-6`. Projects, folders and ids
        of scenarios use it."""
        return label_of(self.name, self.options)

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
            f"task {self.name!r} has no scripted play for the warm start of a tiny model; implement `play`, or name a "
            "pretrained base model by `--base-model`"
        )

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Make `count` conversations of `play`, by players of different skill around `defaults.play_skill`.

        A task may override this in place of `play`, e.g. to add exercises that are not whole rollouts.
        """
        return play_by_skill(self, rng, count, self.defaults.play_skill)

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Make the best scripted player for one rollout of a scenario. It may know what the scenario hides.

        It shows the highest reward that can be reached: `art.testing.scripted_model` answers with it, in tests of
        the reward and as the model `scripted` of a comparison.

        Raises:
            ConfigError: the task has no scripted player.
        """
        raise ConfigError(f"task {self.name!r} has no scripted player; implement `player(scenario, *, rollout_index)`")

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
        scenario_id = f"{self.label}/{split}/{seed}/{index}"
        return Scenario(id=scenario_id, seed=derive_seed(scenario_id), inputs=inputs)


def play_by_skill(task: Task, rng: random.Random, count: int, mean_skill: float) -> list[Conversation]:
    """Make conversations of `task.play`, with skills drawn uniformly from the widest interval around the mean.

    A model that has seen weak and strong players can be moved towards the strong ones by reinforcement learning.
    """
    spread = min(mean_skill, 1 - mean_skill)
    return [task.play(rng, rng.uniform(mean_skill - spread, mean_skill + spread)) for _ in range(count)]


Split = Literal["train", "val", "test"]


class Scenario(BaseModel):
    """One task input. All randomness of a rollout follows from `seed` and the rollout's index in its group."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Unique among the scenarios of a task. The same scenario has the same id in every run."""
    seed: int
    """Seed of the scenario's randomness, e.g. of an opponent's moves and of sampling."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """What the rollout needs to know, in values that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation for the warm start of a tiny model, in a task's format. It ends with an assistant message."""

    messages: Messages
    tools: Tools | None = None


class PlacedTask(Task):
    """A task from an id, an address or a folder, its first argument. Its options are further arguments by name."""

    place_word: ClassVar[str]
    """A word for what follows the prefix of the name, for errors: `DIR` in `harbor:DIR`."""
    place_help: ClassVar[str]
    """What it names, e.g. "a task directory of Harbor"."""
    place: str | None = None
    """What the user wrote after the prefix; `None` for a task made in Python, which keeps its plain name."""

    @classmethod
    def at(cls, place: str, options: dict[str, Any]) -> Self:
        """Make the task of a place, labelled by it.

        Raises:
            ConfigError: an option is not allowed, or there is no such place.
        """
        chosen = read_options(cls.name, cls.options_class, options)
        task = cls(place, **chosen.model_dump())  # type: ignore[call-arg]
        task.place, task.options = place, chosen
        return task

    @property
    def label(self) -> str:
        """The name, the place and the options that differ from their defaults, such as `verifiers-my-env`."""
        name = self.name if self.place is None else safe_label(f"{self.name}-{self.place_name()}")
        return label_of(name, self.options)

    def place_name(self) -> str:
        """The place as a part of the label."""
        return str(self.place)
