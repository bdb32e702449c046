"""The process of one job on files: it copies, exports, pushes or pulls a checkpoint.

It reads one call from standard input, and writes progress and result as JSON lines to standard output.

    in    {"call": "copy", "params": {...}}      one of `FILE_CALLS`
    out   {"progress": [done, total]}            any number
          {"result": {...}} or {"error": {...}}  once, at the end

It ends with its parent. A kill at any moment leaves at most a temporary folder, which the next process clears away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from art.errors import NotFoundError
from art.exports import OnBytes, S3Store, copy_checkpoint, export, push_to_hub
from art.protocol.calls import FILE_CALLS, Call, Copy, Export, Pull, Push, decode_call
from art.protocol.checkpoint_calls import HubTarget
from art.protocol.rpc import error_body
from art.storage.logs import log_to_stderr
from art.worker.child import die_with_parent, ignore_ctrl_c

TELL_EVERY_S = 0.2


def copy(call: Copy, on_bytes: OnBytes) -> dict[str, Any]:
    copy_checkpoint(call.source, call.target, on_bytes)
    return {}


def push(call: Push, on_bytes: OnBytes) -> dict[str, Any]:
    if isinstance(call.target, HubTarget):
        return {"url": push_to_hub(call.source, call.target, call.message)}
    return {"url": S3Store(call.target).push(call.source, call.place, on_bytes)}


def pull(call: Pull, on_bytes: OnBytes) -> dict[str, Any]:
    """Fetch a checkpoint from an S3 store into a model's folder, unless it is there already. Returns its step."""
    store, limit = S3Store(call.source), call.not_after_step
    steps, step = store.steps(call.place), call.step
    if step is None:
        step = max((one for one in steps if limit is None or one <= limit), default=None)
    if step is None or step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"there is no such checkpoint at {call.place} in {call.source.bucket}; steps: {there}")
    target = call.checkpoints / f"{step:04d}"
    if not target.is_dir():
        store.pull(f"{call.place}/{step:04d}", target, on_bytes)
    return {"step": step}


HANDLERS: Mapping[type[Call[Any]], Callable[[Any, OnBytes], dict[str, Any]]] = {
    Copy: copy,
    Export: export,
    Push: push,
    Pull: pull,
}


def main() -> None:
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print; that is not an answer
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
        call = decode_call(FILE_CALLS, request["call"], request["params"])
        tell(result=HANDLERS[type(call)](call, on_bytes))
    except Exception as error:  # the boundary of the process
        tell(error=error_body(error))


if __name__ == "__main__":
    main()
