"""Commands that start processes on other machines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from art.config import NodeConfig
from art.errors import ConfigError
from art.runtime.children.nodes import interface_towards, remote_script


def test_the_command_runs_there_with_what_training_depends_on() -> None:
    code = "import os, sys; print(sorted(os.environ.items()), sys.argv[1:], os.getcwd())"
    odd = 'it\'s {"a": 1} $HOME `id`'
    secrets = {"HF_TOKEN": "secret", "ART_API_KEY": "secret", "NCCL_SOCKET_IFNAME": "eth0"}
    environment = {"RANK": "3", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": odd, "CUDA_VISIBLE_DEVICES": "0,1", **secrets}
    script = remote_script([sys.executable, "-c", code, odd], environment)
    assert "secret" not in script
    [*start, end] = NodeConfig(name="there", start=("sh", "-c", "{command}")).command(script)
    seen = subprocess.run([*start, end], env={}, capture_output=True, text=True, check=True).stdout
    for name in ("RANK", "OMP_NUM_THREADS", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"):
        assert repr((name, environment[name])) in seen
    assert "eth0" not in seen
    assert f"{[odd]!r} {os.getcwd()}" in seen


def test_a_machine_without_this_folder_runs_the_command_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only here").mkdir()
    monkeypatch.chdir(tmp_path / "only here")
    script = remote_script([sys.executable, "-c", "import os; print(os.getcwd())"], {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only here").rmdir()
    ended = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"{tmp_path}\n", "")


def test_names_of_gpus_stay_on_their_machine() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in remote_script(["true"], {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"})
    assert "CUDA_VISIBLE_DEVICES" not in remote_script(["true"], {"CUDA_VISIBLE_DEVICES": ""})


def test_ssh_gets_the_command_as_one_argument() -> None:
    command = NodeConfig(name="gpu2").command("cd /tmp && exec env A=1 python -m x")
    assert command == ["ssh", "-o", "BatchMode=yes", "gpu2", "cd /tmp && exec env A=1 python -m x"]
    assert shlex.split(shlex.join(command)) == command


def test_a_start_without_the_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the argument"):
        NodeConfig(name="there", start=("ssh", "there"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interface_of_this_machine() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("127.0.0.2") == "lo"
    assert interface_towards("no such host.invalid") is None
