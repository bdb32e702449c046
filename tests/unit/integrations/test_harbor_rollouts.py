"""The sandbox of Harbor's tasks, and rollouts in it by scripted players."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from art.cli.terminal.event_loop import run_coroutine
from art.errors import ConfigError, ToolServerError
from art.integrations.harbor import sandbox as sandboxes
from art.integrations.harbor.harbor_task import HarborTask
from art.integrations.harbor.sandbox import Limits, check_sandbox, open_sandbox
from art.integrations.harbor.verifier import read_reward
from art.task import Player, Scenario, get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory

SAMPLE = Path(__file__).parents[3] / "examples" / "harbor_tasks"


def can_make_a_sandbox() -> bool:
    try:
        check_sandbox()
    except ConfigError:
        return False
    return True


needs_sandbox = pytest.mark.skipif(not can_make_a_sandbox(), reason="this machine has no user namespaces")


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


# --- the sandbox ---


@needs_sandbox
async def test_commands_reach_nothing_of_the_user(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    os.environ["SOME_API_KEY"] = "the secret"
    try:
        async with open_sandbox(Limits(disk_mb=16, memory_mb=300)) as sandbox:

            async def run(script: str, timeout_s: float = 60) -> tuple[int, str]:
                finished = await sandbox.run(script, timeout_s=timeout_s)
                return finished.code, finished.output.strip()

            assert await run(f"cat {secret}") == (1, f"cat: {secret}: No such file or directory")
            assert "the secret" not in (await run("env; cat /proc/*/environ; cat /proc/*/cmdline"))[1]
            assert (await run("cat /proc/1/environ"))[0] != 0, "the first process cannot be read or traced"
            code, processes = await run("cat /proc/[0-9]*/comm")
            assert set(processes.split()) <= {"bash", "timeout", "cat"}, "only its own processes are seen"
            assert "CapBnd:\t0000000000000000" in (await run("cat /proc/self/status"))[1]
            assert (await run("touch /usr/bin/new"))[1] == "touch: cannot touch '/usr/bin/new': Read-only file system"
            assert (await run("mount -t tmpfs none /mnt"))[0] != 0
            assert (await run("unshare --user --map-root-user true"))[0] != 0, "rights cannot be had again"
            assert (await run("echo 1 > /proc/sys/user/max_user_namespaces"))[0] != 0
            assert (await run("cat /etc/shadow; ls /home /root /var/lib"))[1].count("No such file") == 2
            code, found = await run("cat < /dev/tcp/1.1.1.1/80")
            assert code != 0
            assert "Network is unreachable" in found
            assert (await run("ls -A /tmp /opt /srv | grep -v :"))[1].split() == []
            (code, said), free = await run("head -c 40M /dev/zero > /tmp/big"), (await run("rm /tmp/big; echo ok"))[1]
            assert code != 0
            assert "No space left on device" in said
            assert free == "ok"
            assert (await run("ulimit -v; ulimit -u"))[1].split() == [str(300 * 1024), "256"]
        assert secret.read_text() == "the secret"
    finally:
        del os.environ["SOME_API_KEY"]


@needs_sandbox
async def test_limits_of_time_and_output() -> None:
    async with open_sandbox(Limits(disk_mb=16, output_bytes=100)) as sandbox:
        late = await sandbox.run("echo before; sleep 36000", timeout_s=2)
        assert (late.code, late.output, late.timed_out) == (137, "before\n", True)
        assert (await sandbox.run("sleep 36000 & echo done", timeout_s=600)).output == "done\n"
        assert (await sandbox.run("kill -9 $$", timeout_s=60)).timed_out is False
        long = await sandbox.run("seq 1 1000", timeout_s=60)
        assert long.output.startswith("1\n2\n")
        assert long.output.endswith("999\n1000\n")
        assert "bytes left out ...]" in long.output
        assert len(long.output) < 200
        assert (await sandbox.run("cat; echo " + "x" * 300_000, timeout_s=60)).code == 0, (
            "longer than an argument can be"
        )
        endless = await sandbox.run("yes", timeout_s=60)
        assert (endless.code, endless.timed_out) != (0, True), "it ends when nobody reads on"
        both = await asyncio.gather(*(sandbox.run(f"sleep 0.2; echo {i}", timeout_s=60) for i in range(3)))
        assert [finished.output for finished in both] == ["0\n", "1\n", "2\n"]


@needs_sandbox
def test_commands_run_in_the_event_loop_of_art_train() -> None:
    async def run() -> str:
        async with open_sandbox(Limits(disk_mb=16)) as sandbox:
            return (await sandbox.run("sleep 36000 & echo one", timeout_s=600)).output

    assert run_coroutine(run()) == "one\n"


@needs_sandbox
async def test_nothing_is_left_of_a_sandbox() -> None:
    async with open_sandbox(Limits(disk_mb=16)) as sandbox:
        await sandbox.run("setsid sleep 4711 > /dev/null 2>&1 & sleep 0.3", timeout_s=60)
        assert "4711" in running("4711")
        await sandbox.kill_all()
        assert "sleep" not in (await sandbox.run("cat /proc/[0-9]*/comm", timeout_s=60)).output
        await sandbox.run("setsid sleep 4712 > /dev/null 2>&1 & sleep 0.3", timeout_s=60)
        assert running("4711") == ""
    assert running("4712") == ""


def running(seconds: str) -> str:
    """The command line of `sleep SECONDS`, if one runs on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", seconds.encode()]:
            return seconds
    return ""


@needs_sandbox
@pytest.mark.slow
def test_a_killed_program_leaves_no_sandbox(tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom art.integrations.harbor.sandbox import *\nasync def main():\n"
        "    async with open_sandbox(Limits(disk_mb=16)) as sandbox:\n"
        "        await sandbox.run('setsid sleep 4713 > /dev/null 2>&1 & sleep 0.3', timeout_s=60)\n"
        "        print('started', flush=True)\n        await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert running("4713")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while running("4713") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running("4713")


@needs_sandbox
async def test_an_archive_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in (f"../../..{tmp_path}/planted", "usr/bin/planted", "app/fine"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"ok"))
    async with open_sandbox(Limits(disk_mb=16)) as sandbox:
        with pytest.raises(ToolServerError, match=r"(?s)could not be copied into the sandbox: .*Read-only file"):
            await sandbox.put(packed.getvalue())
        assert (await sandbox.run("cat /app/fine", timeout_s=60)).output == "ok"
    assert not (tmp_path / "planted").exists()


def test_a_machine_without_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxes._try_once.cache_clear()
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name, path: None if name == "nsenter" else name)
    with pytest.raises(ConfigError, match=r"cannot make one: there is no nsenter .* docs/rollouts\.md"):
        check_sandbox()
    monkeypatch.undo()
    monkeypatch.setattr(sandboxes, "_command", lambda limits, then: ["sh", "-c", "echo unshare failed: no >&2; exit 1"])
    with pytest.raises(ConfigError, match=r"cannot make one: unshare failed: no\. It needs Linux with user namespaces"):
        check_sandbox()
    monkeypatch.setattr(sandboxes.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="namespaces are a part of Linux, and this is darwin"):
        HarborTask(SAMPLE)


async def test_a_sandbox_that_does_not_start_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_command", lambda limits, then: ["sh", "-c", "echo mount failed >&2; exit 1"])
    started = time.monotonic()
    with pytest.raises(ConfigError, match="cannot make one: mount failed"):
        async with open_sandbox(Limits()):
            pass
    assert time.monotonic() - started < sandboxes._START_S
    monkeypatch.setattr(sandboxes, "_START_S", 0.1)
    monkeypatch.setattr(sandboxes, "_command", lambda limits, then: ["sleep", "4714"])
    with pytest.raises(ToolServerError, match=r"a sandbox was not there after 0\.1 s"):
        async with open_sandbox(Limits()):
            pass
    assert running("4714") == ""


# --- rollouts ---


@needs_sandbox
async def test_the_solutions_of_the_sample_earn_the_whole_reward() -> None:
    task = get_task(f"harbor:{SAMPLE}", {"max_sandboxes": "2"})
    assert re.fullmatch("harbor-harbor_tasks-[0-9a-f]{8}", task.label), "the number of sandboxes is no part of it"
    assert get_task(f"harbor:{SAMPLE}/totals", {"max_turns": 3}).label.endswith("-max_turns-3")
    scenarios = [scenario for split in ("train", "val", "test") for scenario in task.scenarios(split, seed=0, count=1)]
    assert {scenario.inputs["task"] for scenario in scenarios} == {path.name for path in SAMPLE.iterdir()}
    model = ScriptedModel(task)
    for trajectory in await asyncio.gather(*map(model.play, scenarios)):
        assert (trajectory.reward, trajectory.metrics["solved"], trajectory.metadata["ending"]) == (
            1.0,
            1.0,
            "submitted",
        )
        assert trajectory.metadata["outcome"] == "ok"


@needs_sandbox
async def test_an_agent_sees_what_its_commands_do(folder: Path) -> None:
    wrong_calls = ({"name": "bash", "arguments": "{"}, {"name": "shell", "arguments": {"command": "ls"}})
    commands = ("pwd; ls notes", "cat missing", "echo hi > x; sleep 60", "cat x", "true", "seq 1 200 | tr '\\n' ' '")
    trajectory = await roll_out(folder, *wrong_calls, *commands, command_timeout=5, output_chars=100)
    shown = results(trajectory)
    assert shown[0] == shown[1]
    assert shown[0].startswith("Error: the tools are bash")
    assert shown[2] == "/app\nbirds.txt\nrivers.txt\nstars.txt"
    assert shown[3] == "cat: missing: No such file or directory\n[exit code 1]"
    assert shown[4:7] == ["[killed after 5 s]", "hi", "[no output]"]
    assert "characters left out" in shown[7]
    assert len(shown[7]) < 150
    expected = {"num_turns": 9, "num_commands": 6, "num_failed_commands": 2, "malformed_calls": 2, "solved": 0}
    assert {name: trajectory.metrics[name] for name in expected} == expected
    assert (trajectory.reward, trajectory.metadata["ending"]) == (0.0, "submitted")


@needs_sandbox
@pytest.mark.parametrize(
    ("calls", "options", "ending"),
    [
        (("echo rivers.txt > answer.txt", {"content": "done"}), {}, "no_call"),
        (("echo rivers.txt > answer.txt", "true"), {"max_turns": 2}, "out_of_turns"),
        (("echo rivers.txt > answer.txt", "sleep 60", "true"), {}, "out_of_time"),
    ],
)
async def test_what_was_done_counts_however_a_rollout_ends(
    folder: Path, calls: tuple[Any, ...], options: dict[str, Any], ending: str
) -> None:
    if ending == "out_of_time":
        toml = folder / "task.toml"
        toml.write_text(toml.read_text().replace("timeout_sec = 120.0", "timeout_sec = 5"))
    trajectory = await roll_out(folder, *calls, **options)
    assert (trajectory.metadata["ending"], trajectory.metadata["outcome"]) == (ending, "policy_fault")
    assert trajectory.reward == 1.0


@needs_sandbox
async def test_an_agent_sees_no_tests_and_leaves_none_and_no_process(folder: Path) -> None:
    planted = "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; "
    planted += "echo 1 > /logs/verifier/reward.json; ls -A /tests; ls /solution; "
    trajectory = await roll_out(folder, planted + "(while true; do echo 1 > /logs/verifier/reward.json; done) & true")
    assert results(trajectory)[0].startswith("test.sh\nls: cannot access '/solution'")
    assert trajectory.reward == 0.0, "what it planted is gone before the tests run"


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("echo the reason; exit 3", "wrote no reward to .* ended with code 3: the reason"),
        ("echo begun; sleep 60", "wrote no reward to .* timed out after 5 s: begun"),
        ("echo good > /logs/verifier/reward.txt", "reward 'good\\\\n' is neither a number nor JSON"),
    ],
)
async def test_a_verifier_without_reward_is_no_reward_of_0(folder: Path, test: str, said: str) -> None:
    (folder / "tests" / "test.sh").write_text(test)
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 30.0", "timeout_sec = 5"))
    with pytest.raises(ToolServerError, match=said):
        await roll_out(folder)


def test_rewards_are_read() -> None:
    assert read_reward("0.5\n") == (0.5, {})
    assert read_reward('{"reward": 1, "style": 0.25}') == (1.0, {"reward/reward": 1.0, "reward/style": 0.25})
    assert read_reward('{"passed": true}') == (1.0, {"reward/passed": 1.0})
    for text in ("", "[1]", '{"a": 1, "b": 0}', '{"reward": "1"}', "NaN", json.dumps({"reward": None}), '"1"'):
        with pytest.raises(ValueError, match=r"must be one finite number|neither a number nor JSON"):
            read_reward(text)
