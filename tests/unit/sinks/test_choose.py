"""Which trackers a model has, by its own setting or by the environment."""

from __future__ import annotations

import logging
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.metrics import delivery
from art.metrics.delivery import choose_sinks, is_installed, load_tracker
from art.plugins import find_plugins
from art.sinks import Run, Sink
from art.storage.logs import plain_config
from art_recipes.training.recipe_config import reported_to

ROOT = Path(__file__).parents[3]


class Mine(Sink):
    name = "mine"

    def start(self, run: Run) -> None: ...

    def metrics(self, row: Any) -> None: ...


class Here(Mine):
    name = "here"
    package = "json"
    environment = ("HERE_KEY", "HERE_ID")
    switched_off_by = (("HERE_MODE", "disabled"),)


class Gone(Mine):
    name, package, extra = "gone", "no_such_package", "gone"
    environment = ("GONE_KEY",)


class OfAnotherName(Mine):
    name = "other"


@pytest.fixture(autouse=True)
def _trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers whose packages exist or not, whatever is installed here."""
    trackers = {"gone": Gone, "here": Here}
    monkeypatch.setattr(delivery, "find_plugins", lambda group: trackers)
    monkeypatch.setattr(delivery, "load_plugin", lambda group, name: trackers[name])
    monkeypatch.setattr(delivery, "_warned", set())


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
    monkeypatch.setattr(Mine, "package", "only_a_folder")
    assert not is_installed(Mine)


@pytest.mark.parametrize("named", [OfAnotherName, Mine(), dict])
def test_an_entry_point_must_name_a_sink_of_its_name(monkeypatch: pytest.MonkeyPatch, named: object) -> None:
    point = EntryPoint("mine", "theirs:Mine", "art.trackers")
    monkeypatch.setattr(delivery, "find_plugins", lambda group: {"mine": point})
    monkeypatch.setattr(delivery, "load_plugin", lambda group, name: named)
    with pytest.raises(ConfigError, match=r"\(theirs:Mine\) must be a subclass of `art.sinks.Sink` with name = 'mine'"):
        choose_sinks(["mine"])


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


@pytest.mark.parametrize("name", sorted(find_plugins("art.trackers")))
def test_each_tracker_has_an_extra_and_a_section(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the trackers of this repository
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tracker = load_tracker(name)
    page = (ROOT / "docs" / "trackers.md").read_text()
    assert (tracker.package is None) == (tracker.extra is None)
    if tracker.extra is not None:
        assert tracker.extra in extras
        assert f"[{tracker.extra}]" in page
    assert all(variable in page for names in tracker.environment for variable in names.split("|"))
    assert re.search(rf"^\| \[`{name}`\]\(#\w+\)", page, re.MULTILINE)
