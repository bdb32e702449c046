"""Loads an attribute that a command names: `module:attribute` or `path/to/file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from art.errors import ConfigError


def load_attribute(path: str, what: str) -> Any:
    """Load an object that a user names as `module:attribute` or `path/to/file.py:attribute`.

    Args:
        what: what the object should be, for errors: "task".

    Raises:
        ConfigError: there is no such module or attribute, or the module cannot be imported.
    """
    module_name, _, attribute = path.rpartition(":")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        own = (module_name + ".").startswith(f"{getattr(error, 'name', None)}.")
        if isinstance(error, FileNotFoundError) or (isinstance(error, ModuleNotFoundError) and own):
            raise ConfigError(
                f"{what} {path!r}: there is no module {module_name!r}; is its folder the working directory "
                f"({Path.cwd()}) or on PYTHONPATH?"
            ) from error
        raise ConfigError(f"{what} {path!r}: {module_name} cannot be imported{describe_failure(error)}") from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        defined = ", ".join(names[:9]) or "nothing"
        raise ConfigError(f"{what} {path!r}: {module.__file__} has no `{attribute}`; it defines {defined}")
    return getattr(module, attribute)


def _import_file(name: str) -> ModuleType:
    """Import the module in a file, once. It may import other modules from its folder."""
    path = Path(name).resolve(strict=True)
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def describe_failure(error: Exception) -> str:
    """Describe an error as text to write after "failed": the line of the user's code at fault, and the message."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno}): {type(error).__name__}: {error.msg}"
    _, *frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and "site-packages" not in frame.filename]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{place}: {type(error).__name__}: {error}"
