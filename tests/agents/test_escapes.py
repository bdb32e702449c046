"""The agent as an adversary: what it can do to the machine, to other rollouts, to the server and to the check."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art.trajectory import Trajectory
from art_agents import containers as module
from art_agents.address import _MAX_CONNECTIONS, MOUNT, open_address
from art_agents.containers import Container, ContainerEngine, Limits, is_left, owner
from art_tasks.harbor import HarborTask
from tests.agents.conftest import BASE
from tests.support.app import KEY
from tests.support.served_app import ServedApp

pytestmark = pytest.mark.timeout(300)
ASK = """python3 - <<'END'
import json, os, urllib.request as http
body = json.dumps({"model": os.environ["ART_MODEL"], "messages": [{"role": "user", "content": "well?"}]}).encode()
http.urlopen(http.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"}))
END
"""
RIGHT = "echo right > /srv/answer.txt\n"
CHECK = '#!/bin/bash\n[ "$(cat /srv/answer.txt)" = right ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
FORK = """python3 - <<'END'
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.2)
END
"""


async def roll_out(
    served: ServedApp, folder: Path, script: str, *, check: str = CHECK, seconds: float = 120
) -> Trajectory:
    """A whole rollout in which the agent asks the model once, and then runs a script."""
    served.app.bench.engine.turns = [["I try."]]
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text(check)
    (folder / "instruction.md").write_text("Write right into /srv/answer.txt.")
    (folder / "task.toml").write_text(
        f'[environment]\ndocker_image = "{BASE}"\nstorage_mb = 100\nmemory_mb = 400\n'
        f"[agent]\ntimeout_sec = {seconds:.1f}\n"
    )
    task = HarborTask(folder, agent=f"command:{ASK}{script}")
    (scenario,) = task.scenarios("train", seed=0, count=1)
    return await task.rollout(served.policy, scenario)


@contextlib.asynccontextmanager
async def opened(engine: ContainerEngine, **limits: int) -> AsyncIterator[Container]:
    async with engine.open(BASE, Limits(**limits)) as container:
        yield container


def own_containers(engine: ContainerEngine) -> set[str]:
    asked = [engine.program, "ps", "--all", "--filter=label=art.harbor", "--format={{.Names}}"]
    names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return {name for name in names if owner() in name}


async def said(container: Container, script: str, seconds: float = 60) -> str:
    return (await container.run(script, timeout_s=seconds)).output.strip()


# --- the machine ---


async def test_a_fork_bomb_stops_at_its_limit_and_the_check_runs(
    containers: ContainerEngine, served: ServedApp, tmp_path: Path
) -> None:
    async with opened(containers) as other:
        bomb = asyncio.create_task(roll_out(served, tmp_path / "task", RIGHT + FORK, seconds=8))
        seen = 0
        while not bomb.done():
            assert await said(other, "echo $(echo well)") == "well"
            for name in await asyncio.to_thread(own_containers, containers) - {other.name}:
                top = await containers.call("top", name)
                seen = max(seen, len(re.findall(r"python3 -\s*\n", top.output)))
    trajectory = await bomb
    assert 200 < seen <= Limits().max_processes
    assert trajectory.metadata["ending"] == "out_of_time"
    assert trajectory.reward == 1.0, "the check has run, beside none of its processes"


async def test_processes_that_have_ended_do_not_count(containers: ContainerEngine) -> None:
    """Where nobody takes them in, their places are lost."""
    async with opened(containers, max_processes=40) as container:
        assert (
            await said(container, "for i in $(seq 60); do (sleep 0.01 &); sleep 0.01; done; sleep 0.5; echo ok") == "ok"
        )


async def test_memory_ends_the_command_not_the_container(containers: ContainerEngine) -> None:
    async with opened(containers, memory_mb=100) as container:
        assert (await container.run("python3 -c 'x = bytearray(10**9)'", timeout_s=60)).code == 137
        assert (await container.run("head -c 200M /dev/zero > /dev/shm/x", timeout_s=60)).code != 0
        many = "for i in $(seq 20); do python3 -c 'x = bytearray(3 * 10**7); import time; time.sleep(9)' & done; wait"
        await container.run(many, timeout_s=60)
        await container.kill_all()
        assert await said(container, "rm /dev/shm/x; echo alive") == "alive"
    assert "oom" not in os.listdir(), "a mark of Podman"


async def test_a_full_disk_ends_the_rollout(containers: ContainerEngine, served: ServedApp, tmp_path: Path) -> None:
    fill = "for i in $(seq 1000); do head -c 90M /dev/zero > /$i; sleep 0.2; done\n"
    trajectory = await roll_out(served, tmp_path / "task", RIGHT + fill)
    assert (trajectory.metadata["ending"], trajectory.metadata["outcome"]) == ("out_of_disk", "policy_fault")
    assert trajectory.reward == 1.0, "what it has done until then counts"


async def test_many_small_files_are_seen_too(containers: ContainerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may free as much space as a container takes; so it is looked at from time to time all the same."""
    monkeypatch.setattr(module, "_LOOK_S", 2.0)
    monkeypatch.setattr(module, "_free_mb", lambda root: 10**9)
    async with opened(containers, disk_mb=20) as container:
        write = "for i in $(seq 30000); do head -c 8192 /dev/zero > /srv/$i; done"
        assert (await container.run(write, timeout_s=120)).code == 137
        assert container.is_full.is_set()


async def test_volumes_of_an_image_count_as_written(containers: ContainerEngine) -> None:
    if containers.program == "docker":
        pytest.skip("Docker cannot leave out the volumes of an image: docs/security.md")
    image = await containers.build_layer(f"FROM {BASE}\nRUN mkdir /data\nVOLUME /data\n", timeout_s=60)
    async with containers.open(image, Limits(disk_mb=20)) as container:
        await container.run("head -c 60M /dev/zero > /data/x; sleep 60", timeout_s=60)
        assert container.is_full.is_set()


# --- keys, other rollouts and containers ---


async def test_no_key_and_no_other_rollout_is_in_the_container(
    containers: ContainerEngine, served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "SOME_API_KEY"):
        monkeypatch.setenv(name, "http://user:the-secret@127.0.0.1:1")
    url = served.policy.rollout_base_url("mine")
    async with (
        open_address(url, KEY, 5) as address, open_address(served.policy.rollout_base_url("other"), KEY, 5) as other,
        containers.open(BASE, Limits(), mount=(address.folder, MOUNT)) as container,
    ):  # fmt: skip
        look = "env; cat /proc/*/environ /proc/*/cmdline /proc/mounts /proc/net/unix; grep -rsl {0} /etc /opt /run /tmp /root"
        shown = await said(container, look.format(KEY))
        assert "PATH=" in shown
        for secret in (KEY, "the-secret", str(other.folder), "mine"):
            assert secret not in shown
        assert await said(container, f"ls -A {MOUNT}") == "rollout"
        for change in (
            f"rm {MOUNT}/rollout",
            f"touch {MOUNT}/x",
            f"mount -o remount,rw {MOUNT}",
            f"ls {MOUNT}/../../tmp",
        ):
            done = await container.run(f"{change} && find / -xdev -name 'art-address-*'", timeout_s=60)
            assert done.code != 0 or not done.output, change
    assert not address.folder.exists()


async def test_containers_do_not_reach_each_other(containers: ContainerEngine) -> None:
    async with opened(containers) as one, opened(containers) as other:
        await other.run("python3 -m http.server 8000 > /dev/null 2>&1 & sleep 4711 & sleep 1", timeout_s=60)
        assert await said(one, "ls /sys/class/net") == "lo"
        assert (await one.run("exec 3<>/dev/tcp/127.0.0.1/8000", timeout_s=60)).code != 0
        assert "4711" not in await said(one, "cat /proc/*/cmdline | tr '\\0' ' '")
        for attack in (
            "nsenter --target 1 --net --mount true", "mount -t proc proc /mnt", "mknod /dev/disk b 253 0 && cat /dev/disk",
            "echo 1 > /proc/sys/kernel/panic", "chroot /proc/1/root/../../.. ls /root/outside", "kill -0 $(($$ + 100000))",
            "unshare --user --map-root-user mount -t tmpfs none /mnt",
        ):  # fmt: skip
            assert (await one.run(attack, timeout_s=60)).code != 0, attack


# --- the check ---

TRAPS = {
    "process": "(until [ -e /tests/test.sh ]; do :; done; while true; do echo right > /srv/answer.txt; done) & disown\nnohup setsid bash -c "
    "'trap \"\" TERM HUP INT; while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; done' &\n",
    "planted": "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh\n"
    "chmod 000 /tests; echo 1 > /logs/verifier/reward.json\n",
    "links": "rm -rf /tests /logs; mkdir /trap; ln -s /trap /tests; ln -s /trap /logs; echo 1 > /trap/reward.json\n",
    "start files": "for f in /root/.bashrc /root/.profile /etc/profile /etc/bash.bashrc /opt/art-agent/home/.bashrc; do\n"
    "echo 'echo right > /srv/answer.txt' >> $f; done; (crontab - <<< '* * * * * echo right > /srv/answer.txt')\n",
    "variables": "export PATH=/trap LD_PRELOAD=/trap.so BASH_ENV=/trap.sh; echo 'echo right > /srv/answer.txt' > /trap.sh\n",
}


@pytest.mark.parametrize("trap", TRAPS)
async def test_no_trap_is_left_when_the_check_runs(
    containers: ContainerEngine, served: ServedApp, tmp_path: Path, trap: str
) -> None:
    trajectory = await roll_out(served, tmp_path / "task", f"ls /tests /solution\n{TRAPS[trap]}\nexit 0\n")
    assert "cannot access '/tests'" in str(trajectory.metadata["printed"])
    assert trajectory.reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "for i in $(seq 50); do cat /proc/1/fd/0 > /dev/null & done",
        "yes > /proc/1/fd/1 & yes > /proc/1/fd/0 &",
        "kill -KILL 1; kill -STOP 1; kill -TERM 1; kill -HUP 1",
        "rm -f /bin/kill /usr/bin/kill; ln -sf /bin/true /bin/kill",
    ],
)
async def test_the_first_process_goes_on(
    containers: ContainerEngine, served: ServedApp, tmp_path: Path, attack: str
) -> None:
    """It kills all others, whatever the agent does to it."""
    trap = "(while true; do echo 0 > /logs/verifier/reward.json; done) 2>/dev/null &\nsleep 1; exit 0"
    trajectory = await roll_out(served, tmp_path / "task", f"{RIGHT}mkdir -p /logs/verifier\n{attack}\n{trap}")
    assert trajectory.metadata["ending"] in ("finished", "failed"), "it may have ended itself"
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    "change",
    [
        *(f"cp /bin/true /tmp/x; mv /tmp/x $(command -v {tool})" for tool in ("timeout", "tar", "head", "cat")),
        "printf '#!/bin/sh\\necho right\\n' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat",
        "mv /usr/bin/bash /usr/bin/bush; cp /bin/true /usr/bin/bash",
        "rm /bin; mkdir /bin; /usr/bin/cp /usr/bin/bash /usr/bin/sh /bin/",
        "echo /trap.so > /etc/ld.so.preload",
        "cd $(dirname $(readlink -f /lib/*/libc.so.6)); cp libc.so.6 x; mv x libc.so.6",
    ],
)
async def test_a_check_whose_tools_are_replaced_does_not_run(
    containers: ContainerEngine, served: ServedApp, tmp_path: Path, change: str
) -> None:
    trajectory = await roll_out(served, tmp_path / "task", f"{RIGHT}{change}\nexit 0\n")
    assert (trajectory.metadata["ending"], trajectory.reward) == ("changed_tools", 0.0)
    assert trajectory.metadata["outcome"] == "policy_fault"


async def test_what_a_shared_container_cannot_prevent(
    containers: ContainerEngine, served: ServedApp, tmp_path: Path
) -> None:
    """The check believes other programs of the container. docs/security.md says so; change it when this fails."""
    script = "rm /usr/bin/python3; printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/python3; chmod +x /usr/bin/python3\n"
    check = "#!/bin/bash\npython3 -c 'exit(1)'; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    trajectory = await roll_out(served, tmp_path / "task", script, check=check)
    assert (trajectory.metadata["ending"], trajectory.reward) == ("finished", 1.0)


async def test_the_forwarder_is_the_agents_own(containers: ContainerEngine, served: ServedApp, tmp_path: Path) -> None:
    kill = "for p in /proc/[0-9]*; do grep -qs 8817 $p/cmdline && kill -9 ${p#/proc/}; done; exit 0\n"
    trajectory = await roll_out(served, tmp_path / "task", f"{RIGHT}{kill}")
    assert (trajectory.reward, trajectory.metrics["num_turns"]) == (1.0, 1)


# --- the address, without containers ---


class Upstream:
    """A server that keeps what each connection sends."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.answer = asyncio.Event()
        self.answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readuntil(b"\r\n\r\n")
        number = len(self.received)
        self.received.append(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while piece := await reader.read(65536):
                    self.received[number] += piece
        await self.answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()


@contextlib.asynccontextmanager
async def addressed(max_answers: int = 5) -> AsyncIterator[tuple[Upstream, Path]]:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/projects/p/rollouts/mine/v1"
    async with server, open_address(url, "the-key", max_answers) as address:
        yield upstream, address.folder / "rollout"


async def send(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


POST = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"
NEXT = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
REFUSED = {
    "parent": b"GET /v1/../../other/v1/models HTTP/1.1\r\n\r\n",
    "encoded parent": b"GET /v1/%2e%2e/%2e%2e/other/v1/models HTTP/1.1\r\n\r\n",
    "backslash": b"GET /v1\\..\\other HTTP/1.1\r\n\r\n",
    "double slash": b"GET //v1/models HTTP/1.1\r\n\r\n",
    "double slash inside": b"GET /v1//models HTTP/1.1\r\n\r\n",
    "outside of v1": b"GET /api/rollouts HTTP/1.1\r\n\r\n",
    "absolute": b"GET http://127.0.0.1/api/models HTTP/1.1\r\n\r\n",
    "other host": b"CONNECT other:443 HTTP/1.1\r\n\r\n",
    "other method": b"PUT /v1/models HTTP/1.1\r\n\r\n",
    "fragment of a line": b"GET /v1/models HTTP/1.1\nX: y HTTP/1.1\r\n\r\n",
    "two paths": b"GET /v1/models /api HTTP/1.1\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}" + NEXT,
    "list of lengths": POST + b"Content-Length: 2, 50\r\n\r\n{}" + NEXT,
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}" + NEXT,
    "chunked": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "chunked and a length": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "folded": POST + b"X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    "space before colon": POST + b"Transfer-Encoding : chunked\r\nContent-Length: 2\r\n\r\n{}",
    "bare LF": POST + b"X: y\nAuthorization: Bearer mine\r\n\r\n",
    "bare CR": POST + b"X: y\rTransfer-Encoding: chunked\r\n\r\n",
    "bare LF LF": POST + b"X: y\n\nGET /api/models HTTP/1.1\r\n\r\n",
    "NUL": POST + b"X: y\0\r\n\r\n",
    "no name": POST + b": y\r\n\r\n",
}


async def test_side_requests_reach_the_rollout_for_them() -> None:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/rollouts/"
    async with server, open_address(f"{url}mine/v1", "the-key", 5, side_url=f"{url}side/v1") as address:
        for _ in range(2):
            await send(address.folder / "rollout", NEXT)
            await send(address.folder / "rollout", NEXT.replace(b"/v1", b"/side/v1"))
    paths = [received.split(b" ")[1] for received in upstream.received]
    assert paths == [b"/rollouts/mine/v1/messages", b"/rollouts/side/v1/messages"] * 2


@pytest.mark.parametrize("name", REFUSED)
async def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    async with addressed() as (upstream, path):
        answer = await send(path, REFUSED[name])
        assert re.match(rb"HTTP/1.1 4\d\d ", answer)
        assert upstream.received == []


async def test_a_request_reaches_the_rollout_with_its_body_and_no_more() -> None:
    async with addressed() as (upstream, path):
        headers = b"Authorization: Bearer mine\r\nX-Api-Key: mine\r\nCookie: a=b\r\nX-Forwarded-For: 1.2.3.4\r\n"
        headers += b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nX-Art-In-Flight: switch\r\n"
        one = b"POST /v1/messages?beta=true HTTP/1.1\r\nContent-Type: application/json\r\n" + headers
        assert b"200 OK" in await send(path, one + b"Content-Length: 2\r\n\r\n{}" + NEXT + b"GET /api HTTP/1.1\r\n\r\n")
        (got,) = upstream.received
        head, _, body = got.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        assert first == "POST /projects/p/rollouts/mine/v1/messages?beta=true HTTP/1.1"
        assert {line.partition(":")[0].lower() for line in lines} == {
            "host", "connection", "authorization", "content-type", "content-length",
        }  # fmt: skip
        assert "Authorization: Bearer the-key" in lines
        assert body == b"{}", "what comes after the body is no request"


async def test_answers_are_counted_before_they_come() -> None:
    async with addressed(max_answers=3) as (upstream, path):
        upstream.answer.clear()
        asking = [asyncio.create_task(send(path, NEXT)) for _ in range(20)]
        await asyncio.sleep(0.5)
        upstream.answer.set()
        answers = await asyncio.gather(*asking)
        assert len(upstream.received) == 3
        assert sum(b"200 OK" in answer for answer in answers) == 3
        assert sum(b"403 Forbidden" in answer for answer in answers) == 17


async def test_connections_that_say_nothing_take_no_place_of_others() -> None:
    async with addressed() as (_, path), addressed() as (_, other):
        silent = [await asyncio.open_unix_connection(path) for _ in range(3 * _MAX_CONNECTIONS)]
        await asyncio.sleep(0.2)
        assert len(os.listdir("/proc/self/fd")) < 5 * _MAX_CONNECTIONS + 60
        with contextlib.suppress(ConnectionError):
            assert await send(path, NEXT) == b""
        assert b"200 OK" in await send(other, NEXT)
        for _, writer in silent:
            writer.close()


async def test_a_head_without_end_is_not_kept() -> None:
    async with addressed() as (upstream, path):
        with contextlib.suppress(ConnectionError):
            assert await send(path, b"GET /v1/models HTTP/1.1\r\nX: " + b"y" * 300_000) == b""
        assert upstream.received == []


@pytest.mark.parametrize(
    ("answer", "is_broken"),
    [
        (None, True),
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", False),
    ],
)
async def test_what_the_server_fails_in_is_told_from_what_the_agent_does(answer: bytes | None, is_broken: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, open_address(url, "the-key", 5) as address:
        got = await send(address.folder / "rollout", NEXT)
        assert got == answer or (answer is None and b" 503 " in got)
        assert address.is_broken == is_broken


# --- what kills leave ---


async def test_leftovers_of_dead_programs_are_removed(containers: ContainerEngine) -> None:
    ask = "from art_agents.containers import owner; print(owner())"
    dead = (await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", ask], text=True)).strip()
    assert is_left(f"art-{dead}-x", "art")
    assert not is_left(f"art-{owner()}-x", "art")
    assert not is_left(f"art-000000{dead[6:]}-x", "art"), "of another machine, whose processes are not seen here"
    reused = re.sub(r"-\d+-", f"-{os.getpid()}-", dead)
    assert is_left(f"art-{reused}-x", "art"), "the id is now that of another process"
    left, kept = f"art-{dead}-test", f"art-{owner()}-test"
    folders = [Path(tempfile.gettempdir(), f"art-address-{one}-test") for one in (dead, owner())]
    try:
        for name, folder in zip((left, kept), folders, strict=True):
            folder.mkdir()
            create = (
                "create",
                f"--name={name}",
                "--label=art.harbor",
                "--volume=/data",
                "--entrypoint=sleep",
                BASE,
                "9",
            )
            assert (await containers.call(*create)).code == 0
        module._remove_leftovers.cache_clear()
        ContainerEngine.find()
        assert kept in await asyncio.to_thread(own_containers, containers)
        assert (await containers.call("container", "inspect", left)).code != 0
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for name, folder in zip((left, kept), folders, strict=True):
            await containers.call("rm", "--force", "--volumes", name)
            shutil.rmtree(folder, ignore_errors=True)


async def test_a_cancelled_start_leaves_nothing(containers: ContainerEngine) -> None:
    async def use() -> None:
        async with opened(containers) as container:
            await container.run("sleep 60", timeout_s=60)

    async with asyncio.timeout(60):
        for pause in (0.0, 0.0005, 0.01, 0.1, 0.3, 0.8):
            task = asyncio.create_task(use())
            await asyncio.sleep(pause)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    deadline = time.monotonic() + 30
    while (left := await asyncio.to_thread(own_containers, containers)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    assert not left
