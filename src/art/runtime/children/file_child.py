"""The process of one file job: reads what to do from standard input, tells progress and result by JSON lines.

    in    {"call": "copy", ...}                  one of `FileCall`
    out   {"progress": [done, total]}            any number
          {"result": {...}} or {"error": {...}}  once, at the end

It ends with its parent. Killing it at any moment leaves nothing but a temporary folder, which the next one clears away.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pydantic import TypeAdapter

from art.errors import NotFoundError
from art.exports.folder import OnBytes, copy_checkpoint
from art.protocol.checkpoint_calls import HubTarget
from art.protocol.file_calls import CopyCall, ExportCall, FileCall, MergeAdapterCall, PullCall, PushCall
from art.protocol.rpc import error_body
from art.runtime.children.child import die_with_parent, ignore_ctrl_c, log_to_stderr

Result = dict[str, Any]
TELL_EVERY_S = 0.2


def make(call: FileCall, on_bytes: OnBytes) -> Result:
    match call:
        case CopyCall():
            copy_checkpoint(call.source, call.target, on_bytes)
            return {}
        case ExportCall():
            from art.exports import formats

            formats.export(call.source, call.base_model, call.format, call.target, call.llama_cpp, on_bytes)
            return formats.describe(call.target)
        case MergeAdapterCall():
            from art.exports import formats

            formats.merge_adapter(call.adapter, call.base_model, call.target, on_bytes)
            return {}
        case PushCall():
            return {"url": _push(call, on_bytes)}
        case PullCall():
            return {"step": _pull(call, on_bytes)}


def _push(call: PushCall, on_bytes: OnBytes) -> str:
    if isinstance(call.target, HubTarget):
        from art.exports.hub import push_to_hub

        return push_to_hub(call.source, call.target, call.message)
    from art.exports.s3 import S3Store

    return S3Store(call.target).push(call.source, call.place, on_bytes)


def _pull(call: PullCall, on_bytes: OnBytes) -> int:
    from art.exports.s3 import S3Store

    store = S3Store(call.source)
    steps, limit, step = store.steps(call.place), call.not_after_step, call.step
    if step is None:
        step = max((step for step in steps if limit is None or step <= limit), default=None)
    if step is None or step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"there is no such checkpoint at {call.place} in {call.source.bucket}; steps: {listed}")
    target = call.checkpoints / f"{step:04d}"
    if not target.is_dir():
        store.pull(f"{call.place}/{step:04d}", target, on_bytes)
    return step


def main() -> None:
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    line = sys.stdin.readline()
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
        tell(result=make(TypeAdapter[FileCall](FileCall).validate_json(line), on_bytes))
    except Exception as error:  # the boundary of the process
        tell(error=error_body(error))


if __name__ == "__main__":
    main()
