"""Processes 1, 2, ... of a trainer that trains in several. Process 0 starts them, as `torchrun` would.

    server process -- socket --> process 0 of the trainer -- calls and gradients --> processes 1, 2, ...

Process 0 passes each call to the others, and all of them make it. Like process 0 they ignore Ctrl-C. They end with it:
Linux kills them, and elsewhere, or before that is arranged, the end of their stdin ends them. In turn process 0 never
continues without one of them. It logs which one died or fell silent, and exits; the supervisor then restarts all
processes, and the call is repeated. Process k writes its own log, `<log of process 0>.<k>`, and a byte to its stdout
every second.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time

from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ProcessError
from art.protocol.exits import describe_exit
from art.runtime.children.child import (
    HEARTBEAT_S,
    Child,
    die_with_parent,
    dump_stacks_on_signal,
    ignore_ctrl_c,
)
from art.runtime.children.trainer_calls import TrainerCalls
from art.runtime.supervision.process import FIRST_HEARTBEAT_S
from art.storage.log_lines import log_to_stderr
from art.storage.logs import log_tail, open_log, rotate_log
from art.trainer.machine.distributed import Team

_log = logging.getLogger(__name__)

_TAIL_LINES = 8
"""Lines from the log of a process that died. They must fit into the end of the log of process 0."""
_BEATS_PER_ROTATION = 60
_ADDRESS = "127.0.0.1"


def start_team(config: TrainerConfig, child: Child) -> Team:
    """Start processes 1, 2, ... as helpers of `child`, connect to them, and return the team as process 0 sees it.

    Raises:
        ConfigError: this machine has fewer devices than processes.
    """
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
        _ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    for rank in range(1, config.num_processes):
        member = _Member(rank, config, child)
        threading.Thread(target=member.leave_after, name=f"process-{rank}", daemon=True).start()
    team = Team.from_environment(config)
    del store  # torch keeps its own reference
    return team


class _Member:
    """Process `rank`, seen from process 0."""

    def __init__(self, rank: int, config: TrainerConfig, child: Child) -> None:
        self._name = f"process {rank} of this trainer"
        self._log_path = child.log_path.with_name(f"{child.log_path.name}.{rank}") if child.log_path else None
        self._silence_s = child.heartbeat_timeout_s
        command = [sys.executable, "-m", "art.runtime.children.trainer_team", config.model_dump_json()]
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = open_log(self._log_path) if self._log_path else None
        self._process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        if log is not None:
            log.close()
        child.helpers[self._process.pid] = self._log_path

    def leave_after(self) -> None:
        """End this process, which is process 0, when the other one dies or stays silent for too long."""
        process, stdout = self._process, self._process.stdout
        assert stdout is not None
        num_beats, patience_s = 0, max(self._silence_s, FIRST_HEARTBEAT_S)
        while (readable := select.select([stdout], [], [], patience_s)[0]) and os.read(stdout.fileno(), 4096):
            num_beats, patience_s = num_beats + 1, self._silence_s
            if num_beats % _BEATS_PER_ROTATION == 0 and self._log_path is not None:
                rotate_log(self._log_path)
        problem = ""
        if not readable:
            problem = f"; it was silent for {patience_s:.0f} s and was killed"
            process.kill()
        end = f"{self._name} (pid {process.pid}) died ({describe_exit(process.wait())}{problem})"
        tail = log_tail(self._log_path, _TAIL_LINES) if self._log_path is not None else ""
        _log.error("%s\n%s; the others leave too", tail.strip(), end)
        os._exit(1)


def main() -> None:
    """Run one of the processes 1, 2, ... of a trainer: make each call that process 0 passes on."""
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr(prefix=f"[{os.environ['RANK']}] ")
    dump_stacks_on_signal()
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    team = Team.from_environment(TrainerConfig.model_validate_json(sys.argv[1]))
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


def _beat() -> None:
    while True:
        sys.stdout.buffer.write(b".")
        sys.stdout.buffer.flush()
        time.sleep(HEARTBEAT_S)


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
