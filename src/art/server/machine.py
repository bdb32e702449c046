"""What touches the machine is for keys with scope `admin`: files of the server as a base model, and settings that
choose devices, memory, addresses or flags of programs. Who may train must not thereby run programs on the server."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from art.config import ServerConfig, VllmConfig
from art.config.base_models import is_local, resolve_base_model
from art.errors import PermissionDeniedError
from art.protocol.training import RegisterRequest
from art.server.auth import Caller

HARMLESS = {
    "lora": None,
    "render": None,
    "engine": {"kind", "dtype", "max_context", "quantization"},
    "trainer": {"dtype", "max_tokens", "gradient_checkpointing", "quantization"},
}
"""Settings that any key may choose; `None` stands for all of a group. The others must be as the server has them."""


def check_registration(request: RegisterRequest, caller: Caller, config: ServerConfig) -> None:
    """
    Raises:
        PermissionDeniedError: the request names something of the machine, and the key has no scope `admin`.
        ConfigError: a base model that does not exist under this name.
    """
    if caller.may("admin"):
        return
    offered = {resolve_base_model(name) for name in config.models}
    base_model = resolve_base_model(request.base_model)
    if base_model not in offered and (config.only_models or is_local(base_model)):
        there = ", ".join(sorted(offered)) or "none"
        what = "is not one of them" if config.only_models else "is a folder of the server"
        raise PermissionDeniedError(
            f"base model {request.base_model!r} {what}; without scope `admin` a key may use those that the server "
            f"offers ({there})" + ("" if config.only_models else " and hub ids"),
            param="base_model",
        )
    for group, allowed in HARMLESS.items():
        given = getattr(request.settings, group)
        if allowed is None:
            continue
        usual = VllmConfig() if isinstance(given, VllmConfig) else getattr(config.settings, group)
        for name in _changed(given, usual) - allowed:
            raise PermissionDeniedError(
                f"`settings.{group}.{name}` touches the machine; it needs a key with scope `admin`, or leave it out",
                param=f"settings.{group}.{name}",
            )


def _changed(given: BaseModel, usual: BaseModel) -> set[str]:
    """Fields that differ from the class's defaults and from what the server uses itself."""
    fields: dict[str, Any] = {name: getattr(given, name) for name in type(given).model_fields}
    return {
        name
        for name, value in fields.items()
        if value != type(given).model_fields[name].get_default() and value != getattr(usual, name, value)
    }
