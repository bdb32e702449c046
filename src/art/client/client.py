"""`ArtClient`: one typed method per endpoint of an ART server.

A server may be restarted at any time. A job is submitted under an id that the server runs at most once, so a repeated
call continues the same job.
"""

from __future__ import annotations

import logging
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from art.client.jobs import JobClient, model_path
from art.errors import ArtError, NotFoundError
from art.protocol.checkpoint_calls import (
    BEST_METRIC,
    CheckpointList,
    ExportFormat,
    FileList,
    Logged,
    LogRequest,
    MetricsRow,
    Recorded,
)
from art.protocol.keys import LOGIN_MARK, Empty, PageLink
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    ExchangeIds,
    ModelStatus,
    RegisterRequest,
)

if TYPE_CHECKING:
    from art.protocol.answers import EnginePressure, ModelCard
    from art.protocol.organisation.promotions import PromoteRequest, Promotion, PromotionHistory
    from art.protocol.organisation.usage_report import Quota, UsageReport
    from art.protocol.preflight import PreflightReport, PreflightRequest

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 900.0
"""Time limit of a registration, the first of which downloads the base model and starts its engine."""


class ArtClient(JobClient):
    """A client of one server. Use it from any event loop, and close it in each."""

    _takes_logs = True

    async def health(self) -> dict[str, Any]:
        """Return the answer of `GET /health`: `status`, and for a key that may read all projects also details."""
        content = await self.request("GET", "/health")
        try:
            answer = loads(content)
        except ValueError as error:
            raise ArtError(f"GET {self.base_url}/health gave no JSON; is this an ART server?") from error
        if not isinstance(answer, dict):
            raise ArtError(f"GET {self.base_url}/health gave no JSON object; is this an ART server?")
        return answer

    async def register(self, request: RegisterRequest) -> ModelStatus:
        what = f"the server to register {request.project}/{request.name} ({request.base_model})"
        return await self.typed(
            ModelStatus, "POST", "/api/models", body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """Check on the server what training the model needs. With a trial it takes as long as a training step."""
        from art.protocol.preflight import PreflightReport

        path, what = model_path(project, name, "preflight"), f"the checks of {project}/{name}"
        return await self.typed(
            PreflightReport, "POST", path, body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def page_link(self) -> str:
        """Return an address that opens the server's page in a browser, once, with the rights of this client's key."""
        link = await self.typed(PageLink, "POST", "/view/links", body=Empty())
        return f"{self.base_url}/{LOGIN_MARK}{link.code}"

    async def list_models(self) -> list[ModelCard]:
        """List the models that can be sampled from; the id of each is `project/name`."""
        from art.protocol.answers import ModelList

        return (await self.typed(ModelList, "GET", "/v1/models")).data

    async def model_status(self, project: str, name: str) -> ModelStatus:
        return await self.typed(ModelStatus, "GET", model_path(project, name))

    async def engine_pressure(self, project: str, name: str) -> EnginePressure:
        """Return how busy the engine of a model is for the model's project."""
        from art.protocol.answers import EnginePressure

        return await self.typed(EnginePressure, "GET", model_path(project, name, "pressure"))

    async def missing_exchanges(self, project: str, name: str, exchange_ids: list[str]) -> list[str]:
        """Return those of some exchanges (recorded answers) that the server does not have in the model's project."""
        asked = ExchangeIds(exchange_ids=exchange_ids)
        path = model_path(project, name, "exchanges/missing")
        return (await self.typed(ExchangeIds, "POST", path, body=asked)).exchange_ids

    async def checkpoints(self, project: str, name: str, *, best_metric: str = BEST_METRIC) -> CheckpointList:
        params = {"metric": best_metric}
        return await self.typed(CheckpointList, "GET", model_path(project, name, "checkpoints"), params=params)

    async def download_checkpoint(
        self, project: str, name: str, step: int, target: Path, *, format: ExportFormat | None = None
    ) -> FileList:
        """Download a checkpoint, or an export of it, as the folder `target`; see `download`."""
        place = model_path(project, name, f"checkpoints/{step}" + (f"/exports/{format}" if format else ""))
        from art.client.files import download  # few programs need it

        return await download(self, place, target)

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        await self.typed(Recorded, "POST", model_path(project, name, "metrics"), body=row)

    async def log(self, project: str, name: str, request: LogRequest) -> None:
        """Send a row of the history with its groups, of which the server keeps what it does not have yet.

        A failure is logged and not raised: the script has its own log. A server of an older version takes none, which
        is said once.
        """
        if not self._takes_logs:
            return
        try:
            await self.typed(Logged, "POST", model_path(project, name, "log"), body=request)
        except NotFoundError as error:
            self._takes_logs = False
            logger.warning("the server takes no logs, so its page shows none of them: %s", error)
        except ArtError as error:
            lost = f"{len(request.groups)} groups of step {request.step}"
            logger.warning("the server did not get %s for its page: %s", lost, error)

    async def delete_checkpoints(
        self, project: str, name: str, request: DeleteCheckpointsRequest
    ) -> DeleteCheckpointsResponse:
        path = model_path(project, name, "checkpoints/delete")
        return await self.typed(DeleteCheckpointsResponse, "POST", path, body=request)

    async def promote(self, project: str, name: str, request: PromoteRequest) -> Promotion:
        """Make a checkpoint the one that `project/name@promoted` means. The engine loads it first."""
        from art.protocol.organisation.promotions import Promotion

        is_plain = request == type(request)(step=request.step)  # older servers know this address only
        path = model_path(project, name, f"checkpoints/{request.step}/promote" if is_plain else "promotions")
        body = None if is_plain else request
        what = f"step {request.step} of {project}/{name} to load"
        return await self.typed(Promotion, "POST", path, body=body, read_timeout_s=REGISTER_TIMEOUT_S, what=what)

    async def promotions(self, project: str, name: str) -> PromotionHistory:
        """Return the decisions about the promoted checkpoint of a model, oldest first."""
        from art.protocol.organisation.promotions import PromotionHistory

        return await self.typed(PromotionHistory, "GET", model_path(project, name, "promotions"))

    async def usage(self, *, month: str | None = None, project: str | None = None, keys: bool = False) -> UsageReport:
        """Return what projects have used in a month, by default the current one; with `keys` by API key too."""
        from art.protocol.organisation.usage_report import UsageReport

        params = {name: value for name, value in (("month", month), ("project", project)) if value is not None}
        if keys:
            params["keys"] = "true"
        return await self.typed(UsageReport, "GET", "/api/usage", params=params or None)

    async def set_quota(self, project: str | None, quota: Quota) -> UsageReport:
        """Set what a project may use in a month, or with `None` every project without a quota of its own."""
        from art.protocol.organisation.usage_report import QuotaRequest, UsageReport

        return await self.typed(UsageReport, "PUT", "/api/quotas", body=QuotaRequest(project=project, quota=quota))

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> RolloutRecord:
        """Return a rollout and its recorded conversations; `project` is needed if several projects use the same id."""
        params = None if project is None else {"project": project}
        return await self.typed(RolloutRecord, "GET", _rollout_path(rollout_id), params=params)

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        return await self.typed(RolloutStatus, "PUT", _rollout_path(rollout_id), body=update)

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        params = query.model_dump(mode="json", exclude_none=True)
        return await self.typed(RolloutPage, "GET", "/api/rollouts", params=params)


def _rollout_path(rollout_id: str) -> str:
    return f"/api/rollouts/{quote(rollout_id, safe='')}"
