"""What `art launch` does: launching, and the actions on a server that was launched."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from art.backends.ssh.launched import Launched, LaunchRecord
from art.backends.ssh.log_follower import LogFollower
from art.backends.ssh.ssh_backend import SshBackend
from art.cli.launching.kinds import KINDS, kind_for, kind_named
from art.cli.options.model_name import ModelName
from art.errors import ArtError, NotFoundError

_COLUMNS = ("name", "kind", "machine", "state", "version", "starts", "launched", "data")


async def launch(launched: Launched, args: argparse.Namespace) -> int:
    """Install and start a server, record it, and print how to use it."""
    kind = kind_for(args)
    if await kind.do_instead(args):
        return 0
    backend = kind.new_backend(args, args.name)
    async with backend:
        earlier = launched.names()
        await kind.prepare(launched, args, backend, args.name)
        try:
            client = await backend.open()
        except ArtError:
            for name in set(launched.names()).difference(earlier):
                _note(f"`art launch down {name}` removes what this launch leaves on {backend.ssh.name}")
            raise
        record = kind.new_record(args, backend, args.name)
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
    backends = [kind_named(record.kind).backend(record) for record in records]
    for kind in KINDS:
        pairs = zip(records, backends, strict=True)
        kind_named(kind).share_questions([backend for record, backend in pairs if record.kind == kind])
    tables = await asyncio.gather(*map(_rows, records, backends))
    rows = [_COLUMNS, *(row for table in tables for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


async def _rows(record: LaunchRecord, backend: SshBackend) -> list[tuple[str, ...]]:
    """The row of a server, and one for each of its further machines."""
    row, nodes = await asyncio.gather(_row(record, backend), _node_rows(backend))
    return [row, *nodes]


async def _node_rows(backend: SshBackend) -> list[tuple[str, ...]]:
    try:
        nodes = await backend.describe_nodes()
    except ArtError:  # the row of the server says why
        return []
    return [("", "", name, words, version, "", "", "") for name, words, version in nodes]


async def _row(record: LaunchRecord, backend: SshBackend) -> tuple[str, ...]:
    version = starts = "-"
    try:
        is_up, words = await backend.describe()
        state = await backend.server.status() if is_up else None
    except ArtError as error:
        words = f"unknown: {error.message.splitlines()[0]}"
    else:
        if is_up:
            server = "nothing installed" if state is None else "running" if state.is_running else "stopped"
            words = f"{server}; {words}" if words else server
        if state is not None:
            words += f" ({state.failure})" if state.failure else ""
            version, starts = state.version, str(state.num_starts)
    launched_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.launched_at))
    data = backend.server.data_dir
    return record.name, record.kind, backend.ssh.name, words, version, starts, launched_at, data


async def logs(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Print the last lines of a server's log, and with `--follow` what is added to it, until Ctrl-C."""
    backend = kind_named(record.kind).backend(record)
    if args.follow:
        await LogFollower(
            backend.ssh, backend.server.folder, num_lines=args.lines, write=_write, say=_note
        ).run()  # fmt: skip
    print(await backend.server.log_tail(args.lines), end="")
    return 0


def _write(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


async def tunnel(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Hold a tunnel open, and the server running, until Ctrl-C."""
    async with kind_named(record.kind).backend(record) as backend:
        client = await backend.open()
        assert client.api_key is not None
        launched.save(record, client.api_key)
        print(f"{record.name} is reachable at {record.url} until Ctrl-C")
        _print_use(launched, record)
        await asyncio.Event().wait()
    return 0


async def pull(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    """Fetch the newest checkpoint of one model or of all, each as FOLDER/project/name/step."""
    backend = kind_named(record.kind).backend(record)
    backend.local_port = None  # a free one, since `art launch tunnel` may hold the recorded one
    async with backend:
        client = await backend.open()
        assert client.api_key is not None
        launched.save(record, client.api_key)  # a rented machine's backend has recorded the port of this call
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
    backend = kind_named(record.kind).backend(record)
    await backend.stop()
    _note(f"{record.name} is stopped; its data stays in {backend.server.data_dir} on {backend.ssh.name}")
    return 0


async def down(launched: Launched, record: LaunchRecord, args: argparse.Namespace) -> int:
    backend = kind_named(record.kind).backend(record)
    if await backend.down(delete_data=args.delete_data):
        kept = f"; its data stays in {backend.kept_data}"
        if record.name in launched.names():  # a machine that SkyPilot rented is gone, and so is its record
            kept += f". `art launch down {record.name} --delete-data` deletes it, with the record here"
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
