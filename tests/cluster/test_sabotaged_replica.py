"""One of two engines on Ray does not load what was trained: it alone is refused, and the other one serves."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art.cli.status import describe_server
from tests.cluster.test_one_node import processes_of
from tests.support.clusters import RayNodes, ray_nodes, registered, rollout, settings, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
SABOTAGE = '''
"""Python runs this when it starts. The first engine process to load step 0 stays honest (its parent is known: the actor). Every other one loads zeros in
place of all later adapters, and tells the norm of what it should have loaded."""
import os, sys

if "art.worker.engine_child" in sys.orig_argv:
    import tempfile
    from dataclasses import replace
    from pathlib import Path

    from safetensors.numpy import load_file, save_file

    from art.engines.torch.pool import EnginePool
    from art.storage import checkpoints

    honest = EnginePool.load_adapter

    def load_adapter(self, name, path):
        claim = Path(os.environ["ART_TEST_HONEST_ENGINE"])
        info = honest(self, name, path)
        if name.endswith("@0"):
            try:
                with claim.open("x") as file:
                    file.write(str(os.getppid()))
            except FileExistsError:
                pass
        elif not name.startswith("test/") and claim.read_text() != str(os.getppid()):
            with tempfile.TemporaryDirectory() as folder:
                weights = load_file(path / checkpoints.ADAPTER_WEIGHTS)
                save_file({key: 0 * one for key, one in weights.items()}, Path(folder, checkpoints.ADAPTER_WEIGHTS))
                config = (path / checkpoints.ADAPTER_CONFIG).read_bytes()
                Path(folder, checkpoints.ADAPTER_CONFIG).write_bytes(config)
                info = replace(honest(self, name, Path(folder)), norm=info.norm)
        return info

    EnginePool.load_adapter = load_adapter
'''


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    folder = tmp_path / "sabotage"
    folder.mkdir()
    folder.joinpath("sitecustomize.py").write_text(SABOTAGE)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        patch.setenv("ART_TEST_HONEST_ENGINE", str(tmp_path / "honest"))
        with ray_nodes(tmp_path, 3) as cluster:
            patch.undo()  # the node has it, and what runs at home does not
            yield cluster


async def test_a_replica_that_does_not_load_the_adapter_is_refused_alone(
    cluster: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    async with art.LocalBackend(path=tmp_path / "home", show_page=False) as backend:
        at_home = await train(backend, await registered(backend, tiny_model, settings()), 2)
    async with art.LocalBackend(path=tmp_path / "ray", cluster="ray", show_page=False) as backend:
        model = await registered(backend, tiny_model, settings(replicas=2))
        seen = await train(backend, model, 1)
        answers = await asyncio.gather(*(rollout(model, 1, index) for index in range(16)))
        assert all(len(answer.messages()) == 2 for answer in answers)
        async with asyncio.timeout(60):  # the refused one starts again, and is refused again
            engines = (await processes_of(backend))[0]
            while sum(engine["restarts"] and bool(engine["policies"]) for engine in engines) != 1:
                await asyncio.sleep(0.2)
                engines = (await processes_of(backend))[0]
        (good,) = [engine for engine in engines if "cluster/agent@1" in engine["policies"]]
        (bad,) = [engine for engine in engines if engine is not good]
        assert (good["refused"], good["restarts"], good["pid"]) == ({}, 0, int((tmp_path / "honest").read_text()))
        assert bad["policies"] == ["cluster/agent@0"]
        assert bad["restarts"] == 1
        assert "differ from the trainer's" in bad["refused"]["cluster/agent@1"]
        assert "it refused cluster/agent@1" in bad["last_end"]
        report = await describe_server((await backend.open()).base_url)
        assert "serves cluster/agent@0, refused cluster/agent@1 (cluster/agent@1 was not published" in report
        seen += await train(backend, model, 1)  # sampled by the good one alone
        log = (tmp_path / "ray" / "logs" / "server.log").read_text()
    for number in (1, 2):
        assert f"the {bad['name']} refused cluster/agent@{number}, which others serve" in log
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=2e-6)  # as in test_same_training.py
