"""The package of docs/extending.md, installed as its users would have it: each of its parts is found and works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, os, sys
from pathlib import Path
import art
from art.cli.main import main
from art.server.app import App

async def log() -> None:
    model = art.Model(name="a", project="p", base_path="data", report_metrics=["lines"])
    for step in range(3):
        await model.log(metrics={"reward": [0.1, 0.9, 0.5][step]}, step=step)
    await model.close()

asyncio.run(log())
task = art.get_task("parity")
assert [len(task.scenarios("train", seed=1, count=4)), task.scenarios("val", seed=1, count=1)[0].id] == [4, "parity/val/1/0"]
os.environ["STAGING_KEY"] = "k"
assert isinstance(art.StagingBackend(), art.Backend)
pages = App(None, api_key="k", data_dir=Path("data"))
assert {"/", "/running"} < {route.path for route in pages.routes}
pages.close()
assert main(["tasks"]) == 0
assert main(["best-step", "data/p/models/a/history.jsonl"]) == 0
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Write the package's modules and the metadata that an installer makes of its pyproject.toml."""
    page = (ROOT / "docs" / "extending.md").read_text()
    site, texts = tmp_path / "site", {}
    for name, text in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, flags=re.DOTALL):
        texts[name] = texts.get(name, "") + text
    project = tomllib.loads(texts.pop("pyproject.toml"))["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in texts.items():
        (site / name).write_text(text)
    return site


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def test_the_package_of_the_page_adds_all_its_parts(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "say odd or even" in done.stdout
    assert done.stdout.splitlines()[-1] == "1"
    (lines,) = tmp_path.glob("data/**/logged.jsonl")
    assert [json.loads(line)["val/reward"] for line in lines.read_text().splitlines()] == [0.1, 0.9, 0.5]
    shown = run(installed, tmp_path, "-m", "art.cli.main", "--help").stdout
    assert "Print the step with the highest reward" in " ".join(shown.split())


def test_a_name_that_two_packages_claim_is_refused(installed: Path, tmp_path: Path) -> None:
    other = installed / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[art.tasks]\nparity = other:Parity\n")
    done = run(installed, tmp_path, "-m", "art.cli.main", "tasks")
    assert done.returncode == 1
    assert "two installed packages offer 'parity'" in done.stderr
