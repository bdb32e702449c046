"""What a user may name as the base model, what is said where it is not there, and adapters that become models."""

from __future__ import annotations

import json
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
from art.runtime.registration import prepare_base_model
from art.runtime.runtime import Runtime
from art.storage.layout import DataDir

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
        await prepare_base_model(name, DataDir(tmp_path))


@pytest.mark.parametrize("name", ["", " "])
async def test_no_name_is_not_the_working_directory(name: str, tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path / "data")
    with pytest.raises(ConfigError, match="`base_model` is empty"):
        await art.TrainableModel(name="m", project="p", base_model=name).register(backend)
    with pytest.raises(ConfigError, match="`base_model` is empty"):
        await prepare_base_model(name, DataDir(tmp_path))
    assert backend.server_pid is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], r"has no config\.json, which"),
        (["a.txt"], r"has no config\.json, which (?!.*a\.txt)"),
        (["config.json", "pytorch_model.bin"], r"has no model\*\.safetensors"),
        (["adapter_config.json"], r"has no adapter_model\.safetensors, which a LoRA adapter needs"),
        (["config.json", "model.safetensors", "adapter_config.json"], "a model and an adapter in one folder"),
    ],
)
async def test_a_folder_that_is_no_model_says_what_is_missing(names: list[str], said: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "folder", *names)
    with pytest.raises(ConfigError, match=said):
        await prepare_base_model(str(folder), DataDir(tmp_path / "data"))
    with pytest.raises(ConfigError, match="is a file"):
        await prepare_base_model(str(fill(tmp_path / "other", "file") / "file"), DataDir(tmp_path / "data"))


async def test_folders_of_models_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "home" / "model", "config.json", "model-00001-of-00002.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder.parent)
    data_dir = DataDir(tmp_path / "data")
    for name in (str(folder), "./model", "model", "model/"):
        assert await prepare_base_model(name, data_dir) == name
    assert await prepare_base_model("~/model", data_dir) == str(folder)


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
    assert await prepare_base_model("org/model", DataDir(tmp_path)) == "org/model"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no hub id looks like that"):
        await prepare_base_model("org/a model", DataDir(tmp_path))


# -- adapters --


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, `base`, and an adapter that peft has saved, `adapter`."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from art.testing.tiny_model import build_tiny_model

    folder = tmp_path_factory.mktemp("adapted")
    build_tiny_model(folder / "base", warm_start_steps=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model.config._name_or_path = "../base"
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(folder / "adapter")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(folder / "base")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_an_adapter_becomes_a_model_once(adapted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    data_dir = DataDir(adapted / "data")
    merged = Path(await prepare_base_model(str(adapted / "adapter"), data_dir))
    assert merged.parent == adapted / "data" / ".bases"
    base = AutoModelForCausalLM.from_pretrained(adapted / "base", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    tokens = torch.tensor([[5, 17, 3, 200, 41]])
    with torch.no_grad():
        before, after = base(tokens).logits, model(tokens).logits
        theirs = peft.PeftModel.from_pretrained(base, str(adapted / "adapter"))(tokens).logits
    assert (after - theirs).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2
    monkeypatch.setattr(art.runtime.registration, "run_file_call", None)  # it would start a process
    assert await prepare_base_model(str(adapted / "adapter"), data_dir) == str(merged)


async def test_another_adapter_of_the_same_name_is_another_model(adapted: Path, tmp_path: Path) -> None:
    adapter = fill(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes((adapted / "adapter/adapter_model.safetensors").read_bytes())
    (adapter / "chat_template.jinja").write_text("{# its own #}")
    config = json.loads((adapted / "adapter" / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    data_dir = DataDir(adapted / "data")
    other = await prepare_base_model(str(adapter), data_dir)
    assert other != await prepare_base_model(str(adapted / "adapter"), data_dir)
    assert (Path(other) / "chat_template.jinja").read_text() == "{# its own #}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model_name_or_path": None}, "does not say which model the adapter is for"),
        ({"base_model_name_or_path": "/models/nope"}, "base model '/models/nope': /models/nope does not exist"),
    ],
)
async def test_an_adapter_that_cannot_be_merged_says_why(
    changes: dict[str, Any], said: str, adapted: Path, tmp_path: Path
) -> None:
    adapter = fill(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes((adapted / "adapter/adapter_model.safetensors").read_bytes())
    config = json.loads((adapted / "adapter" / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=said):
        await prepare_base_model(str(adapter), DataDir(tmp_path / "data"))
