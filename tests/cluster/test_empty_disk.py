"""A node with an empty disk, which joins with a token. Its own file: Ray keeps the token of a process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from tests.cluster.test_nodes import status_of
from tests.support.clusters import RayNodes, registered, settings, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"),
    pytest.mark.slow,
]

HERE, THERE = "10.77.5.1", "10.77.5.2"
"""Addresses of the two ends of a cable between this machine and a network namespace."""


@pytest.fixture
def other_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A network namespace; the command that runs another one in it, on a disk without the files of tests and of Ray."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    name = f"art-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", "art-here", "type", "veth", "peer", "name", "art-there", "netns", name)
        ip("address", "add", f"{HERE}/24", "dev", "art-here")
        ip("link", "set", "art-here", "up")
        for words in (
            ("address", "add", f"{THERE}/24", "dev", "art-there"),
            ("link", "set", "art-there", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("netns", "exec", name, "ip", *words)
        hidden = (Path("/tmp/ray"), tmp_path_factory.getbasetemp())
        for folder in hidden:
            folder.mkdir(exist_ok=True)
        empty = " && ".join(f"mount -t tmpfs none {folder}" for folder in hidden)
        yield ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", f'{empty} && exec "$0" "$@"']
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)
        subprocess.run(["ip", "link", "delete", "art-here"], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and iproute2")
async def test_another_machine_with_an_empty_disk_gets_every_file_that_it_needs(
    other_machine: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with art.LocalBackend(path=tmp_path / "home", show_page=False) as backend:
        at_home = await train(backend, await registered(backend, tiny_model, settings()), 3)
    token = Path.home() / f".art-test-token-{os.getpid()}"  # where the other machine sees it
    token.write_text("b" * 64)
    cluster = RayNodes(tmp_path, HERE)
    try:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        cluster.add(0)
        cluster.add(4, ip=THERE, prefix=other_machine)
        monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
        async with art.LocalBackend(path=tmp_path / "ray", cluster="ray", show_page=False) as backend:
            model = await registered(backend, tiny_model, settings(ranks=2, replicas=2))
            seen = await train(backend, model, 3)
            status = await status_of(backend)
        assert all(THERE in machine for actor in status["actors"] for machine in actor["machines"])
    finally:
        for node in reversed(cluster.nodes):
            node.kill()
        token.unlink()
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=2e-6)  # float32 sums that cancel to about 0, in another order
