"""`art checkpoints`: the checkpoints of a server's models. It needs the core package only."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

from art.backend import RemoteBackend
from art.cli.arguments import ModelArgument, server_address
from art.client.terminal import ProgressLine
from art.errors import ConfigError
from art.protocol.checkpoint_calls import BEST_METRIC, CheckpointInfo, ExportFormat
from art.protocol.promotions import PromotionRecord

FORMATS = get_args(ExportFormat)


Action = Callable[[RemoteBackend, argparse.Namespace], Awaitable[None]]


def add_checkpoints_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the server (default: ART_SERVER_URL)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(
        name: str, action: Action, summary: str, step: str | None = "step of the checkpoint (default: the newest)"
    ) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary)
        added.add_argument("model", type=ModelArgument.parse, help="the model, as PROJECT/NAME")
        added.set_defaults(act=action)
        if step:
            added.add_argument("--step", type=int, help=step)
        return added

    listing = add("list", list_checkpoints, "list steps with their metrics, size and place", None)
    listing.add_argument("--metric", default=BEST_METRIC, help=f"metric of the best (default: {BEST_METRIC})")
    fetching = add("download", download, "fetch a checkpoint, or an export that has been made")
    fetching.add_argument("path", type=Path, help="folder to make")
    fetching.add_argument("--format", choices=FORMATS, help="an export, instead of the checkpoint itself")
    deleting = add("delete", delete, "delete all but the newest, best, promoted, those in use and those named", None)
    deleting.add_argument("--keep", type=int, nargs="*", default=[], metavar="STEP", help="further ones to keep")
    deleting.add_argument("--keep-recent", type=int, default=1, metavar="N", help="number of the newest (default: 1)")
    deleting.add_argument("--metric", default=BEST_METRIC, help=f"metric of the best (default: {BEST_METRIC})")
    deleting.add_argument("--yes", action="store_true", help="delete them; without it they are listed only")
    forking = add("fork", fork, "begin another model with a checkpoint of this one")
    forking.add_argument("to", type=ModelArgument.parse, help="the other model, as PROJECT/NAME")
    forking.add_argument("--not-after", type=int, metavar="STEP", help="take the newest checkpoint up to this step")
    exporting = add("export", export, "export a checkpoint for peft, vLLM and SGLang, or transformers (merged)")
    exporting.add_argument("format", choices=FORMATS, help="the programs that read it")
    exporting.add_argument("--path", type=Path, help="folder to fetch it as (default: it stays on the server)")
    pushing = add("push", push, "send a checkpoint, or an export that has been made, to a store or hub")
    pushing.add_argument("target", help="s3://bucket/prefix or hf://owner/name")
    formats = ("checkpoint", *FORMATS)
    pushing.add_argument("--format", choices=formats, default=formats[0], help="what is sent (default: %(default)s)")
    pulling = add("pull", pull, "begin a model with a checkpoint from a store")
    pulling.add_argument("source", help="the store, as s3://bucket/prefix")
    pulling.add_argument(
        "--from-model", type=ModelArgument.parse, help="the model that it was pushed from (default: the same name)"
    )


def run_checkpoints(args: argparse.Namespace) -> int:
    """`art checkpoints`: list, fetch, delete, fork, export, push and pull checkpoints of a server's models.

    The server is at --url or ART_SERVER_URL, and the key is in ART_API_KEY. A model is PROJECT/NAME.

        art checkpoints list games/agent
        art checkpoints download games/agent ./adapter --format peft
        art checkpoints delete games/agent --keep-recent 3 --yes
        art checkpoints fork games/agent games/agent-2 --step 40
        art checkpoints export games/agent merged --path ./model
        art checkpoints push games/agent s3://bucket/prefix
    """

    async def act() -> None:
        async with RemoteBackend(server_address(args.url)) as backend:
            await args.act(backend, args)

    asyncio.run(act())
    return 0


async def list_checkpoints(backend: RemoteBackend, args: argparse.Namespace) -> None:
    checkpoints = await backend.list_checkpoints(args.model, best_metric=args.metric)
    print(f"{'step':>6}  {'made':16}  {'MiB':>8}  {args.metric:>12}")
    for info in checkpoints:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created_at))
        value = info.metrics.get(args.metric)
        number = "-" if value is None else f"{value:.4g}"
        print(f"{info.step:>6}  {made:16}  {info.size_bytes / 2**20:>8.1f}  {number:>12}  {_marks(info)}".rstrip())
    for record in await backend.checkpoints.promotions(args.model):
        print(_describe(record))


def _describe(record: PromotionRecord) -> str:
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at))
    before = "nothing" if record.previous_step is None else f"step {record.previous_step}"
    what = "refused: " + before + " stays" if record.decision == "refused" else f"promoted in place of {before}"
    how = {"ungated": " without a gate", "forced": " by force"}.get(record.decision, "")
    parts = [f"{at}  step {record.step} {what}{how}, by key {record.key_id}"]
    verdict = record.verdict
    if verdict is not None and verdict.difference is not None:
        low = "" if verdict.low is None else f", above {verdict.low:+.3f}"
        parts.append(
            f"{verdict.difference:+.3f} against step {verdict.reference_step}{low} ({verdict.num_scenarios} scenarios, "
            f"required {verdict.require:+g})"
        )
    elif verdict is not None:
        parts.append(f"{verdict.num_scenarios} scenarios were measured with both checkpoints, too few to compare")
    return "; ".join([*parts, *([record.note] if record.note else [])])


def _marks(info: CheckpointInfo) -> str:
    named = (("newest", info.newest), ("best", info.best), ("promoted", info.promoted))
    marks = [word for word, applies in named if applies]
    return ", ".join([*marks, *(f"in use: {what}" for what in info.in_use)])


async def download(backend: RemoteBackend, args: argparse.Namespace) -> None:
    with ProgressLine(f"downloading {args.model}"):
        path = await backend.download_checkpoint(args.model, args.path, step=args.step, format=args.format)
    print(path)


async def delete(backend: RemoteBackend, args: argparse.Namespace) -> None:
    if args.keep_recent < 1:
        raise ConfigError(f"--keep-recent must be at least 1, got {args.keep_recent}: the newest is always kept")
    checkpoints = await backend.list_checkpoints(args.model, best_metric=args.metric)
    recent = sorted(info.step for info in checkpoints)[-args.keep_recent :]
    going = [info for info in checkpoints if not (_marks(info) or info.step in recent or info.step in args.keep)]
    if not going:
        print(f"there is nothing to delete: all {len(checkpoints)} checkpoints are kept")
        return
    steps = ", ".join(str(info.step) for info in going)
    size = f"{sum(info.size_bytes for info in going) / 2**20:.1f} MiB"
    print(f"{len(going)} of {len(checkpoints)} checkpoints of {args.model}, {size}: steps {steps}")
    if not args.yes:
        print("nothing was deleted: that cannot be undone, so add --yes to do it")
        return
    gone = await backend.delete_checkpoints(
        args.model, keep_steps=[info.step for info in checkpoints if info not in going],
        keep_recent=args.keep_recent, best_metric=args.metric,
    )  # fmt: skip
    print(f"deleted {', '.join(map(str, gone)) or 'nothing'}")


async def fork(backend: RemoteBackend, args: argparse.Namespace) -> None:
    step = await backend.fork(args.to, args.model, step=args.step, not_after_step=args.not_after)
    print(f"{args.to.project}/{args.to.name} is at step {step}")


async def export(backend: RemoteBackend, args: argparse.Namespace) -> None:
    with ProgressLine(f"exporting {args.model}"):
        made: dict[str, Any] = await backend.export(args.model, args.format, step=args.step, path=args.path)
    place = args.path or f"{made['path']} on the server"
    print(f"{place}: {', '.join(made['files'])} ({made['size_bytes'] / 2**20:.1f} MiB)")
    for server, command in made.get("commands", {}).items():
        print(f"{server}: {command.replace('$PWD', str(args.path or made['path']))}")


async def push(backend: RemoteBackend, args: argparse.Namespace) -> None:
    with ProgressLine(f"pushing {args.model}"):
        url = await backend.push(args.model, args.target, step=args.step, format=args.format)
    print(url)


async def pull(backend: RemoteBackend, args: argparse.Namespace) -> None:
    origin = args.from_model or args.model
    with ProgressLine(f"pulling {origin}"):
        step = await backend.pull(
            args.model, args.source, from_model=origin.name, from_project=origin.project, step=args.step
        )
    print(f"{args.model.project}/{args.model.name} is at step {step}")
