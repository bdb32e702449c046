"""What a key may ask for that touches the machine: settings of a model, and losses that are code.

Only keys with scope `admin` may register models with settings that touch the machine: folders of the server as base
models, devices, memory, addresses, and flags of programs. A key that may train must not run programs on the server.
A key of a project reads no folder of another project, and no folder elsewhere that the operator has not named. Losses
that are code need the operator's consent, whatever the key.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from art.config import CustomLossConfig, ServerConfig, VllmConfig
from art.config.base_models import is_local, resolve_base_model
from art.errors import PermissionDeniedError
from art.protocol.training import RegisterRequest
from art.server.auth import Caller

HARMLESS = {
    "lora": None,
    "render": None,
    "sampling": None,
    "engine": {"kind", "dtype", "max_context", "quantization"},
    "trainer": {"dtype", "max_tokens", "gradient_checkpointing", "quantization"},
}
"""Settings that any key may choose; `None` means all settings of a group. Others must have the server's values."""


def check_registration(request: RegisterRequest, caller: Caller, config: ServerConfig) -> None:
    """Check that a caller may register a model with these settings.

    Raises:
        PermissionDeniedError: the request touches the machine, and the key does not have scope `admin`.
        ConfigError: there is no base model of this name.
    """
    if caller.may("admin"):
        return
    offered = {resolve_base_model(name) for name in config.models}
    base_model = resolve_base_model(request.base_model)
    if base_model not in offered and (config.only_models or is_local(base_model)):
        listed = ", ".join(sorted(offered)) or "none"
        what = "is not one of them" if config.only_models else "is a folder of the server"
        raise PermissionDeniedError(
            f"base model {request.base_model!r} {what}; without scope `admin` a key may use those that the server "
            f"offers ({listed})"
            + ("" if config.only_models else " and hub ids")
            + "; the operator can offer it: `art-server --model`",
            param="base_model",
        )
    for group, allowed in HARMLESS.items():
        settings = getattr(request.settings, group)
        if allowed is None:
            continue
        usual = VllmConfig() if isinstance(settings, VllmConfig) else getattr(config.settings, group)
        for name in _changed(settings, usual) - allowed:
            raise PermissionDeniedError(
                f"`settings.{group}.{name}` touches the machine; it needs a key with scope `admin`, or leave it out",
                param=f"settings.{group}.{name}",
            )


def check_base_folder(folder: Path, caller: Caller, config: ServerConfig, data_dir: Path | None) -> None:
    """Check that a caller may have a model read from a folder of the server.

    The folder counts with `..` and symbolic links resolved. A key of a project may name the models of its project in
    the data directory; any admin key may name what is in `base_model_folders`, and one for all projects, where these
    are not set, every folder.

    Raises:
        PermissionDeniedError: the folder belongs to another project, or is not in one that the operator allows.
    """
    real = folder.expanduser().resolve()
    if any(real == Path(name).expanduser().resolve() for name in config.models if is_local(name)):
        return
    if data_dir is not None and real.is_relative_to(data_dir.resolve()):
        if caller.project is None or real.is_relative_to((data_dir / caller.project / "models").resolve()):
            return
        reason = f"is in the data directory and not in the folder of project {caller.project!r}"
    else:
        allowed = config.base_model_folders
        if allowed is None and caller.project is None:
            return
        if any(real.is_relative_to(Path(one).expanduser().resolve()) for one in allowed or ()):
            return
        reason = "is in no folder that this server takes base models from (`base_model_folders` of its configuration)"
    raise PermissionDeniedError(
        f"base model {str(folder)!r} {reason}; use a hub id, or a folder that the operator offers", param="base_model"
    )


def check_custom_loss(loss: CustomLossConfig, config: ServerConfig) -> None:
    """Check that the operator allows a custom loss, which runs code in the trainer's process.

    Raises:
        PermissionDeniedError: its module is not among `config.custom_losses`.
    """
    module = loss.function.partition(":")[0]
    if not any(name == "*" or module == name or module.startswith(f"{name}.") for name in config.custom_losses):
        listed = ", ".join(config.custom_losses) or "none"
        raise PermissionDeniedError(
            f"the custom loss {loss.function!r} would run code on this server, which allows modules by name: {listed}. "
            f"Its operator can start it with `--custom-losses {module}`; `LocalBackend` allows every custom loss",
            param="config.loss",
        )


def _changed(settings: BaseModel, usual: BaseModel) -> set[str]:
    """Names of fields that differ from the class's defaults and from the server's own settings."""
    return {
        name
        for name, field in type(settings).model_fields.items()
        if (value := getattr(settings, name)) not in (field.get_default(), getattr(usual, name, value))
    }
