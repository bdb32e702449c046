"""The task file: readable YAML without ports and keys. `test_skypilot_package.py` shows it to the real SkyPilot."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from art.backends.skypilot import SkyConfig, SkyPilotBackend
from art.backends.skypilot.task_file import make_task, write_yaml
from art.backends.ssh import Install

FOLDER = "~/.art/servers/art"


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
