"""Rollouts of Harbor's tasks by scripted players: with a container that answers by a table, and with real ones.

The tests with real containers need Podman or Docker with the image debian:12-slim, and are skipped without.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from art.cli.output import run_coroutine
from art.errors import ConfigError, ToolServerError
from art.task import Player, Scenario, get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_agents import containers
from art_agents.containers import Container, ContainerEngine, Finished, Limits
from art_tasks.harbor import HarborTask, read_reward

SAMPLE = Path(__file__).parents[3] / "examples" / "harbor_tasks"
BASE = "debian:12-slim"


def engine_with_base() -> ContainerEngine | None:
    try:
        engine = ContainerEngine.find()
    except ConfigError:
        return None
    asked = subprocess.run([engine.program, "image", "inspect", BASE], capture_output=True, check=False)
    return engine if asked.returncode == 0 else None


ENGINE = engine_with_base()
needs_containers = pytest.mark.skipif(ENGINE is None, reason=f"needs Podman or Docker with the image {BASE}")


class Scripted(HarborTask):
    """Tasks of Harbor whose player makes given calls: texts are commands, other values whole messages."""

    calls: tuple[Any, ...] = ()

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        calls = iter(self.calls)

        def answer(messages: Any, tools: Any) -> dict[str, Any]:
            call = next(calls, {"name": "submit"})
            if isinstance(call, str):
                call = {"name": "bash", "arguments": {"command": call}}
            return call if "content" in call else {"tool_calls": [{"function": call}]}

        return answer


async def roll_out(folder: Path, *calls: Any, **options: Any) -> Trajectory:
    task = Scripted(folder, **options)
    task.calls = calls
    (scenario,) = task.scenarios("train", seed=0, count=1)
    return await ScriptedModel(task).play(scenario)


def results(trajectory: Trajectory) -> list[str]:
    return [str(message["content"]) for message in trajectory.messages() if message["role"] == "tool"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a task whose answer is in /app/answer.txt."""
    return Path(shutil.copytree(SAMPLE / "largest_file", tmp_path / "task"))


# --- without containers ---


class TableEngine(ContainerEngine):
    """An engine whose containers answer commands by a table."""

    answers: dict[str, Finished] = {}

    async def build(self, folder: Path, *, timeout_s: float) -> str:
        return "image"

    async def workdir(self, image: str) -> str:
        return "/app"

    @contextlib.asynccontextmanager
    async def open(self, image: str, limits: Limits) -> AsyncIterator[Container]:
        holder: Any = None
        yield TableContainer(self, "container", limits, holder)


class TableContainer(Container):
    async def put(self, archive: bytes) -> None: ...

    async def kill_all(self) -> None: ...

    async def changed_tools(self) -> list[str]:
        return []

    async def run(self, script: str, **_: Any) -> Finished:
        done = Finished(code=0, output="", timed_out=False)
        return next((answer for part, answer in TableEngine.answers.items() if part in script), done)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finished]:
    monkeypatch.setattr(ContainerEngine, "find", lambda program=None: TableEngine("podman"))
    monkeypatch.setattr(
        TableEngine, "answers", answers := {"reward.txt": Finished(code=0, output="1", timed_out=False)}
    )
    return answers


async def test_an_agent_sees_the_output_of_its_commands(folder: Path, table: dict[str, Finished]) -> None:
    table["cat missing"] = Finished(code=1, output="No such file", timed_out=False)
    table["sleep"] = Finished(code=137, output="", timed_out=True)
    table["seq"] = Finished(code=0, output="x" * 300, timed_out=False)
    wrong_calls = ({"name": "bash", "arguments": "{"}, {"name": "shell", "arguments": {"command": "ls"}})
    trajectory = await roll_out(
        folder, *wrong_calls, "cat missing", "sleep 60", "true", "seq 1 200", command_timeout=5, output_chars=100
    )
    shown = results(trajectory)
    assert shown[0] == shown[1]
    assert shown[0].startswith("Error: the tools are bash")
    assert shown[2:5] == ["No such file\n[exit code 1]", "[killed after 5 s]", "[no output]"]
    assert shown[5] == f"{'x' * 50}\n[... 200 characters left out ...]\n{'x' * 50}"
    expected = {"num_turns": 7, "num_commands": 4, "num_failed_commands": 2, "malformed_calls": 2, "solved": 1}
    assert {name: trajectory.metrics[name] for name in expected} == expected
    assert (trajectory.reward, trajectory.metadata["ending"]) == (1.0, "submitted")
    assert str(trajectory.messages()[1]["content"]).endswith("Working directory: /app")


@pytest.mark.parametrize(
    ("calls", "options", "ending"),
    [
        (("true", {"content": "done"}), {}, "no_call"),
        (("true", "true"), {"max_turns": 2}, "out_of_turns"),
        (("sleep 60", "true"), {}, "out_of_time"),
    ],
)
async def test_what_was_done_counts_however_a_rollout_ends(
    folder: Path, table: dict[str, Finished], calls: tuple[Any, ...], options: dict[str, Any], ending: str
) -> None:
    table["sleep"] = Finished(code=137, output="", timed_out=True)
    trajectory = await roll_out(folder, *calls, **options)
    assert (trajectory.metadata["ending"], trajectory.metadata["outcome"]) == (ending, "policy_fault")
    assert trajectory.reward == 1.0


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A plain folder that wants a file."""
    folder = tmp_path / "plain"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "a.txt").write_text("given\n")
    (folder / "task.toml").write_text(f'instruction = "Copy a.txt to b.txt."\n[environment]\ndocker_image = "{BASE}"\n')
    (folder / "check.sh").write_text("cmp a.txt b.txt\n")
    (folder / "solve.sh").write_text("cp a.txt b.txt\n")
    return folder


@pytest.mark.parametrize(
    ("code", "written", "reward"),
    [(0, (9, ""), 1.0), (1, (9, ""), 0.0), (0, (0, "0.5"), 0.5), (1, (0, "1"), 0.0), (137, (0, "1"), 0.0)],
)
async def test_the_exit_code_of_a_plain_check_decides(
    plain: Path, table: dict[str, Finished], code: int, written: tuple[int, str], reward: float
) -> None:
    table["reward.txt"] = Finished(code=written[0], output=written[1], timed_out=False)
    table["bash /tests/test.sh"] = Finished(code=code, output="", timed_out=code == 137)
    trajectory = await roll_out(plain)
    assert trajectory.reward == reward
    assert str(trajectory.messages()[1]["content"]) == "Copy a.txt to b.txt.\n\nWorking directory: /app"


@pytest.mark.parametrize(
    ("test", "reward", "said"),
    [
        (Finished(code=3, output="the reason", timed_out=False), (9, ""), "ended with code 3: the reason"),
        (Finished(code=137, output="begun", timed_out=True), (0, "1"), r"timed out after 30 s: begun"),
        (Finished(code=0, output="", timed_out=False), (0, "good"), "reward 'good' is neither a number nor JSON"),
    ],
)
async def test_a_verifier_without_reward_is_no_reward_of_0(
    folder: Path, table: dict[str, Finished], test: Finished, reward: tuple[int, str], said: str
) -> None:
    table["reward.txt"] = Finished(code=reward[0], output=reward[1], timed_out=False)
    table["bash /tests/test.sh"] = test
    with pytest.raises(ToolServerError, match=said):
        await roll_out(folder)


def test_a_machine_without_containers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    containers._why_not.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"there is no podman; there is no docker\. Install Podman .* docs/rollouts\.md"
    ):
        HarborTask(SAMPLE)
    (tmp_path / "podman").write_text("#!/bin/sh\necho no user namespaces >&2\nexit 1\n")
    (tmp_path / "podman").chmod(0o755)
    containers._why_not.cache_clear()
    with pytest.raises(ConfigError, match="`podman info` failed: no user namespaces; there is no docker"):
        HarborTask(SAMPLE)
    containers._why_not.cache_clear()


async def test_a_failed_build_and_start_say_why(tmp_path: Path) -> None:
    fake = tmp_path / "podman"
    fake.write_text("#!/bin/sh\necho warning\necho the reason >&2\nexit 125\n")
    fake.chmod(0o755)
    engine = ContainerEngine(str(fake))
    with pytest.raises(ConfigError, match=r"(?s)podman build .*` failed: .*the reason"):
        await engine.build(tmp_path, timeout_s=60)
    with pytest.raises(ToolServerError, match=r"(?s)a container did not start within 60 s: .*the reason"):
        async with engine.open("image", Limits()):
            pass


def test_rewards_are_read() -> None:
    assert read_reward("0.5\n") == (0.5, {})
    assert read_reward('{"reward": 1, "style": 0.25}') == (1.0, {"reward/reward": 1.0, "reward/style": 0.25})
    assert read_reward('{"passed": true}') == (1.0, {"reward/passed": 1.0})
    for text in ("", "[1]", '{"a": 1, "b": 0}', '{"reward": "1"}', "NaN", json.dumps({"reward": None}), '"1"'):
        with pytest.raises(ValueError, match=r"must be one finite number|neither a number nor JSON"):
            read_reward(text)


# --- with containers ---


@contextlib.asynccontextmanager
async def opened(**limits: Any) -> AsyncIterator[Container]:
    assert ENGINE is not None
    async with ENGINE.open(BASE, Limits(**limits)) as container:
        yield container


@needs_containers
async def test_commands_reach_nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    monkeypatch.setenv("SOME_API_KEY", "the secret")
    async with opened(memory_mb=300) as container:

        async def run(script: str) -> tuple[int, str]:
            finished = await container.run(script, timeout_s=60)
            return finished.code, finished.output.strip()

        assert await run(f"cat {secret}") == (1, f"cat: {secret}: No such file or directory")
        assert "the secret" not in (await run("env; cat /proc/*/environ; cat /proc/*/cmdline"))[1]
        _, processes = await run("cat /proc/[0-9]*/comm")
        assert set(processes.split()) <= {"bash", "timeout", "cat"}, "only its own processes are seen"
        assert (await run("mount -t tmpfs none /mnt"))[0] != 0
        code, found = await run("cat < /dev/tcp/1.1.1.1/80")
        assert (code != 0, "Network is unreachable" in found) == (True, True)
        assert (await run("head -c 600M /dev/zero > /big"))[0] != 0, "a file is at most 512 MB"
        assert (await run("head -c 400M /dev/zero | tail"))[0] != 0, "memory of the container"


@needs_containers
async def test_limits_of_time_and_output() -> None:
    async with opened(output_bytes=100) as container:
        late = await container.run("echo before; sleep 36000", timeout_s=2)
        assert (late.code, late.output, late.timed_out) == (137, "before\n", True)
        assert (await container.run("sleep 36000 & echo done", timeout_s=600)).output == "done\n"
        assert (await container.run("kill -9 $$", timeout_s=60)).timed_out is False
        long = await container.run("seq 1 1000", timeout_s=60)
        assert (long.output[:4], long.output[-9:]) == ("1\n2\n", "999\n1000\n")
        assert "bytes left out ...]" in long.output
        assert (await container.run("cat; echo " + "x" * 300_000, timeout_s=60)).code == 0, "longer than an argument"
        endless = await container.run("yes", timeout_s=60)
        assert (endless.code, endless.timed_out) == (137, False), "an output without end ends its command"
        both = await asyncio.gather(*(container.run(f"sleep 0.2; echo {i}", timeout_s=60) for i in range(3)))
        assert [finished.output for finished in both] == ["0\n", "1\n", "2\n"]


@needs_containers
def test_commands_run_in_the_event_loop_of_art_train() -> None:
    async def run() -> str:
        async with opened() as container:
            return (await container.run("sleep 36000 & echo one", timeout_s=600)).output

    assert run_coroutine(run()) == "one\n"


def running_containers() -> str:
    assert ENGINE is not None
    command = [ENGINE.program, "ps", "--all", "--quiet", "--filter=label=art.harbor"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_containers
async def test_nothing_is_left_of_a_container() -> None:
    async with opened() as container:
        await container.run("setsid sleep 4711 > /dev/null 2>&1 &", timeout_s=60)
        await container.kill_all()
        states = await container.run("grep -h -A2 Name:.sleep /proc/[0-9]*/status", timeout_s=60)
        assert "running" not in states.output
        assert "sleeping" not in states.output
        await container.run("setsid sleep 4712 > /dev/null 2>&1 &", timeout_s=60)
        name = container.name
    assert ENGINE is not None
    assert (await ENGINE.call("container", "inspect", name)).code != 0


@needs_containers
@pytest.mark.slow
def test_a_killed_program_leaves_no_container() -> None:
    script = (
        "import asyncio\nfrom art_agents.containers import *\nasync def main():\n"
        f"    async with ContainerEngine.find().open({BASE!r}, Limits()) as container:\n"
        "        await container.run('setsid sleep 4713 > /dev/null 2>&1 &', timeout_s=60)\n"
        "        print('started', flush=True)\n        await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert running_containers()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while running_containers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running_containers()


@needs_containers
async def test_an_archive_stays_in_the_container(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in (f"../../..{tmp_path}/planted", "app/fine"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"ok"))
    async with opened() as container:
        with pytest.raises(ToolServerError, match=r"(?s)could not be copied into the container: .*contains '\.\.'"):
            await container.put(packed.getvalue())
        assert (await container.run("cat /app/fine", timeout_s=60)).output == "ok"
    assert not (tmp_path / "planted").exists()


@needs_containers
async def test_the_solutions_of_the_sample_earn_the_whole_reward() -> None:
    task = get_task(f"harbor:{SAMPLE}", {"max_containers": "2"})
    assert re.fullmatch("harbor-harbor_tasks-[0-9a-f]{8}", task.label), "the number of containers is no part of it"
    assert get_task(f"harbor:{SAMPLE}/totals", {"max_turns": 3}).label.endswith("-max_turns-3")
    scenarios = [scenario for split in ("train", "val", "test") for scenario in task.scenarios(split, seed=0, count=1)]
    assert {scenario.inputs["task"] for scenario in scenarios} == {path.name for path in SAMPLE.iterdir()}
    for trajectory in await asyncio.gather(*map(ScriptedModel(task).play, scenarios)):
        assert (trajectory.reward, trajectory.metrics["solved"], trajectory.metadata["outcome"]) == (1.0, 1.0, "ok")


@needs_containers
async def test_an_agent_sees_no_tests_and_leaves_none_and_no_process(folder: Path) -> None:
    planted = "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; "
    planted += "echo 1 > /logs/verifier/reward.json; ls -A /tests; ls /solution; "
    trajectory = await roll_out(
        folder, "pwd; ls notes", planted + "(while true; do echo 1 > /logs/verifier/reward.json; done) & true"
    )
    assert results(trajectory)[0] == "/app\nbirds.txt\nrivers.txt\nstars.txt"
    assert results(trajectory)[1].startswith("test.sh\nls: cannot access '/solution'")
    assert trajectory.reward == 0.0, "what it planted is gone before the tests run"
