"""What every test may ask for: a tokenizer, a tiny model, and the real application in this process or behind a socket."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from art.backoff import Backoff
from art.metrics.choose_sinks import load_tracker
from art.plugins import find_plugins

if TYPE_CHECKING:
    from tests.support.app import AppBench
    from tests.support.served_app import ServedApp

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same cases in every run, however long the machine takes for one: nothing fails by chance.
    # ART_RANDOM_CASES=1 and `make fuzz` draw new ones.
    is_random = bool({"ART_RANDOM_CASES", "ART_FUZZ_CASES"} & os.environ.keys())
    settings.register_profile("art", deadline=None, derandomize=not is_random)
    settings.load_profile("art")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage, then leave all that was imported out of later searches.

    Modules and tests live until the end. Searching them again and again took half of the collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@contextmanager
def _same_environment() -> Iterator[None]:
    """Hide the variable in which pytest names the test that runs.

    A warm parent forks only children with its own environment. Where it changes with every test, the children of a
    runtime in this process are new interpreters, which import torch for seconds each.
    """
    name = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        yield
    finally:
        if name is not None:
            os.environ["PYTEST_CURRENT_TEST"] = name


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    with _same_environment():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with _same_environment():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal the files of `make test` to its processes."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.support.one_worker import FilesWithOneServer

    return FilesWithOneServer(config, log)


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep keys of servers and notes of warm starts apart from those of the user and of other test processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for tracker in map(load_tracker, find_plugins("art.trackers")):  # the developer's own trackers get nothing
            for name in "|".join(tracker.environment).split("|"):
                patch.delenv(name, raising=False)
        yield


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again almost at once."""
    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 0.02)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in the style of ChatML."""
    from tests.support.gateway import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers yes, no or maybe, about equally often. Tests only read it."""
    from art.testing.tiny_model import build_tiny_model
    from tests.support.shared_folder import made_once

    return made_once(
        tmp_path_factory, "yes-no-maybe", lambda folder: build_tiny_model(folder, task="yes_no_maybe", seed=0)
    )


@pytest.fixture
async def app(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[AppBench]:
    """The real application in this process, over a scripted engine."""
    from tests.support.app import open_app

    async with open_app(tmp_path, tokenizer_dir) as opened:
        yield opened


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    """The same behind a real socket, with a model of somebody else beside it."""
    from tests.support.served_app import serve_app

    async with serve_app(tmp_path, tokenizer_dir) as opened:
        yield opened
