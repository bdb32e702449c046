"""Training steps of one model: submit them, follow them to their end, and make their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from art.client.jobs import JobClient, JobView, Submission, describe_job
from art.client.training.models import BackendModel, TrainResult, name_of
from art.client.training.steps import ModelSteps
from art.client.training.train_job import TrainJob
from art.client.waiting import announce_wait
from art.config.training import OnNothing
from art.errors import NotFoundError
from art.protocol.job_states import JobKind
from art.protocol.training import JobStatus, TrainRequest, TrainSFTRequest


@dataclass(frozen=True, slots=True)
class Training:
    """Submits and follows the training jobs of one model."""

    client: JobClient
    steps: ModelSteps
    """Takes note of each step."""
    model: BackendModel

    async def make_step(
        self,
        kind: JobKind,
        request: TrainRequest | TrainSFTRequest,
        instead: Callable[[], TrainRequest] | None = None,
        *,
        verbose: bool,
        wait: bool,
        on_nothing: OnNothing,
    ) -> TrainResult | TrainJob:
        """Submit a step. Return its result, or with `wait=False` a job as soon as the server has stored it.

        Args:
            instead: makes the request in a longer form, for a server that refuses `request`.
            verbose: show a progress bar.
        """
        submit = self.client.submission(kind, self.model.project, self.model.name, request, instead)
        result = self._follow(await submit.send(), submit, wait=wait, verbose=verbose, on_nothing=on_nothing)
        return await result if wait else TrainJob(self.client, request.job_id, result)

    async def find(self, job_id: str) -> TrainJob:
        """Return a job that was submitted before.

        Raises:
            NotFoundError: there is no such job, or it is not a training of this model.
        """
        status, model = await self.client.job_status(job_id), self.model
        if (status.project, status.name) != (model.project, model.name) or status.kind not in ("train", "train_sft"):
            raise NotFoundError(f"job {job_id} is {status.kind} of {status.project}/{status.name}", param="job_id")
        return TrainJob(self.client, job_id, self._follow(status, None, wait=False))

    async def _follow(
        self,
        status: JobStatus,
        submit: Submission | None,
        *,
        wait: bool,
        verbose: bool = False,
        on_nothing: OnNothing = "skip",
    ) -> TrainResult:
        """Follow a job to its end.

        Args:
            submit: submits the job again if the server has lost it.
            wait: whether somebody waits, who is told from time to time how far it is.
        """
        what = describe_job(status.kind, self.model.project, self.model.name)
        with JobView(what, show=verbose) as view, announce_wait(view.describe) if wait else contextlib.nullcontext():
            status = await self.client.follow_job(status, view, submit)
        return self.steps.conclude(name_of(self.model), status, on_nothing)
