"""The process of one file job: reads what to do from standard input, tells progress and result by JSON lines.

    in    {"call": "copy", "params": {...}}
    out   {"progress": [done, total]}            any number
          {"result": {...}} or {"error": {...}}  once, at the end

It ends with its parent. Killing it at any moment leaves nothing but a temporary folder, which the next one clears away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art.errors import NotFoundError
from art.exports.folder import OnBytes, copy_checkpoint
from art.protocol.checkpoint_calls import HubTarget, S3Target
from art.protocol.rpc import error_body
from art.runtime.children.child import die_with_parent, ignore_ctrl_c, log_to_stderr

Params = dict[str, Any]
TELL_EVERY_S = 0.2


def copy(params: Params, on_bytes: OnBytes) -> Params:
    copy_checkpoint(Path(params["source"]), Path(params["target"]), on_bytes)
    return {}


def export(params: Params, on_bytes: OnBytes) -> Params:
    from art.exports import formats

    target = Path(params["target"])
    formats.export(
        Path(params["source"]), params["base_model"], params["format"], target, params["llama_cpp"], on_bytes
    )
    return formats.describe(target)


def merge_adapter(params: Params, on_bytes: OnBytes) -> Params:
    """A base model for which the user named the folder of an adapter."""
    from art.exports import formats

    formats.merge_adapter(Path(params["adapter"]), params["base_model"], Path(params["target"]), on_bytes)
    return {}


def push(params: Params, on_bytes: OnBytes) -> Params:
    folder, target = Path(params["source"]), params["target"]
    if target["kind"] == "hub":
        from art.exports.hub import push_to_hub

        return {"url": push_to_hub(folder, HubTarget.model_validate(target), params["message"])}
    from art.exports.s3 import S3Store

    return {"url": S3Store(S3Target.model_validate(target)).push(folder, params["place"], on_bytes)}


def pull(params: Params, on_bytes: OnBytes) -> Params:
    """Fetches nothing that is here already."""
    from art.exports.s3 import S3Store

    store, place = S3Store(S3Target.model_validate(params["source"])), params["place"]
    steps, limit = store.steps(place), params["not_after_step"]
    wanted = params["step"]
    if wanted is None:
        wanted = max((step for step in steps if limit is None or step <= limit), default=None)
    if wanted is None or wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"there is no such checkpoint at {place} in {params['source']['bucket']}; steps: {there}")
    target = Path(params["checkpoints"]) / f"{wanted:04d}"
    if not target.is_dir():
        store.pull(f"{place}/{wanted:04d}", target, on_bytes)
    return {"step": wanted}


CALLS: dict[str, Callable[[Params, OnBytes], Params]] = {
    "copy": copy,
    "export": export,
    "merge_adapter": merge_adapter,
    "push": push,
    "pull": pull,
}


def main() -> None:
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    request = json.loads(sys.stdin.readline())
    told = 0.0

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def on_bytes(done: int, total: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told > TELL_EVERY_S or done == total:
            told = now
            tell(progress=[done, total])

    try:
        tell(result=CALLS[request["call"]](request["params"], on_bytes))
    except Exception as error:  # the boundary of the process
        tell(error=error_body(error))


if __name__ == "__main__":
    main()
