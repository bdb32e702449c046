"""The checks that run before a model is trained.

    versions, devices, disk space, memory forecast, chat format   take a second; also run before a model's first step
    memory and time, by a trial step (`trial.py`)                 take as long as a step; run when `art doctor` asks

A check fails if the training would fail, or would train something else than it claims.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from art.config import VllmConfig
from art.errors import ConfigError, DiskFullError
from art.protocol.preflight import CheckResult
from art.runtime.checks.format_checks import check_template, check_tools
from art.runtime.checks.machine_checks import DISK_SPACE, check_devices, check_disk, check_versions, check_vllm
from art.runtime.checks.memory_check import check_forecast
from art.runtime.host import BaseModelHost
from art.runtime.hosts import host_key
from art.runtime.placement.default_engine import FASTER, SLOW, is_slow
from art.runtime.registry import RegisteredModel

logger = logging.getLogger(__name__)


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
        key = f"{model.key}|{host_key(model)}"
        if key in self._passed:
            return []
        checks = await quick_checks(host, data_dir, checkpoint)
        if failures := [check for check in checks if check.status == "failure"]:
            listed = "\n".join(f"- {_describe(failure)}" for failure in failures)
            error = DiskFullError if all(failure.name == DISK_SPACE for failure in failures) else ConfigError
            raise error(
                f"{model.key} is not ready to be trained:\n{listed}\n"
                "`art doctor` shows all checks; `ServerConfig(preflight=False)` trains without them"
            )
        self._passed.add(key)
        return [_describe(check) for check in checks if check.status == "warning"]


async def quick_checks(host: BaseModelHost, data_dir: Path, checkpoint: Path) -> list[CheckResult]:
    """Check versions, devices, disk space, the memory forecast, chat template and tool parser."""
    checks = [
        await asyncio.to_thread(check_versions),
        check_devices(host.placement, await host.engine_info()),
        await asyncio.to_thread(check_disk, data_dir, checkpoint),
        check_forecast(await asyncio.to_thread(host.memory_plan)),
    ]
    engine = host.settings.engine
    if is_slow(host.settings, host.placement.engine.kind):
        checks.append(CheckResult(name="engine", status="warning", found=SLOW, remedy=FASTER))
    if isinstance(engine, VllmConfig) and not engine.urls:
        checks.insert(1, await asyncio.to_thread(check_vllm, host.vllm_python))
    try:
        renderer = await host.renderer()
    except ConfigError as error:
        remedy = "use an instruction-tuned model, or add a chat template to its folder"
        return [*checks, CheckResult(name="chat template", status="failure", found=error.message, remedy=remedy)]
    return [*checks, await asyncio.to_thread(check_template, renderer), await asyncio.to_thread(check_tools, renderer)]


def _describe(check: CheckResult) -> str:
    return f"{check.name}: {check.found}" + (f" ({check.remedy})" if check.remedy else "")
