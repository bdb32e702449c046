"""Settings of a machine: what is impossible is refused by name. What older code gives becomes settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art.backends.skypilot import SkyConfig, SkyPilotBackend
from art.backends.skypilot.older import read_environment, read_resources, source_of_version
from art.backends.skypilot.records import make_record, read_record
from art.config import ServerConfig
from art.errors import ConfigError, StorageError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": "H100 x 8"}, "a kind and a number"),
        ({"region": "us-east-1"}, "needs its cloud"),
        ({"idle_minutes": 1}, "idle_minutes must be 2 or more"),
        ({"on_idle": "sleep"}, '"down" or "stop"'),
        ({"spot": True, "on_idle": "stop"}, "spot machines cannot be stopped"),
        ({"volume": "v", "bucket": "s3://b"}, "not both"),
        ({"bucket": "s3://b/folder"}, "an address like s3://name"),
        ({"budget_usd": 0}, "budget_usd must be above 0"),
        ({"pull_minutes": -1}, "pull_minutes must be above 0"),
        ({"resources": {"ports": 8000}}, "open the machine to the internet"),
        ({"resources": {"accelerators": "H100:1"}}, "is set by gpu of SkyConfig"),
        ({"resources": {"autostop": False}}, "is set by idle_minutes"),
    ],
)
def test_what_is_impossible_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SkyConfig(**settings)


@pytest.mark.parametrize("name", ["", "1st", "a b", "-c", "art-", "a" * 33, "art;ls"])
def test_a_name_that_skypilot_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a cluster's name"):
        SkyPilotBackend("H100:1", cluster=name)


def test_arguments_win_over_those_of_the_config() -> None:
    backend = SkyPilotBackend("A100:2", idle_minutes=7, config=SkyConfig(gpu="H100:1", spot=True))
    assert (backend.config.gpu, backend.config.idle_minutes, backend.config.spot) == ("A100:2", 7, True)
    assert backend.server_config == ServerConfig(gpu=True)
    assert SkyPilotBackend().server_config is None


def test_a_file_of_variables_is_read(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# tokens\n\nHF_TOKEN=hf_1\nexport WANDB_API_KEY = \"a b=c\" \nEMPTY=\nQUOTE='x'\n")
    assert read_environment(path) == {"HF_TOKEN": "hf_1", "WANDB_API_KEY": "a b=c", "EMPTY": "", "QUOTE": "x"}
    path.write_text("HF_TOKEN=1\nno variable\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is not NAME=value"):
        read_environment(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_environment(tmp_path / "missing")


def test_resources_of_older_code_become_settings() -> None:
    class Resources:
        """Like `sky.Resources`."""

        def to_yaml_config(self) -> dict[str, Any]:
            return {"infra": "aws/us-east-1", "accelerators": {"H100": 2}, "use_spot": True, "disk_size": 500,
                    "ports": ["7999", "8000"], "cpus": "16+", "autostop": None}  # fmt: skip

    config = read_resources(Resources())
    assert config == SkyConfig(
        gpu="H100:2", cloud="aws", region="us-east-1", spot=True, disk_gb=500, resources={"cpus": "16+"}
    )
    assert read_resources({"cloud": "RunPod", "accelerators": "H100:1"}) == SkyConfig(gpu="H100:1", cloud="runpod")
    assert read_resources(None) == SkyConfig()
    for wrong, words in ((5, "fields by name"), ({"accelerators": ["H100:1"]}, "one kind"),
                         ({"autostop": 5}, "is set by idle_minutes")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            read_resources(wrong)


def test_a_version_or_a_folder_says_what_is_installed(tmp_path: Path) -> None:
    assert source_of_version("0.1.0") == "agent-reinforcement-trainer[local]==0.1.0"
    assert source_of_version(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="a version such as"):
        source_of_version("newest")


async def test_older_code_must_say_which_machine() -> None:
    with pytest.raises(ConfigError, match='needs `gpu`, such as "H100:1"'):
        await SkyPilotBackend.initialize_cluster(cluster_name="art")


def test_a_record_keeps_the_settings() -> None:
    config, server_config = SkyConfig(gpu="H100:1", resources={"cpus": "16+"}), ServerConfig(gpu=True)
    settings = {"config": config, "server_config": server_config}
    record = make_record("art", "~/.art/servers/art", 5001, settings, launched_at=12.0)
    assert read_record(record) == (config, server_config)
    assert (record.kind, record.host, record.launched_at) == ("skypilot", "art", 12.0)
    with pytest.raises(StorageError, match="another version of ART"):
        read_record(record.model_copy(update={"details": {"config": '{"unknown": 1}'}}))
