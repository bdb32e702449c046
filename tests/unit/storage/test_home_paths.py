"""A data directory or local log whose path begins with `~` is in the user's home, whatever reads the path."""

from __future__ import annotations

from pathlib import Path

import pytest

import art
from art.cli.server import build_parser, read_options


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def test_backends_keep_their_files_in_the_home(home: Path) -> None:
    assert art.LocalBackend(path="~/runs").path == home / "runs"
    assert art.ServerlessBackend("wandb-key-0123456789", path="~/runs")._data.root == home / "runs"


def test_a_server_and_its_file_of_settings_name_the_home(home: Path) -> None:
    (home / "art.toml").write_text('data_dir = "~/runs"\n')
    for arguments in (["--data-dir=~/runs"], ["--config", str(home / "art.toml")]):
        assert read_options(build_parser().parse_args(arguments))[1] == home / "runs"


async def test_a_model_writes_its_log_there(home: Path) -> None:
    model = art.Model(name="agent", project="shop", base_path="~/runs", report_metrics=[])
    await model.log([art.Trajectory(reward=1.0, messages_and_choices=[])], split="val")
    assert (home / "runs/shop/models/agent/history.jsonl").is_file()
