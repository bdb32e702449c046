"""`art status`: show the processes and jobs of a server, and what its models have cost."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from art.client.client import ServerClient
from art.costs import Ledger
from art.errors import NotFoundError, ProcessError
from art.protocol.live import ClusterPart
from art.storage.layout import DataDir
from art.storage.local_key import find_local_key
from art.storage.lock import lock_holder

REPORT_TIMEOUT_S = 10.0
UNREACHABLE_S = 5.0
"""Seconds to reach a server on another machine."""


def add_status_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data-dir", type=Path, help="data directory of a server on this machine (default: .art)")
    where.add_argument("--url", help="address of a server elsewhere (default: ART_SERVER_URL)")


def run_status(args: argparse.Namespace) -> int:
    """`art status`: show the processes and jobs of a server, and what its models have cost.

    The server of a data directory is asked at the address that it has left there. One elsewhere, at --url or
    ART_SERVER_URL, is asked with the key in ART_API_KEY. --data-dir wins over ART_SERVER_URL.
    """
    if url := args.url or (os.environ.get("ART_SERVER_URL") if args.data_dir is None else None):
        print(asyncio.run(describe_server(url)))
        return 0
    data_dir = DataDir((args.data_dir or Path(".art")).expanduser().resolve())
    sections = []
    for path in sorted(data_dir.root.glob("*/models/*/costs.jsonl")):
        if lines := Ledger(path=path).lines():
            sections.append("\n  ".join([f"Costs of {path.parents[2].name}/{path.parent.name}", *lines]))
    try:
        report = asyncio.run(describe_local_server(data_dir))
    except NotFoundError as error:
        if not sections:
            raise
        report = error.message
    print("\n\n".join([report, *sections]))
    return 0


def describe_cluster(cluster: ClusterPart) -> list[str]:
    """Return a line for each node, actor and waiting worker of a cluster, and one about the whole."""
    lines = [f"{cluster.kind}: {cluster.num_lost} workers lost so far"]
    if cluster.nodes:
        lines[0] += f", {_amounts(cluster.free)} free"
    if cluster.store_bytes:
        used = (cluster.store_used_bytes or 0) / 2**30
        lines[0] += f", {used:.2f} of {cluster.store_bytes / 2**30:.2f} GiB of the object store used"
    for node in cluster.nodes:
        state = "alive" if node.alive else "gone"
        lines.append(f"node {node.machine} ({node.address}): {state}, {_amounts(node.resources)}")
    for actor in cluster.actors:
        where = ", ".join(actor.machines) or actor.problem or "not placed"
        lines.append(f"{actor.name}: {where}; {actor.starts} starts")
    workers = sorted(cluster.workers, key=lambda worker: worker.since)
    return lines + [f"{one.kind} worker {one.pid} on {one.machine}: {one.state}" for one in workers]


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in resources.items())


async def describe_local_server(data_dir: DataDir) -> str:
    """Describe the server that uses `data_dir`, as `describe_server` does.

    Raises:
        NotFoundError: no server uses it.
        ProcessError: the server does not answer.
    """
    pid = lock_holder(data_dir.lock)
    if pid is None:
        how = "runs on" if data_dir.database.exists() else "has ever run on"
        raise NotFoundError(
            f"no art-server {how} {data_dir.root}; name the `path` of its backend, or its --data-dir, by --data-dir, "
            "or the address of one that runs elsewhere by --url or ART_SERVER_URL"
        )
    try:
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            while not data_dir.address.exists():  # it is starting
                await asyncio.sleep(0.05)
            return await describe_server(data_dir.address.read_text(encoding="utf-8"))
    except TimeoutError:
        raise ProcessError(
            f"art-server (pid {pid}) gave no answer within {REPORT_TIMEOUT_S:.0f} s. `py-spy dump --pid {pid}` shows "
            "where it stands; if a signal has stopped it, SIGCONT lets it go on"
        ) from None


async def describe_server(url: str) -> str:
    """Ask the server at `url` for its processes, models and unfinished jobs, and return them as text.

    It shows its processes only to keys for all projects.
    """
    key = os.environ.get("ART_API_KEY") or find_local_key(url)
    async with ServerClient(url, key, unreachable_deadline_s=UNREACHABLE_S) as client:
        health, models = await client.health(), await client.list_models()
        jobs = await client.list_jobs(unfinished=True)
    processes = []
    for host in health.get("base_models", ()):
        engines = {f"engine {number}": one for number, one in enumerate(host.get("replicas", ()), 1)}
        if len(engines) < 2:  # also an older server, which does not list them
            engines = {"engine": host["engine"]}
        for part, process in (engines | {"trainer": host["trainer"]}).items():
            placed = host["placement"][part.split()[0]]
            place = process.get("place", f"{placed['devices']} ({placed['reason']})")
            processes.append(f"{part} of {host['base_model']}: {process['state']} on {place}{_details(process)}")
    unfinished = []
    for job in jobs:
        detail = job.state if job.queue_place is None else f"{job.state} at place {job.queue_place}"
        if job.queue_place is None and job.progress is not None:
            detail += f", {job.progress.phase}: {job.progress.done} of {job.progress.total}"
        unfinished.append(f"{job.job_id}: {job.kind} of {job.project}/{job.name}, {detail}")
    cluster = {} if health.get("cluster") is None else {"Cluster": describe_cluster(ClusterPart(**health["cluster"]))}
    sections = {
        "Processes": processes if "base_models" in health else ["shown to keys for all projects only"],
        **cluster,
        "Models": [f"{one.id}: step {one.step}, {one.base_model}" for one in models if not one.is_base_model],
        "Base models": sorted({one.base_model for one in models if one.is_base_model}),
        "Jobs that have not ended": unfinished,
    }
    return "\n\n".join(
        [f"art-server at {url}", *("\n  ".join([heading, *(lines or ["none"])]) for heading, lines in sections.items())]
    )


def _details(process: dict[str, Any]) -> str:
    """What a process does, and what became of the one before it."""
    line = ""
    if process["pid"] is not None:
        line += f", pid {process['pid']}"
    if process.get("rss_bytes") is not None:  # unknown where there is no /proc, as on macOS
        line += f", {process['rss_bytes'] / 2**30:.2f} GiB"
    if "doing" in process:
        line += f", `{process['doing']}` since {process['since_s']:.0f} s"
    if "requests" in process:  # one of several replicas
        line += f", {process['requests']} requests, serves {', '.join(process['policies']) or 'no adapters'}"
        line += "".join(f", refused {name} ({why.splitlines()[0]})" for name, why in process["refused"].items())
    if process["restarts"]:
        line += f", {process['restarts']} restarts, the last since {process['last_end']}"
    return line
