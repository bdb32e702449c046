"""The task file: readable YAML without ports and keys. `test_skypilot_package.py` shows it to the real SkyPilot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from art.backends.skypilot import SkyConfig, SkyPilotBackend
from art.backends.skypilot.task_file import make_task, write_yaml
from art.backends.ssh import Install

FOLDER = "~/.art/servers/art"
ROOT = Path(__file__).parents[4]


def task(config: SkyConfig, requirement: str | None = None) -> dict[str, Any]:
    return make_task("art", config, folder=FOLDER, requirement=requirement)


def test_the_file_is_yaml_that_says_what_was_asked_for() -> None:
    made = task(SkyConfig(gpu="H100", cloud="aws", region="us-east-1", spot=True, disk_gb=500, image="docker:a/b:1",
                          resources={"cpus": "16+", "labels": {"team": "x: y"}}))  # fmt: skip
    assert yaml.safe_load(write_yaml(made)) == made
    assert made["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H100:1", "use_spot": True, "disk_size": 500,
        "image_id": "docker:a/b:1", "cpus": "16+", "labels": {"team": "x: y"},
        "autostop": {"idle_minutes": 5, "down": True, "wait_for": "jobs_and_ssh"},
    }  # fmt: skip
    assert "ports" not in write_yaml(made)


def test_scripts_can_be_read_in_the_file() -> None:
    text = write_yaml(task(SkyConfig(), "agent-reinforcement-trainer[local]==0.1.0"))
    assert "setup: |\n  set -e\n" in text
    assert (
        "\n  \"$HOME\"/.art/servers/art/venv/bin/python -m pip install 'agent-reinforcement-trainer[local]==0.1.0'\n"
        in text
    )


@pytest.mark.parametrize(("idle_minutes", "of_watch", "of_sky"), [(30, 25, 5), (10, 5, 5), (4, 2, 2), (3, 2, 1)])
def test_the_watch_and_skypilot_share_the_idle_minutes(idle_minutes: int, of_watch: int, of_sky: int) -> None:
    made = task(SkyConfig(idle_minutes=idle_minutes, on_idle="stop"))
    assert f"--idle-minutes {of_watch}\n" in made["run"]
    assert made["resources"]["autostop"]["idle_minutes"] == of_sky
    assert made["resources"]["autostop"]["down"] is False


def test_a_bucket_is_mounted_and_filled_by_the_watch_and_before_the_machine_goes() -> None:
    made = task(SkyConfig(bucket="s3://mine", copy_minutes=7.5))
    assert made["file_mounts"] == {"/art-bucket": {"source": "s3://mine", "mode": "MOUNT"}}
    assert made["run"].rstrip().endswith("--copy-to /art-bucket/art/art --copy-every-minutes 7.5")
    (hook,) = made["config"]["hooks"]
    assert hook["events"] == ["stop", "down"]
    assert hook["run"].endswith("copying copy ~/.art/servers/art/data /art-bucket/art/art")


def test_a_volume_holds_the_data_directory() -> None:
    made = task(SkyConfig(volume="alice-disk"))
    assert made["volumes"] == {"/art-volume": "alice-disk"}
    assert 'ln -sfn /art-volume/data "$HOME"/.art/servers/art/data' in made["setup"]


def test_a_released_art_is_installed_by_the_setup_and_a_checkout_over_ssh() -> None:
    released = SkyPilotBackend(install=Install(source="agent-reinforcement-trainer[local]==0.1.0"))
    assert "pip install 'agent-reinforcement-trainer[local]==0.1.0'" in released.task()
    assert "pip install" not in SkyPilotBackend().task().partition("uv venv")[2]  # the tests run from a checkout


def test_the_scripts_do_on_a_machine_what_they_say(tmp_path: Path) -> None:
    home = tmp_path / "home"
    programs = home / ".local" / "bin"
    programs.mkdir(parents=True)
    uv = programs / "uv"
    interpreter = f'#!/bin/sh\\nPYTHONPATH={ROOT}/src exec {sys.executable} \\"\\$@\\"\\n'
    uv.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/uv-calls\nfor last; do :; done\nmkdir -p "$last/bin"\n'
        f'printf "{interpreter}" > "$last/bin/python"\nchmod +x "$last/bin/python"\n'
    )
    uv.chmod(0o755)
    volume, bucket = tmp_path / "volume", tmp_path / "bucket"
    volume.mkdir()
    server = home / ".art" / "servers" / "art"

    def shell(script: str) -> str:
        for path, here in (("/art-volume", volume), ("/art-bucket", bucket)):
            script = script.replace(path, str(here))
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    for _ in range(2):  # SkyPilot runs it again on a machine that is there
        shell(task(SkyConfig(volume="alice-disk"))["setup"])
    assert (tmp_path / "uv-calls").read_text() == f"venv --seed --python 3.12 {server}/venv\n"
    (server / "data" / "art.db").touch()
    assert (volume / "data" / "art.db").exists()
    assert (server / "set-up").exists()
    (server / "keeper.py").write_text(f"open({str(tmp_path / 'stopped')!r}, 'w').write('yes')")
    made = task(SkyConfig(bucket="s3://mine"))
    printed = shell(made["run"].replace("--idle-minutes 25", "--idle-minutes 0 --poll-s 0"))
    assert "stopping the server" in printed
    assert (tmp_path / "stopped").exists()
    assert (bucket / "art" / "art" / "art.db").exists()  # the last copy
    (bucket / "art" / "art" / "art.db").unlink()
    (bucket / "art" / "art" / ".copied.json").unlink()
    shell(made["config"]["hooks"][0]["run"])
    assert (bucket / "art" / "art" / "art.db").exists()
    (bucket / "art" / "art" / "art.db").unlink()
    (server / "data" / "art.db").unlink()
    (server / "data" / "checkpoint").touch()
    shell(made["config"]["hooks"][0]["run"])  # on another machine of the cluster, which has copies only
    assert not list((bucket / "art" / "art").glob("checkpoint"))


def test_of_several_machines_only_the_first_watches_and_each_knows_its_address(tmp_path: Path) -> None:
    made = task(SkyConfig(gpu="H100:8", num_nodes=2))
    assert made["num_nodes"] == 2
    assert task(SkyConfig())["num_nodes"] == 1
    assert "SKYPILOT" not in task(SkyConfig())["setup"] + task(SkyConfig())["run"]
    folder = tmp_path / ".art" / "servers" / "art"
    (folder / "venv" / "bin").mkdir(parents=True)
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    for program in (folder / "venv" / "bin" / "python", tmp_path / ".local" / "bin" / "uv"):
        program.write_text("#!/bin/sh\necho $@\n")
        program.chmod(0o755)

    def shell(script: str, **variables: str) -> str:
        variables |= {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=120, env=variables, check=True
        ).stdout

    for rank, address in enumerate(("10.0.0.7", "10.0.0.9")):
        setup = {"SKYPILOT_SETUP_NODE_IPS": "10.0.0.7\n10.0.0.9", "SKYPILOT_SETUP_NODE_RANK": str(rank)}
        shell(made["setup"], **setup)
        assert (folder / "node-address").read_text() == f"{address}\n"
        printed = shell(made["run"], SKYPILOT_NODE_RANK=str(rank))
        assert ("skypilot.watch" in printed) is (rank == 0)
    shell(made["setup"])  # a SkyPilot that tells no addresses
    assert (folder / "node-address").read_text().strip() == ""
