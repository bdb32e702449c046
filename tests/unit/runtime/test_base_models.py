"""What a user may name as the base model, and what is said where it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

import art
from art.config import ServerConfig
from art.errors import ConfigError
from art.protocol.training import RegisterRequest
from art.runtime.registration import find_base_model
from art.runtime.runtime import Runtime

NAMES = ["./nope", "/nope", "~/nope", "x/y/z", "nope/", "org/nope/"]


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("name", NAMES)
async def test_a_path_to_nothing_is_refused_by_name_before_anything_starts(name: str, tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path / "data")
    try:
        with pytest.raises(ConfigError, match="does not exist") as refused:
            await art.TrainableModel(name="m", project="p", base_model=name).register(backend)
        assert repr(name) in refused.value.message
        assert backend.server_pid is None
        assert not (tmp_path / "data").exists()
    finally:
        await backend.close()
    with pytest.raises(ConfigError, match="does not exist"):  # of a client elsewhere
        await find_base_model(name)


@pytest.mark.parametrize("name", ["", " "])
async def test_no_name_is_not_the_working_directory(name: str, tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path / "data")
    with pytest.raises(ConfigError, match="`base_model` is empty"):
        await art.TrainableModel(name="m", project="p", base_model=name).register(backend)
    with pytest.raises(ConfigError, match="`base_model` is empty"):
        await find_base_model(name)
    assert backend.server_pid is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], r"has no config\.json, which"),
        (["a.txt"], r"has no config\.json, which (?!.*a\.txt)"),
        (["config.json", "pytorch_model.bin"], r"has no model\*\.safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "has a LoRA adapter.*merge_and_unload"),
        (["config.json", "model.safetensors", "adapter_config.json"], "has a LoRA adapter"),
    ],
)
async def test_a_folder_that_is_no_model_says_what_is_missing(names: list[str], said: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "folder", *names)
    with pytest.raises(ConfigError, match=said):
        await find_base_model(str(folder))
    with pytest.raises(ConfigError, match="is a file"):
        await find_base_model(str(fill(tmp_path / "other", "file") / "file"))


async def test_folders_of_models_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "home" / "model", "config.json", "model-00001-of-00002.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder.parent)
    for name in (str(folder), "./model", "model", "model/"):
        assert await find_base_model(name) == name
    assert await find_base_model("~/model") == str(folder)


def hub_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response = httpx2.Response(status, request=httpx2.Request("HEAD", "https://huggingface.co"))
    return kind("the hub's own words", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_error(RepositoryNotFoundError, 404), "the hub has no such model, or it is private"),
        (hub_error(GatedRepoError, 403), "accepted its terms"),
        (hub_error(RemoteEntryNotFoundError, 404), "has no config.json"),
        (httpx2.ConnectError("Name or service not known"), "cannot be reached: ConnectError"),
        (OfflineModeIsEnabled("offline"), "cannot be reached"),
    ],
)
async def test_a_hub_id_that_cannot_be_had_says_what_was_tried(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(url: str, **_: Any) -> None:
        asked.append(url)
        raise error

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    monkeypatch.chdir(tmp_path)
    runtime = Runtime(tmp_path / "data", ServerConfig())
    await runtime.start()
    try:
        with pytest.raises(ConfigError, match=said) as refused:
            await runtime.registration.register(RegisterRequest(project="p", name="m", base_model="org/nope"))
        assert f"no folder of this name ({tmp_path / 'org/nope'})" in refused.value.message
        assert "own words" not in refused.value.message
        assert (await runtime.health())["base_models"] == []
    finally:
        await runtime.close()
    assert len(asked) == 1  # no retries
    assert asked[0].endswith("org/nope/resolve/main/config.json")


async def test_what_the_cache_has_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **_: pytest.fail("asked"))
    assert await find_base_model("org/model") == "org/model"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no hub id looks like that"):
        await find_base_model("org/a model")
