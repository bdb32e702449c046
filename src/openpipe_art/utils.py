"""`art.utils`: small helpers for training scripts, and names that older code imports from there or from submodules.

`art.utils.retry`, `art.utils.litellm`, `art.guided_completion` and others are this module too; see `older.ALIASES`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random
import sys
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from pydantic import BaseModel

from art.backoff import retry
from art.errors import ConfigError
from art.storage.layout import DataDir
from openpipe_art.older import refuse

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

__all__ = [
    "DatasetBatch", "convert_litellm_choice_to_openai", "format_message", "freeze_tool_schema",
    "get_guided_completion_params", "get_model_step", "get_repo_root_path", "iterate_dataset", "limit_concurrency",
    "retry", "strip_logprobs",
]  # fmt: skip

__path__: list[str] = []
"""Python looks for submodules of a package only; `older.find_module` finds ours."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    return refuse("art.utils", name)


@dataclass(frozen=True)
class DatasetBatch(Generic[T]):
    """The items of a data set for one training step, with the numbers of step and epoch.

    It unpacks like the tuple of older code: `batch, epoch, global_step, epoch_step`.
    """

    items: list[T]
    step: int
    """Number of the batch, from 0, over all epochs."""
    epoch: int
    """Number of the epoch, from 0."""
    epoch_step: int
    """Number of the batch within the epoch, from 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
    *,
    seed: int = 0,
) -> Iterator[DatasetBatch[T]]:
    """Yield a data set in batches of `groups_per_step` items. Each epoch has another order and may end with fewer.

    The order depends only on `seed`, the epoch and the size of the data set: a run that begins at `initial_step` gets
    the same batches from there on as an uninterrupted run.
    """
    from tqdm.auto import tqdm

    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    steps_per_epoch = -(-len(dataset) // groups_per_step)
    steps = range(initial_step, steps_per_epoch * num_epochs)
    total = len(steps) + initial_step
    with tqdm(desc="iterate", unit="step", total=total, initial=initial_step, disable=not use_tqdm) as bar:
        order: list[int] = []
        for step in steps:
            epoch, epoch_step = divmod(step, steps_per_epoch)
            if not order or epoch_step == 0:
                order = list(range(len(dataset)))
                random.Random(f"{seed}/{epoch}").shuffle(order)
            chosen = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
            yield DatasetBatch([dataset[i] for i in chosen], step, epoch, epoch_step)
            bar.update(1)


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate an async function to run at most `n` times at once; further calls wait.

    Args:
        derive_key: called with the same arguments; each key has a limit of its own.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        # Semaphores belong to one event loop. Each is kept while a call uses it.
        by_loop: WeakKeyDictionary[Any, WeakValueDictionary[Hashable, asyncio.Semaphore]] = WeakKeyDictionary()

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = derive_key(*args, **kwargs) if derive_key is not None else None
            by_key = by_loop.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
            semaphore = by_key.setdefault(key, asyncio.Semaphore(n))
            async with semaphore:
                return await function(*args, **kwargs)

        return call

    return decorate


def format_message(message: Mapping[str, Any]) -> str:
    """Format a message as a heading and its parts:

    assistant:
    (thinking) Is it a draw?
    I look it up.
    -> search({"q": "x"})
    """
    lines = [f"{message.get('role', '?')}:"]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        lines.append(f"(thinking) {reasoning}")
    if content := message.get("content"):
        lines.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    if refusal := message.get("refusal"):
        lines.append(f"(refusal) {refusal}")
    for call in message.get("tool_calls") or ():
        function = call["function"] if isinstance(call, Mapping) else call.function.model_dump()
        lines.append(f"-> {function['name']}({function['arguments']})")
    return "\n".join(lines)


def strip_logprobs(obj: T) -> T:
    """Copy an object without its log-probs, at any depth.

    Dictionaries lose the key `logprobs`; in choices, trajectories and other objects it becomes `None`. Training still
    works, because the server has recorded the log-probs of each answer.
    """
    if isinstance(obj, dict):
        return {key: strip_logprobs(value) for key, value in obj.items() if key != "logprobs"}  # type: ignore[return-value]
    if isinstance(obj, (list, tuple)):
        items = [strip_logprobs(item) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    if isinstance(obj, BaseModel):
        return obj.model_copy(update=_without(obj.__dict__) | _without(obj.model_extra or {}))
    if isinstance(obj, type) or not hasattr(obj, "__dict__"):
        return obj
    copied = copy.copy(obj)
    for name, value in _without(vars(obj)).items():
        object.__setattr__(copied, name, value)  # also into a frozen dataclass
    return copied


def _without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name == "logprobs" else strip_logprobs(value) for name, value in fields.items()}


def convert_litellm_choice_to_openai(litellm_choice: Any) -> Choice:
    """Convert `litellm_response.choices[0]` to an OpenAI `Choice`.

    LiteLLM moves unknown fields into `provider_specific_fields`. The `exchange_id`, by which training finds the exact
    tokens, is moved back.

    Raises:
        ValueError: the choice holds no assistant message.
    """
    from openai.types.chat.chat_completion import Choice

    data: dict[str, Any] = litellm_choice.model_dump(exclude_none=True)
    message = data.get("message")
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise ValueError(f"expected a choice with an assistant message, got {data}")
    for holder in (data, message):
        extra = holder.pop("provider_specific_fields", None) or {}
        for key, value in extra.items():
            holder.setdefault(key, value)
    if "exchange_id" in message:
        data.setdefault("exchange_id", message.pop("exchange_id"))
    for call in message.get("tool_calls") or ():
        call.setdefault("type", "function")
    message.setdefault("content", None)
    return Choice.model_validate(data)


def freeze_tool_schema(tool: Mapping[str, Any], fixed_args: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tool so that it can only be called with these arguments."""
    frozen = copy.deepcopy(dict(tool))
    frozen["function"]["parameters"] = {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in fixed_args.items()},
        "required": list(fixed_args),
        "additionalProperties": False,
    }
    return frozen


def get_guided_completion_params(
    completion: Any, base_tools: Iterable[Mapping[str, Any]] | None = None
) -> tuple[list[str] | None, dict[str, Any] | None, list[dict[str, Any]] | None]:
    """Return `guided_choice`, `tool_choice` and `tools` that leave a model only the answer of `completion`.

    Args:
        completion: A chat completion of the teacher; its first choice counts, and of that the first tool call.
        base_tools: The tools that the teacher was offered, for an answer that calls one of them.

    Raises:
        ConfigError: the answer calls a tool that is not in `base_tools`.
    """
    message = completion.choices[0].message
    if not message.tool_calls:
        return [message.content or ""], None, None
    called = message.tool_calls[0].function
    tool = next((tool for tool in base_tools or () if tool["function"]["name"] == called.name), None)
    if tool is None:
        raise ConfigError(f"the answer calls the tool {called.name!r}, which is not in `base_tools`: pass it there")
    choice = {"type": "function", "function": {"name": called.name}}
    return None, choice, [freeze_tool_schema(tool, json.loads(called.arguments))]


def get_model_step(model: Any, art_path: str | Path) -> int:
    """The step of the newest checkpoint of `model` (any object with `project` and `name`) below `art_path`, or 0."""
    checkpoints = DataDir(Path(art_path)).model(model.project, model.name).checkpoints
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def get_repo_root_path() -> str:
    """The folder of the git repository around the working directory, or that directory itself without one."""
    here = Path.cwd()
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))


# -- `art.utils.logging`: lines with a time and a coloured label, as notebooks print them --


def _say(label: str, color: int, message: object) -> None:
    sys.stdout.write(f"[{datetime.now():%H:%M:%S}] \x1b[{color}m{label:<5}\x1b[0m {message}\n")


info, step, ok = partial(_say, "INFO", 34), partial(_say, "STEP", 36), partial(_say, "OK", 32)
warn, err = partial(_say, "WARN", 33), partial(_say, "ERR", 31)


def dim(message: object) -> None:
    """Print a line in a faint colour, without time or label."""
    sys.stdout.write(f"\x1b[2m{message}\x1b[0m\n")
