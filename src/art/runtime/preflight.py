"""The checks that run before a model is trained.

    devices, disk space, memory forecast, chat format   take a second; also run before a model's first step
    memory and time, by a trial step (`check_trial`)                 take as long as a step; run when `art doctor` asks

A check fails if the training would fail, or would train something else than it claims. None of them loads torch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from art.engine import EngineInfo
from art.errors import ConfigError, DiskFullError
from art.gateway.fidelity import (
    Examined,
    examine,
    plain_conversations,
    reasoning_conversation,
    tool_conversations,
)
from art.gateway.renderer import Renderer
from art.protocol.training import CheckResult, CheckStatus
from art.runtime.hosting.host import BaseModelHost
from art.runtime.memory import check_forecast
from art.runtime.placement import ELSEWHERE, FASTER, SLOW, Placement, is_slow
from art.runtime.registry import RegisteredModel

logger = logging.getLogger(__name__)


DISK_SPACE = "disk space"
FEWEST_CHECKPOINTS, MANY_CHECKPOINTS = 2, 100
"""Free space for fewer checkpoints than the first number is a failure, because a step is written beside the one before.
Free space for fewer than the second is a warning."""


def check_devices(placement: Placement, engine: EngineInfo) -> CheckResult:
    """Check that the engine runs on the device where it was placed."""
    sharing = "they share its memory" if placement.shared else "each has memory of its own"
    if placement.sleeps:
        sharing += ", and the engine sleeps while the trainer works"
    devices = f"engine on {placement.engine} in {engine.dtype}, trainer on {placement.trainer}; {sharing}"
    if placement.engine.kind not in (ELSEWHERE, engine.device.split(":")[0]):
        problem = f"{devices}; but the engine runs on {engine.device}"
        remedy = 'this torch cannot use the GPU: install a build of torch for it, or set device "cpu"'
        return CheckResult(name="devices", status="warning", found=problem, remedy=remedy)
    return CheckResult(name="devices", status="ok", found=devices)


def check_disk(data_dir: Path, checkpoint: Path, free_bytes: int | None = None) -> CheckResult:
    """Check that more checkpoints of the size of `checkpoint` fit on the disk."""
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    free = shutil.disk_usage(data_dir).free if free_bytes is None else free_bytes
    room = free // max(1, size)
    space = f"{free / 2**30:.1f} GiB free in {data_dir}, room for {room:,} checkpoints of {size / 2**20:.1f} MiB"
    measured = {"free_bytes": float(free), "checkpoint_bytes": float(size)}
    if room >= MANY_CHECKPOINTS:
        return CheckResult(name=DISK_SPACE, status="ok", found=space, measured=measured)
    remedy = "free some space, choose another data directory, or call `model.delete_checkpoints()` regularly"
    status: CheckStatus = "warning" if room >= FEWEST_CHECKPOINTS else "failure"
    return CheckResult(name=DISK_SPACE, status=status, found=space, remedy=remedy, measured=measured)


_DETACHED = "the template writes answers in a form that does not continue their prompt, so none could be checked"
_REPORT = "use the model's own current chat template; if you do already, report the model"


def check_template(renderer: Renderer) -> CheckResult:
    """Check the chat template: the prompt of a later turn must begin with the exact tokens of the earlier turn, or be
    a declared branch, and an answer must come back unchanged when its tokens are parsed."""
    plain = [examine(renderer, conversation) for conversation in plain_conversations()]
    reasoning = examine(renderer, reasoning_conversation())
    name = "chat template"
    if plain[0].refused is not None:
        remedy = "use an instruction-tuned model, or correct its chat template"
        return CheckResult(name=name, status="failure", found=plain[0].refused, remedy=remedy)
    if problem := _problem([*plain, reasoning]):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if plain[0].detached:
        remedy = "reinforcement learning works, each turn as a branch; supervised fine-tuning needs another template"
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy=remedy)
    if plain[0].branch is not None:
        problem = f"each turn is a branch ({plain[0].branch}): it does not extend the tokens of the turn before"
        remedy = (
            "it trains correctly, but recomputes every turn of a conversation; a template that only appends is faster"
        )
        return CheckResult(name=name, status="warning", found=problem, remedy=remedy)
    notes = []
    if reasoning.branch is not None:
        notes.append(f"turns with reasoning are branches ({reasoning.branch}), unless `render.keep_reasoning` is set")
    notes += [f"it does not support {item.name}" for item in plain[1:] if item.refused]
    works = "; ".join(["later turns extend earlier ones; answers come back", *notes])
    return CheckResult(name=name, status="ok", found=works)


def check_tools(renderer: Renderer) -> CheckResult:
    """Check that a tool call that the template writes is parsed as the same call."""
    name = "tool parser"
    if not renderer.handles_tools:
        template = renderer.tokenizer.template
        takes_tools = template is not None and template.handles_tools
        why = "writes tool calls in an unknown form" if takes_tools else "has no place for tools"
        refusal = f"the chat template {why}, so requests with `tools` are refused"
        remedy = "describe tools in a message and parse the answer yourself, or use another base model"
        return CheckResult(name=name, status="warning", found=refusal, remedy=remedy)
    examined = [examine(renderer, conversation) for conversation in tool_conversations()]
    if refused := [item.refused for item in examined if item.refused]:
        return CheckResult(name=name, status="failure", found=refused[0], remedy=_REPORT)
    if problem := _problem(examined):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if any(item.detached for item in examined):
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy="inspect the tool calls of a rollout")
    branches = sorted({item.branch for item in examined if item.branch})
    note = f"; the turn after a tool's answer is a branch ({', '.join(branches)})" if branches else ""
    return CheckResult(name=name, status="ok", found=f"calls come back as they were written{note}")


def _problem(examined: list[Examined]) -> str | None:
    for item in examined:
        if problem := item.extend_problem or item.parse_problem:
            return f"{item.name}: {problem}"
    return None


class Preflight:
    """Runs the quick checks before a model is trained, once for each model and its settings."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    async def ensure(self, model: RegisteredModel, host: BaseModelHost, data_dir: Path, checkpoint: Path) -> list[str]:
        """Run the quick checks, unless they have passed before.

        Returns:
            The warnings of the checks; empty if the checks passed before.

        Raises:
            ConfigError: some checks fail. The message lists them, each with a remedy.
            DiskFullError: only the check of the disk space fails.
        """
        key = f"{model.key}|{model.host_key}"
        if key in self._passed:
            return []
        checks = await quick_checks(host, data_dir, checkpoint)
        if failures := [check for check in checks if check.status == "failure"]:
            listed = "\n".join(f"- {_describe(failure)}" for failure in failures)
            error = DiskFullError if all(failure.name == DISK_SPACE for failure in failures) else ConfigError
            raise error(f"{model.key} is not ready to be trained:\n{listed}\n`art doctor` shows all checks")
        self._passed.add(key)
        return [_describe(check) for check in checks if check.status == "warning"]


async def quick_checks(host: BaseModelHost, data_dir: Path, checkpoint: Path) -> list[CheckResult]:
    """Check devices, disk space, the memory forecast, chat template and tool parser."""
    checks = [
        check_devices(host.placement, await host.engine_info()),
        await asyncio.to_thread(check_disk, data_dir, checkpoint),
        check_forecast(await asyncio.to_thread(host.memory_plan)),
    ]
    if is_slow(host.settings, host.placement.engine.kind):
        checks.append(CheckResult(name="engine", status="warning", found=SLOW, remedy=FASTER))
    try:
        renderer = await host.renderer()
    except ConfigError as error:
        remedy = "use an instruction-tuned model, or add a chat template to its folder"
        return [*checks, CheckResult(name="chat template", status="failure", found=error.message, remedy=remedy)]
    return [*checks, await asyncio.to_thread(check_template, renderer), await asyncio.to_thread(check_tools, renderer)]


def _describe(check: CheckResult) -> str:
    return f"{check.name}: {check.found}" + (f" ({check.remedy})" if check.remedy else "")
