"""Find tasks by name: ready ones, registered ones, those of a module or file, and environments of other frameworks."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import ConfigError, InvalidRequestError
from art.plugins import find_plugins, load_plugin
from art.storage.layout import validate_name
from art.task.attributes import describe_failure, load_attribute
from art.task.interface import Conversation, PlacedTask, Scenario, Split, Task, play_by_skill
from art.task.options import TINY_MODEL_FILE, read_options


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
    result = task.warm_start_conversations(rng, count) if skill is None else play_by_skill(task, rng, count, skill)
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


class TinyForm(BaseModel):
    """The task whose play a tiny model was made from, with all options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    label: str
    options: dict[str, Any] = {}

    @classmethod
    def of_task(cls, task: Task) -> TinyForm:
        return cls(name=task.name, label=task.label, options=task.options.model_dump(mode="json"))


def read_tiny_model(base_model: str) -> dict[str, Any] | None:
    """Read how `art tiny-model` made a base model: its seed, its warm start, its task. `None` if it is no tiny model.

    Raises:
        ConfigError: the file is not one that ART wrote.
    """
    path = Path(base_model).expanduser() / TINY_MODEL_FILE
    if not path.is_file():
        return None
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(made, dict):
            raise ValueError(f"it holds a {type(made).__name__}")
        return made
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not what `art tiny-model` writes: {error}") from error


def read_form(base_model: str) -> TinyForm | None:
    """Read what a tiny model was made for. `None` if it is no tiny model, or was made from conversations.

    Raises:
        ConfigError: the file is not one that ART wrote.
    """
    task = (read_tiny_model(base_model) or {}).get("task")
    try:
        return None if task is None else TinyForm.model_validate(task)
    except ValidationError as error:
        raise ConfigError(f"{TINY_MODEL_FILE} of {base_model} is not what `art tiny-model` writes: {error}") from error


def other_task(task: Task, base_model: str) -> str | None:
    """Say that a base model is a tiny model made for another task, or for other options. `None` if it is not."""
    form = read_form(base_model)
    if form is None or form.label == task.label:
        return None
    return (
        f"{base_model} is a tiny model made for {form.label}, not for {task.label}, so it may not know its words and "
        "its format, and may learn nothing. Make one for it by `art tiny-model`, with the same options"
    )


_registered: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task available by its name, and return it.

    Raises:
        ConfigError: the argument is not a task, or another task has the name.
    """
    if not isinstance(task, Task):
        hint = "; pass an instance: register_task(MyTask())" if isinstance(task, type) else ""
        raise ConfigError(f"`register_task` takes a Task, got {task!r}{hint}")
    known = _registered.get(task.name)
    if _entry_of(task.name) or (known is not None and type(known) is not type(task)):
        raise ConfigError(f"there is already a task named {task.name!r}; give yours another `name`")
    _registered[task.name] = task
    return task


def list_tasks() -> list[str]:
    """Return the names of the tasks that are registered or that installed packages have."""
    return sorted({*(name for name in find_plugins("art.tasks") if not name.endswith(":")), *_registered})


def known_task(name: str) -> Task | type[Task]:
    """Return a registered task, or the class of a ready one: it may need packages to be made, and none to be shown."""
    if name in _registered:
        return _registered[name]
    kind: type[Task] = load_plugin("art.tasks", name)
    return kind


def _entry_of(name: str) -> str:
    """Return `module:class` of a task of an installed package; empty if none has this name."""
    entry = find_plugins("art.tasks").get(name) or find_plugins("art.names").get(f"tasks.{name}")
    return "" if entry is None else entry.value


def describe_tasks() -> dict[str, str]:
    """Return the description of each task by its name. This imports all of them."""
    return {name: known_task(name).description for name in list_tasks()}


def get_task(name: str, options: Mapping[str, Any] | None = None, *, is_tiny: bool = False) -> Task:
    """Return a task by its registered name, or from `module:attribute` or `path/to/file.py:attribute`.

    `verifiers:NAME`, `openenv:URL` and `harbor:DIR` name environments of other frameworks. A module of your own with
    such a name is found as `./verifiers.py:attribute`.

    Args:
        options: options of the task, by name. A value may be a text, as on the command line.
        is_tiny: whether a tiny model will do the task, so that `tiny_options` hold where `options` say nothing.

    Raises:
        ConfigError: there is no such task, it cannot be used, or an option is not allowed.
    """
    if name in _registered:
        return _chosen(_registered[name], options or {}, is_tiny)
    prefix, _, place = name.partition(":")
    if f"{prefix}:" in find_plugins("art.tasks"):
        return _placed(prefix, place, {**(options or {})})
    path = _entry_of(name) or name
    if ":" not in path:
        raise ConfigError(_no_such_task(name))
    task = load_attribute(path, "task")
    if isinstance(task, type) and issubclass(task, Task):
        task = _instance(name, task, options or {}, is_tiny)
    elif isinstance(task, Task):
        task = _chosen(task, options or {}, is_tiny)
    else:
        raise ConfigError(f"task {path!r}: expected a Task or a subclass of it, got {task!r}")
    _check_names(path, task)
    return task


def _placed(prefix: str, place: str, options: dict[str, Any]) -> Task:
    kind: type[PlacedTask] = load_plugin("art.tasks", f"{prefix}:")
    if not place:
        raise ConfigError(f"task '{prefix}:': write {prefix}:{kind.place_word}, {kind.place_help}")
    try:
        return kind.at(place, options)
    except ConfigError as error:
        raise ConfigError(f"task '{prefix}:{place}': {error.message}") from error
    except Exception as error:
        raise ConfigError(f"task '{prefix}:{place}' cannot be used{describe_failure(error)}") from error


def _no_such_task(name: str) -> str:
    tasks = describe_tasks()
    near = difflib.get_close_matches(name, tasks, n=1)
    width = max(map(len, tasks), default=0)
    listed = "".join(f"\n  {other:<{width}}  {words}" for other, words in tasks.items())
    kinds = {prefix: load_plugin("art.tasks", prefix) for prefix in find_plugins("art.tasks") if prefix.endswith(":")}
    forms = "".join(f"\n  {prefix}{kind.place_word}  {kind.place_help}" for prefix, kind in kinds.items())
    return (
        f"no task is named {name!r}{f'; did you mean {near[0]!r}?' if near else '.'} Name a task of your own as "
        f"`module:attribute` or `./file.py:attribute`, or call `register_task` first. Ready tasks:{listed}\n"
        f"Environments of other frameworks:{forms}"
    )


def _check_names(path: str, task: Any) -> None:
    if missing := [field for field in ("name", "description") if not isinstance(getattr(task, field, None), str)]:
        example = f'`{missing[0]} = "{path.rpartition(":")[2].lower()}"`'
        raise ConfigError(
            f"task {path!r}: class {type(task).__name__} has no string {' and '.join(missing)}; add e.g. {example}"
        )
    try:
        validate_name(task.name, param="name")
    except InvalidRequestError as error:  # the name becomes part of the names of models and files
        raise ConfigError(f"task {path!r}: its {error}") from error


def _instance(name: str, task: type[Task], options: Mapping[str, Any], is_tiny: bool) -> Task:
    if missing := sorted(task.__abstractmethods__):
        raise ConfigError(f"task {name!r}: class {task.__name__} does not implement {', '.join(missing)}")
    values = {**(task.tiny_options if is_tiny else {}), **options}
    if values:  # a class with arguments of its own would complain of an unknown one in other words
        read_options(name, task.options_class, values)
    try:
        return task(**values)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _entry_of(name):
            raise  # a package of an extra, which the commands name
        raise ConfigError(
            f"task {name!r}: {task.__name__}() failed{describe_failure(error)}. If the class needs arguments, make an "
            "instance in the module and give the instance's name"
        ) from error


def _chosen(task: Task, options: Mapping[str, Any], is_tiny: bool) -> Task:
    """Return the task itself, or one of its class with further options. The options that it was made with count as
    the user's."""
    own = task.options.model_dump(exclude_unset=True)
    values = {**(task.tiny_options if is_tiny else {}), **own, **options}
    if values == own:
        return task
    read_options(task.name, task.options_class, values)
    try:
        return type(task)(**values)
    except TypeError as error:
        raise ConfigError(
            f"task {task.name!r} is an instance that was made with arguments of its own, so its options are set where "
            f"it is made: {type(task).__name__}(...); got {', '.join(values)}"
        ) from error
