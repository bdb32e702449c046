"""Every call that the server makes of its child processes: the engine, the trainer and file jobs.

A call is a frozen dataclass, and its type parameter is the type of its result. The method in the frame is the name of
the class in snake case:

    Score(token_ids=[1, 2], adapter=None)  -->  {"method": "score", "params": {"token_ids": [1, 2], "adapter": null}}
    {"result": [-0.5]}                     -->  [-0.5]

`ENGINE_CALLS`, `VLLM_CALLS`, `TRAINER_CALLS` and `FILE_CALLS` list what each kind of child must serve. Prompts and
metrics are taken as they are; everything else is checked when it is decoded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeAlias, TypeVar, dataclass_transform, get_args

from pydantic import ConfigDict, PlainValidator, SkipValidation, TypeAdapter, ValidationError

from art.config import EngineConfig, LoraConfig, Quantization, TrainConfig, TrainerConfig, TrainSFTConfig, VllmConfig
from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.errors import ArtError, ConfigError, InvalidRequestError
from art.protocol.checkpoint_calls import HubTarget, S3Target
from art.protocol.compact import write_samples
from art.protocol.samples import StepResult, TrainingSample

Result = TypeVar("Result", covariant=True)
_MAX_COMPLAINTS = 3
QUANTIZED = "quantized"
"""Name, among number types, of an engine that rounds weights, activations or KV cache to 8 bits or fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a training call: the number of its micro-batches that are `done`, of `total`."""

    done: int
    total: int


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Call(Generic[Result]):
    """Base class of all calls to child processes. It makes each subclass a frozen dataclass."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    method: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    """Fields that name files or folders which the child reads. They travel to a child on another machine."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Fields that name folders which the child makes. They travel back."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.method = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def params(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def decode_result(cls, value: Any) -> Result:
        """Build a result of this call from its JSON value, which the child process sent."""
        kind: Any = cls
        try:
            result: Result = _adapter(get_args(kind.__orig_bases__[0])[0]).validate_python(value)
        except ValidationError as error:
            raise ArtError(f"the answer to `{cls.method}` is malformed: {_complaints(error)}") from error
        return result


Calls: TypeAlias = Mapping[str, type[Call[Any]]]


def decode_call(calls: Calls, method: str, params: Mapping[str, Any]) -> Call[Any]:
    """Build a call from the method and parameters in a frame, a message between processes. Raises `InvalidRequestError`
    if `calls` has no such method or the parameters do not fit it, and `ConfigError` if settings are not valid."""
    kind: Any = calls.get(method)
    if kind is None:
        raise InvalidRequestError(f"unknown method {method!r}; this process has {', '.join(calls)}")
    try:
        call: Call[Any] = _adapter(kind).validate_python(params)
    except ValidationError as error:
        is_config = all(one["loc"][:1] in (("config",), ("lora",)) for one in error.errors(include_url=False))
        problem = f"`{method}` has invalid parameters: {_complaints(error)}"
        raise (ConfigError if is_config else InvalidRequestError)(problem) from error
    return call


def decode_engine_call(calls: Calls, frame: Mapping[str, Any]) -> Call[Any]:
    """Decode a call to an engine from a frame. A request for a completion gets the id of its call, in place of the id
    that the caller chose. The errors are those of `decode_call`."""
    params = frame["params"]
    if isinstance(request := params.get("request"), dict):  # changing the request later would build it a second time
        request["request_id"] = str(frame["id"])
    return decode_call(calls, frame["method"], params)


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _complaints(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_input=False)
    texts = [f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in errors[:_MAX_COMPLAINTS]]
    return "; ".join(texts) + (f"; and {len(errors) - _MAX_COMPLAINTS} more" if len(errors) > _MAX_COMPLAINTS else "")


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The samples of a call, in a file that both processes can read (see `art.protocol.compact`)."""

    path: Path


Numbers = SkipValidation[dict[str, float]]
"""Numbers by name. What is not finite crosses as null."""
Samples = Annotated[Sequence[TrainingSample] | SampleFile, PlainValidator(TypeAdapter(SampleFile).validate_python)]


# -- engine --


class StartEngine(Call[EngineInfo]):
    """Load the base model into the embedded engine. Comes once, before all other calls."""

    reads: ClassVar = ("model",)

    model: str
    config: EngineConfig
    quantization: Quantization = "none"
    """Rounding of the base weights, which is the trainer's."""


class StartVllm(Call[EngineInfo]):
    """Start vLLM servers, or connect to those that run already. Comes once, before all other calls."""

    reads: ClassVar = ("model",)

    model: str
    config: VllmConfig
    lora_rank: int | None
    """Rank of the LoRA adapters; `None` if the engine takes no adapters."""
    sleeps: bool = False
    memory_bytes: int | None = None
    """Memory of the smallest of the engine's GPUs, if known."""
    work_dir: Path | None = None
    """Folder for merged weights, with `weights="merged"`."""


class Info(Call[EngineInfo]):
    """Ask the engine for its description, an `EngineInfo`."""


class Generate(Call[TokenChunk]):
    """Sample a completion. The results are its chunks, the last of which has a `finish_reason`."""

    request: GenerateRequest
    stream: bool


class Score(Call[list[float]]):
    """Compute the log-prob of each token in `token_ids[1:]`, given the tokens before it."""

    token_ids: list[int]
    adapter: str | None


class LoadAdapter(Call[AdapterInfo]):
    """Load a LoRA adapter, or a checkpoint with all weights, into the engine under a name."""

    reads: ClassVar = ("path",)

    name: str
    path: Path


class PrepareWeights(Call[None]):
    """Merge an adapter into the base weights ahead of the `LoadAdapter` with the same name and path."""

    reads: ClassVar = ("path",)

    name: str
    path: Path


class UnloadAdapter(Call[None]):
    """Remove an adapter from the engine. The result comes when the last request that uses it has ended."""

    name: str


class Stats(Call[Numbers]):
    """Read the engine's counters and gauges."""


class Sleep(Call[None]):
    """Make the engine free its GPU memory, so that a trainer can use it. The result comes when it is free."""


class Wake(Call[None]):
    """Make an engine that sleeps take its GPU memory back. The result comes when it has it."""


# -- trainer --


class StartTrainer(Call[None]):
    """Load the base model into the trainer. Comes once, before all other calls."""

    reads: ClassVar = ("model",)

    model: str
    config: TrainerConfig
    shares_gpu: bool = False
    """Whether an engine sleeps on the same GPU, so that freed memory must go back to the device."""


class InitCheckpoint(Call[StepResult]):
    """Write the checkpoint of step 0, from which the first training step starts."""

    writes: ClassVar = ("path",)

    path: Path
    lora: LoraConfig | None
    """Settings of the LoRA adapter; `None` means that all weights are trained."""


class SampleCall(Call[Result]):
    """Base of the calls that bring samples. To cross processes, a call must be `written`."""

    samples: Samples

    def written(self, path: Path) -> Self:
        """Write the samples to a file, and return this call with the file in their place. The errors are those of
        `write_samples`."""
        if isinstance(self.samples, SampleFile):
            return self
        write_samples(path, self.samples)
        return replace(self, samples=SampleFile(path))


class Train(SampleCall[Progress | StepResult]):
    """Make one step of reinforcement learning, from one checkpoint to the next. The last result is the `StepResult`."""

    reads: ClassVar = ("samples", "from_checkpoint", "references")
    writes: ClassVar = ("to_checkpoint", "record_to")

    config: TrainConfig
    from_checkpoint: Path
    to_checkpoint: Path
    job_id: str
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of rollout ids, (chosen, rejected), for preference losses."""
    references: dict[int, Path] = field(default_factory=dict)
    """Folders of the checkpoints that the loss compares the policy with, or that sampled stale tokens, by step."""
    engine_dtype: str | None = None
    """Number type in which the engine computed the sampling log-probs, or `QUANTIZED`; `None`: that of the trainer."""
    probe_gap: float | None = None
    """Largest difference, in nats, between this engine and this trainer in a handshake; `None` if there was none."""
    record_to: Path | None = None
    """Folder for the step's token file, which holds log-prob, entropy and mask reason of each target; `None`: none."""


class TrainSft(SampleCall[Progress | StepResult]):
    """Make one step of supervised fine-tuning. The last result is the `StepResult`."""

    reads: ClassVar = ("samples", "from_checkpoint")
    writes: ClassVar = ("to_checkpoint", "record_to")

    config: TrainSFTConfig
    from_checkpoint: Path
    to_checkpoint: Path
    job_id: str
    record_to: Path | None = None
    """Folder for the step's token file, which holds log-prob, entropy and mask reason of each target; `None`: none."""


class Trial(SampleCall[Numbers]):
    """Measure the time and memory of one update on `samples`. The updated weights are dropped."""

    reads: ClassVar = ("samples",)

    lora: LoraConfig | None


class WriteLoudAdapters(Call[Numbers]):
    """Write one test adapter per kind of layer, with its probe. The result is the effect of each in nats, by kind.

    The checkpoint in memory is dropped. The next call loads the one that it names.
    """

    writes: ClassVar = ("folder",)

    folder: Path
    """Folder to make; it must not exist."""
    lora: LoraConfig


# -- file jobs --


class Copy(Call[dict[str, Any]]):
    """Copy a checkpoint. The result becomes part of the job's result, like that of every file job."""

    source: Path
    target: Path


class Export(Call[dict[str, Any]]):
    """Write a checkpoint in a format that other programs read."""

    source: Path
    target: Path
    base_model: str
    format: str
    model_name: str = "agent"
    """Name under which a production server is told to serve the export."""
    template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the chat template with which the model was trained."""


class Push(Call[dict[str, Any]]):
    """Send a checkpoint or an export to the Hugging Face hub or an S3 store."""

    source: Path
    target: HubTarget | S3Target
    place: str
    message: str


class Pull(Call[dict[str, Any]]):
    """Fetch a checkpoint from an S3 store."""

    source: S3Target
    place: str
    checkpoints: Path
    """Folder that gets the checkpoint, named by its step."""
    step: int | None = None
    """Step of the checkpoint; `None` takes the newest."""
    not_after_step: int | None = None


def _by_method(*kinds: type[Call[Any]]) -> Calls:
    return {kind.method: kind for kind in kinds}


_OF_EVERY_ENGINE = (Info, Generate, Score, LoadAdapter, UnloadAdapter, Stats)
ENGINE_CALLS = _by_method(StartEngine, *_OF_EVERY_ENGINE)
VLLM_CALLS = _by_method(StartVllm, *_OF_EVERY_ENGINE, PrepareWeights, Sleep, Wake)
TRAINER_CALLS = _by_method(StartTrainer, InitCheckpoint, Train, TrainSft, Trial, WriteLoudAdapters)
FILE_CALLS = _by_method(Copy, Export, Push, Pull)
