"""How the call of a function gets from the script to a worker, and its result back.

    script:  Call(rollout, (model, scenario))  ->  pack  ->  bytes
    worker:  bytes  ->  run_packed  ->  bytes  ->  script:  unpack  ->  trajectory, or the error that the rollout raised

A call is pickled, as Ray does with all that it sends between the processes of one user. So functions and classes travel
by their names. The script itself is imported in the worker too, under the name `__mp_main__`, as Python's
multiprocessing does. The rollout's checkpoint and seeds travel with it; its bookings in a ledger come back.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import io
import pickle
import sys
import traceback
import types
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art import costs
from art.client.rollout_context import RolloutContext, current_rollout, inside_rollout
from art.errors import ConfigError, RolloutError
from art.model import Model
from art.rollout_workers import EXPECTED_FUNCTION, Call
from art.trajectory import RemoteTraceback

# -- to the worker --


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script of the user, for workers that need something that is defined in it."""

    path: str
    source: str
    package: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A call as it is sent to a worker."""

    payload: bytes
    addresses: frozenset[str]
    """Base URLs of the models in its arguments."""


class _Pickler(pickle.Pickler):
    """Sends a model as a state by which a worker recognises it, so that all its rollouts share one model and client."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.addresses: set[str] = set()

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Model):
            return None
        if item.inference_base_url:
            self.addresses.add(item.inference_base_url)
        return pickle.dumps(item), None if item.budget_usd is None else item.costs.spent_usd


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        state, spent_usd = pid
        model = _load_model(state)
        if spent_usd is not None:
            model.costs.begin_from(spent_usd)
        return model


@functools.lru_cache(maxsize=64)
def _load_model(state: bytes) -> Any:
    return pickle.loads(state)


_SCRIPT_NAMES = (b"\x8c\x08__main__", b"\x8c\x0b__mp_main__")
"""How pickle writes the module of what the script defines: the length, then the name. Texts may contain the name."""


def pack(call: Call) -> Packed:
    """Pickle a call together with the rollout that the running code belongs to.

    Raises:
        ConfigError: a worker could not import the function, or an argument cannot be pickled.
    """
    context = current_rollout.get()
    rollout = context and {name: getattr(context, name) for name in ("model", "step", "seed", "switches")}
    try:
        pickle.dumps(call.function)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"workers cannot import {call.function!r} ({error}): {EXPECTED_FUNCTION}. Move it there"
        ) from error
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((rollout, call))
    except ConfigError:
        raise
    except Exception as error:
        name = getattr(call.function, "__qualname__", repr(call.function))
        raise ConfigError(
            f"an argument of `{name}` cannot be sent to a worker ({type(error).__name__}: {error}): pass data, "
            "registered models, and functions and classes of the top level of a module"
        ) from error
    packed = file.getvalue()
    script = read_script() if any(name in packed for name in _SCRIPT_NAMES) else None
    return Packed(payload=pickle.dumps((script, packed)), addresses=frozenset(pickler.addresses))


@functools.cache
def read_script() -> Script:
    """Read the script that runs, which workers import without its main part.

    Raises:
        ConfigError: there is no such file, as in a notebook, or it has no main part that is left out at import.
    """
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # what is defined in the script comes back under this name
    path = getattr(main, "__file__", None)
    if path is None:
        raise ConfigError(
            "workers cannot import what is defined in a notebook or an interactive session: write the rollout and its "
            "classes into a module, such as rollouts.py beside it, and import them from there"
        )
    source = Path(path).read_text(encoding="utf-8")
    guards = (node.test for node in ast.parse(source).body if isinstance(node, ast.If))
    if not any(isinstance(part, ast.Name) and part.id == "__name__" for test in guards for part in ast.walk(test)):
        raise ConfigError(
            f"workers import the script {path} to find the rollout, and would run all of it: put what starts the "
            'training under `if __name__ == "__main__":`, for instance `asyncio.run(main())`'
        )
    return Script(path=path, source=source, package=main.__package__)


def _load_script(script: Script) -> None:
    """In a worker: make the script importable as `__main__`, once."""
    if getattr(sys.modules.get("__mp_main__"), "__file__", None) == script.path:
        return
    module = types.ModuleType("__mp_main__")
    module.__file__, module.__package__ = script.path, script.package
    main = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # before it runs: dataclasses look for their module
    try:
        exec(compile(script.source, script.path, "exec"), module.__dict__)
    except BaseException:
        sys.modules["__main__"] = main
        del sys.modules["__mp_main__"]
        raise


# -- in the worker --


async def run_packed(payload: bytes) -> bytes:
    """Run a call that was packed, and pack how it ended. A function that is not async runs in a thread."""
    if costs.undelivered is None:
        costs.undelivered = []
    try:
        script, packed = pickle.loads(payload)
        if script is not None:
            _load_script(script)
        rollout, call = _Unpickler(io.BytesIO(packed)).load()
    except Exception as error:
        why = f"a worker cannot load the rollout ({type(error).__name__}: {error})"
        advice = 'install what it imports there, or give the workers runtime_env={"working_dir": ".", "pip": [...]}'
        return _pack_error(ConfigError(f"{why}: {advice}"))
    try:
        with inside_rollout(RolloutContext(**rollout)) if rollout else nullcontext():
            if inspect.iscoroutinefunction(call.function):
                result = await call.start()
            else:
                result = await asyncio.to_thread(call.start)
                result = await result if inspect.isawaitable(result) else result
        return pickle.dumps((None, result, costs.take_undelivered()))
    except Exception as error:
        return _pack_error(error)


def _pack_error(error: Exception) -> bytes:
    report = traceback.TracebackException.from_exception(error)
    frames = [(frame.filename, frame.lineno, frame.name, frame.line) for frame in report.stack]
    shown = "".join(report.format())
    for state in _states_of(error):
        try:
            packed = pickle.dumps(state)
            _load_error(*pickle.loads(packed))
        except Exception:
            continue
        return pickle.dumps(((packed, shown, frames), None, costs.take_undelivered()))
    raise AssertionError("unreachable: the last state is text")


def _states_of(error: Exception) -> Iterable[tuple[Any, ...]]:
    """Ways to send an error, the most faithful first. Errors of many libraries cannot be pickled as they are."""
    yield (error,)
    kept = {}
    for name, value in vars(error).items():
        try:
            kept[name] = pickle.loads(pickle.dumps(value))
        except Exception:  # such as the connection that an answer came from
            continue
    yield type(error), tuple(arg for arg in error.args if isinstance(arg, (str, int, float))), kept
    yield (RolloutError(f"{type(error).__name__}: {error}"),)


def _load_error(error: Any, args: tuple[Any, ...] = (), values: dict[str, Any] | None = None) -> Exception:
    if isinstance(error, Exception):
        return error
    made: Exception = error.__new__(error, *args)
    made.args = args
    vars(made).update(values or {})
    return made


# -- back in the script --


def unpack(answer: bytes) -> Any:
    """Return the result of a call, or raise its error. What it has booked is written to the script's ledgers."""
    failure, result, bookings = pickle.loads(answer)
    costs.book_delivered(bookings)
    if failure is None:
        return result
    packed, shown, frames = failure
    raise _load_error(*pickle.loads(packed)) from RemoteTraceback(shown, traceback.StackSummary.from_list(frames))
