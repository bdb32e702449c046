"""`RemoteServer` and its keeper: installing, starting, restarting, stopping, on a machine that is a folder of this one."""

from __future__ import annotations

import asyncio
import json
import nturl2path
import re
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import art
from art.backends.ssh import Install, RemoteServer, Ssh, install, install_progress, keeper, probing, remote_server
from art.backends.ssh.install import make_package
from art.errors import ConfigError, MachineError, UnreachableError
from tests.support.fake_ssh import FakeMachine
from tests.unit.backends.ssh.test_tunnel import until

INSTALL = Install(source="art==1.2.3", extras=())


def server_of(machine: FakeMachine, config: art.ServerConfig | None = None) -> RemoteServer:
    return RemoteServer(Ssh("box"), install=INSTALL, config=config)


async def test_a_server_is_installed_once_started_once_and_found_again(machine: FakeMachine) -> None:
    lines: list[str] = []
    assert await server_of(machine).status() is None
    first = await server_of(machine).ensure(lines.append)
    assert (first.is_running, first.version, first.num_starts) == (True, "1.2.3", 1)
    assert first.api_key.startswith("art-")
    assert first.api_key not in repr(first)
    assert "installing art==1.2.3" in "\n".join(lines)
    assert "ART 1.2.3 is installed" in "\n".join(lines)
    again: list[str] = []
    assert await server_of(machine).ensure(again.append) == first
    assert again == []
    await server_of(machine).ensure()
    assert len(machine.processes("keeper.py supervise")) == 1
    assert len(machine.processes("keeper.py serve")) == 1


async def test_two_who_start_it_at_once_get_one_server(machine: FakeMachine) -> None:
    await server_of(machine).install()
    one, other = await asyncio.gather(server_of(machine).start(), server_of(machine).start())
    assert (one.port, one.api_key, one.server_pid) == (other.port, other.api_key, other.server_pid)
    assert len(machine.processes("keeper.py supervise")) == 1


async def test_a_server_that_is_killed_comes_back_and_after_a_reboot_it_has_the_same_port_and_key(
    machine: FakeMachine,
) -> None:
    server = server_of(machine, art.ServerConfig(only_models=True))
    first = await server.ensure()
    machine.kill("keeper.py serve")
    state_file = machine.server_folder / "state.json"
    await until(lambda: json.loads(state_file.read_text())["num_starts"] == 2)
    state = await server.status()
    assert state is not None
    assert state.last_exit == "signal 9"
    assert state.server_pid != first.server_pid
    machine.kill()
    state = await server.status()
    assert state is not None
    assert not state.is_running
    revived = await RemoteServer(Ssh("box"), install=Install(source="installed")).ensure()
    assert (revived.port, revived.api_key) == (first.port, first.api_key)
    assert revived.config == {"only_models": True}, "settings that are not named are those of before"
    await server.stop()
    assert machine.processes() == {}
    await server.stop()


async def test_a_server_whose_keeper_is_killed_ends_and_can_be_started_again(machine: FakeMachine) -> None:
    server = server_of(machine)
    first = await server.ensure()
    machine.kill("keeper.py supervise")
    await until(lambda: not machine.processes("keeper.py serve"))
    assert (await server.revive()).port == first.port


def content_of(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_what_is_secret_is_in_one_file_and_in_no_list_of_processes(machine: FakeMachine) -> None:
    machine.set_pip("Looking in indexes\n")
    url = "https://alice:pa55word@host/simple"
    server = RemoteServer(Ssh("box"), install=Install(source="art==1.2.3", extras=(), index_url=url))
    key = (await server.ensure()).api_key
    assert (machine.folder / "pip.conf").read_text() == f"[global]\nindex-url = {url}\n", "pip got it"
    (machine.folder / "pip.conf").unlink()
    holders = [path for path in machine.folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert holders == [machine.server_folder / "api.key"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    contents = [path.read_bytes() for path in machine.folder.rglob("*") if path.is_file() and path not in holders]
    assert len(machine.processes()) == 2
    contents += [content_of(pid, name) for pid in machine.processes() for name in ("cmdline", "environ")]
    for secret in (key, "pa55word"):
        assert not any(secret.encode() in content for content in contents)


async def test_other_settings_than_those_of_the_running_server_are_refused(machine: FakeMachine) -> None:
    await server_of(machine, art.ServerConfig(only_models=True)).ensure()
    await server_of(machine).ensure()
    with pytest.raises(ConfigError, match="runs already, with other settings"):
        await server_of(machine, art.ServerConfig(drain_s=3)).ensure()


async def test_a_server_that_ends_by_itself_again_and_again_is_given_up_with_its_words(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = remote_server._keeper().replace(b"LONGEST_DELAY_S = 10.0", b"LONGEST_DELAY_S = 0.0")
    monkeypatch.setattr(remote_server, "_keeper", lambda: program)
    machine.set_program("nvidia-smi", "echo GPU 0: a GPU")
    server = server_of(machine, art.ServerConfig(gpu=True))
    await server.install()
    for num_launches in (1, 2):
        await server.start()
        await until(lambda: not machine.processes("keeper.py"))
        state = await server.status()
        assert state is not None
        assert state.failure == "it ended 5 times in a row at once (exit status 1)"
        assert (await server.log_tail()).count("there is no CUDA device") == 5 * num_launches
        said = str(await server.start_failure(state))
        assert said.endswith("(exit status 1)\nart-server: there is no CUDA device"), "the lines of one start"


async def test_a_machine_without_a_gpu_is_told_before_anything_is_installed(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = re.sub(r"/dev/nvidia.*/proc/driver/nvidia", "/nowhere", probing._PROBE)
    assert "/nowhere" in script
    monkeypatch.setattr(probing, "_PROBE", script)
    server = server_of(machine, art.ServerConfig(gpu=True))
    machine.set_program("nvidia-smi", "echo No devices were found; exit 6")
    with pytest.raises(MachineError, match="box has no GPU: `nvidia-smi -L` lists none"):
        await server.install()
    assert not (machine.server_folder / "keeper.py").exists()
    machine.set_program("nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    await server.install()


async def test_a_quiet_installation_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_progress, "QUIET_S", 0.01)
    lines: list[str] = []
    async with install_progress.told("box", lines.append) as take:
        take("Collecting torch")
        await until(lambda: len(lines) > 1)
    assert all(re.fullmatch(r"box: \d+ s: still installing", line) for line in lines)


async def test_a_port_that_is_asked_for_and_in_use_is_named(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = remote_server._keeper().replace(b"OLD_SERVER_S = 15.0", b"OLD_SERVER_S = 0.1")
    monkeypatch.setattr(remote_server, "_keeper", lambda: program)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} is in use"):
            await server_of(machine, art.ServerConfig(port=port)).ensure()


async def test_pip_that_fails_is_quoted_and_tried_again_the_next_time(machine: FakeMachine) -> None:
    machine.set_pip("ERROR: No matching distribution found for art==1.2.3\n", rc=1)
    with pytest.raises(
        MachineError, match=r"pip failed \(all of it is in .*install.log\)(.|\n)*No matching distribution"
    ):
        await server_of(machine).ensure()
    machine.set_pip("ERROR: Could not install packages: [Errno 28] No space left on device\n", rc=1)
    with pytest.raises(MachineError, match=r"the disk of .* is full"):
        await server_of(machine).ensure()
    machine.set_pip("fine\n")
    assert (await server_of(machine).ensure()).is_running


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('[ "$1" = -c ] && echo 3.9.18', r"has only Python 3.9.18 at .*/python3, and ART needs 3.11 or newer"),
        ("exit 127", "has no Python, and ART needs 3.11 or newer; install one"),
    ],
)
async def test_a_machine_without_a_python_that_is_new_enough_is_told_apart(
    machine: FakeMachine, script: str, message: str
) -> None:
    machine.set_program("python3", script)
    for name in ("python3.11", "python3.12", "python3.13"):
        machine.set_program(name, "exit 127")
    (probe := probing._PROBE).index("/opt/conda/bin/python /usr/local/bin/python3")
    server = server_of(machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "_PROBE", probe.replace("/opt/conda/bin/python /usr/local/bin/python3", ""))
        with pytest.raises(MachineError, match=message):
            await server.ensure()


def test_a_python_that_cannot_make_environments_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho The virtual environment was not created: ensurepip is not available\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(keeper, "FOLDER", tmp_path)
    monkeypatch.setattr(keeper, "PYTHON", tmp_path / "venv" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", str(python))
    said = r"python cannot make virtual environments. .* install python3-venv"
    with (tmp_path / "log").open("w") as log, pytest.raises(keeper.Refused, match=said):
        keeper.make_environment(log)


@pytest.mark.parametrize(
    ("free_gb", "has_index", "message"),
    [
        (
            0.1,
            False,
            r"box has 0\.1 GB of free space for ~/.art/servers/default.*at least 6\.4 GB.*pip config --user set",
        ),
        (5.0, False, r"at least 6\.4 GB.*no GPU: torch for CPUs needs 3\.2 GB instead of 6\.4 GB"),
        (2.0, True, r"at least 3\.2 GB; free some, or choose another folder with Install\(folder=\.\.\.\)$"),
    ],
)
async def test_a_disk_without_space_is_told_before_anything_is_installed(
    free_gb: float, has_index: bool, message: str, machine: FakeMachine
) -> None:
    machine.set_program("df", f"echo header; echo x 1 1 {int(free_gb * 1e9 / 1024)} 1% /")
    machine.set_program("nvidia-smi", "exit 1")
    machine.set_program("ls", "exit 1")
    index = "https://download.pytorch.org/whl/cpu"
    machine.set_program("cat", f"echo 'extra-index-url = {index}'" if has_index else "exit 1")
    with pytest.raises(MachineError, match=message):
        await RemoteServer(Ssh("box"), install=Install(source="art[local]==1.2.3")).ensure()


async def test_a_connection_that_breaks_is_made_again(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "RETRY_DELAY_S", 0.0)
    machine.set_problem("kex_exchange_identification: Connection closed by remote host")
    with pytest.raises(UnreachableError):
        await server_of(machine).status()
    assert len(machine.calls()) == remote_server.NUM_TRIES


async def test_removing_leaves_the_data_unless_it_is_named(machine: FakeMachine) -> None:
    server = server_of(machine)
    await server.ensure()
    data = machine.server_folder / "data"
    await until(data.exists)
    (data / "art.db").touch()
    await server.remove()
    assert [path.name for path in machine.server_folder.iterdir()] == ["data"]
    assert machine.processes() == {}
    await server.remove(delete_data=True)
    assert not machine.server_folder.exists()
    await server.remove()


async def test_a_login_shell_may_print_what_it_likes(machine: FakeMachine) -> None:
    server = server_of(machine)
    machine.set_shell("printf 'Welcome! '; echo 'Maintenance on Sunday' >&2")
    assert (await server.ensure()).version == "1.2.3"
    await server.remove(delete_data=True)
    assert not machine.server_folder.exists()


async def test_a_folder_that_cannot_be_deleted_is_told(machine: FakeMachine) -> None:
    server = server_of(machine)
    await server.ensure()
    await server.stop()
    machine.set_program("rm", "echo rm: cannot remove it >&2; exit 1")
    with pytest.raises(MachineError, match=r"deleting ~/.art/servers/default failed: rm: cannot remove it"):
        await server.remove(delete_data=True)


@pytest.mark.parametrize("folder", ["art", "~", "/", "~/"])
def test_a_folder_that_is_no_place_of_its_own_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="folder must be"):
        RemoteServer(Ssh("box"), install=Install(folder=folder))


def test_names_and_hosts_of_servers_are_checked() -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        RemoteServer(Ssh("box"), name="../etc")
    with pytest.raises(ConfigError, match="listens on its loopback only"):
        RemoteServer(Ssh("box"), config=art.ServerConfig(host="0.0.0.0"))


def test_what_is_installed_is_what_runs_here(tmp_path: Path) -> None:
    package = make_package(Install())
    assert package.target == "./source[local]", "the tests run from a checkout"
    assert package == make_package(Install())
    assert package.file is not None
    assert make_package(Install(source="index", extras=("local", "vllm"))).target == (
        f"agent-reinforcement-trainer[local,vllm]=={art.__version__}"
    )
    wheel = tmp_path / "agent_reinforcement_trainer-9-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    made = make_package(Install(source=wheel, extras=()))
    assert (made.target, made.file) == (f"./{wheel.name}", (wheel.name, b"wheel"))
    wheel.write_bytes(b"other")
    assert make_package(Install(source=wheel, extras=())).digest != made.digest
    for wrong in (
        Install(source=tmp_path),
        Install(source="./no.whl"),
        Install(extras=("a;b",)),
        Install(index_url="x"),
    ):
        with pytest.raises(ConfigError):
            make_package(wrong)


def test_a_wheel_that_was_installed_on_windows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "C:\\a wheel\\art.whl"
    (tmp_path / path).write_bytes(b"wheel")  # on this machine a file whose name has backslashes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "__file__", "/no/checkout/at/all/here/install.py")
    monkeypatch.setattr(install, "url2pathname", nturl2path.url2pathname)
    origin = Mock(read_text=Mock(return_value='{"url": "file:///C:/a%20wheel/art.whl"}'))
    monkeypatch.setattr(install.importlib.metadata, "distribution", Mock(return_value=origin))
    assert install._own_source() == Path(path)
