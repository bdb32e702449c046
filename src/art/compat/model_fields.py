"""Fields of `Model` in older code that have no meaning here."""

from __future__ import annotations

from typing import Any

from art.errors import ConfigError

_REFUSED = {
    "entity": "projects have no owners here. W&B's owner is set by the variable WANDB_ENTITY",
    "id": "a model is identified by `project` and `name`",
    "run_id": "a run in W&B is identified by `project` and `name`, and continues by itself",
}


def drop_older_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a model's fields without those of older code that no longer exist, which may only be empty.

    Raises:
        ConfigError: an older field has a value, which would have no effect.
    """
    for name in _REFUSED.keys() & fields.keys():
        if fields[name] not in (None, []):
            raise ConfigError(f"{name}={fields[name]!r} is not supported: {_REFUSED[name]}. Leave it out", param=name)
    return {name: value for name, value in fields.items() if name not in _REFUSED}
