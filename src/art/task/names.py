"""Find tasks by name: ready ones, registered ones, those of a module or file, and environments of other frameworks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.errors import ConfigError, InvalidRequestError
from art.storage.layout import validate_name
from art.task.interface import PlacedTask, Task
from art.task.options import read_options
from art.utils.attributes import describe_failure, load_attribute

_BUILT_IN = {
    "calendar": "art.tasks.desks.calendar_jobs:Calendar",
    "chat_rubric": "art.tasks.chat_rubric:ChatRubric",
    "codenames": "art.tasks.codenames.codenames_task:Codenames",
    "game_2048": "art.tasks.game_2048.game:Game2048",
    "inventory": "art.tasks.desks.inventory_jobs:Inventory",
    "mail_search": "art.tasks.mail_search.mail_search_task:MailSearch",
    "support_desk": "art.tasks.support_desk:SupportDesk",
    "temporal_clue": "art.tasks.temporal_clue.temporal_clue_task:TemporalClue",
    "tic_tac_toe": "art.tasks.tic_tac_toe:TicTacToe",
    "yes_no_maybe": "art.tasks.yes_no_maybe:YesNoMaybe",
}
PREFIXES = {
    "harbor": (
        "art.integrations.harbor.harbor_task:HarborTask",
        "DIR",
        "a task directory of Harbor, or a folder of them",
    ),
    "openenv": ("art.integrations.openenv:OpenEnvTask", "URL", "an environment that OpenEnv serves"),
    "verifiers": ("art.integrations.verifiers:VerifiersTask", "NAME", "an installed environment of verifiers"),
}
"""Environments of other frameworks by the prefix of their names: class, what follows the prefix, description."""
_OLDER = {"search_emails": "art.tasks.mail_search.mail_search_task:SearchEmails"}
"""Tasks under names of older programs. They are found, and not listed."""
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
    if task.name in {**_BUILT_IN, **_OLDER} or (known is not None and type(known) is not type(task)):
        raise ConfigError(f"there is already a task named {task.name!r}; give yours another `name`")
    _registered[task.name] = task
    return task


def list_tasks() -> list[str]:
    return sorted({*_BUILT_IN, *_registered})


def known_task(name: str) -> Task | type[Task]:
    """Return a registered task, or the class of a ready one: it may need packages to be made, and none to be shown."""
    if name in _registered:
        return _registered[name]
    kind: type[Task] = load_attribute(_BUILT_IN[name], "task")
    return kind


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
    if prefix in PREFIXES:
        return _placed(prefix, place, {**(options or {})})
    path = {**_BUILT_IN, **_OLDER}.get(name, name)
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
    path, what, words = PREFIXES[prefix]
    own = f"; an attribute of your own module is named ./{prefix}.py:{place or 'Task'}"
    hint = own if Path(f"{prefix}.py").exists() or Path(prefix).is_dir() else ""
    if not place:
        raise ConfigError(f"task '{prefix}:': write {prefix}:{what}, {words}{hint}")
    kind: type[PlacedTask] = load_attribute(path, "task")
    try:
        return kind.at(place, options)
    except ConfigError as error:
        raise ConfigError(f"task '{prefix}:{place}': {error.message}{hint}") from error
    except Exception as error:
        raise ConfigError(f"task '{prefix}:{place}' cannot be used{describe_failure(error)}{hint}") from error


def _no_such_task(name: str) -> str:
    tasks = describe_tasks()
    near = difflib.get_close_matches(name, tasks, n=1)
    width = max(map(len, tasks))
    listed = "".join(f"\n  {other:<{width}}  {words}" for other, words in tasks.items())
    forms = "".join(f"\n  {prefix}:{what}  {words}" for prefix, (_, what, words) in PREFIXES.items())
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
        if isinstance(error, ModuleNotFoundError) and name in _BUILT_IN:
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
