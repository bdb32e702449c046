"""Which trackers a model has, by its own setting or by the environment."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.recipes.recipe_config import reported_to
from art.sinks import Run, Sink, choose
from art.sinks.choose import KINDS, SinkKind, choose_sinks, plain_config

ROOT = Path(__file__).parents[3]


class Mine(Sink):
    name = "mine"

    def start(self, run: Run) -> None: ...

    def metrics(self, row: Any) -> None: ...


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trackers whose packages exist or not, whatever is installed here."""
    kind = SinkKind(
        module="json", factory="JSONDecoder", package="json", extra="here", environment=("HERE_KEY", "HERE_ID"),
        switched_off_by=(("HERE_MODE", "disabled"),),
    )  # fmt: skip
    missing = SinkKind(module="no", factory="no", package="no_such_package", extra="gone", environment=("GONE_KEY",))
    kinds = {"here": kind, "gone": missing}
    monkeypatch.setattr(choose, "KINDS", kinds)
    monkeypatch.setattr(choose, "_warned", set())


def names(report_metrics: Any, **environment: str) -> list[str]:
    return [choice.name for choice in choose_sinks(report_metrics, environment)]


def test_names_classes_and_functions() -> None:
    assert names(["here", Mine]) == ["here", "mine"]
    assert names([lambda: Mine()]) == ["mine"]
    assert names([], HERE_KEY="k", HERE_ID="i") == []
    assert names(["here"], HERE_MODE="disabled") == ["here"], "the setting wins"


@pytest.mark.parametrize(
    ("report_metrics", "says"),
    [
        (["wnadb"], "'wnadb', which is no tracker; there are gone, here"),
        (["gone"], r"'no_such_package' is not installed: pip install 'agent-reinforcement-trainer\[gone\]'"),
        (["here", "here"], "more than once"),
        ([dict], "subclasses of `art.sinks.Sink`"),
        ([Mine()], "subclasses of `art.sinks.Sink`"),
    ],
)
def test_mistakes_are_refused(report_metrics: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_sinks(report_metrics, {})


def test_the_environment_chooses_if_all_variables_are_set() -> None:
    assert names(None) == names(None, HERE_KEY="k") == names(None, HERE_KEY="k", HERE_ID="") == []
    assert names(None, HERE_KEY="k", HERE_ID="i") == ["here"]
    assert names(None, HERE_KEY="k", HERE_ID="i", HERE_MODE="Disabled") == []
    (choice,) = choose_sinks(None, {"HERE_KEY": "k", "HERE_ID": "i"})
    assert choice.why == "HERE_KEY and HERE_ID is set; `report_metrics=[]` switches it off"


def test_a_tracker_of_the_environment_that_is_not_installed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert names(None, GONE_KEY="k") == names(None, GONE_KEY="k") == []
    (record,) = caplog.records
    assert "GONE_KEY is set, but no_such_package is not installed" in record.message


def test_a_folder_of_data_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb makes a folder `wandb` where the program runs, and Python would import it."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = SinkKind(module="x", factory="x", package="only_a_folder", extra="x")
    assert not kind.is_installed


async def test_register_refuses_before_it_asks_the_backend(tmp_path: Path) -> None:
    model = art.Model(name="a", project="p", base_path=str(tmp_path), report_metrics=["gone"])
    backend = art.RemoteBackend("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not installed"):
        await model.register(backend)


def test_secrets_are_not_sent() -> None:
    config = plain_config(
        {"api_key": "x1", "nested": {"hf_token": "x2", "keys": ["a"]}, "path": Path("/tmp"), "text": "sk-" + "a" * 30}
    )
    assert config["api_key"] == config["nested"]["hf_token"] == "[redacted]"
    assert config["nested"]["keys"] == ["a"]
    assert config["path"] == "/tmp"
    assert "aaa" not in config["text"]


def test_report_of_the_command_line() -> None:
    assert reported_to(None) is None
    assert reported_to(["none"]) == []
    assert reported_to(("wandb", "mlflow")) == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match="`none` means no tracker"):
        reported_to(["none", "wandb"])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_tracker_has_an_extra_and_a_page(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kind = KINDS[name]
    assert kind.extra in extras
    page = (ROOT / "docs" / "trackers" / f"{name}.md").read_text()
    assert f"[{kind.extra}]" in page
    assert all(variable in page for names in kind.environment for variable in names.split("|"))
    assert re.search(rf"\| \[`{name}`\]\(trackers/{name}\.md\)", (ROOT / "docs" / "trackers.md").read_text())
