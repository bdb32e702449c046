"""`Service`: the calls of the Serverless Training API, as far as ART uses it, with their types.

GET, DELETE, register    the same result however often they arrive: repeated until there is an answer, which is JSON and
                         no page of a proxy. What a repeated DELETE does not find any more is deleted
create a job             no idempotency key: repeated only if the service cannot have taken the request, that is,
                         after a connection that was never made, and after a 429, which refuses it

The public description of the API is version 1.0.0, of 2026. Requests forbid unknown fields. Answers ignore them: the
service belongs to somebody else, and may add a field at any time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from art.backoff import Backoff, Failure, call_with_retries, retry_after_s
from art.client.http import ERRORS_BY_STATUS, LostAnswerError, PerLoop
from art.client.terminal import announce_wait
from art.config import (
    CispoConfig,
    KlConfig,
    MismatchConfig,
    ModelSettings,
    OptimizerConfig,
    PpoConfig,
    ScheduleConfig,
    TrainConfig,
    TrainSFTConfig,
)
from art.config.base_models import looks_like_path, resolve_base_model
from art.errors import ArtError, ConfigError, OverloadedError, ProcessError, TrajectoryError
from art.trajectory import finite_number

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 120.0
PAGE_SIZE = 100
"""Items of a page: the most that the service gives."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


def finite_numbers(values: Any) -> dict[str, float]:
    """Return those metrics of the service that are finite numbers. A loss, for example, may be none."""
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in pairs if (number := finite_number(value)) is not None}


class ServiceRequest(BaseModel):
    """Base class of what is sent."""

    model_config = ConfigDict(extra="forbid")


class ServiceAnswer(BaseModel):
    """Base class of what the service answers."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateModel(ServiceRequest):
    entity: str | None
    """Team or user in W&B that owns the model; `None` for the owner of the key."""
    project: str
    name: str
    base_model: str
    return_existing: Literal[True] = True
    """Answer with the model of this name if there is one, so that the call can be repeated."""


class ServiceModel(ServiceAnswer):
    id: str
    entity: str
    project: str
    name: str
    base_model: str
    run_id: str | None = None
    """Id of the run in W&B that belongs to the model."""

    @property
    def inference_name(self) -> str:
        """Name to send as `model` in chat requests; the newest checkpoint answers."""
        return f"wandb-artifact:///{self.entity}/{self.project}/{self.name}"


class ServiceRlConfig(ServiceRequest):
    """Settings of a step of reinforcement learning: the ones of `ExperimentalTrainingConfig` that ART maps to."""

    learning_rate: float
    loss_fn: Literal["cispo", "ppo"]
    ppo: bool
    """Older word for `loss_fn="ppo"`; both are sent, so that neither version of the service can read another loss."""
    epsilon: float
    epsilon_high: float
    scale_rewards: bool
    normalize_advantages: bool
    """Newer word for `scale_rewards`."""
    importance_sampling_level: Literal["token"] = "token"
    precalculate_logprobs: bool = False
    """Compare with the trainer's log-probs at the start of the step instead of the sampled ones."""
    truncated_importance_sampling: float | None = None
    kl_penalty_coef: float = 0.0
    kl_penalty_reference_step: int | None = None


class CreateRlJob(ServiceRequest):
    model_id: str
    trajectory_groups: list[dict[str, Any]]
    experimental_config: ServiceRlConfig


class ServiceSftConfig(ServiceRequest):
    batch_size: int
    learning_rate: float | list[float]


class CreateSftJob(ServiceRequest):
    model_id: str
    training_data_url: str
    """Address of a W&B artifact with the file `train.jsonl`."""
    config: ServiceSftConfig


class DeleteSteps(ServiceRequest):
    steps: list[int]


class CreatedJob(ServiceAnswer):
    id: str


class ServiceEvent(ServiceAnswer):
    id: str
    type: str
    """`training_started` with `num_sequences`, `gradient_step` with metrics, `training_ended`, or `training_failed`
    with `error_message`."""
    data: dict[str, Any]


class EventPage(ServiceAnswer):
    data: list[ServiceEvent]
    has_more: bool


class ServiceCheckpoint(ServiceAnswer):
    id: str
    step: int
    metrics: dict[str, float] = {}
    """Metrics of the checkpoint that are finite numbers."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> dict[str, float]:
        return finite_numbers(value)


class CheckpointPage(ServiceAnswer):
    data: list[ServiceCheckpoint]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long `ServerlessBackend` waits for the service, in seconds."""

    poll_s: float = 1.0
    """Time between two questions about a job."""
    answer_s: float = 300.0
    """Time after which a call without any usable answer fails."""
    checkpoint_s: float = 600.0
    """Time in which the checkpoint of a job that has ended must be listed."""
    lost_job_s: float = 1800.0
    """Time in which the checkpoint of a job must be listed, if the answer to its submission was lost."""
    job_s: float = 24 * 3600.0
    """Time that a job may take, its time in the service's queue included."""


class _TryAgainError(Exception):
    """A request that may succeed a little later."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.retry_after_s = getattr(cause, "retry_after_s", None)


class Service:
    """Connections to one address of the service. Use it from any event loop, and close it in each."""

    def __init__(self, base_url: str, api_key: str, patience: Patience) -> None:
        """
        Args:
            base_url: address with `/v1` at its end.
        """
        self.base_url = base_url
        self._api_key = api_key
        self._patience = patience
        self._http: PerLoop[httpx2.AsyncClient] = PerLoop(httpx2.AsyncClient.aclose)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._http.close()

    async def create_model(self, request: CreateModel) -> ServiceModel:
        return _read(ServiceModel, await self._call("POST", "/preview/models", request))

    async def base_models(self) -> list[str]:
        """List the models that the service trains, by their hub ids."""
        content = await self._call("GET", "/preview/base-models")
        try:
            return TypeAdapter(list[str]).validate_json(content)
        except ValidationError as error:
            raise ArtError(f"the service gave no list of base models: {error}") from error

    async def checkpoints(self, model_id: str) -> list[ServiceCheckpoint]:
        """List all checkpoints of a model by their steps."""
        checkpoints: list[ServiceCheckpoint] = []
        params: dict[str, str] = {"limit": str(PAGE_SIZE), "order": "asc"}
        while True:
            page = _read(CheckpointPage, await self._call("GET", _checkpoints_path(model_id), params=params))
            if page.data and page.data[0] in checkpoints:
                raise ArtError(f"the service gave the same page of checkpoints after {params['after']} as before it")
            checkpoints += page.data
            if not (page.has_more and page.data):
                return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
            params["after"] = page.data[-1].id

    async def newest_checkpoint(self, model_id: str) -> ServiceCheckpoint | None:
        params = {"limit": "1", "order": "desc"}
        page = _read(CheckpointPage, await self._call("GET", _checkpoints_path(model_id), params=params))
        return page.data[0] if page.data else None

    async def delete_checkpoints(self, model_id: str, steps: list[int]) -> None:
        """Delete checkpoints. Those that are gone already, such as after an answer that was lost, are no error."""
        await self._call("DELETE", _checkpoints_path(model_id), DeleteSteps(steps=steps))

    async def create_job(self, request: CreateRlJob | CreateSftJob) -> str:
        """Send a training job, once. Returns its id.

        Raises:
            LostAnswerError: there was no usable answer, so the service may have taken the job.
            ArtError: the service refused the job, or was never reached.
        """
        path = "/preview/training-jobs" if isinstance(request, CreateRlJob) else "/preview/sft-training-jobs"
        content = await self._call("POST", path, request, once=True)
        try:
            return CreatedJob.model_validate_json(content).id
        except ValidationError as error:
            raise LostAnswerError(f"POST {path} was answered without the id of the job") from error

    async def events(self, job_id: str, after: str | None) -> EventPage:
        """Return the next page of a job's events, after the event with the id `after`."""
        params = {"limit": str(PAGE_SIZE)} | ({} if after is None else {"after": after})
        path = f"/preview/training-jobs/{quote(job_id, safe='')}/events"
        return _read(EventPage, await self._call("GET", path, params=params))

    async def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        params: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> bytes:
        """Send a request again until it is answered, with pauses that double or that the service asks for.

        Args:
            once: the request must not arrive twice. It is sent again only if the service cannot have taken it.

        Raises:
            LostAnswerError: with `once`, there was no usable answer, so the service may have taken the request.
            ProcessError: there was no usable answer for `Patience.answer_s` seconds.
            ArtError: the service refused.
        """
        what = f"{method} {path}"
        try:
            content = None if body is None else body.model_dump_json().encode()
        except ValueError as error:  # half a character, such as "\ud83d" alone
            raise TrajectoryError(
                f"the trajectories cannot be sent as JSON: {error}. Clean their texts first"
            ) from error

        def open_client() -> httpx2.AsyncClient:
            timeout = httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
            return httpx2.AsyncClient(headers={"Authorization": f"Bearer {self._api_key}"}, timeout=timeout)

        async def send() -> bytes:
            try:
                response = await self._http.get(open_client).request(
                    method, self.base_url + path, params=params, content=content,
                    headers={"Content-Type": "application/json"} if content is not None else None,
                )  # fmt: skip
            except httpx2.RequestError as lost:
                if once and not isinstance(lost, _NEVER_SENT):
                    raise LostAnswerError(f"{what} got no answer: {type(lost).__name__}: {lost}") from lost
                raise _TryAgainError(lost) from lost
            status = response.status_code
            if response.is_success and (once or method == "DELETE" or _is_json(response)):
                return response.content
            error = _error_of(response, what)
            if not (response.is_success or status in (408, 429) or status >= 500):
                raise error
            if once and status != 429:
                raise LostAnswerError(str(error))
            raise _TryAgainError(error)

        def before_retry(failure: Failure) -> None:
            assert isinstance(failure.error, _TryAgainError)
            error, tried_s = failure.error.cause, failure.lasting_s
            if tried_s + failure.pause_s > self._patience.answer_s:
                if isinstance(error, OverloadedError):
                    too_busy = OverloadedError(
                        f"{error}. It is busy: it asks to wait for {error.retry_after_s:.0f} s more, after "
                        f"{tried_s:.0f} s of tries, and `Patience.answer_s` is {self._patience.answer_s:g}"
                    )
                    too_busy.retry_after_s = error.retry_after_s
                    raise too_busy from error
                raise ProcessError(
                    f"{what}: {self.base_url} gave no usable answer for {tried_s:.0f} s (last: {type(error).__name__}: "
                    f"{error}). Is the address right, and is the service up?"
                ) from error
            level = logging.WARNING if failure.number == 4 else logging.DEBUG
            logger.log(level, "%s: %s; trying again in %.1f s", what, error, failure.pause_s)

        first_s = 0.5 * min(self._patience.poll_s, 1.0)
        backoff = Backoff(first_s=first_s, longest_s=60 * first_s, longest_asked_s=math.inf)
        with announce_wait(f"an answer to {what} of {self.base_url}"):
            return await call_with_retries(send, backoff, before_retry, _TryAgainError)


def _checkpoints_path(model_id: str) -> str:
    return f"/preview/models/{quote(model_id, safe='')}/checkpoints"


def _read(kind: type[A], content: bytes) -> A:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ArtError(
            f"the service gave no {kind.__name__}: {error}. Is the address that of Serverless Training, and is this "
            "version of ART still right for it?"
        ) from error


def _is_json(response: httpx2.Response) -> bool:
    try:
        response.json()
    except ValueError:
        return False
    return True


def _error_of(response: httpx2.Response, what: str) -> ArtError:
    """The error in an answer, with what it complains about: FastAPI's list of fields, a message, or its beginning."""
    try:
        body = response.json()
        detail = body.get("detail", body.get("error", body))
        if isinstance(detail, list):
            complaint = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in detail)
        else:
            complaint = str(detail.get("message", detail) if isinstance(detail, dict) else detail)
    except (ValueError, AttributeError, KeyError, TypeError):
        complaint = repr(response.text[:300])
    kind = ERRORS_BY_STATUS.get(response.status_code, ProcessError if response.status_code >= 500 else ArtError)
    error = kind(f"the service answered {what} with {response.status_code}: {complaint}")
    if isinstance(error, OverloadedError):
        error.retry_after_s = retry_after_s(response.headers) or 0.0
    return error


AUTO_BATCH_SIZE = 2
"""Trajectories per update with `batch_size="auto"`, as in `TrainSFTConfig`."""
_OPTIMIZER = "it chooses its optimiser itself"
_WEIGHT = "its loss has no weight; change the learning rate"

REFUSED: Mapping[type[BaseModel], Mapping[str, str]] = {
    TrainConfig: {
        "baseline": "it subtracts the mean reward of the group",
        "normalize": "it normalises its loss in its own way",
        "mask_truncated": "it learns from truncated rollouts too; leave them out of the groups",
        "num_minibatches": "it chooses the number of its updates itself",
        "sft_weight": "it trains no supervised data in the same step; call `train_sft` in between",
        "observation_weight": "it learns sampled tokens only",
        "optimizer": _OPTIMIZER,
    },
    TrainSFTConfig: {"optimizer": _OPTIMIZER},
    ModelSettings: {
        "lora": "it chooses the adapter itself, and has no full fine-tuning",
        "engine": "it samples with engines of its own",
        "trainer": "it trains on machines of its own",
        "render": "it renders messages with the base model's own template",
        "sampling": "it samples as each request asks; set the sampling in the agent",
    },
    CispoConfig: {"weight": _WEIGHT},
    PpoConfig: {"weight": _WEIGHT},
    KlConfig: {},
}
"""Why the service does not honour a setting. It honours the other fields of these classes, and has no other losses.

Refusals come before anything is sent. A test holds the table to the fields of the settings, and to docs/serverless.md.
"""
LEFT = {"normalize", "num_minibatches", "optimizer", "lora", "engine", "trainer", "render"}
"""Settings of `REFUSED` of which our default is not what happens: setting them at all is refused."""


def check_model(settings: ModelSettings, optimizer: OptimizerConfig | None, base_model: str) -> str:
    """Check what a model is registered with. Returns the hub id of its base model.

    Raises:
        ConfigError: a setting cannot be honoured, or the base model is a folder or a name that nobody knows.
    """
    refused = _refused_fields(settings, "settings.")
    if optimizer is not None:
        refused.append(f"trainer_args ({_OPTIMIZER})")
    _raise_if(refused)
    if looks_like_path(base_model):
        raise ConfigError(
            f"base model {base_model!r} is a folder, which the service cannot read; expected a hub id that it trains, "
            "see `await backend.base_models()`",
            param="base_model",
        )
    return resolve_base_model(base_model)


def rl_config(config: TrainConfig, step: int) -> ServiceRlConfig:
    """Make the service's settings of a step that starts from checkpoint `step`.

    Raises:
        ConfigError: a setting cannot be honoured, or the schedule of the learning rate has ended.
    """
    refused = _refused_fields(config)
    loss, kl = _loss_terms(config, refused)
    if config.scale_rewards not in ("none", "group"):
        refused.append(f'scale_rewards={config.scale_rewards!r} (it knows only "none" and "group")')
    truncate = None
    if (gate := config.mismatch) is not None and "mismatch" in config.model_fields_set:
        defaults, truncate = MismatchConfig().model_dump(), gate.truncate
        bounds = [name for name, value in gate.model_dump().items() if name != "truncate" and value != defaults[name]]
        if bounds or truncate is None:
            names = ", ".join(f"mismatch.{name}" for name in bounds) or "mismatch"
            refused.append(f"{names} (it has no gate; pass mismatch=None, or only `truncate`)")
    _raise_if(refused)
    scales = config.scale_rewards == "group"
    return ServiceRlConfig(
        learning_rate=config.rate_at(step), loss_fn=loss.type, ppo=loss.type == "ppo", epsilon=loss.clip_low,
        epsilon_high=loss.clip_high, scale_rewards=scales, normalize_advantages=scales,
        precalculate_logprobs=config.anchor == "step_start", truncated_importance_sampling=truncate,
        kl_penalty_coef=0.0 if kl is None else kl.weight,
        kl_penalty_reference_step=kl.reference if kl is not None and isinstance(kl.reference, int) else None,
    )  # fmt: skip


def uses_default_loss(config: TrainConfig) -> bool:
    """Whether the user has chosen no objective, so that the service's cispo is used in place of ART's default."""
    return config.terms[0] is TrainConfig.model_fields["loss"].default


def sft_config(config: TrainSFTConfig, num_trajectories: int) -> ServiceSftConfig:
    """Make the service's settings of supervised fine-tuning.

    Raises:
        ConfigError: a setting cannot be honoured.
    """
    _raise_if(_refused_fields(config))
    size = AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size
    rate, num_batches = config.learning_rate, math.ceil(num_trajectories / size)
    if isinstance(rate, ScheduleConfig):
        rates = [rate.rate_at(i, total_steps=num_batches) for i in range(num_batches)]
        return ServiceSftConfig(batch_size=size, learning_rate=rates)
    return ServiceSftConfig(batch_size=size, learning_rate=rate)


def _loss_terms(config: TrainConfig, refused: list[str]) -> tuple[CispoConfig | PpoConfig, KlConfig | None]:
    """The objective and the KL term of a step. What cannot be honoured is added to `refused`."""
    loss: CispoConfig | PpoConfig = CispoConfig()
    kl: KlConfig | None = None
    for term in config.terms[1:] if uses_default_loss(config) else config.terms:
        if type(term) not in REFUSED:
            refused.append(f"the loss {term.type} (it has only cispo and ppo: loss='cispo')")
            continue
        refused += _refused_fields(term, f"{term.type}.")
        if isinstance(term, KlConfig):
            kl = term
            if (term.where, term.estimator) != ("reward", "k1"):
                refused.append(
                    f"a KL term with where={term.where!r} and estimator={term.estimator!r} (it knows only "
                    'where="reward" with estimator="k1", which is `kl_penalty_coef`)'
                )
        elif isinstance(term, (CispoConfig, PpoConfig)):
            loss = term
    return loss, kl


def _refused_fields(settings: BaseModel, prefix: str = "") -> list[str]:
    refused = []
    for name, why in REFUSED[type(settings)].items():
        value, default = getattr(settings, name), type(settings).model_fields[name].default
        if name in settings.model_fields_set if name in LEFT else value != default:
            if isinstance(value, BaseModel):  # of an object only what was set
                fields = ", ".join(f"{part}={getattr(value, part)!r}" for part in sorted(value.model_fields_set))
                shown = f"{type(value).__name__}({fields})"
            else:
                shown = repr(value)
            refused.append(f"{prefix}{name}={shown} ({why})")
    return refused


def _raise_if(refused: list[str]) -> None:
    if refused:
        raise ConfigError(
            f"the serverless service cannot honour {'; '.join(refused)}. Leave it out, or train with a backend that "
            "has an ART server, such as art.LocalBackend"
        )
