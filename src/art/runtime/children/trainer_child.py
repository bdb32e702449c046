"""The trainer process: frames in, `Trainer` calls, frames out. `art.runtime.children.trainer_calls` lists the methods.

`train` and `train_sft` also send {progress: {done, total}}, any number of times, before their result.

One call at a time, in order. A failed call leaves the process alive. A cancelled call that waits is dropped; one that
runs ends behind its micro-batch, with a `JobCancelledError`: nothing of it is kept, since a checkpoint is written last.
A base model that is sharded cannot be stopped so, as its processes meet within every layer; the parent ends those.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from art.config import TrainerConfig
from art.errors import ArtError, JobCancelledError, ProcessError
from art.runtime.children.child import Child, child_from_argv
from art.runtime.children.trainer_calls import TrainerCalls, validated

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 3.0
"""Time for `trainer_team` to notice which process died."""


class TrainerServer:
    """Answers the frames of one `Child`."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._calls = TrainerCalls()
        self._may_stop = True

    def run(self) -> None:
        """Serve until the process is killed, or exits because the parent is gone or another process of its team is."""
        while True:
            self._child.tick("idle")
            frame = self._child.inbox.get()
            if "cancel" not in frame and not self._is_cancelled(frame["id"]):
                self._answer(frame["id"], frame["method"], frame["params"])

    def _answer(self, call_id: int, method: str, params: dict[str, Any]) -> None:
        def on_progress(done: int, total: int) -> None:
            self._child.tick(f"{method}: micro-batch {done} of {total}")
            self._child.socket.reply(call_id, {"progress": {"done": done, "total": total}}, last=False)
            if self._may_stop and self._is_cancelled(call_id):
                raise JobCancelledError(f"`{method}` was cancelled behind micro-batch {done} of {total}")

        self._child.tick(method)
        try:
            if method == "start":
                config = validated(TrainerConfig, params["config"])
                self._may_stop = not config.shard_base
                self._start_team(config)
            if self._calls.team is not None:
                self._calls.team.broadcast((method, params))
            result = self._calls.make(method, params, on_progress)
        except ProcessError:  # the team broke: the supervisor starts all anew, and the call over
            _log.exception("%s failed", method)
            time.sleep(_LAST_WORDS_S)
            os._exit(1)
        except Exception as error:  # the boundary of the process: the caller gets it, and the next call may succeed
            if not isinstance(error, ArtError):
                _log.exception("%s failed", method)
            self._child.socket.fail(call_id, error)
        else:
            self._child.socket.reply(call_id, result)

    def _start_team(self, config: TrainerConfig) -> None:
        """The other processes, if there are to be any and are none yet."""
        if config.num_processes > 1 and self._calls.team is None:
            from art.runtime.children.trainer_team import start_team  # torch: only once the connection stands

            self._calls.team = start_team(config, self._child)

    def _is_cancelled(self, call_id: int) -> bool:
        """Whether the caller of a call has gone meanwhile, or wants it to stop."""
        with self._child.inbox.mutex:
            return any(frame.get("cancel") == call_id for frame in self._child.inbox.queue)


def main() -> None:
    TrainerServer(child_from_argv("art-trainer")).run()


if __name__ == "__main__":
    main()
