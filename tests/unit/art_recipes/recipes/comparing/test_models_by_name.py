"""What the words of `--models` and the tables of a TOML file mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.errors import ConfigError
from art.protocol.promotions import Decision, PromotionRecord
from art.runtime.registry import Registry
from art.storage.checkpoints import MANIFEST
from art.storage.database import Database
from art.storage.layout import DataDir
from art_recipes.comparing.compare_models import locate
from art_recipes.comparing.compared_models import BaseModel, Checkpoint, Endpoint, parse_model


def make_model(folder: Path, weights: bytes = b"1") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for project, name, steps in (("games", "agent", (0, 7, 12)), ("games", "both", (0,)), ("shop", "both", (0,))):
        for step in steps:
            checkpoint = tmp_path / project / "models" / name / "checkpoints" / f"{step:04d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / MANIFEST).write_text("{}")
    return tmp_path


def test_an_address_with_a_model_name_and_the_variable_of_its_key(data_dir: Path) -> None:
    endpoint = parse_model("org/llama3:8b=https://host:8000/v1#MY_KEY", data_dir)
    assert endpoint == Endpoint(
        label="org/llama3:8b", url="https://host:8000/v1", model="org/llama3:8b", key_variable="MY_KEY"
    )


def test_without_a_variable_no_key_is_sent(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint = parse_model("m=http://host/v1", data_dir)
    assert isinstance(endpoint, Endpoint)
    assert endpoint.key() == "none"


def test_a_provider_has_its_address_and_variable(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "secret")
    endpoint = parse_model("openrouter/qwen/qwen3-8b", data_dir)
    assert isinstance(endpoint, Endpoint)
    assert (endpoint.model, endpoint.url) == ("qwen/qwen3-8b", "https://openrouter.ai/api/v1")
    assert endpoint.key() == "secret"
    assert "secret" not in repr(endpoint)


def test_checkpoints_by_name_and_step(data_dir: Path) -> None:
    assert parse_model("agent@7", data_dir) == Checkpoint(label="agent@7", project="games", name="agent", step=7)
    assert parse_model("shop/both@latest", data_dir) == Checkpoint(
        label="shop/both@latest", project="shop", name="both", step="latest"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("both@0", r"has 2 models named .both.; .* There are games/agent, games/both, shop/both"),
        ("agent@last", "number, `latest` or `promoted`"),
        ("games/nobody@1", "no model games/nobody"),
        ("../agent@1", "no folder of a model"),
    ],
)
def test_checkpoints_that_are_not_there(data_dir: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model(text, data_dir)


async def test_the_promoted_step_is_that_of_the_database(data_dir: Path) -> None:
    promoted = parse_model("agent@promoted", data_dir)
    with pytest.raises(ConfigError, match=r"agent@promoted.*: no checkpoint of games/agent was promoted"):
        locate(promoted, data_dir)
    database = Database(DataDir(data_dir).database)
    registry = Registry(database)
    await registry.start()
    decisions: list[tuple[int, Decision]] = [(7, "ungated"), (12, "refused")]
    for step, decision in decisions:
        await registry.add_decision(
            "games",
            "agent",
            PromotionRecord(number=0, at=1.0, step=step, previous_step=None, decision=decision, key_id="k"),
        )
    database.close()
    assert locate(promoted, data_dir).where == "games/agent@7"


def test_a_step_that_is_not_there_names_those_that_are(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 8 .* has 0, 7, 12"):
        locate(parse_model("agent@8", data_dir), data_dir)


def test_base_models(data_dir: Path, tmp_path: Path) -> None:
    assert parse_model("Qwen/Qwen3-8B", data_dir) == BaseModel(label="Qwen/Qwen3-8B", path="Qwen/Qwen3-8B")
    assert parse_model("hub:openai/gpt-oss-20b", data_dir) == BaseModel(
        label="openai/gpt-oss-20b", path="openai/gpt-oss-20b"
    )
    folder = make_model(tmp_path / "small")
    assert parse_model(folder, data_dir) == BaseModel(label="small", path=folder)


def test_a_base_model_whose_weights_changed_is_another_one(tmp_path: Path) -> None:
    model = parse_model(make_model(tmp_path / "small"), tmp_path)
    before = locate(model, tmp_path).identity
    make_model(tmp_path / "small", b"22")
    assert locate(model, tmp_path).identity != before
