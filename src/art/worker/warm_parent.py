"""A process that has imported what engine and trainer need, and forks them when the server asks.

    server --{"module", "argv", "num_threads"} + [child's socket, log, status socket]--> warm parent --fork--> child
    server <--pid, then its exit status-------------------------- status socket ------------'

Importing torch and transformers takes five seconds of CPU time; a fork of a process that has done so takes
milliseconds. Linux only, and only for children that compute on the CPU: CUDA does not survive a fork. The process has
one thread, or it refuses to fork: a lock that another thread holds would stay locked in the child. It ends with the
server, and its children end with it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import select
import socket
import sys
import traceback
from typing import Any, NoReturn

from art.worker.child import die_with_parent, ignore_ctrl_c, import_transformers

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read when torch is imported, so the warm parent has 1. A fork gets its number from `torch.set_num_threads`."""
MAX_REQUEST_BYTES = 2**16


class Forker:
    """Forks children as the server asks, and reports how each of them ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Process id and status socket of each child, by the pidfd that tells its end."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until the server is gone."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._control.fileno():
                    self._bury(fd)
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 3)
        if not data:
            return False
        request, (frames, log, status_fd) = json.loads(data), fds
        if (pid := os.fork()) == 0:
            self._become(request, frames, log, status_fd)
        os.close(frames)
        os.close(log)
        status, pidfd = socket.socket(fileno=status_fd), os.pidfd_open(pid)
        self._children[pidfd] = pid, status
        self._poll.register(pidfd, select.POLLIN)
        _tell(status, pid)
        return True

    def _bury(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid, status = self._children.pop(pidfd)
        _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        status.close()

    def _become(self, request: dict[str, Any], frames: int, log: int, status_fd: int) -> NoReturn:
        """Be the child: with its files, its number of threads and randomness of its own; then run its module."""
        code = 1
        try:
            die_with_parent()
            for pidfd, (_, status) in self._children.items():
                os.close(pidfd)
                status.close()
            self._control.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.close(status_fd)
            _adapt_libraries(request["num_threads"])
            sys.argv = [request["module"], "--fd", str(frames), *request["argv"]]
            importlib.import_module(request["module"]).main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _adapt_libraries(num_threads: int) -> None:
    """Do for this fork what libraries did once, in the warm parent, when they were imported."""
    import numpy
    import torch

    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(num_threads)))
    torch.set_num_threads(num_threads)
    torch.seed()
    numpy.random.seed()  # `os.fork` has done the same for Python's own generator


def _tell(status: socket.socket, number: int) -> None:
    try:
        status.send(str(number).encode())
    except OSError:
        return  # nobody waits for this child any more; it ends by itself, since its own socket is closed too


def _import_all() -> None:
    import_transformers()
    importlib.import_module("art.engines.torch.pool")
    importlib.import_module("art.trainer.trainer")
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the pages of all these objects


def main() -> None:
    parser = argparse.ArgumentParser(prog="warm_parent")
    parser.add_argument("--fd", type=int, required=True)
    die_with_parent()
    ignore_ctrl_c()
    control = socket.socket(fileno=parser.parse_args().fd)
    _import_all()
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.exit(f"{threads} threads run after the imports, so that a fork is not safe")
    Forker(control).run()


if __name__ == "__main__":
    main()
