"""The trainer process: `python -m art.runtime.children.trainer_child --fd N`.

    frame --> decode_call --> TrainerCalls --> Trainer --> result
                                 |
                                 +--> the other processes of the team, which make the same call

It serves one call at a time, in order, and survives a failed call. A waiting call that is cancelled is dropped. A
running one ends after its current micro-batch with a `JobCancelledError` and leaves nothing, because the checkpoint is
written last. A trainer with a sharded base model cannot stop like this, since its processes meet within every layer;
the parent kills it instead.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from art.errors import ArtError, JobCancelledError, ProcessError, TrainingError
from art.protocol.calls import TRAINER_CALLS, Call, Progress, StartTrainer, decode_call
from art.runtime.children.child import Child, child_from_argv
from art.runtime.children.trainer_calls import TrainerCalls

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 3.0
"""Time for `trainer_team` to notice which process died."""


class TrainerServer:
    """Answers the calls that the server sends to this trainer process, one at a time."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._calls = TrainerCalls()
        self._may_stop = True

    def run(self) -> None:
        """Serve until the process is killed, or exits because the parent or another process of its team is gone."""
        while True:
            self._child.tick("idle")
            frame = self._child.inbox.get()
            if "cancel" not in frame and not self._is_cancelled(frame["id"]):
                self._answer(frame["id"], frame["method"], frame["params"])

    def _answer(self, call_id: int, method: str, params: dict[str, Any]) -> None:
        def on_progress(done: int, total: int) -> None:
            self._child.tick(f"{method}: micro-batch {done} of {total}")
            self._child.socket.reply(call_id, Progress(done=done, total=total), last=False)
            if self._may_stop and self._is_cancelled(call_id):
                raise JobCancelledError(f"`{method}` was cancelled after micro-batch {done} of {total}")

        self._child.tick(method)
        try:
            call = decode_call(TRAINER_CALLS, method, params)
            self._tell_team(call)
            result = self._calls.make(call, on_progress)
        except ProcessError:  # the team broke: the supervisor restarts all of it and repeats the call
            _log.exception("%s failed", method)
            time.sleep(_LAST_WORDS_S)
            os._exit(1)
        except Exception as error:  # the boundary of the process: the caller gets it, and the next call may succeed
            if not isinstance(error, ArtError):
                _log.exception("%s failed", method)
            self._child.socket.fail(call_id, _explained(error, method))
        else:
            self._child.socket.reply(call_id, result)

    def _tell_team(self, call: Call[Any]) -> None:
        """Pass a call on to the other processes. The first `start_trainer` starts them, if it asks for any."""
        if isinstance(call, StartTrainer):
            self._may_stop = not call.config.shard_base
            if call.config.num_processes > 1 and self._calls.team is None:
                from art.runtime.children.trainer_team import start_team  # torch: only once the connection exists

                self._calls.team = start_team(call.config, self._child)
        if self._calls.team is not None:
            self._calls.team.broadcast(call)

    def _is_cancelled(self, call_id: int) -> bool:
        """Tell whether the caller has gone meanwhile, or wants the call to stop."""
        with self._child.inbox.mutex:
            return any(frame.get("cancel") == call_id for frame in self._child.inbox.queue)


def _explained(error: Exception, method: str) -> Exception:
    """Return the error for the caller. A failed allocation is told in the words of who can do something about it."""
    from art.trainer.machine.memory import is_out_of_memory  # torch: only once the connection exists

    if isinstance(error, ArtError) or not is_out_of_memory(error):
        return error
    return TrainingError(
        f"the trainer ran out of memory in `{method}` ({type(error).__name__}: {error}). No checkpoint was written. "
        "Free memory on its machine or raise the limit that it runs under; smaller micro-batches "
        "(`TrainerConfig.max_tokens`) need less. Then train the same trajectories again, without a restart"
    )


def main() -> None:
    TrainerServer(child_from_argv("trainer_child")).run()


if __name__ == "__main__":
    main()
