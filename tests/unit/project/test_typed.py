"""Users of a type checker see types: the package says that it has them, and mypy reads them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import art

ROOT = Path(__file__).parents[3]
SCRIPT = """
import art
from art.config import PpoConfig

async def rollout(model: art.TrainableModel, scenario: str) -> art.Trajectory:
    return art.Trajectory(reward=1.0)

async def main() -> None:
    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name="a", project="p", base_model="b")
        await model.register(backend)
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in ("x", "y")
        )
        reveal_type(groups)
        reveal_type(await model.train(groups, learning_rate=1e-5, loss=PpoConfig()))
        reveal_type(await backend.train(model, groups, art.TrainConfig(), verbose=True))
        reveal_type(await backend.list_checkpoints(model))
        reveal_type(await backend.fork(model, "other"))
        reveal_type(art.get_task)
        await model.train(groups, art.TrainConfig(learning_rat=1e-5))
        await model.train(groups, verbose="yes")
"""
EXPECTED = [
    'Revealed type is "list[art.trajectory.TrajectoryGroup]"',
    'Revealed type is "art.client.training.TrainResult"',
    'Revealed type is "art.client.training.TrainResult"',
    'Revealed type is "list[art.protocol.checkpoint_calls.CheckpointInfo]"',
    'Revealed type is "int"',
    'Revealed type is "def (name: str, options: typing.Mapping[str, Any] | None =, *, is_tiny: bool =) -> '
    'art.task.interface.Task"',
    'Unexpected keyword argument "learning_rat" for "TrainConfig"',
    'Argument "verbose" to "train" of "TrainableModel" has incompatible type',
]


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(art.__file__).parent / "py.typed").is_file()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "src/art" in wheel["packages"], "hatch ships every file of these folders"
    assert not {"exclude", "only-include"} & wheel.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_sees_the_types_of_a_user_s_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nplugins = pydantic.mypy\nfollow_imports = silent\n"
        "[mypy-openai.*,httpx2.*,tqdm.*,langchain_core.*,langchain_openai.*,langgraph.*,langsmith.*,mcp.*,numpy.*,rich.*]\n"
        "follow_imports = skip\n"  # large, and not what is tested
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "script.py"],
        cwd=tmp_path, env={"MYPYPATH": str(Path(art.__file__).parents[1]), "MYPY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [line.split(": ", 2)[-1].replace("builtins.", "") for line in done.stdout.splitlines()]
    lines = [line for line in lines if not line.startswith('"train" defined in')]
    assert len(lines) == len(EXPECTED), done.stdout + done.stderr
    for line, expected in zip(lines, EXPECTED, strict=True):
        assert expected in line
