"""The one place that repeats a call when the process that serves it dies.

    connect --> call --> result
       ^          |
       +-- died --+     at most `attempts` calls in all

`connect` waits until the supervisor has started the process again, and its error is final: when a process cannot start,
nothing here tries once more. The numbers are in `RestartConfig`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from art.errors import ProcessError
from art.protocol.rpc import RpcClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
Connect = Callable[[], Awaitable[RpcClient]]
"""Returns the live connection; raises `ProcessError` when the process cannot be started."""


async def retry_on_process_death(
    connect: Connect, call: Callable[[RpcClient], Awaitable[T]], what: str, attempts: int
) -> T:
    """Return the result of `call`, which is made again on a new connection when its process dies.

    Args:
        call: must do no harm when it is repeated.
        what: names the call in the log.
        attempts: calls in all.

    Raises:
        ProcessError: the process died during every attempt, or `connect` failed.
    """
    attempt = 1
    while True:
        client = await connect()
        try:
            return await call(client)
        except ProcessError as error:
            note_death(what, attempt, attempts, error)
            attempt += 1


def note_death(what: str, attempt: int, attempts: int, error: ProcessError) -> None:
    """Log that attempt number `attempt` failed, or raise `error` if it was the last one."""
    if attempt >= attempts:
        raise error
    first_line = error.message.splitlines()[0]
    logger.warning("%s starts over (attempt %d of %d): %s", what, attempt + 1, attempts, first_line)
