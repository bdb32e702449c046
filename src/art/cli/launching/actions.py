"""What `art launch` does: launching, and the actions on a server that was launched."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from art.backends.skypilot.skypilot_backend import SkyPilotBackend
from art.backends.ssh.ssh import in_sh, shell_path
from art.cli.arguments import ModelName
from art.cli.launching.launched import Launched, LaunchRecord
from art.cli.launching.machines import backend_of, new_backend, new_record
from art.errors import ArtError, NotFoundError

_COLUMNS = ("name", "kind", "machine", "state", "version", "launched", "data")


async def launch(launched: Launched, args: argparse.Namespace) -> int:
    """Install and start a server, record it, and print how to use it."""
    backend = new_backend(args)
    if isinstance(backend, SkyPilotBackend) and args.dry_run:
        print(backend.task(), end="")
        return 0
    async with backend:
        record = new_record(args, backend)
        is_new = record.name not in launched.names()
        if is_new:  # before anything is rented or installed, so that a failed launch can be taken down
            if not isinstance(backend, SkyPilotBackend):
                await backend.server.status()  # raises if the machine does not let us in
            launched.save(record, "")
        try:
            client = await backend.open()
        except ArtError:
            if is_new:
                _note(f"`art launch down {record.name}` removes what this launch leaves on {backend.ssh.host}")
            raise
        assert client.api_key is not None
        launched.save(record, client.api_key)
    print(f"# Make it reachable here, and keep this running:\n    art launch tunnel {record.name}")
    _print_use(launched, record)
    return 0


def _print_use(launched: Launched, record: LaunchRecord) -> None:
    print(
        "# In another terminal, for scripts with `RemoteBackend`, `art checkpoints`, `art status` and others:\n"
        f"    export ART_SERVER_URL={record.url}\n"
        f"    export ART_API_KEY=$(cat {shlex.quote(str(launched.key_path(record.name)))})",
        flush=True,
    )


async def show_status(launched: Launched, name: str | None) -> int:
    """Print a table of the servers. The machines are asked at once."""
    records = [launched.find(name)] if name is not None else [launched.find(each) for each in launched.names()]
    if not records:
        print(f"no server was launched, as far as {launched.folder} knows")
        return 0
    rows = [_COLUMNS, *await asyncio.gather(*map(_row, records))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


async def _row(record: LaunchRecord) -> tuple[str, ...]:
    backend, version, words = backend_of(record), "-", ""
    try:
        is_up = True
        if isinstance(backend, SkyPilotBackend):
            is_up, words = await backend.describe()
        if is_up:
            state = await backend.server.status()
            server = "nothing installed" if state is None else "running" if state.is_running else "stopped"
            words = f"{server}; {words}" if words else server
            if state is not None:
                words += f" ({state.failure.splitlines()[0]})" if state.failure else ""
                version = state.version
    except ArtError as error:
        words = f"unknown: {error.message.splitlines()[0]}"
    launched_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.launched_at))
    return record.name, record.kind, backend.ssh.host, words, version, launched_at, backend.server.data_dir


async def logs(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Print the last lines of a server's log, and with `--follow` what is added to it, until Ctrl-C."""
    backend = backend_of(record)
    tail = f"tail -n {args.lines} {'-F' if args.follow else ''} {shell_path(backend.server.data_dir)}/logs/server.log"
    if args.follow:  # the end of our side is the end of its input; `tail` itself would stay until the next line
        tail = f"exec 3<&0; {tail} & {{ cat <&3; kill $!; }} > /dev/null 2>&1 & wait $!"
    command = [*backend.ssh.base_command(), in_sh(tail)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
    return await process.wait()


async def tunnel(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Hold a tunnel open, and the server running, until Ctrl-C."""
    async with backend_of(record) as backend:
        client = await backend.open()
        assert client.api_key is not None
        launched.save(record, client.api_key)
        print(f"{record.name} is reachable at {record.url} until Ctrl-C")
        _print_use(launched, record)
        await asyncio.Event().wait()
    return 0


async def pull(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Fetch the newest checkpoint of one model or of all, each as FOLDER/project/name/step."""
    backend = backend_of(record)
    backend.local_port = None  # a free one, since `art launch tunnel` may hold the recorded one
    async with backend:
        client = await backend.open()
        if args.model is not None:
            models = [args.model]
        else:
            models = sorted(
                {card.id.partition("@")[0] for card in await client.list_models() if not card.is_base_model}
            )
        if not models:
            raise NotFoundError(f"the server {record.name!r} has no models")
        for text in models:
            model = ModelName.parse(text)
            step = (await client.model_status(model.project, model.name)).step
            folder = Path(args.to) / model.project / model.name / f"{step:04d}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            print(await backend.download_checkpoint(model, folder, step=step), flush=True)
    return 0


async def stop(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    backend = backend_of(record)
    await backend.stop()
    _note(f"{record.name} is stopped; its data stays in {backend.server.data_dir} on {backend.ssh.host}")
    return 0


async def down(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    backend = backend_of(record)
    if await backend.down(delete_data=args.delete_data):
        kept = (
            f"; its data stays in {backend.kept_data}. `art launch down {record.name} --delete-data` deletes it, with "
            "the record here"
        )
    else:
        launched.forget(record.name)
        kept = ""
    _note(f"{record.name} is down{kept}")
    return 0


ACTIONS: dict[str, Callable[[Launched, LaunchRecord, argparse.Namespace], Coroutine[None, None, int]]] = {
    "logs": logs, "tunnel": tunnel, "pull": pull, "stop": stop, "down": down,
}  # fmt: skip
"""What is done with one server, by the name of the action."""


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
