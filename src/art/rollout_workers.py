"""Rollouts in other processes: what `workers=` of a gather or pipeline takes, and how a rollout becomes a call.

    rollout(model, scenario)    a coroutine that has not started
    call_of(...)                Call(rollout, (model, scenario)): what a worker needs to run it
    workers.run(...)            sends the call to a worker, and gives its trajectory or error back

`art.RayWorkers` is one such pool. Functions travel by their names, so a worker must be able to import them.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from art.errors import ConfigError
from art.trajectory import PendingGroup, close_unstarted, time_limit

EXPECTED_FUNCTION = (
    "expected an `async def` at the top level of a module or of the script, or a method of a class there"
)


class Workers(Protocol):
    """Interface of a pool of processes that run rollouts, such as `art.RayWorkers`."""

    @property
    def num_seats(self) -> int:
        """Rollouts that run at once."""
        ...

    def check(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Raise a `ConfigError` if a worker could not be given this call."""
        ...

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in a worker when one has a seat, and return its result or raise its error.

        The call belongs to `art.client.rollout_context.current_rollout`. Arguments that are a `Call` are called in the
        worker. An implementation enters `art.trajectory.without_time_limit` while it waits for a seat.
        """
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments. An argument that is a `Call` is called in the worker too."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Any:
        args = [arg.start() if isinstance(arg, Call) else arg for arg in self.args]
        return self.function(*args, **{k: v.start() if isinstance(v, Call) else v for k, v in self.kwargs.items()})


def move_to(workers: Workers | None, groups: list[Any]) -> list[Any]:
    """Let workers run rollouts, or those of groups, that were not awaited. Without workers nothing changes.

    Raises:
        ConfigError: workers cannot run one of them. None has started then.
    """
    if workers is None:
        return groups
    parts = [group.rollouts if isinstance(group, PendingGroup) else [group] for group in groups]
    try:
        calls = [call_of(item) for part in parts for item in part if inspect.isawaitable(item)]
        for call in calls:
            workers.check(call.function, *call.args, **call.kwargs)
    except BaseException:
        close_unstarted(groups)
        raise
    moved = iter(calls)
    for part in parts:
        part[:] = [run_in(workers, next(moved)) if inspect.isawaitable(item) else item for item in part]
    pairs = zip(groups, parts, strict=True)
    return [group if isinstance(group, PendingGroup) else part[0] for group, part in pairs]


async def run_in(workers: Workers, call: Call) -> Any:
    """Run a rollout as a whole in a worker. Its time limit begins when it gets one."""
    if (limit := time_limit.get()) is not None:
        limit.is_in_worker = True
    return await workers.run(call.function, *call.args, **call.kwargs)


def call_of(rollout: Any) -> Call:
    """Return the call that made a coroutine which has not started, and close the coroutine.

    Example: `call_of(rollout(model, scenario))` is `Call(rollout, (model, scenario))`.

    Raises:
        ConfigError: it is no such coroutine, or its function cannot be found by its name.
    """
    if not inspect.iscoroutine(rollout) or inspect.getcoroutinestate(rollout) != inspect.CORO_CREATED:
        what = type(rollout).__name__ + (" that has started" if inspect.iscoroutine(rollout) else "")
        raise ConfigError(f"a worker cannot run a {what}: pass calls of an `async def`, `rollout(model, scenario)`")
    code, frame = rollout.cr_code, rollout.cr_frame
    assert frame is not None  # it has not started
    values = dict(frame.f_locals)
    # What `functools.wraps` made has the name of the function that it wraps, which is in a variable of the wrapper.
    wrapped = [values.get(name) for name in code.co_freevars]
    modules = [frame.f_globals.get("__name__"), *(getattr(value, "__module__", None) for value in wrapped)]
    function = next((one for name in modules if (one := _find(name, rollout.__qualname__, code)) is not None), None)
    if function is None:
        raise ConfigError(
            f"workers cannot import the rollout `{modules[0]}.{rollout.__qualname__}`: {EXPECTED_FUNCTION}. Move it "
            "there, and pass what it took from around it as arguments"
        )
    names = iter(code.co_varnames)
    positional = [values[next(names)] for _ in range(code.co_argcount)]
    named = {name: values[name] for name in (next(names) for _ in range(code.co_kwonlyargcount))}
    if code.co_flags & inspect.CO_VARARGS:
        positional += values[next(names)]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named |= values[next(names)]
    if inspect.ismethod(function):  # a class method: its class is bound already
        positional = positional[1:]
    rollout.close()
    return Call(function, tuple(map(_nested, positional)), {name: _nested(value) for name, value in named.items()})


def _nested(value: Any) -> Any:
    """Take a rollout that is the argument of another one, as in `art.capture_auto_trajectory(rollout(...))`."""
    return call_of(value) if inspect.iscoroutine(value) else value


def _find(module: str | None, qualname: str, code: types.CodeType) -> Any:
    """Return the function with this name and code; `None` if there is none."""
    found: Any = sys.modules.get(module or "")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found if getattr(found, "__code__", None) is code else None
