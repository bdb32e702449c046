"""What a server tells about its cluster: `art status`, the page's System view, `/metrics`, `art doctor --cluster workers`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art.cli.main import build_parser
from art.cli.status import describe_cluster
from art.config import ModelSettings, ServerConfig
from art.errors import ConfigError
from art.protocol.live import ClusterPart
from art.runtime.hosting.cluster import WorkersCluster
from art.runtime.live import Overview, measure_cluster
from art.server.state import FAMILIES
from art.storage.layout import DataDir
from art.worker.door import KEY_VARIABLE
from art_recipes.doctor_command import run

STATUS: dict[str, Any] = {
    "kind": "ray",
    "nodes": [
        {"machine": "a", "address": "10.0.0.1", "alive": True, "resources": {"CPU": 8.0, "GPU": 1.0}},
        {"machine": "b", "address": "10.0.0.2", "alive": False, "resources": {"CPU": 8.0, "GPU": 0.0}},
    ],
    "free": {"CPU": 6.0, "GPU": 0.0},
    "store_bytes": 2 * 2**30,
    "store_used_bytes": 2**30,
    "workers": [{"kind": "engine", "machine": "a", "pid": 7, "state": "working", "since": 1.0}],
    "actors": [
        {"name": "engine of m", "machines": ["a (10.0.0.1)"], "starts": 2},
        {"name": "trainer of m", "machines": [], "starts": 0},
    ],
    "num_lost": 1,
}


class Cluster:
    def status(self) -> dict[str, Any]:
        return STATUS


def test_status_has_a_line_for_everything() -> None:
    assert describe_cluster(ClusterPart(**STATUS)) == [
        "ray: 1 workers lost so far, 6 CPU, 0 GPU free, 1.00 of 2.00 GiB of the object store used",
        "node a (10.0.0.1): alive, 8 CPU, 1 GPU",
        "node b (10.0.0.2): gone, 8 CPU, 0 GPU",
        "engine of m: a (10.0.0.1); 2 starts",
        "trainer of m: not placed; 0 starts",
        "engine worker 7 on a: working",
    ]


def test_measurements_are_in_the_catalogue() -> None:
    cluster: Any = Cluster()
    found = {(one.name, *one.labels.values()): one.value for one in measure_cluster(cluster)}
    assert {name for name, *_ in found} <= FAMILIES.keys()
    assert found["art_cluster_nodes", "alive"] == found["art_cluster_nodes", "gone"] == 1
    assert found["art_cluster_workers", "engine", "working"] == 1
    assert found["art_cluster_workers", "trainer", "waiting"] == 0
    assert found["art_cluster_lost_total",] == 1
    assert found["art_cluster_store_used_bytes",] == 2**30


async def test_the_system_view_shows_it_to_keys_for_all_projects() -> None:
    part: Any = SimpleNamespace(
        all=list, activity=list, trained={}, tokens={}, live=SimpleNamespace(num_viewers=0),
        data_dir=SimpleNamespace(root=Path.cwd()),
    )  # fmt: skip
    cluster: Any = Cluster()
    overview = Overview(part, part, part, part, cluster)
    assert (await overview.system(None)).cluster == ClusterPart(**STATUS)
    assert (await overview.system("games")).cluster is None
    assert (await Overview(part, part, part, part).system(None)).cluster is None


async def test_workers_that_dial_in_are_a_cluster_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    cluster = WorkersCluster(ServerConfig(cluster="workers"), DataDir(tmp_path))
    assert ClusterPart(**cluster.status()) == ClusterPart(kind="workers")
    (check,) = await cluster.examine(ModelSettings(), None)
    assert (check.status, check.remedy) == ("warning", "ask the server: `art status`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a base model, as in `art doctor MODEL`, or a cluster by --cluster"),
        (("./tiny", "--cluster", "ray", "--task", "tic_tac_toe"), "--task and --longest are for a trial"),
        (("--cluster", "./tiny"), "there is no cluster './tiny'"),
    ],
)
def test_the_doctor_refuses_what_it_cannot_do(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run(build_parser(["doctor"]).parse_args(["doctor", *words]))
