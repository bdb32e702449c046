"""`art status`: show the processes and jobs of a server, who waits for whom, and what its models have cost.

It asks the server of a data directory by a signal. It therefore needs neither address nor key, and a server that hangs
answers too, with the stack of its event loop. With --stacks the report ends with the stacks of all tasks and processes.

Warm starts of tiny models are shown too, whichever command of this user runs them.

A server elsewhere, at --url or ART_SERVER_URL, is asked over HTTP with the key in ART_API_KEY for its processes, its
models and its unfinished jobs. --data-dir wins over ART_SERVER_URL. With --rollout it is asked for one rollout: how it
ended, and which conversations it has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from art.cli.tiny_model import warm_starts
from art.client import ArtClient
from art.costs import Ledger
from art.errors import ConfigError, NotFoundError, ProcessError
from art.protocol.chat import short
from art.protocol.training import JobStatus
from art.storage.layout import DataDir
from art.storage.local_key import find_local_key
from art.storage.lock import lock_holder
from art.storage.logs import log_since, log_size

REPORT_TIMEOUT_S = 10.0
STACKS_TIMEOUT_S = 2.0
UNREACHABLE_S = 5.0
"""Seconds to reach a server on another machine."""


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data-dir", type=Path, help="of a server on this machine (default: .art)")
    where.add_argument("--url", help="of a server elsewhere (default: ART_SERVER_URL)")
    parser.add_argument("--rollout", metavar="ID", help="show one rollout of the server at --url and its conversations")
    parser.add_argument("--stacks", action="store_true", help="also show the stacks of all tasks and processes")


def run(args: argparse.Namespace) -> int:
    if url := args.url or (os.environ.get("ART_SERVER_URL") if args.data_dir is None else None):
        if args.stacks:
            raise ConfigError("--stacks needs --data-dir, on the machine of the server")
        print(asyncio.run(describe_rollout(url, args.rollout) if args.rollout else describe_server(url)))
        return 0
    if args.rollout:
        raise ConfigError("--rollout needs the address of the server, by --url or ART_SERVER_URL")
    data_dir = DataDir((args.data_dir or Path(".art")).expanduser().resolve())
    sections = describe_costs(data_dir)
    if starts := warm_starts():
        sections.append("\n  ".join(["Warm starts of tiny models", *starts]))
    stacks: list[str] = []
    try:
        report = ask_for_report(data_dir)
    except NotFoundError as error:
        if not sections:
            raise
        report = error.message
    else:
        from art.runtime.supervision.report import STACKS_HEADING

        report, *stacks = report.partition(f"\n\n{STACKS_HEADING}")
    print("\n\n".join([report, *sections]) + ("".join(stacks) if args.stacks else ""))
    return 0


async def describe_server(url: str) -> str:
    """Ask the server at `url` for its processes, models and unfinished jobs, and return them as text.

    It shows its processes only to keys for all projects.
    """
    key = os.environ.get("ART_API_KEY") or find_local_key(url)
    async with ArtClient(url, key, unreachable_deadline_s=UNREACHABLE_S) as client:
        health, models = await client.health(), await client.list_models()
        jobs = await client.list_jobs(unfinished=True)
    processes = [
        f"{part} of {host['base_model']}: {host[part]['state']}{_describe_place(host.get('placement', {}).get(part))}"
        for host in health.get("base_models", ())
        for part in ("engine", "trainer")
    ]
    sections = {
        "Processes": processes if "base_models" in health else ["shown to keys for all projects only"],
        "Models": [f"{one.id}: step {one.step}, {one.base_model}" for one in models if not one.is_base_model],
        "Base models": sorted({one.base_model for one in models if one.is_base_model}),
        "Jobs that have not ended": list(map(_describe_job, jobs)),
    }
    return "\n\n".join(
        [f"art-server at {url}", *("\n  ".join([heading, *(lines or ["none"])]) for heading, lines in sections.items())]
    )


async def describe_rollout(url: str, rollout_id: str) -> str:
    """Ask the server at `url` for a rollout, and describe how it ended and which conversations it has."""
    async with ArtClient(url, os.environ.get("ART_API_KEY") or find_local_key(url)) as client:
        record = await client.get_rollout(rollout_id)
    sampling = "as its requests ask" if record.sampling is None else record.sampling.model_dump_json()
    facts = f"{record.outcome or 'running'}, reward {record.reward}, group {record.group_id}, sampled {sampling}"
    conversations = [_describe_conversation(history["messages_and_choices"]) for history in record.histories]
    return "\n  ".join([f"rollout {rollout_id} of {record.model}: {facts}", *(conversations or ["no conversations"])])


def _describe_conversation(items: list[dict[str, Any]]) -> str:
    answers = [item for item in items if "exchange_id" in item]
    num_tokens = sum(answer["exchange"]["completion_tokens"] for answer in answers)
    prompt = next((item["content"] for item in items if item.get("role") == "system"), None)
    about = "no system prompt" if prompt is None else f"system prompt {short(prompt)}"
    return f"conversation of {len(items)} messages with {len(answers)} answers, {num_tokens} sampled tokens; {about}"


def _describe_place(place: dict[str, str] | None) -> str:
    """Say on which devices a process is, and why. Older servers do not tell."""
    return "" if place is None else f" on {place['devices']} ({place['reason']})"


def _describe_job(job: JobStatus) -> str:
    detail: str = job.state
    if job.queue_place is not None:
        detail += f" at place {job.queue_place}"
    elif job.progress is not None:
        detail += f", {job.progress.phase}: {job.progress.done} of {job.progress.total}"
    return f"{job.job_id}: {job.kind} of {job.project}/{job.name}, {detail}"


def describe_costs(data_dir: DataDir) -> list[str]:
    """Describe the costs so far of each model in a data directory; models without costs are left out."""
    costs = []
    for path in sorted(data_dir.root.glob("*/models/*/costs.jsonl")):
        if lines := Ledger(path=path).lines():
            costs.append("\n  ".join([f"Costs of {path.parents[2].name}/{path.parent.name}", *lines]))
    return costs


def ask_for_report(data_dir: DataDir) -> str:
    """Ask the server that uses `data_dir`, by a signal, for a report on its processes and jobs.

    Raises:
        NotFoundError: no server uses it.
        ProcessError: the server gives no report. The message has the stack of its event loop.
    """
    pid = lock_holder(data_dir.lock)
    if pid is None:
        how = "runs on" if data_dir.database.exists() else "has ever run on"
        raise NotFoundError(
            f"no art-server {how} {data_dir.root}; name the `path` of its backend, or its --data-dir, by --data-dir, "
            "or the address of one that runs elsewhere by --url or ART_SERVER_URL"
        )
    # Here and not above: a server elsewhere is also asked from Windows, which has no such signals.
    from art.runtime.supervision.report import REPORT_SIGNAL
    from art.runtime.supervision.waits import process_state

    before = _version(data_dir.report)
    try:
        os.kill(pid, REPORT_SIGNAL)
    except PermissionError:
        raise ProcessError(f"art-server (pid {pid}) belongs to another user; ask as that user") from None
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while time.monotonic() < deadline:
        if _version(data_dir.report) != before:
            return data_dir.report.read_text(encoding="utf-8")
        time.sleep(0.05)
    state = process_state(pid)
    stopped = ": a signal has stopped it (SIGCONT lets it go on)" if state == "T" else ""
    problem = f"art-server (pid {pid}, state {state}) gave no report within {REPORT_TIMEOUT_S:.0f} s{stopped}"
    raise ProcessError(f"{problem}\n{_stacks(data_dir, pid)}")


def _version(path: Path) -> tuple[int, int] | None:
    """A value that changes when the file is replaced."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_mtime_ns
    return None


def _stacks(data_dir: DataDir, pid: int) -> str:
    from art.runtime.supervision.report import STACKS_SIGNAL

    size = log_size(data_dir.server_stacks)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline and log_size(data_dir.server_stacks) == size:
        time.sleep(0.05)
    time.sleep(0.1)
    return log_since(data_dir.server_stacks, size)
