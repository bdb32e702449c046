"""Settings of a registered model, and of the server."""

from __future__ import annotations

import re
import shlex
from typing import Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from art.config.base import Config
from art.config.processes import AnyEngineConfig, EngineConfig, LoraConfig, TrainerConfig, VllmConfig


class RenderConfig(Config):
    """How messages are rendered to tokens."""

    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Arguments of the chat template, e.g. `{"enable_thinking": False}`."""
    keep_reasoning: bool | None = None
    """Whether the reasoning of earlier turns stays in the context; `None` leaves that to the model's template."""


class SamplingConfig(Config):
    """How a model or a rollout is sampled, whatever its requests ask for. Penalties that they ask for are left out."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divisor of the logits. At 0, nothing can be trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the most likely tokens that have this probability together."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many of the most likely tokens; 0 means from all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw only tokens at least this many times as likely as the most likely one."""


def _get(settings: Any, name: str) -> Any:
    """A setting that was given; `None` if it was not."""
    if isinstance(settings, dict):
        return settings.get(name)
    return getattr(settings, name, None) if name == "kind" or name in settings.model_fields_set else None


class ModelSettings(Config):
    """How a trainable model is trained and served. They are sent when it is registered, and the server keeps them."""

    lora: LoraConfig | None = LoraConfig()
    """Settings of the adapter. `None` is full fine-tuning: all weights of the decoder layers and the final norm are
    trained instead of an adapter; embedding and language-model head stay frozen."""
    engine: AnyEngineConfig = EngineConfig()
    """Settings of the engine that samples: `EngineConfig` or `VllmConfig`. If you name none, the server takes vLLM
    where it is installed on a machine with NVIDIA GPUs, and otherwise the embedded engine."""
    trainer: TrainerConfig = TrainerConfig()
    """Settings of the trainer."""
    render: RenderConfig = RenderConfig()
    """How messages are rendered to tokens."""
    sampling: SamplingConfig | None = None
    """How every request to the model is sampled, in place of what it asks for; `None`: as it asks. A rollout's own
    `sampling` wins. Use it for agents that ask for temperature 0 or a penalty, which cannot be trained."""

    @model_validator(mode="before")
    @classmethod
    def _follow_trainer(cls, data: Any) -> Any:
        """Give the engine the trainer's type of weights in full fine-tuning, where its own settings name none. Drop its
        rounding, which older settings named and which had to equal the trainer's."""
        if not isinstance(data, dict) or "trainer" not in data:
            return data
        trainer, engine = data["trainer"], data.get("engine", EngineConfig())
        if isinstance(engine, dict) and engine.get("quantization", "none") == _get(trainer, "quantization"):
            engine = {name: value for name, value in engine.items() if name != "quantization"}
            data = data | {"engine": engine}
        dtype = _get(trainer, "dtype")
        if data.get("lora", 0) is not None or dtype in (None, "auto"):
            return data
        if isinstance(engine, dict):
            return data | {"engine": {"dtype": dtype} | engine}
        if "dtype" in engine.model_fields_set:
            return data
        return data | {"engine": engine.model_copy(update={"dtype": dtype})}

    @model_serializer(mode="wrap")
    def _leave_open(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an engine that was not named, so that the server chooses it, and a sampling that was not set, which
        older servers do not know."""
        data: dict[str, Any] = dump(self)
        if self.sampling is None:
            data.pop("sampling", None)
        if "engine" not in self.model_fields_set:
            data.pop("engine", None)
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        engine, trainer = self.engine, self.trainer
        if self.lora is None:  # full fine-tuning needs whole weights, and the same rounding on both sides
            if isinstance(engine, VllmConfig) and engine.weights != "merged":
                raise ValueError(
                    "the vLLM engine serves LoRA adapters; for full fine-tuning (lora=None) set "
                    '`VllmConfig(weights="merged")`, or use the embedded engine'
                )
            if trainer.shard_base or trainer.quantization != "none":
                raise ValueError("full fine-tuning (lora=None) needs whole weights: no `shard_base`, no `quantization`")
            if engine.dtype != trainer.dtype or (engine.dtype == "auto" and engine.device != trainer.device):
                raise ValueError(
                    f"`trainer` has dtype {trainer.dtype!r} on {trainer.device!r} and `engine` {engine.dtype!r} on "
                    f"{engine.device!r}; full fine-tuning (lora=None) rounds the weights: set the same dtype for both"
                )
        if isinstance(engine, VllmConfig) and trainer.quantization != "none":
            raise ValueError("the vLLM engine cannot round alike what `trainer.quantization` rounds: use another one")
        return self


CALL_ATTEMPTS = 4
"""Attempts of one request, training step or load of a checkpoint. Another follows only if the process died."""
JOB_TIMEOUT_S = 24 * 3600.0
"""Seconds that one training step may take."""
FAILED_STARTS = 3
"""Starts of an engine, a trainer or `art-server` in a row that may fail. Then all callers get the error. An engine or
trainer is tried again all the same, with growing pauses, for as long as a model needs it."""


class LimitsConfig(Config):
    """Limits on what clients may ask of a server.

    Requests above a limit are refused with 429 and a time to try again. The defaults leave room for thousands of
    rollouts at once. Limits of requests per key and per project do not apply to the key that the server was started
    with, which `LocalBackend` uses. What is within the limits takes turns: see `max_running` of the engine's settings.
    """

    max_requests: int = Field(default=16_384, ge=1)
    """Requests at once, of all keys together."""
    max_requests_per_key: int | None = Field(default=4096, ge=1)
    """Requests of one key at once; `None` for no limit."""
    max_chats_per_project: int | None = Field(default=4096, ge=1)
    """Chat requests at once, of all keys of one project; `None` for no limit."""
    max_jobs_per_project: int | None = Field(default=1024, ge=1)
    """Training jobs of one project that are queued or running, of all its keys; `None` for no limit."""


class PricesConfig(Config):
    """What usage of a server costs, for `art usage` and quotas in USD. Later changes do not change past usage."""

    device_usd_per_hour: float = Field(default=0.0, ge=0)
    """Price of one device (GPU) for each hour in which it trains."""
    prompt_usd: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, cached ones included."""
    completion_usd: float = Field(default=0.0, ge=0)
    """Price of a million sampled tokens."""

    def usd(self, *, prompt_tokens: int, completion_tokens: int, device_s: float) -> float:
        """Return the price of some usage in USD."""
        tokens = prompt_tokens * self.prompt_usd + completion_tokens * self.completion_usd
        return tokens / 1e6 + device_s * self.device_usd_per_hour / 3600


class ServerConfig(Config):
    """Settings of `art-server`."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for other machines too."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    cluster: str | None = None
    """Where engines and trainers run: `None` on this machine; "workers" on those whose `art worker` connects to it;
    "ray" on the Ray cluster of RAY_ADDRESS, or "ray://HOST:10001" on another. See docs/cluster.md."""
    worker_address: str | None = None
    """HOST:PORT at which workers connect. `None`: for "workers" port 5001 of `host`; for "ray" a free port of the
    address by which Ray knows this machine."""
    cluster_files: str | None = None
    """How adapters, samples, checkpoints and base models in folders get to the nodes of a Ray cluster and back: `None`
    through Ray's object store; else through this folder, which all nodes see under the same path, or bucket, such as
    "s3://bucket/art" (any address that `fsspec` knows; it may need a package there and here)."""
    room_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which a Ray cluster must have room for an engine or trainer, before the model is refused. Raise it
    where an autoscaler adds nodes. Meanwhile `art status` shows what lacks."""
    models: tuple[str, ...] = ()
    """Base models to load at the start: hub ids, folders, or short names (see `art.config.base_models`)."""
    settings: ModelSettings = ModelSettings()
    """Settings with which `models` are loaded. A model registered with the same settings shares their processes."""
    gpu: bool = False
    """Refuse to start without a CUDA device."""
    strict: bool = False
    """Refuse requests with a field that would be ignored, such as `reasoning_effort`, or replaced by the sampling of a
    model or rollout. Otherwise such fields are reported: in the header `x-art-ignored` of the answer, and once per
    key and field in the log."""
    only_models: bool = False
    """Whether keys without the scope `admin` may only register models that are based on `models`."""
    base_model_folders: tuple[str, ...] | None = None
    """Folders from which keys with scope `admin` may take base models, each with all folders in it. `None`: any folder
    for a key for all projects, none for a key of a project. `models`, and a project's own models in the data directory,
    need not be listed."""
    custom_losses: tuple[str, ...] = ()
    """Modules and packages whose functions any key with scope `train` may name as a loss (`CustomLossConfig`).
    `*` means all modules. The functions run in the trainer's process. `LocalBackend` allows all unless this is set."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Largest body of a training call in bytes. It holds the rewards and texts of all its trajectories. Every other
    request has at most 8 MiB, which a conversation of a million tokens fills by half."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://lab.example`, `http://localhost:3000`) whose web pages may send requests and read the answers;
    by default none may. A page still needs a key, so give it one that its readers may have. Also the addresses at which
    browsers reach the page through a proxy, such as `https://art.lab.example`: names other than `localhost`, IP
    addresses and `host` are refused, because somebody else may have pointed them here."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on what clients may ask."""
    prices: PricesConfig = PricesConfig()
    """What the usage of projects costs, for `art usage` and quotas in USD; by default nothing."""
    require_gain: float | None = Field(default=None, allow_inf_nan=False)
    """Refuse to promote a checkpoint unless it is certain to be better than the promoted one by more than this. A
    caller may ask for more. Only keys with scope `admin` may force a promotion against it. `None`: each caller
    chooses. See docs/organisation.md."""
    alerts: str | None = None
    """Where findings of training and failed jobs are sent, each once: a URL that gets them by POST as JSON, or a
    command that gets the text on its standard input, such as `mail -s ART me@lab.example`. `None`: nowhere."""
    child_start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds an engine or trainer has to load its model, including a first download."""
    heartbeat_timeout_s: float = Field(default=120.0, gt=0)
    """Kill and restart a child that sends no heartbeat for this many seconds. `LocalBackend` does the same with a
    server that gives no answer."""
    record_retention_s: float | None = Field(default=30 * 24 * 3600.0, gt=0)
    """Age in seconds after which recorded exchanges (requests with answers) and rollouts are deleted, unless a younger
    one continues them. Trajectories made from deleted ones can no longer be trained. `None` keeps all."""

    record_alternatives: int = Field(default=0, ge=0, le=20)
    """How many of the most likely tokens are recorded beside each sampled one, for the page's view of tokens. Each
    takes 8 bytes per token in the record."""

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if re.fullmatch(r"https?://[^/\s*@?#]+", origin) is None:
                raise ValueError(f"an origin is scheme, host and port, like 'https://lab.example:8443'; got {origin!r}")
        return origins

    @field_validator("alerts")
    @classmethod
    def _check_alerts(cls, alerts: str | None) -> str | None:
        if alerts is not None and not shlex.split(alerts):
            raise ValueError("`alerts` is the URL of a webhook or a command, and must not be empty")
        return alerts

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.cluster_files is not None and str(self.cluster).partition("://")[0] != "ray":
            raise ValueError(
                f"`cluster_files` is for a Ray cluster, but `cluster` is {self.cluster!r}; workers by hand see the "
                "data directory. Leave `cluster_files` out"
            )
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.models and isinstance(self.settings.engine, VllmConfig) and self.settings.engine.weights == "merged":
            raise ValueError(
                'with `settings.engine.weights` "merged" each model has an engine of its own: leave out `models`'
            )
        return self
