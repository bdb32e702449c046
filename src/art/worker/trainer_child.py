"""The trainer process: `python -m art.worker.trainer_child --fd N`.

    server process --> process 0 --> decode_call --> TrainerCalls --> Trainer --> result
                          |
                          +-- calls and gradients --> processes 1, 2, ... (`--member`), which make the same calls

It serves one call at a time, in order, and survives a failed call. A waiting call that is cancelled is dropped. A
running one ends after its current micro-batch with a `JobCancelledError` and leaves nothing, because the checkpoint is
written last. A trainer with a sharded base model cannot stop like this, since its processes meet within every layer;
the parent kills it instead.

Process 0 starts processes 1, 2, ..., as `torchrun` would. They ignore Ctrl-C too, and end with it: Linux kills them,
and elsewhere, or before that is arranged, the end of their stdin ends them. In turn process 0 never continues without
one of them. It logs which one died, and exits; the supervisor then restarts all processes, and the call is repeated.
Process k writes its own log, `<log of process 0>.<k>`.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from art.config import TrainerConfig
from art.errors import ArtError, InvalidRequestError, JobCancelledError, ProcessError, TrainingError
from art.protocol.calls import (
    TRAINER_CALLS,
    Call,
    InitCheckpoint,
    Progress,
    StartTrainer,
    Train,
    TrainSft,
    Trial,
    WriteLoudAdapters,
    decode_call,
)
from art.storage.logs import describe_exit, log_tail, log_to_stderr, open_log, rotate_log
from art.worker.child import (
    Child,
    child_from_argv,
    die_with_parent,
    dump_stack_on_abort,
    ignore_ctrl_c,
    import_transformers,
)

if TYPE_CHECKING:
    from art.trainer.distributed import Team
    from art.trainer.trainer import OnProgress, Trainer

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 3.0
"""Time for `_leave_after` to notice which process died."""
_TAIL_LINES = 8
"""Lines from the log of a process that died. They must fit into the end of the log of process 0."""
_ROTATE_EVERY_S = 60.0
_ADDRESS = "127.0.0.1"


class TrainerCalls:
    """Runs the calls that a trainer process receives, on its one `Trainer`."""

    def __init__(self, team: Team | None = None) -> None:
        self.team = team
        """The processes that train together and make the same calls; `None` if this process trains alone."""
        self._trainer: Trainer | None = None
        self._after: Callable[[], None] | None = None
        self.handlers: Mapping[type[Call[Any]], Callable[[Any, OnProgress | None], Any]] = {
            StartTrainer: self._start,
            InitCheckpoint: lambda call, _: self._started.init_checkpoint(call.path, call.lora),
            Train: lambda call, on_progress: self._started.train(call, on_progress),
            TrainSft: lambda call, on_progress: self._started.train(call, on_progress),
            Trial: lambda call, _: self._started.trial(call.samples, call.lora),
            WriteLoudAdapters: lambda call, _: self._started.write_loud_adapters(call.folder, call.lora),
        }

    def make(self, call: Call[Any], on_progress: OnProgress | None = None) -> Any:
        """Make the call and return its result. Raises `InvalidRequestError` if there is no trainer yet and `ArtError`
        if what the trainer raises."""
        try:
            return self.handlers[type(call)](call, on_progress)
        finally:
            if self._after is not None:
                self._after()

    def _start(self, call: StartTrainer, on_progress: OnProgress | None) -> None:
        import_transformers()
        from art.trainer.distributed import ALONE
        from art.trainer.memory import release_memory
        from art.trainer.trainer import Trainer

        self._trainer = Trainer(call.model, call.config, self.team or ALONE)
        if call.shares_gpu:
            self._after = release_memory  # torch keeps what it frees, and the engine needs it to wake up

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise InvalidRequestError("the trainer has no model yet: call `start_trainer` first")
        return self._trainer


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
            frame = self._child.read()
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
                from art.trainer.memory import is_out_of_memory  # torch: only once the connection exists

                if is_out_of_memory(error):
                    error = TrainingError(
                        f"the trainer ran out of memory in `{method}` ({type(error).__name__}: {error}). No checkpoint "
                        "was written. Free memory on its machine or raise the limit that it runs under; smaller "
                        "micro-batches (`TrainerConfig.max_tokens`) need less. Then train the same trajectories again, "
                        "without a restart"
                    )
            self._child.socket.fail(call_id, error)
        else:
            self._child.socket.reply(call_id, result)

    def _tell_team(self, call: Call[Any]) -> None:
        """Pass a call on to the other processes. The first `start_trainer` starts them, if it asks for any."""
        if isinstance(call, StartTrainer):
            self._may_stop = not call.config.shard_base
            if call.config.num_processes > 1 and self._calls.team is None:
                self._calls.team = start_team(call.config, self._child)
        if self._calls.team is not None:
            self._calls.team.broadcast(call)

    def _is_cancelled(self, call_id: int) -> bool:
        """Tell whether the caller has gone meanwhile, or wants the call to stop."""
        return any(frame.get("cancel") == call_id for frame in self._child.socket.arrived())


# -- a team of processes --


def start_team(config: TrainerConfig, child: Child) -> Team:
    """Start processes 1, 2, ... as helpers of `child`, connect to them, and return the team as process 0 sees it. Where
    the environment says where they meet, Ray has started them already. Raises `ConfigError` if a machine has fewer
    devices than processes."""
    from torch import distributed as dist  # only once the connection to the server exists

    from art.trainer.distributed import Team

    if "WORLD_SIZE" in os.environ:
        return Team.from_environment(config)
    listener = socket.create_server((_ADDRESS, 0))  # calls are sent as pickles: nobody on another machine may join
    port = listener.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(config.num_processes),
        "LOCAL_WORLD_SIZE": str(config.num_processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # by itself torch takes the one that belongs to the machine's name
    # Process 0 serves the meeting point on the port that it has already opened, then connects to it like the others.
    store = dist.TCPStore(
        _ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    for rank in range(1, config.num_processes):
        log_path = child.log_path.with_name(f"{child.log_path.name}.{rank}") if child.log_path else None
        log = open_log(log_path) if log_path else None
        process = subprocess.Popen(
            [sys.executable, "-m", "art.worker.trainer_child", "--member", config.model_dump_json()],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        if log is not None:
            log.close()
        threading.Thread(
            target=_leave_after, args=(rank, process, log_path), name=f"process-{rank}", daemon=True
        ).start()
    team = Team.from_environment(config)
    del store  # torch keeps its own reference
    return team


def _leave_after(rank: int, process: subprocess.Popen[bytes], log_path: Path | None) -> None:
    """End this process, which is process 0, when process `rank` dies."""
    returncode: int | None = None
    while returncode is None:
        try:
            returncode = process.wait(_ROTATE_EVERY_S)
        except subprocess.TimeoutExpired:
            if log_path is not None:
                rotate_log(log_path)
    tail = log_tail(log_path, _TAIL_LINES).strip() if log_path is not None else ""
    end = f"process {rank} of this trainer (pid {process.pid}) died ({describe_exit(returncode)})"
    _log.error("%s\n%s; the others leave too", tail, end)
    os._exit(1)


def run_member(config: TrainerConfig) -> NoReturn:
    """Be one of the processes 1, 2, ... of a trainer: make each call that process 0 passes on."""
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr(prefix=f"[{os.environ['RANK']}] ")
    dump_stack_on_abort()

    def leave_with_parent() -> NoReturn:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=leave_with_parent, name="parent", daemon=True).start()
    from art.trainer.distributed import Team

    team = Team.from_environment(config)
    calls = TrainerCalls(team)
    while True:
        call = team.broadcast(None)
        assert call is not None
        try:
            calls.make(call)
        except ProcessError:
            raise
        except Exception as error:  # process 0 has the same error, and answers with it
            _log.info("%s: %s", call.method, error)


def main() -> None:
    if "--member" in sys.argv:
        run_member(TrainerConfig.model_validate_json(sys.argv[-1]))
    TrainerServer(child_from_argv("trainer_child")).run()


if __name__ == "__main__":
    main()
