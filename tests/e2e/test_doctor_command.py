"""`art doctor` as a program, and its checks on a real server."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import art
from art.protocol.training import PreflightRequest
from art.task import get_task
from art_recipes.doctor_command import examine_task

PROJECT = "doctor"


@pytest.fixture(scope="module")
def backend(shared_backend: art.LocalBackend) -> art.LocalBackend:
    return shared_backend


def doctor(cwd: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what --json wrote, and what was printed."""
    command = [sys.executable, "-m", "art.cli.main", "doctor", *arguments, "--json", "doctor.json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    path = cwd / "doctor.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}, done.stdout + done.stderr


@pytest.mark.slow
def test_a_model_that_is_ready(tiny_model: Path, tmp_path: Path) -> None:
    code, summary, output = doctor(tmp_path, str(tiny_model), "--task", "yes_no_maybe", "--longest", "200")
    assert code == 0, output
    assert summary["ready"]
    names = [check["name"] for check in summary["checks"]]
    assert names == [
        "start", "devices", "disk space", "memory forecast", "chat template", "tool parser",
        "longest sequence", "rollouts", "reward spread", "step of the rollouts",
    ]  # fmt: skip
    assert all(check["status"] == "ok" for check in summary["checks"]), output
    assert summary["checks"][6]["measured"]["num_tokens"] == 200
    assert "ready to be trained" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doctor.json"], "it cleans up behind itself"


def test_a_model_that_is_not(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"settings": {"engine": {"device_indices": [63]}}}')
    code, summary, output = doctor(tmp_path, str(tiny_model), "--settings", "settings.json")
    assert code == 1, output
    assert not summary["ready"]
    assert [(check["name"], check["status"]) for check in summary["checks"]] == [("start", "failure")]
    assert "device_indices" in summary["checks"][0]["found"]
    assert "not ready to be trained" in output


def test_settings_that_are_none(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"engines": {}}')
    code, summary, output = doctor(tmp_path, str(tiny_model), "--settings", "settings.json")
    assert (code, summary) == (1, {})
    assert "`engines` is no setting of TaskTrainingConfig; did you mean `engine`?" in output


@pytest.mark.asyncio(loop_scope="module")
async def test_a_preflight_changes_nothing(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    before = await model.get_step()
    report = await backend.preflight(model, PreflightRequest(quick=False, trial_tokens=64))
    assert [(check.name, check.status) for check in report.checks] == [("longest sequence", "ok")]
    assert await model.get_step() == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_is_looked_at(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    arguments = argparse.Namespace(groups=2, rollouts=4, seed=0)
    checks = await examine_task(arguments, get_task("yes_no_maybe"), backend, model)
    assert [check.name for check in checks] == [
        "rollouts", "reward spread", "step of the rollouts",
    ]  # fmt: skip
    by_name = {check.name: check for check in checks}
    assert all(check.status == "ok" for check in by_name.values()), checks
    trial = by_name["step of the rollouts"].measured
    assert 8 <= trial["num_sampled_tokens"] < trial["num_tokens"]
