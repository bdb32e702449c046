"""A base model may be a folder of the server. Whose folders may a key name?"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from art.config import ServerConfig
from art.runtime.runtime import Runtime
from art.server.app import App
from art.storage.keys import KeyStore

ITS_FILE = "private.txt"


class Setup:
    """A server with the projects `a` and `b`. Each folder is no whole model, so a key that may read it gets a 400."""

    def __init__(self, path: Path, allowed: tuple[str, ...] | None) -> None:
        self.data, self.outside = path / "data", path / "outside"
        self.runtime = Runtime(self.data, ServerConfig())
        for folder in (self.checkpoint("a"), self.checkpoint("b"), self.outside / "model"):
            folder.mkdir(parents=True)
            (folder / ITS_FILE).touch()
        self._keys = KeyStore(path / "keys.db")
        config = ServerConfig(**({} if allowed is None else {"base_model_folders": allowed}))
        app = App(self.runtime, api_key="operator", config=config, keys=self._keys, data_dir=self.data)
        self._http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost", verify=False)

    def checkpoint(self, project: str) -> Path:
        return self.data / project / "models" / "agent" / "checkpoints" / "0001"

    async def register(self, base_model: Path | str, *, key_of: str | None) -> tuple[int, str]:
        """Status and text of the answer to a registration in project `a`, by a key of a project or for all."""
        _, key = self._keys.create("test", project=key_of, scopes=["admin"])
        body = {"project": "a", "name": "x", "base_model": str(base_model)}
        answer = await self._http.post("/api/models", json=body, headers={"authorization": f"Bearer {key}"})
        assert ITS_FILE not in answer.text, "an error lists no folder"
        return answer.status_code, answer.text

    async def close(self) -> None:
        await self.runtime.close()
        self._keys.close()


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    setup = Setup(tmp_path, None)
    await setup.runtime.start()
    yield setup
    await setup.close()


READ = 400
REFUSED = 403


async def test_a_checkpoint_belongs_to_its_project(setup: Setup) -> None:
    theirs, own = setup.checkpoint("b"), setup.checkpoint("a")
    link = own / "link"
    link.symlink_to(theirs)
    for folder in (theirs, own / "../../../../../b/models/agent/checkpoints/0001", link, setup.data, setup.data / "b"):
        status, text = await setup.register(folder, key_of="a")
        assert (status, "project 'a'" in text) == (REFUSED, True), folder
    assert (await setup.register(own, key_of="a"))[0] == READ
    assert (await setup.register(theirs, key_of=None))[0] == READ, "a key for all projects has them all"


async def test_an_adapter_does_not_lead_to_the_weights_of_another_project(setup: Setup) -> None:
    adapter = setup.checkpoint("a")
    (adapter / "adapter_model.safetensors").touch()
    config = {"base_model_name_or_path": str(setup.checkpoint("b"))}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    status, text = await setup.register(adapter, key_of="a")
    assert (status, "LoRA adapter" in text) == (READ, True)


async def test_folders_elsewhere_need_a_key_for_all_projects(setup: Setup) -> None:
    assert (await setup.register(setup.outside / "model", key_of=None))[0] == READ
    for folder in (setup.outside / "model", setup.outside / "nothing", "/etc", "~"):
        assert (await setup.register(folder, key_of="a"))[0] == REFUSED


async def test_an_operator_may_say_which_folders_are_allowed(tmp_path: Path) -> None:
    setup = Setup(tmp_path, (str(tmp_path / "outside"),))
    await setup.runtime.start()
    for key_of in ("a", None):
        assert (await setup.register(setup.outside / "model", key_of=key_of))[0] == READ
        assert (await setup.register(tmp_path, key_of=key_of))[0] == REFUSED
    await setup.close()
