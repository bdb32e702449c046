"""An ART server in a few lines, behind an httpx2 transport; it can lose answers and be restarted without its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2

from art.client.client import ServerClient
from art.protocol.rollouts import RolloutRecord
from art.protocol.training import JobStatus, ModelStatus, RegisterRequest, WireError

Trouble = Callable[[httpx2.Request], httpx2.Response]


def refusal(status: int, code: str, message: str = "no", **headers: str) -> httpx2.Response:
    error = {"message": message, "type": "error", "param": None, "code": code}
    return httpx2.Response(status, json={"error": error}, headers=headers)


class FakeArtServer:
    def __init__(self) -> None:
        self.models: dict[str, ModelStatus] = {}
        self.settings: dict[str, Any] = {}
        self.jobs: dict[str, JobStatus] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[httpx2.Headers] = []
        self.trouble: list[Trouble | Exception | None] = []
        """What happens to the next requests, one each; `None` lets a request pass."""
        self.polls_until_done = 1
        self.trained: list[str] = []
        self.job_error: WireError | None = None
        self.nothing_to_learn = False
        """Jobs then succeed without a step."""
        self.findings = ["groups[0]: all rewards are equal, nothing to learn"]
        self.histories: list[dict[str, Any]] = []

    def client(self, **options: Any) -> ServerClient:
        return ServerClient("http://art.test", "key", transport=httpx2.MockTransport(self.handle), **options)

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, request.url.path, body))
        self.headers.append(request.headers)
        if self.trouble and (trouble := self.trouble.pop(0)) is not None:
            if isinstance(trouble, Exception):
                raise trouble
            return trouble(request)
        return self.answer(request, body)

    def answer(self, request: httpx2.Request, body: Any) -> httpx2.Response:
        match request.url.path.strip("/").split("/"):
            case ["health"]:
                return httpx2.Response(200, json={"status": "ok"})
            case ["v1", "models"]:
                cards = [
                    {"id": key, "owned_by": model.project, "base_model": model.base_model, "step": model.step}
                    for key, model in self.models.items()
                ]
                return httpx2.Response(200, json={"data": cards})
            case ["api", "models"]:
                wanted = RegisterRequest.model_validate(body)
                key = f"{wanted.project}/{wanted.name}"
                self.settings[key] = wanted.settings
                status = ModelStatus(
                    project=wanted.project, name=wanted.name, base_model=wanted.base_model, step=0, inference_name=key
                )
                return self.json(self.models.setdefault(key, status))
            case ["api", "models", project, name, *rest]:
                return self.model(f"{project}/{name}", "/".join(rest), body)
            case ["api", "jobs"]:
                return httpx2.Response(
                    200, json={"jobs": [json.loads(job.model_dump_json()) for job in self.jobs.values()]}
                )
            case ["api", "jobs", job_id]:
                return self.poll(job_id)
            case ["api", "rollouts", rollout_id]:
                return self.json(self.rollout(rollout_id))
        return refusal(404, "not_found", f"no route {request.url.path}")

    def rollout(self, rollout_id: str) -> RolloutRecord:
        return RolloutRecord(
            rollout_id=rollout_id, project="p", model="p/m", group_id=None, scenario_id=None, reward=None, outcome=None,
            error=None, metrics={}, metadata={}, num_exchanges=len(self.histories), first_policy_version=None,
            last_policy_version=None, trained_by=None, created_at=0.0, histories=self.histories,
        )  # fmt: skip

    def model(self, key: str, call: str, body: Any) -> httpx2.Response:
        if key not in self.models:
            return refusal(404, "not_found", f"unknown model {key}")
        model = self.models[key]
        match call:
            case "":
                return self.json(model)
            case "train" | "train_sft":
                job = JobStatus(
                    job_id=body["job_id"], kind=call, project=model.project, name=model.name, state="queued"
                )  # type: ignore[arg-type]
                return self.json(self.jobs.setdefault(body["job_id"], job), status=202)
            case "checkpoints":
                steps = list(range(model.step + 1))
                return httpx2.Response(200, json={"steps": steps, "checkpoints": []})
            case "metrics":
                return httpx2.Response(200, json={"row_id": body["row_id"]})
            case "checkpoints/delete":
                deleted = [step for step in range(model.step + 1) if step not in body["keep_steps"]]
                return httpx2.Response(200, json={"deleted_steps": deleted})
        return refusal(404, "not_found")

    def poll(self, job_id: str) -> httpx2.Response:
        if job_id not in self.jobs:
            return refusal(404, "not_found", f"unknown job {job_id}")
        job = self.jobs[job_id]
        self.polls_until_done -= 1
        if self.polls_until_done > 0:
            job.state = "running"
        elif self.job_error is not None:
            job.state, job.error = "failed", self.job_error
        elif job.state != "succeeded" and self.nothing_to_learn:
            job.state, job.trained, job.step = "succeeded", False, self.models[f"{job.project}/{job.name}"].step
            job.metrics = {"data/step_num_groups_submitted": 1.0, "data/step_num_groups_trainable": 0.0}
            job.findings = ["every group (1) has equal rewards: there is nothing to learn from"]
        elif job.state != "succeeded":
            model = self.models[f"{job.project}/{job.name}"]
            model.step += 1
            self.trained.append(job_id)
            job.state, job.step, job.metrics = "succeeded", model.step, {"loss/train": 0.5}
            job.findings = self.findings
            job.checkpoint_path = f"/data/{model.step:04d}"
        return self.json(job)

    def restart_without_jobs(self, request: httpx2.Request) -> httpx2.Response:
        """The server dies before it has written the job, and is back for the next request."""
        self.jobs.clear()
        raise httpx2.ReadError("connection reset", request=request)

    @staticmethod
    def json(model: Any, *, status: int = 200) -> httpx2.Response:
        return httpx2.Response(status, content=model.model_dump_json(), headers={"content-type": "application/json"})
