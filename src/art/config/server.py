"""A model as it is registered, and the server."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from art.config.base import Config
from art.config.engines import AnyEngineConfig, EngineConfig, VllmConfig
from art.config.trainer import LoraConfig, TrainerConfig


class RenderConfig(Config):
    """How messages become tokens."""

    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Passed to the chat template, e.g. `{"enable_thinking": False}`."""
    keep_reasoning: bool | None = None
    """Keep the reasoning of earlier turns in the context; `None` does as the model's template does."""


class ModelSettings(Config):
    """What a trainable model is made of, beside its name. Sent at registration and kept by the server."""

    lora: LoraConfig | None = LoraConfig()
    """`None` is full fine-tuning: instead of an adapter, all weights of the decoder layers and the final norm are
    trained; embedding and language-model head stay frozen."""
    engine: AnyEngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    render: RenderConfig = RenderConfig()

    @model_validator(mode="after")
    def _check_full(self) -> Self:
        """Full fine-tuning needs whole weights, which trainer and engine have to round alike."""
        engine, trainer = self.engine, self.trainer
        if self.lora is not None:
            return self
        if isinstance(engine, VllmConfig) and engine.weights != "merged":
            raise ValueError(
                "the vLLM engine serves LoRA adapters; for full fine-tuning (lora=None) set "
                '`VllmConfig(weights="merged")`, or use the embedded engine'
            )
        if trainer.shard_base or trainer.quantization != "none":
            raise ValueError(
                "full fine-tuning (lora=None) needs whole weights: `shard_base` and `quantization` do not apply"
            )
        if engine.dtype != trainer.dtype or (engine.dtype == "auto" and engine.device != trainer.device):
            raise ValueError(
                f"`trainer` has dtype {trainer.dtype!r} on {trainer.device!r} and `engine` {engine.dtype!r} on "
                f"{engine.device!r}; with full fine-tuning (lora=None) each rounds the trained weights to its dtype, "
                "and the sampled policy would not be the trained one: set the same dtype for both"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        """Engine and trainer have to start from the same base weights."""
        rounded = self.engine.quantization if isinstance(self.engine, EngineConfig) else "none"
        if isinstance(self.engine, VllmConfig) and self.trainer.quantization != "none":
            raise ValueError(
                f"`trainer.quantization` is {self.trainer.quantization!r}, which the vLLM engine cannot round alike; "
                'set it to "none", or use the embedded engine'
            )
        if rounded != self.trainer.quantization:
            raise ValueError(
                f"`trainer.quantization` is {self.trainer.quantization!r} and `engine.quantization` is "
                f"{rounded!r}; the sampled policy would not be the trained one: set both alike"
            )
        return self


class MemoryConfig(Config):
    """Restart a process that holds too much memory, at a moment when that costs nothing.

    A trainer restarts between two steps and an engine while it has no requests. An engine that always has some restarts
    in the middle of them, and they continue at their next token.
    """

    limit_bytes: int | None = Field(default=None, gt=0)
    """Resident memory above which an engine or trainer process restarts; `None`: no limit."""
    leak_growth_bytes: int | None = Field(default=2**30, gt=0)
    """Growth over the last `leak_windows` windows that counts as a leak if each of them added to it; `None`: never."""
    leak_window_s: float = Field(default=300.0, gt=0)
    """Length of one window in seconds."""
    leak_windows: int = Field(default=12, ge=4)
    """Number of windows that must all grow before the growth counts as a leak."""


class RestartConfig(Config):
    """How often a process that dies is started again, and how often a call that died with it is repeated.

    A call is repeated in one place only, so no setting multiplies another.
    """

    call_attempts: int = Field(default=4, ge=1)
    """Attempts of one request, publish or training step. Each further attempt follows the death of its process."""
    failed_starts: int = Field(default=3, ge=1)
    """Starts of an engine, a trainer or `art-server` in a row that may fail. Then all callers get the error."""
    crashes: int = Field(default=20, ge=2)
    """Crashes of an engine or trainer within `crash_window_s` after which it is not started again."""
    crash_window_s: float = Field(default=120.0, gt=0)
    """Seconds over which `crashes` are counted."""
    server_restarts_per_minute: int = Field(default=6, ge=0)
    """Restarts of `art-server` by `LocalBackend` within a minute. A further death within it fails the backend."""


class LimitsConfig(Config):
    """What a server takes from its clients; more is refused with 413 or 429 and a time to come back, and slow
    connections are closed. Those that are numbers of requests leave room for thousands of rollouts at once; limits per
    key do not hold for the key that the server was started with, which is also that of `LocalBackend`."""

    max_requests: int = Field(default=16_384, ge=1)
    """Under way at once, of all keys together."""
    max_requests_per_key: int | None = Field(default=4096, ge=1)
    """Under way at once. `None`: no limit."""
    max_requests_per_minute_per_key: int | None = Field(default=None, ge=1)
    """`None`: no limit."""
    max_chats_per_project: int | None = Field(default=None, ge=1)
    """Under way at once, of all keys that are for one project. `None`: no limit."""
    max_jobs_per_project: int | None = Field(default=None, ge=1)
    """Training jobs of one project that are queued or running, whoever submits them. `None`: no limit."""
    max_json_depth: int = Field(default=64, ge=8, le=256)
    """Lists and objects inside one another, in a request's body."""
    read_timeout_s: float = Field(default=30.0, gt=0)
    """In which the headers of a request have to be there, and the first bytes of its body; a longer body may take a
    second more for each 16 KiB."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """A client that reads nothing of its answer for so long is cut off."""


class ServerConfig(Config):
    """`art-server`."""

    host: str = "127.0.0.1"
    port: int = Field(default=5000, ge=0, le=65535)
    """0 takes a free port."""
    models: tuple[str, ...] = ()
    """Base models to load at the start: hub ids, folders, or short names (`art.config.base_models`)."""
    settings: ModelSettings = ModelSettings()
    """With which they are loaded. A model that is registered with the same ones shares their processes."""
    gpu: bool = False
    """Do not start without a CUDA device."""
    only_models: bool = False
    """Keys without scope `admin` may register models over `models` only."""
    min_free_bytes: int = Field(default=2**30, ge=0)
    """With less free space for the data directory, `/ready` says no."""
    drain_s: float = Field(default=0.0, ge=0, le=3600)
    """After SIGTERM the server goes on answering for so long, while `/ready` says no, so that a load balancer can send
    new requests elsewhere. Then running requests have 4 s to end. A second signal ends this wait."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Of one request; a training call has the rewards and texts of all its trajectories."""
    limits: LimitsConfig = LimitsConfig()
    child_start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds an engine or trainer has to load its model, including a first download."""
    heartbeat_timeout_s: float = Field(default=120.0, gt=0)
    """Kill and restart a child that sends no heartbeat for this many seconds. `LocalBackend` does the same with a
    server that gives no answer."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """Kill and restart a child that still sends heartbeats but has spent this many seconds in one micro-batch or engine
    step."""
    report_after_s: float = Field(default=60.0, gt=0)
    """After this many seconds without progress, the server's log tells who waits for whom, with stacks."""
    job_timeout_s: float = Field(default=24 * 3600.0, gt=0)
    """Seconds that one training step may take."""
    restarts: RestartConfig = RestartConfig()
    memory: MemoryConfig = MemoryConfig()
    record_retention_s: float | None = Field(default=30 * 24 * 3600.0, gt=0)
    """Recorded exchanges and rollouts older than this are deleted, unless a younger exchange continues them; what was
    made of them can no longer be trained. `None` keeps all."""
    llama_cpp: str | None = None
    """A checkout of llama.cpp, whose converters make GGUF files; `None` takes the variable ART_LLAMA_CPP, else what is
    on the PATH."""
    vllm_python: str | None = None
    """Interpreter of the environment that has vLLM; `None` takes the variable ART_VLLM_PYTHON, else ART's own."""
    preflight: bool = True
    """Before a model's first step, look at versions, devices, disk space and chat format, and refuse to train where one
    of them is sure to fail; `art doctor` looks closer."""
    handshake_tolerance: float | None = None
    """Largest allowed probe difference in nats; `None`: 1e-3 in float32, 0.15 in bfloat16."""

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.models and isinstance(self.settings.engine, VllmConfig) and self.settings.engine.weights == "merged":
            raise ValueError(
                '`settings.engine.weights` is "merged", with which each model has an engine of its own, so `models` '
                "cannot be loaded before they are registered; leave one of the two out"
            )
        return self
