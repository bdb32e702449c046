"""A fake of the Serverless Training service on a real socket, made from the frozen shapes of its public API.

It checks each request against them and answers 422 as the service does. Trouble is scripted: `trouble` names what
happens to the next requests of a path, and `outcome` what becomes of the next jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from tests.support.serverless_shapes import API, faults

KEY = "wandb-key-0123456789"
ENTITY = "team"
BASE_MODEL = "OpenPipe/Qwen3-14B-Instruct"
Outcome = Literal["ends", "fails", "never ends", "nothing to learn", "checkpoint only"]
Trouble = Callable[["FakeServerless", web.Request, Callable[[], Awaitable[web.StreamResponse]]], Awaitable[Any]]


def status(code: int, body: Any = None, **headers: str) -> Trouble:
    """The request is answered with an error, and does nothing."""

    async def behave(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body or {"detail": f"status {code}"}, status=code, headers=named)

    return behave


async def lose_answer(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
    """The request does what it asks for, but the connection breaks before the answer."""
    await go_on()
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def cut_answer(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
    """The request does what it asks for, but the connection breaks in the middle of the answer."""
    await go_on()
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id": "')
    assert request.transport is not None
    request.transport.close()
    return response


async def damage_answer(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
    """The request does what it asks for, but the answer cannot be unpacked."""
    await go_on()
    return web.Response(body=b"no gzip", headers={"Content-Encoding": "gzip"})


async def lose_request(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
    """The connection breaks before the request does anything."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def web_page(fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
    """A proxy answers with a page of its own, as if all were well."""
    return web.Response(text="<html>Please wait</html>", content_type="text/html")


class Hold:
    """Requests wait here until the test lets them go on, or gives them another answer."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.answer: asyncio.Future[Trouble | None] = asyncio.get_running_loop().create_future()

    async def __call__(self, fake: FakeServerless, request: web.Request, go_on: Any) -> web.StreamResponse:
        self.num_waiting += 1
        trouble = await self.answer
        return await go_on() if trouble is None else await trouble(fake, request, go_on)

    async def until(self, num_waiting: int) -> None:
        async with asyncio.timeout(60):
            while self.num_waiting < num_waiting:
                await asyncio.sleep(0.001)


@dataclass
class FakeJob:
    id: str
    model_id: str
    body: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class FakeServerless:
    updates: int = 3
    """Gradient steps of a job."""
    page_size: int = 2
    """Most items of a page, whatever the client asks for."""
    outcome: list[Outcome] = field(default_factory=list)
    """What becomes of the next jobs; then they end well."""
    trouble: defaultdict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    """What happens to the next requests, by the end of their path."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the chat requests."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    base_url: str = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServerless]:
        app = web.Application()
        app.router.add_route("*", "/v1/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v1")
        self.requests.append(f"{request.method} {path}")
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"detail": "Invalid API key"}, status=401)

        async def go_on() -> web.StreamResponse:
            return await self._checked(request, path)

        waiting = next((self.trouble[end] for end in self.trouble if path.endswith(end) and self.trouble[end]), None)
        return await waiting.pop(0)(self, request, go_on) if waiting else await go_on()

    async def _checked(self, request: web.Request, path: str) -> web.StreamResponse:
        """Answer a request that fits the shapes of its call; check that the answer fits too."""
        general = re.sub(r"(models|training-jobs)/[^/]+", r"\1/{id}", path)
        name = f"{request.method} {general}"
        call = API["calls"].get(name)
        if call is None:
            return web.json_response({"detail": f"no call {name}"}, status=404)
        body = json.loads(await request.read() or b"null")
        wrong = faults(body, call["sends"]) if "sends" in call else []
        wrong += [f"query.{key}: no such parameter" for key in request.query if key not in call.get("query", ())]
        if wrong:
            detail = [
                {"loc": one.split(":")[0].split("."), "msg": one.partition(": ")[2], "type": "x"} for one in wrong
            ]
            return web.json_response({"detail": detail}, status=422)
        answer = self._answer(name, path.split("/"), body, dict(request.query))
        if answer is None:
            return web.json_response({"detail": "not found"}, status=404)
        assert not faults(answer, call["answers"]), faults(answer, call["answers"])
        return web.json_response(answer)

    def _answer(self, name: str, parts: list[str], body: Any, query: dict[str, str]) -> Any:
        match name:
            case "POST /preview/models":
                return self._create_model(body)
            case "GET /preview/base-models":
                return [BASE_MODEL]
            case "POST /preview/training-jobs" | "POST /preview/sft-training-jobs":
                return self._create_job(body) if body["model_id"] in self.models else None
            case "POST /chat/completions":
                return self._chat(body)
            case "GET /preview/training-jobs/{id}/events":
                job = self.jobs.get(parts[3])
                return None if job is None else self._page(job.events, query)
        if parts[3] not in self.models:
            return None
        match name:
            case "DELETE /preview/models/{id}":
                deleted = len(self.checkpoints.pop(parts[3], ()))
                del self.models[parts[3]]
                return {"model_id": parts[3], "deleted_checkpoints": deleted, "deleted_run": True}
            case "GET /preview/models/{id}/checkpoints":
                known = self.checkpoints[parts[3]]
                return self._page(known[::-1] if query.get("order") == "desc" else known, query)
            case "DELETE /preview/models/{id}/checkpoints":
                return self._delete_steps(parts[3], body["steps"])
        raise AssertionError(f"the fake does not answer {name}")

    def _create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        for model in self.models.values():
            if (model["project"], model["name"]) == (body["project"], body["name"]):
                return model
        model = {key: body[key] for key in ("project", "name", "base_model")}
        model |= {"id": str(uuid.uuid4()), "entity": body.get("entity") or ENTITY, "run_id": "run-1"}
        self.models[model["id"]] = model
        return model

    def _create_job(self, body: dict[str, Any]) -> dict[str, Any]:
        job = FakeJob(str(uuid.uuid4()), body["model_id"], body)
        self.jobs[job.id] = job
        outcome = self.outcome.pop(0) if self.outcome else "ends"
        num_updates = 0 if outcome == "nothing to learn" else self.updates
        self._happen(job, "training_started", {"num_sequences": num_updates})
        if outcome == "fails":
            self._happen(job, "training_failed", {"error_message": "CUDA out of memory"})
        if outcome in ("ends", "nothing to learn"):
            for i in range(num_updates):
                self._happen(job, "gradient_step", {"policy_loss": 1.0 + i, "grad_norm": 0.5, "tokens_per_second": 9})
            self._happen(job, "training_ended", {})
        if outcome in ("ends", "checkpoint only"):
            self.add_checkpoint(job.model_id)
        return {"id": job.id}

    def add_checkpoint(self, model_id: str) -> None:
        step = max((one["step"] for one in self.checkpoints[model_id]), default=0) + 1
        metrics = {"loss/train": 2.0, "val/reward": 1.0 / step}
        self.checkpoints[model_id].append({"id": str(uuid.uuid4()), "step": step, "metrics": metrics})

    def _delete_steps(self, model_id: str, steps: list[int]) -> dict[str, Any]:
        known = {one["step"] for one in self.checkpoints[model_id]}
        self.checkpoints[model_id] = [one for one in self.checkpoints[model_id] if one["step"] not in steps]
        return {"deleted_count": len(known & set(steps)), "not_found_steps": sorted(set(steps) - known)}

    def _happen(self, job: FakeJob, kind: str, data: dict[str, Any]) -> None:
        job.events.append({"id": str(uuid.uuid4()), "type": kind, "data": data})

    def _page(self, items: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
        assert int(query.get("limit", 20)) <= API["page_limit"]
        after = query.get("after")
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        size = min(int(query.get("limit", 20)), self.page_size)
        return {"object": "list", "data": items[start : start + size], "has_more": len(items) > start + size}

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        text = ("yes", "no", "maybe")[len(self.asked) % 3]
        choice: dict[str, Any] = {
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}, "logprobs": None,
        }  # fmt: skip
        if body.get("logprobs"):
            token = {"token": text, "bytes": None, "logprob": -1.1, "top_logprobs": []}
            choice["logprobs"] = {"content": [token], "refusal": None}
        return {
            "id": f"chatcmpl-{len(self.asked)}", "object": "chat.completion", "created": 1, "model": body["model"],
            "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        }  # fmt: skip
