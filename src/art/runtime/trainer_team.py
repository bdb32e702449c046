"""The other processes of a trainer that trains in several: started by the first, as `torchrun` would start them.

    server process -- socket --> process 0 of the trainer -- objects and gradients --> processes 1, 2, ...

Process 0 tells the others each call, and all make it. They ignore Ctrl-C as it does, and end with it: Linux kills
them, and elsewhere, or before that is arranged, the end of their stdin does it. In turn process 0 never goes on without
one of them: it says in the log which one died, and leaves. The supervisor then starts all anew, and the call over.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ProcessError
from art.runtime.child import die_with_parent, ignore_ctrl_c, log_to_stderr
from art.runtime.process import describe_exit
from art.runtime.trainer_calls import TrainerCalls
from art.trainer.distributed import Team

_log = logging.getLogger(__name__)


def start_team(config: TrainerConfig) -> Team:
    """Start processes 1, 2, ... and meet them; returns process 0's place.

    Raises:
        ConfigError: this machine has fewer devices than processes.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # objects are pickles: nobody else may join
    port = listener.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(config.num_processes),
        "LOCAL_WORLD_SIZE": str(config.num_processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Process 0 serves the meeting point, on a port that is its own already, and then comes to it like the others.
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    for rank in range(1, config.num_processes):
        process = subprocess.Popen(
            [sys.executable, "-m", "art.runtime.trainer_team", config.model_dump_json()],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
        )
        threading.Thread(target=_leave_after, args=(process, rank), name=f"process-{rank}", daemon=True).start()
    team = Team.from_environment(config)
    del store  # torch holds it from here on
    return team


def _leave_after(process: subprocess.Popen[bytes], rank: int) -> None:
    exit_text = describe_exit(process.wait())
    _log.error("process %d of this trainer (pid %d) died (%s); the others leave too", rank, process.pid, exit_text)
    os._exit(1)


def main() -> None:
    """The whole life of a process other than the first."""
    die_with_parent()
    ignore_ctrl_c()
    log_to_stderr(f"[{os.environ['RANK']}] ")
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    team = Team.from_environment(TrainerConfig.model_validate_json(sys.argv[1]))
    calls = TrainerCalls(team)
    nothing: dict[str, Any] = {}
    while True:
        method, params = team.broadcast(("", nothing))
        try:
            calls.make(method, params)
        except ProcessError:
            raise
        except Exception as error:  # process 0 has the same, and answers it
            _log.info("%s: %s", method, error)


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
