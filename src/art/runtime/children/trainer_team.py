"""Processes 1, 2, ... of a trainer that trains in several. Process 0 starts them, as `torchrun` would.

    server process -- socket --> process 0 of the trainer -- calls and gradients --> processes 1, 2, ...

Process 0 passes each call to the others, and all of them make it. Like process 0 they ignore Ctrl-C. They end with it:
Linux kills them, and elsewhere, or before that is arranged, the end of their stdin ends them. In turn process 0 never
continues without one of them. It logs which one died or fell silent, and exits; the supervisor then restarts all
processes, and the call is repeated. Process k writes its own log, `<log of process 0>.<k>`, and a byte to its stdout
every second.

On another machine a process is started by a command such as `ssh`, which passes its stdin, stdout and stderr on. So all
of that is the same there, and the end of the connection ends the process.
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

from art.config import NodeConfig, NodesConfig, TrainerConfig
from art.config.nodes import RECEIVED_VARIABLE
from art.errors import ConfigError, ProcessError
from art.protocol.exits import describe_exit
from art.runtime.children.child import (
    HEARTBEAT_S,
    Child,
    die_with_parent,
    dump_stacks_on_signal,
    ignore_ctrl_c,
)
from art.runtime.children.nodes import interface_towards, remote_script
from art.runtime.children.trainer_calls import TrainerCalls
from art.runtime.supervision.process import FIRST_HEARTBEAT_S
from art.storage.log_lines import log_to_stderr
from art.storage.logs import log_tail, open_log, rotate_log
from art.trainer.machine.distributed import Team

_log = logging.getLogger(__name__)

_TAIL_LINES = 8
"""Lines from the log of a process that died. They must fit into the end of the log of process 0."""
_BEATS_PER_ROTATION = 60


def start_team(config: TrainerConfig, child: Child, nodes: NodesConfig | None = None) -> Team:
    """Start processes 1, 2, ... as helpers of `child`, connect to them, and return the team as process 0 sees it.

    Raises:
        ConfigError: this machine has fewer devices than processes, or there are fewer machines than `config.num_nodes`.
    """
    others = nodes.others[: config.num_nodes - 1] if nodes is not None else ()
    if len(others) < config.num_nodes - 1:
        raise ConfigError(
            f"`trainer.num_nodes` is {config.num_nodes}, but the server knows {len(others)} other machines; name "
            f"{config.num_nodes - 1} in `ServerConfig(nodes=NodesConfig(...))`, or lower `num_nodes`",
            param="num_nodes",
        )
    address = nodes.address if nodes is not None and others else "127.0.0.1"
    listener = _listen(address)  # calls are sent as pickles: on one machine nobody else may join
    port = listener.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(config.num_processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    _choose_interface(address)
    # Process 0 serves the meeting point on the port that it has already opened, then connects to it like the others.
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    for rank in range(1, config.world_size):
        node = rank // config.num_processes
        member = _Member(rank, config, child, others[node - 1] if node else None)
        threading.Thread(target=member.leave_after, name=f"process-{rank}", daemon=True).start()
    team = Team.from_environment(config)
    del store  # torch keeps its own reference
    return team


def _listen(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0))
    except OSError as error:
        raise ConfigError(
            f"the trainer cannot open a port at {address!r} for the other machines: {error.strerror or error}. Set "
            "`address` in `ServerConfig(nodes=NodesConfig(...))` to a name or IPv4 address of the server's machine",
            param="address",
        ) from error


def _choose_interface(address: str) -> None:
    """Tell torch which network interface to use. By itself it takes the one that belongs to the machine's name."""
    if (name := interface_towards(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        if name != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


class _Member:
    """Process `rank`, seen from process 0."""

    def __init__(self, rank: int, config: TrainerConfig, child: Child, node: NodeConfig | None) -> None:
        """`node` is the machine of the process; `None` is this one."""
        self._name = f"process {rank} of this trainer" + ("" if node is None else f" on {node.name}")
        self._log_path = child.log_path.with_name(f"{child.log_path.name}.{rank}") if child.log_path else None
        self._silence_s = child.heartbeat_timeout_s
        command = [sys.executable, "-m", "art.runtime.children.trainer_team", config.model_dump_json()]
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank % config.num_processes)}
        if node is not None:
            if node.received is not None:
                variables[RECEIVED_VARIABLE] = node.received
            command = node.command(remote_script([node.python or command[0], *command[1:]], os.environ | variables))
        log = open_log(self._log_path) if self._log_path else None
        self._process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        if log is not None:
            log.close()
        if node is None:
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
    _choose_interface(os.environ["MASTER_ADDR"])
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
