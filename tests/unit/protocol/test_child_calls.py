"""Every message between the server and its children: it survives the way, and each child that must serve it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

import art.protocol.rpc
from art.config import EngineConfig, LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig, VllmConfig
from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.errors import ArtError, ConfigError, InvalidRequestError
from art.protocol import calls
from art.protocol.calls import (
    ENGINE_CALLS,
    FILE_CALLS,
    TRAINER_CALLS,
    VLLM_CALLS,
    Call,
    Progress,
    SampleCall,
    SampleFile,
    decode_call,
)
from art.protocol.checkpoint_calls import HubTarget, S3Target
from art.protocol.compact import read_samples
from art.protocol.rpc import encode_frame
from art.protocol.samples import ConstrainedSpan, Constraint, StepResult, TrainingSample
from art.worker.engine_child import EngineChild
from art.worker.file_child import HANDLERS
from art.worker.trainer_child import TrainerCalls
from art.worker.vllm_child import VllmChild

SAMPLE = TrainingSample(
    sample_id="s", rollout_id="r", token_ids=[1, 2], loss_mask=[False, True], sampling_logprobs=[0.0, -0.5],
    advantages=[0.0, 1.5], component="sft",
)  # fmt: skip
_ANSWER = Constraint(grammar='start: "yes"', stop_token_ids=[2], kept=[[2, 900]])
CONSTRAINED = replace(SAMPLE, constraints=[ConstrainedSpan(start=1, num_tokens=1, constraint=_ANSWER)])
PLACES: dict[str, Any] = {"from_checkpoint": Path("a/0000"), "to_checkpoint": Path("a/0001"), "job_id": "job"}
INFO = EngineInfo(vocab_size=3, max_context=8, dtype="float32", device="cpu", draws_by_index=False)
REQUEST = GenerateRequest(
    request_id="r", adapter="m@1", prompt_token_ids=[1, 2], max_tokens=3, stop_token_ids=(2, 4), seed=2**64 - 1
)
LOADED = AdapterInfo(name="m@1", num_layers=2, rank=4, norm=0.25)
STEP = StepResult(step=1, metrics={"loss/train": 0.5})

EXAMPLES: list[tuple[Call[Any], list[Any]]] = [
    (calls.StartEngine(model="base", config=EngineConfig(num_threads=2)), [INFO]),
    (calls.StartVllm(model="base", config=VllmConfig(), lora_rank=8, work_dir=Path("/w")), [INFO]),
    (calls.Info(), [INFO]),
    (
        calls.Generate(request=REQUEST, stream=True),
        [
            TokenChunk(token_ids=[1], logprobs=[-0.5]),
            TokenChunk(token_ids=[2], logprobs=[-1.0], top_logprobs=[[(2, -1.0), (3, -2.0)]], finish_reason="stop"),
        ],
    ),
    (calls.Score(token_ids=[1, 2], adapter=None), [[-0.5]]),
    (calls.LoadAdapter(name="m@1", path=Path("/c/0001")), [LOADED]),
    (calls.PrepareWeights(name="m@1", path=Path("/c/0001")), [None]),
    (calls.UnloadAdapter(name="m@1"), [None]),
    (calls.Stats(), [{"running": 1.0}]),
    (calls.Sleep(), [None]),
    (calls.Wake(), [None]),
    (calls.StartTrainer(model="base", config=TrainerConfig(num_processes=2), shares_gpu=True), [None]),
    (calls.InitCheckpoint(path=Path("a/0000"), lora=LoraConfig(rank=4)), [StepResult(step=0)]),
    (
        calls.Train(
            samples=[SAMPLE, CONSTRAINED],
            config=TrainConfig(),
            pairs=[("r", "q")],
            references={3: Path("a/0003")},
            **PLACES,
        ),
        [Progress(done=1, total=2), STEP],
    ),
    (
        calls.TrainSft(samples=[SAMPLE], config=TrainSFTConfig(batch_size=2), **PLACES),
        [Progress(done=0, total=1), STEP],
    ),
    (calls.Trial(samples=[SAMPLE], lora=None), [{"seconds": 0.5}]),
    (calls.WriteLoudAdapters(folder=Path("a"), lora=LoraConfig(rank=2)), [{"self_attn.q_proj": 0.5}]),
    (calls.Copy(source=Path("a"), target=Path("b")), [{}]),
    (
        calls.Export(source=Path("a"), target=Path("b"), base_model="base", format="peft"),
        [{"files": ["x"]}],
    ),
    (calls.Push(source=Path("a"), target=HubTarget(repo_id="me/x"), place="", message="step 1"), [{"url": "u"}]),
    (calls.Pull(source=S3Target(bucket="b"), place="p", checkpoints=Path("c"), step=3), [{"step": 3}]),
]
CALLS = {**ENGINE_CALLS, **VLLM_CALLS, **TRAINER_CALLS, **FILE_CALLS}


def sent(value: Any) -> Any:
    return orjson.loads(encode_frame({"value": value})[4:])["value"]


def test_there_is_an_example_of_every_call() -> None:
    assert {type(call) for call, _ in EXAMPLES} == set(CALLS.values())
    assert len(CALLS) == len(EXAMPLES)


def to_send(call: Call[Any], directory: Path) -> Call[Any]:
    return call.written(directory / "samples") if isinstance(call, SampleCall) else call


@pytest.mark.parametrize(("call", "results"), EXAMPLES, ids=[call.method for call, _ in EXAMPLES])
def test_a_call_and_its_results_survive_the_way(call: Call[Any], results: list[Any], tmp_path: Path) -> None:
    written = to_send(call, tmp_path)
    decoded = decode_call(CALLS, call.method, sent(written.params))
    assert decoded == written
    if isinstance(call, SampleCall) and isinstance(decoded, SampleCall):
        assert isinstance(decoded.samples, SampleFile)
        assert replace(decoded, samples=read_samples(decoded.samples.path)) == call
    assert [call.decode_result(sent(result)) for result in results] == results


@pytest.mark.parametrize("call", [call for call, _ in EXAMPLES], ids=[call.method for call, _ in EXAMPLES])
def test_unknown_parameters_are_refused_by_name(call: Call[Any], tmp_path: Path) -> None:
    call = to_send(call, tmp_path)
    with pytest.raises(InvalidRequestError, match=f"`{call.method}` has invalid parameters: speed: "):
        decode_call(CALLS, call.method, sent(call.params) | {"speed": 3})


def test_each_child_has_a_handler_for_every_call_that_it_must_serve() -> None:
    child: Any = None
    assert set(EngineChild(child).handlers) == set(ENGINE_CALLS.values())
    assert set(VllmChild(child).handlers) == set(VLLM_CALLS.values())
    assert set(TrainerCalls().handlers) == set(TRAINER_CALLS.values())
    assert set(HANDLERS) == set(FILE_CALLS.values())


def test_malformed_calls_and_answers_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="unknown method 'sleep'; this process has start_engine, info, "):
        decode_call(ENGINE_CALLS, "sleep", {})
    with pytest.raises(InvalidRequestError, match="`load_adapter` has invalid parameters: path: Field required"):
        decode_call(ENGINE_CALLS, "load_adapter", {"name": "m@1"})
    with pytest.raises(InvalidRequestError, match=r"request\.request_id: Field required"):
        decode_call(ENGINE_CALLS, "generate", {"request": {"seed": 1}, "stream": True})
    with pytest.raises(InvalidRequestError, match="`trial` has invalid parameters: samples"):
        decode_call(TRAINER_CALLS, "trial", {"samples": {"grammars": []}, "lora": None})
    with pytest.raises(ConfigError, match=r"lora\.rank: "):
        decode_call(TRAINER_CALLS, "init_checkpoint", {"path": "a", "lora": {"rank": 0}})
    with pytest.raises(ArtError, match="the answer to `info` is malformed: vocab_size: "):
        calls.Info.decode_result({})
    with pytest.raises(ArtError, match=r"the answer to `generate` is malformed: logprobs: Field required"):
        calls.Generate.decode_result({"token_ids": [1]})
    with pytest.raises(ArtError, match=r"the answer to `train` is malformed: Progress.done: "):
        calls.Train.decode_result({"speed": 3})


def test_a_frame_has_a_largest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(art.protocol.rpc, "MAX_FRAME_BYTES", 100)
    assert encode_frame({"value": "x" * 80})
    with pytest.raises(InvalidRequestError, match="has 212 bytes, at most 100"):
        encode_frame({"value": "x" * 200})
