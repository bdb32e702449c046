"""The commands as programs: `art demo` and `art train`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from art.cli.main import main

FIELDS = {"task", "seed", "held_out", "before", "after", "interval_before", "interval_after", "wall_s", "checkpoint"}


def art(*arguments: str, cwd: Path, timeout_s: float = 200) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "art.cli.main", *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def demo(tmp_path: Path, *arguments: str, timeout_s: float = 200) -> dict[str, object]:
    summary = tmp_path / "summary.json"
    art("demo", "--out", str(tmp_path / "out"), "--json", str(summary), *arguments, cwd=tmp_path, timeout_s=timeout_s)
    return json.loads(summary.read_text())


def test_demo_learns_and_writes_what_scripts_read(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has torch already, and with a model that is there; the slow tests run the program."""
    out, file = tmp_path / "out", tmp_path / "summary.json"
    command = ["demo", "--task", "yes_no_maybe", "--steps", "3", "--held-out", "60", "--seed", "3"]
    assert main([*command, "--base-model", str(tiny_model), "--out", str(out), "--json", str(file)]) == 0
    assert "It learnt: maybe on held-out rollouts 0." in capsys.readouterr().out
    summary = json.loads(file.read_text())
    assert summary.keys() >= FIELDS
    assert summary["after"] > summary["before"] + 0.05
    low, high = summary["interval_after"]
    assert low <= summary["after"] <= high
    assert (Path(summary["checkpoint"]) / "adapter_model.safetensors").exists()
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")


def test_seeds_are_judged_together(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "out", tmp_path / "summary.json"
    command = ["demo", "--task", "yes_no_maybe", "--steps", "2", "--held-out", "20", "--seed", "4", "--seeds", "2"]
    assert main([*command, "--base-model", str(tiny_model), "--out", str(out), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"It learnt with \d of 2 seeds.*: maybe on held-out rollouts changed by .* \(median; ", printed)
    summary = json.loads(file.read_text())
    assert summary["seeds"] == [4, 5]
    assert [run["after"] - run["before"] for run in summary["runs"]] == pytest.approx(summary["changes"])
    (data_dir,) = out.glob("run-*")
    assert {path.name for path in data_dir.glob("*/models/*")} == {"seed4", "seed5"}
    assert (out / "learning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["--lora-rank=8", "--full-finetuning"])
def test_train_continues_where_it_stopped(trained: str, tiny_model: Path, tmp_path: Path) -> None:
    task = ["yes_no_maybe", "--groups", "4", "--learning-rate", "1e-4"]  # so slow that rewards keep their spread
    command = ["train", *task, "--base-model", str(tiny_model), "--data-dir", "data", trained]
    assert "is at step 0 of 2" in art(*command, "--steps", "2", cwd=tmp_path)
    again = art(*command, "--steps", "3", "--held-out", "20", "--json", "train.json", cwd=tmp_path)
    assert "is at step 2 of 3" in again
    summary = json.loads((tmp_path / "train.json").read_text())
    assert summary["step"] == 3
    assert len(summary["rewards"]) == len(summary["headlines"]) == 1
    assert summary["metric"] == "maybe"
    assert summary["costs"]["by_source"]["train/policy"]["completion_tokens"] > 0
    assert summary["costs"]["by_source"]["eval/policy"]["completion_tokens"] > 0
    spent = subprocess.run(
        [sys.executable, "-m", "art.cli.main", *command, "--steps", "9", "--price-per-hour", "3600", "--budget", "0.1"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert spent.returncode == 3, spent.stdout + spent.stderr
    assert "Stopped at step" in spent.stdout
    assert "gpu/rollouts" in spent.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["no_such_task"], 1, "no task is named 'no_such_task'. Name a task of your own as"),
        (["yes_no_maybe", "--full-finetuning", "--lora-rank", "4"], 2, "--lora-rank: not allowed with argument --full"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        ended = main(["train", *arguments])
    except SystemExit as exit_:
        ended = exit_.code
    assert ended == status
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tic_tac_toe_is_learnt_over_three_seeds(tmp_path: Path) -> None:
    summaries = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        summaries.append(demo(folder, "--seed", str(seed), timeout_s=300))
    assert max(summary["before"] for summary in summaries) <= 0.65
    assert statistics.fmean(summary["after"] for summary in summaries) >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tool_protocol_of_mail_search_is_learnt(tmp_path: Path) -> None:
    arguments = ["--task", "mail_search", "--steps", "24", "--held-out", "100"]
    summary = demo(tmp_path, *arguments, timeout_s=600)
    assert summary["after"] > summary["before"] + 0.15  # type: ignore[operator]
    (history,) = tmp_path.rglob("history.jsonl")
    errors = [json.loads(line)["train/protocol_error"] for line in history.read_text().splitlines()]
    assert statistics.fmean(errors[-4:]) < 0.5 * statistics.fmean(errors[:4])
