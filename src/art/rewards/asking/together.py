"""Runs several questions to judges at once, all of which must succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from art.errors import ArtError

T = TypeVar("T")


async def run_together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. Returns their results in order; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise next((e for e in failed.exceptions if isinstance(e, ArtError)), failed.exceptions[0]) from None
    return [task.result() for task in tasks]
