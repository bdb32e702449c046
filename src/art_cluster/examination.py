"""What a Ray cluster has, for `art status`, and whether engine and trainer find room in it, for `art doctor --cluster`.

Nothing is loaded. Each node says by a short task which versions and devices it has. Where the actors would run is what
Ray itself answers to a reservation, which is given back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from art.config import ModelSettings
from art.memory import GIB, PROCESS_BYTES, Part, read_shape
from art.protocol.training import CheckResult
from art.runtime.memory import DeviceForecast, MemoryPlan, check_devices, check_forecast
from art.runtime.placement import VISIBLE, AssignedDevices, Devices, Placement, find_devices
from art.worker.door import WorkerKind, own_versions

EXAMINE_TIMEOUT_S = 8.0
"""Longest wait for a reservation, and for an answer of each node."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one actor is to run, such as Place("trainer", "rank 1 of the trainer", node, {"GPU": 1.0})."""

    kind: WorkerKind
    name: str
    node: str
    bundle: Mapping[str, float]
    """What it takes of its node."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node says of itself."""

    machine: str
    versions: Mapping[str, str] | None
    devices: Devices | None
    problem: str = ""
    """Why it says nothing."""


def look_at_cluster() -> dict[str, Any]:
    """Return its nodes, what is free on all of them together, and the use of the object store."""
    total, free = ray.cluster_resources(), ray.available_resources()
    store = total.get("object_store_memory", 0.0)
    return {
        "nodes": [
            {
                "machine": node["NodeManagerHostname"],
                "address": node["NodeManagerAddress"],
                "alive": node["Alive"],
                "resources": {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")},
            }
            for node in ray.nodes()
        ],
        "free": {name: free.get(name, 0.0) for name in ("CPU", "GPU")},
        "store_bytes": int(store),
        "store_used_bytes": int(store - free.get("object_store_memory", 0.0)),
    }


def _say_what_you_have() -> tuple[dict[str, str], Devices]:
    os.environ.pop(VISIBLE, None)  # Ray hides the GPUs from a task that takes none
    return own_versions(), find_devices()


async def look_at_nodes() -> dict[str, NodeReport]:
    """Ask all nodes for their versions and devices, by the id of the node."""

    async def look(node: Mapping[str, Any]) -> NodeReport:
        machine = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(_say_what_you_have).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            async with asyncio.timeout(EXAMINE_TIMEOUT_S):
                versions, devices = await task.remote()
        except TimeoutError:
            return NodeReport(machine, None, None, f"no answer within {EXAMINE_TIMEOUT_S:.0f} s")
        except Exception as error:  # of Ray: the node is gone, or ART is not installed there
            return NodeReport(machine, None, None, str(error).strip().splitlines()[-1])
        return NodeReport(machine, versions, devices)

    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    reports = await asyncio.gather(*map(look, nodes))
    return {node["NodeID"]: report for node, report in zip(nodes, reports, strict=True)}


def check_cluster(view: Mapping[str, Any]) -> CheckResult:
    """List the nodes, what is free, and the object store."""
    alive = [node for node in view["nodes"] if node["alive"]]
    each = "; ".join(f"{node['machine']} ({node['address']}) with {_amounts(node['resources'])}" for node in alive)
    store = f"{view['store_used_bytes'] / GIB:.1f} of {view['store_bytes'] / GIB:.1f} GiB of the object store used"
    gone = f", {num_gone} more are gone" if (num_gone := len(view["nodes"]) - len(alive)) else ""
    finding = f"{len(alive)} nodes{gone}: {each}; {_amounts(view['free'])} free; {store}"
    return CheckResult(name="cluster", status="ok", found=finding, measured={"nodes": float(len(alive))})


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))


def check_software(nodes: Mapping[str, NodeReport]) -> CheckResult:
    """Check that each node has the versions of this machine."""
    ours = own_versions()
    wrong = [f"{node.machine}: {node.problem}" for node in nodes.values() if node.problem]
    wrong += [
        f"{node.machine}: {name} {node.versions.get(name, 'missing')}, here {version}"
        for node in nodes.values() if node.versions is not None
        for name, version in ours.items() if node.versions.get(name) != version
    ]  # fmt: skip
    if wrong:
        remedy = "install the same versions of agent-reinforcement-trainer[local,cluster] on all nodes and here"
        return CheckResult(name="software", status="failure", found="; ".join(wrong), remedy=remedy)
    versions = ", ".join(f"{name} {version}" for name, version in ours.items())
    return CheckResult(name="software", status="ok", found=f"all nodes and this machine have {versions}")


def check_places(places: Sequence[Place], nodes: Mapping[str, NodeReport]) -> CheckResult:
    """Tell where Ray would run each actor."""
    found = "; ".join(f"{one.name} ({_amounts(one.bundle)}) on {_machine(one.node, nodes)}" for one in places)
    return CheckResult(name="places", status="ok", found=found)


def _machine(node: str, nodes: Mapping[str, NodeReport]) -> str:
    return nodes[node].machine if node in nodes else f"the new node {node[:8]}"


def check_room(
    places: Sequence[Place], nodes: Mapping[str, NodeReport], settings: ModelSettings, base_model: str
) -> CheckResult:
    """Forecast the memory of each device that an actor would use."""
    if (shape := read_shape(base_model)) is None:
        return check_forecast(None)
    kind = "cuda" if places[0].bundle.get("GPU") else "cpu"
    forecasts, num_tokens = [], 0
    for node in dict.fromkeys(place.node for place in places):
        report = nodes.get(node)
        if report is None or report.devices is None:  # `check_software` says why
            continue
        placement = Placement(AssignedDevices(kind, (), ""), AssignedDevices(kind, (0,) if kind == "cuda" else (), ""))
        plan = MemoryPlan(placement, settings, report.devices, shape)
        num_tokens = plan.num_tokens
        peak, limit = plan.trainer.at_peak(num_tokens), report.devices.memory_bytes
        gpus, first = report.devices.gpus or (), 0
        main: tuple[Part, ...] = ()
        for place in (one for one in places if one.node == node):
            engine, is_engine = plan.engine(limit), place.kind == "engine"
            if kind == "cpu":
                main += engine.awake if is_engine else peak
                continue
            main += (engine.host,) if is_engine else (Part("trainer", "process in main memory", PROCESS_BYTES),)
            last = first + int(place.bundle["GPU"])
            for index, gpu in enumerate(gpus[first:last], start=first):
                if gpu.memory_bytes is not None:
                    parts = plan.engine(gpu.memory_bytes).awake if is_engine else peak
                    where = f"GPU {index} ({gpu.name}) of {report.machine}"
                    forecasts.append(_forecast(where, index, gpu.memory_bytes, parts))
            first = last
        forecasts.append(_forecast(f"main memory of {report.machine}", None, limit, main))
    return check_devices(forecasts, num_tokens)


def _forecast(where: str, index: int | None, limit_bytes: int, parts: tuple[Part, ...]) -> DeviceForecast:
    return DeviceForecast(where=where, gpu_index=index, limit_bytes=limit_bytes, parts=parts, unavoidable=parts)
