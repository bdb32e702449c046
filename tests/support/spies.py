"""A runtime that knows two projects and remembers what it was asked, for tests of who may ask for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from art.protocol.live import FindingMade, LiveEvent
from art.protocol.training import JobStatus, ModelStatus

SECRET = "only-for-b"
"""Stands in everything of project b."""


def named_projects(args: tuple[Any, ...]) -> set[Any]:
    """Projects, among other things, that a call names: as an argument, or in one."""
    return {arg for arg in args if isinstance(arg, str)} | {getattr(arg, "project", None) for arg in args}


class Spy:
    """Answers every method, and remembers the call. Only a call for project a gets nothing of b."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def answer(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((method, args, kwargs))
            return {} if "a" in named_projects(args) else {"secret": SECRET}

        return answer


class Rollouts(Spy):
    def announced_model(self, rollout_id: str, project: str | None) -> str | None:
        return None


class Models(Spy):
    def list_all(self) -> list[ModelStatus]:
        return [self._model(project) for project in ("a", "b")]

    async def status(self, project: str, name: str) -> ModelStatus:
        self.calls.append(("status", (project, name), {}))
        return self._model(project)

    @staticmethod
    def _model(project: str) -> ModelStatus:
        base = SECRET if project == "b" else "base"
        return ModelStatus(project=project, name="agent", base_model=base, step=0, inference_name=f"{project}/agent")


class Recorder:
    """Every exchange that it is asked for belongs to project b."""

    def find(self, ids: list[str]) -> dict[str, Any]:
        return {i: SimpleNamespace(id=i, project="b", message={"content": SECRET}) for i in ids}


class Resolver:
    def name_in(self, project: str, model: str) -> str | None:
        name = f"{project}/agent"
        return name if model in ("agent", name) else None


class Jobs(Spy):
    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        return await self.status(job_id)

    async def status(self, job_id: str) -> JobStatus:
        project = job_id.removeprefix("job-of-")
        return JobStatus(
            job_id=job_id,
            kind="train",
            project=project,
            name="agent",
            state="queued",
            findings=[SECRET] if project == "b" else [],
        )

    async def find(self, *, project: str | None, name: str | None, unfinished: bool, limit: int) -> list[JobStatus]:
        self.calls.append(("find", (project,), {}))
        return [await self.status(f"job-of-{owner}") for owner in ("a", "b") if project in (None, owner)]

    async def cancel(self, job_id: str) -> JobStatus:
        self.calls.append(("cancel", (job_id,), {}))
        return await self.status(job_id)


class Live(Spy):
    goes_on = False

    async def watch(self, project: str | None) -> AsyncGenerator[list[LiveEvent], None]:
        """One event of each project that the caller may see, then silence if it `goes_on`."""
        self.calls.append(("watch", (project,), {}))
        for number, owner in enumerate(("a", "b"), start=1):
            if project in (None, owner):
                text = SECRET if owner == "b" else "said"
                made = FindingMade(project=owner, name="agent", step=1, text=f"{text} in /usr/share/x")
                yield [LiveEvent(number=number, at=0.0, data=made)]
        while self.goes_on:
            await asyncio.sleep(0.01)
            yield []


class Overview(Spy):
    async def system(self, project: str | None) -> Any:
        self.calls.append(("system", (project,), {}))
        return {} if project == "a" else {"secret": SECRET}


class TwoProjects(Spy):
    """Models `a/agent` and `b/agent`, and a job of each."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway = Spy()
        self.gateway.rollouts = Rollouts()  # type: ignore[attr-defined]
        self.gateway.recorder = Recorder()  # type: ignore[attr-defined]
        self.models, self.jobs, self.resolver = Models(), Jobs(), Resolver()
        self.registration, self.training, self.checkpoints = Spy(), Spy(), Spy()
        self.promotions, self.usage = Spy(), Spy()
        self.live, self.overview = Live(), Overview()

    def parts(self) -> list[Spy]:
        """This runtime and its parts, except the gateway's."""
        return [
            self, self.models, self.jobs, self.registration, self.training, self.checkpoints,
            self.promotions, self.usage,
        ]  # fmt: skip

    def reset(self) -> None:
        for spy in (*self.parts(), self.gateway, self.gateway.rollouts):
            spy.calls.clear()

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "secret": SECRET}

    async def obstacles(self) -> dict[str, str]:
        return {"disk": SECRET}
