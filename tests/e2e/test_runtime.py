"""The runtime against what users and disks do to it: repeated calls, changed settings, failures in the wrong moment."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import art.runtime.hosting.host
import art.runtime.runtime
from art.config import (
    DpoConfig,
    DppoConfig,
    EngineConfig,
    LoraConfig,
    LossConfig,
    ModelSettings,
    ServerConfig,
    TrainConfig,
    TrainSFTConfig,
)
from art.errors import (
    ArtError,
    ConfigError,
    ConstraintMismatchError,
    DiskFullError,
    NothingTrainableError,
    StorageError,
)
from art.metrics import catalogue
from art.protocol.calls import Train
from art.protocol.chat_completions import parse_chat_request
from art.protocol.training import JobStatus, ModelStatus, RegisterRequest, TrainRequest, TrainSFTRequest
from art.record.conversations import forget_older
from art.runtime.hosting.trainer_handle import TrainerHandle
from art.runtime.jobs.job import Done
from art.runtime.jobs.runner import TrainingWork
from art.runtime.registry import RegisteredModel
from art.runtime.runtime import Runtime
from art.storage import checkpoints
from art.worker.launch import Launch, Process, WarmParent
from tests.support.metric_names import find_metric

PROMPT = {"role": "user", "content": "say yes, no or maybe"}
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    yield runtime
    await runtime.close()


def request_for(tiny_model: Path, name: str, **settings: Any) -> RegisterRequest:
    return RegisterRequest(project="p", name=name, base_model=str(tiny_model), settings=ModelSettings(**settings))


async def train_request(runtime: Runtime, name: str, job_id: str) -> TrainRequest:
    chat = parse_chat_request({"model": f"p/{name}", "messages": [PROMPT], "n": 12, "max_tokens": 8})
    completion = await runtime.gateway.complete(chat)
    trajectories = [
        {"reward": REWARDS.get(choice["message"]["content"] or "", 0.0), "histories": [{"items": [PROMPT, {"choice": choice}]}]}
        for choice in completion["choices"]
    ]  # fmt: skip
    config = TrainConfig(learning_rate=1e-3)
    return TrainRequest.model_validate({"job_id": job_id, "groups": [{"trajectories": trajectories}], "config": config})


async def ended(runtime: Runtime, job: JobStatus, *, within_s: float = 60) -> JobStatus:
    async with asyncio.timeout(within_s):
        while job.state in ("queued", "running"):
            job = await runtime.jobs.wait(job.job_id, 5.0)
    return job


@in_module_loop
async def test_a_request_that_is_sent_again_after_its_step_is_the_same_job(runtime: Runtime, tiny_model: Path) -> None:
    """As when the answer to the first one is lost and the server is quick."""
    await runtime.registration.register(request_for(tiny_model, "again"))
    request = await train_request(runtime, "again", "job-again")
    done = await ended(runtime, await runtime.training.train("p", "again", request))
    assert (done.state, done.step) == ("succeeded", 1)
    assert await runtime.training.train("p", "again", request) == done
    assert (await runtime.models.status("p", "again")).step == 1


@in_module_loop
async def test_a_step_with_nothing_to_learn_is_a_job_that_ends_well(runtime: Runtime, tiny_model: Path) -> None:
    await runtime.registration.register(request_for(tiny_model, "flat"))
    request = await train_request(runtime, "flat", "job-flat")
    for trajectory in request.groups[0].trajectories:
        trajectory.reward = 0.5
    done = await ended(runtime, await runtime.training.train("p", "flat", request))
    assert (done.state, done.trained, done.step) == ("succeeded", False, 0)
    assert done.checkpoint_path == str(runtime.data_dir.model("p", "flat").checkpoint(0))
    assert done.metrics["data/step_num_groups_trainable"] == 0
    assert done.metrics["ledger/sampled_tokens"] == done.metrics["ledger/dropped_tokens/no_reward_spread"] > 0
    assert done.metrics["ledger/trained_tokens"] == 0
    assert done.findings[0].startswith("every group (1) has equal rewards")
    assert await runtime.training.train("p", "flat", request) == done, "a retry gets the same answer"
    following = await ended(
        runtime, await runtime.training.train("p", "flat", await train_request(runtime, "flat", "job-next"))
    )
    assert (following.trained, following.step) == (True, 1)
    assert await runtime.training.train("p", "flat", request) == done, "after another step too"


@pytest.mark.parametrize(
    ("name", "loss", "error", "reason"),
    [
        ("pairs", DpoConfig(), NothingTrainableError("none of the 9 can be compared"), "sampler_mismatch"),
        ("forms", DppoConfig(), ConstraintMismatchError("none of the 9 could be drawn"), "constraint_mismatch"),
    ],
)
@in_module_loop
async def test_what_the_trainer_refuses_is_a_step_with_nothing_to_learn(
    name: str,
    loss: LossConfig,
    error: NothingTrainableError,
    reason: str,
    runtime: Runtime,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preference pairs whose samples the gate masks, answers that are not of their grammar: only the trainer knows."""

    async def refuse(trainer: TrainerHandle, call: Train, **_: Any) -> None:
        raise error

    await runtime.registration.register(request_for(tiny_model, name))
    request = await train_request(runtime, name, f"job-{name}")
    request.config = TrainConfig(loss=loss)
    monkeypatch.setattr(TrainerHandle, "train", refuse)
    done = await ended(runtime, await runtime.training.train("p", name, request))
    assert (done.state, done.trained, done.step) == ("succeeded", False, 0), done.error
    assert done.findings[0].startswith("none of the 9")
    assert done.metrics[f"ledger/dropped_tokens/{reason}"] > 0
    assert done.metrics["data/step_num_groups_trainable"] == done.metrics["ledger/trained_tokens"] == 0
    dropped = [value for name, value in done.metrics.items() if name.startswith("ledger/dropped_tokens/")]
    assert sum(dropped) == done.metrics["ledger/sampled_tokens"]


@in_module_loop
async def test_a_step_reports_what_the_catalogue_lists_and_says_what_is_out_of_range(
    runtime: Runtime, tiny_model: Path
) -> None:
    await runtime.registration.register(request_for(tiny_model, "reporting"))
    request = await train_request(runtime, "reporting", "job-reporting")
    solved = request.groups[0].model_copy(
        update={"trajectories": [t.model_copy(update={"reward": 1.0}) for t in request.groups[0].trajectories]}
    )
    request = request.model_copy(update={"groups": [*request.groups, *[solved] * 4]})
    status = await ended(runtime, await runtime.training.train("p", "reporting", request))
    known = catalogue.TRAINER_METRICS | catalogue.PLAN_METRICS | catalogue.JOB_METRICS
    assert [name for name in status.metrics if find_metric(name, known) is None] == []
    always = {name for name, metric in known.items() if metric.when == catalogue.ALWAYS and "*" not in name}
    assert always <= status.metrics.keys()
    groups, repeated, easy = status.findings
    assert "the same recorded answers as an earlier trajectory" in repeated
    assert groups == "groups[1], groups[2], groups[3], groups[4]: all rewards are equal, nothing to learn"
    assert "most rollouts get the highest reward" in easy
    assert [name for name in status.metrics if name.startswith("findings/")] == ["findings/too_easy"]

    messages = [PROMPT, {"role": "assistant", "content": "yes"}]
    supervised = TrainSFTRequest.model_validate(
        {"job_id": "job-supervised", "trajectories": [{"histories": [{"items": messages}]}]}
    )
    status = await ended(runtime, await runtime.training.train_sft("p", "reporting", supervised))
    known = catalogue.TRAINER_METRICS | catalogue.SFT_METRICS | catalogue.JOB_METRICS
    assert [name for name in status.metrics if find_metric(name, known) is None] == []
    always = {name for name, metric in known.items() if metric.when == catalogue.ALWAYS and "*" not in name}
    assert always <= status.metrics.keys()
    assert status.findings == []


@in_module_loop
async def test_a_step_published_during_a_registration_stays(
    runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runtime.registration.register(request_for(tiny_model, "race"))
    request = await train_request(runtime, "race", "job-race")
    save_model = runtime._registry.save_model

    async def train_and_save(model: RegisteredModel) -> None:
        await ended(runtime, await runtime.training.train("p", "race", request))
        await save_model(model)

    monkeypatch.setattr(runtime._registry, "save_model", train_and_save)
    assert (await runtime.registration.register(request_for(tiny_model, "race"))).step == 1
    assert (await runtime.models.status("p", "race")).step == 1


@in_module_loop
async def test_a_wrong_base_model_can_be_corrected(runtime: Runtime, tiny_model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "model"
    with pytest.raises(ArtError):
        await runtime.registration.register(request_for(elsewhere, "typo"))
    assert str(elsewhere) not in [host["base_model"] for host in (await runtime.health())["base_models"]]
    assert (await runtime.registration.register(request_for(tiny_model, "typo"))).base_model == str(tiny_model)


@in_module_loop
@pytest.mark.slow
async def test_new_settings_count_and_replace_the_old_processes(runtime: Runtime, tiny_model: Path) -> None:
    def contexts(status: dict[str, Any]) -> list[int]:
        return sorted(host["engine_info"]["max_context"] for host in status["base_models"] if host["engine_info"])

    await runtime.registration.register(request_for(tiny_model, "settings", engine=EngineConfig(max_context=48)))
    await train_request(runtime, "settings", "unused-1")
    assert 48 in contexts(await runtime.health())
    await runtime.registration.register(request_for(tiny_model, "settings", engine=EngineConfig(max_context=64)))
    await train_request(runtime, "settings", "unused-2")
    now = contexts(await runtime.health())
    assert 64 in now
    assert 48 not in now


@in_module_loop
async def test_a_step_after_one_that_could_not_be_recorded_serves_its_own_weights(
    runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runtime.registration.register(request_for(tiny_model, "full"))

    async def full(*_: Any, **__: Any) -> None:
        raise DiskFullError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.jobs.store, "finish", full)
        lost = await runtime.training.train("p", "full", await train_request(runtime, "full", "job-lost"))
        lost = await ended(runtime, lost)
    assert lost.error is not None
    assert lost.error.code == "disk_full"
    assert (await runtime.models.status("p", "full")).step == 0
    kept = await ended(
        runtime, await runtime.training.train("p", "full", await train_request(runtime, "full", "job-kept"))
    )
    assert (kept.state, kept.step) == ("succeeded", 1)
    assert "publish/probe_gap" in kept.metrics  # loaded and proved anew, though an adapter of that name was there


@in_module_loop
async def test_no_step_starts_from_a_checkpoint_that_was_swapped(runtime: Runtime, tiny_model: Path) -> None:
    await runtime.registration.register(request_for(tiny_model, "swapped"))
    request = await train_request(runtime, "swapped", "job-swap-0")
    await ended(runtime, await runtime.training.train("p", "swapped", request))
    later = [await train_request(runtime, "swapped", f"job-swap-{number}") for number in (1, 2)]
    paths = runtime.data_dir.model("p", "swapped")
    published = paths.checkpoint(1).rename(paths.root / "published")
    shutil.copytree(paths.checkpoint(0), paths.checkpoint(1))
    job = await ended(runtime, await runtime.training.train("p", "swapped", later[0]))
    assert (job.state, job.error and job.error.code) == ("failed", "corrupt_checkpoint")
    shutil.rmtree(paths.checkpoint(1))
    published.rename(paths.checkpoint(1))
    job = await ended(runtime, await runtime.training.train("p", "swapped", later[1]))
    assert (job.state, job.step) == ("succeeded", 2), job.error


@in_module_loop
async def test_a_deleted_adapter_does_not_keep_the_engine_from_coming_back(runtime: Runtime, tiny_model: Path) -> None:
    for name in ("gone", "stays"):
        await runtime.registration.register(request_for(tiny_model, name))
    shutil.rmtree(runtime.data_dir.model("p", "gone").checkpoint(0))
    pids = [host["engine"]["pid"] for host in (await runtime.health())["base_models"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    request = await train_request(runtime, "stays", "unused-3")
    assert len(request.groups[0].trajectories) == 12


@in_module_loop
async def test_other_lora_settings_after_a_failed_first_registration(
    runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(model: RegisteredModel) -> None:
        raise DiskFullError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(runtime._registry, "save_model", full)
        with pytest.raises(DiskFullError):
            await runtime.registration.register(request_for(tiny_model, "rank", lora=LoraConfig(rank=4)))
    await runtime.registration.register(request_for(tiny_model, "rank", lora=LoraConfig(rank=8)))
    assert checkpoints.read_state(runtime.data_dir.model("p", "rank").checkpoint(0)).lora["rank"] == 8


@in_module_loop
async def test_a_fully_trained_model_trains_and_serves(runtime: Runtime, tiny_model: Path) -> None:
    """Beside a LoRA of the same base model. A copy of its folder goes on under another name."""
    await runtime.registration.register(request_for(tiny_model, "lora"))
    await runtime.registration.register(request_for(tiny_model, "whole", lora=None))
    metrics = []
    for step in (1, 2):
        request = await train_request(runtime, "whole", f"job-whole-{step}")
        status = await ended(runtime, await runtime.training.train("p", "whole", request))
        assert (status.state, status.step) == ("succeeded", step), status.error
        assert status.metrics["publish/probe_gap"] < 1e-4
        assert status.metrics["publish/adapter_norm"] == pytest.approx(status.metrics["loss/adapter_norm"], rel=1e-6)
        assert status.metrics["offpolicy/ratio_max"] == pytest.approx(1, abs=1e-4), "sampled by what was trained"
        metrics.append(status.metrics)
    assert metrics[1]["publish/probe_effect"] > 1e-3
    lora = await train_request(runtime, "lora", "job-lora-beside")
    assert (await ended(runtime, await runtime.training.train("p", "lora", lora))).state == "succeeded"
    path = runtime.data_dir.model("p", "whole").checkpoint(2)
    assert checkpoints.is_full(path)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {entry.name for entry in path.iterdir()}
    with pytest.raises(ConfigError, match=r"was trained with LoRA settings None; got .* \(None is full fine-tuning\)"):
        await runtime.registration.register(request_for(tiny_model, "whole"))

    copy = runtime.data_dir.model("p", "copy").checkpoints
    shutil.copytree(runtime.data_dir.model("p", "whole").checkpoints, copy)
    assert (await runtime.registration.register(request_for(tiny_model, "copy", lora=None))).step == 2


async def register_in(data_dir: Path, request: RegisterRequest) -> ModelStatus:
    runtime = Runtime(data_dir, ServerConfig())
    await runtime.start()
    try:
        return await runtime.registration.register(request)
    finally:
        await runtime.close()


async def interrupted_step(data_dir: Path, tiny_model: Path) -> None:
    """A server that ends with a job queued."""
    runtime = Runtime(data_dir, ServerConfig())
    await runtime.start()
    await runtime.registration.register(request_for(tiny_model, "agent"))
    await runtime.training.train("p", "agent", await train_request(runtime, "agent", "job-interrupted"))
    await runtime.close()


@pytest.mark.slow
async def test_the_next_run_begins_after_the_step_that_the_last_one_left(tiny_model: Path, tmp_path: Path) -> None:
    """Else the script would gather the same scenarios for the old step and train on them twice."""
    await interrupted_step(tmp_path / "a", tiny_model)
    assert (await register_in(tmp_path / "a", request_for(tiny_model, "agent"))).step == 1
    # A copy of the model without the database goes on too, and nothing of it is overwritten.
    shutil.copytree(tmp_path / "a" / "p", tmp_path / "b" / "p")
    assert (await register_in(tmp_path / "b", request_for(tiny_model, "agent"))).step == 1
    shutil.copytree(tmp_path / "a" / "p", tmp_path / "c" / "p")
    with pytest.raises(ConfigError, match=r"LoRA settings(.|\n)*Use another model name"):
        await register_in(tmp_path / "c", request_for(tiny_model, "agent", lora=LoraConfig(rank=2)))


class Borrowed(WarmParent):
    """The warm parent of another runtime, which has imported torch already and goes on when this runtime ends."""

    def __init__(self, lender: Runtime) -> None:
        super().__init__()
        self._lender = lender._hosts._warm_parent

    async def fork(self, launch: Launch, timeout_s: float) -> Process | None:
        return await self._lender.fork(launch, timeout_s)


@in_module_loop
async def test_a_queued_step_outlives_the_retention_and_the_server(
    runtime: Runtime, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no tokens: the record keeps them for it, and a server that comes after a kill -9 trains the same."""
    monkeypatch.setattr(art.runtime.hosting.host, "WarmParent", lambda: Borrowed(runtime))
    run, leave = TrainingWork.run, asyncio.Event()

    async def run_later(*args: Any) -> Done:
        await leave.wait()
        return await run(*args)

    monkeypatch.setattr(TrainingWork, "run", run_later)
    first = Runtime(tmp_path / "a", ServerConfig())
    await first.start()
    try:
        await first.registration.register(request_for(tiny_model, "agent"))
        request = await train_request(first, "agent", "job-queued")
        await train_request(first, "agent", "job-never-sent")
        await first.training.train("p", "agent", request)
        ((payload,),) = first._database.read("SELECT payload FROM jobs")
        assert b"ex_" in zlib.decompress(payload)
        assert b"token_ids" not in zlib.decompress(payload)
        gateway, needed = first.gateway, first.jobs.store.needed_exchanges
        assert (await forget_older(gateway.recorder, -3600, needed))[0] == 12
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # all that a kill -9 leaves at this moment
        leave.set()
        undisturbed = await ended(first, await first.jobs.status("job-queued"))
        assert (await forget_older(gateway.recorder, -3600, needed))[0] == 12, "it has ended"
    finally:
        await first.close()
    second = Runtime(tmp_path / "b", ServerConfig())
    await second.start()
    try:
        # Its engine and trainer have to start first.
        after_kill = await ended(second, await second.jobs.status("job-queued"), within_s=300)
    finally:
        await second.close()
    assert (undisturbed.state, after_kill.state) == ("succeeded", "succeeded"), after_kill.error
    weights = [
        runtime.data_dir.model("p", "agent").checkpoint(1) / "adapter_model.safetensors" for runtime in (first, second)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


async def test_a_data_directory_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(art.runtime.runtime, "LOCK_WAIT_S", 0.2)
    first, second = Runtime(tmp_path, ServerConfig()), Runtime(tmp_path, ServerConfig())
    await first.start()
    with pytest.raises(StorageError, match=rf"in use by another art-server \(pid {os.getpid()}\)"):
        await second.start()
    await first.close()
    await second.start()
    await second.close()


@in_module_loop
async def test_a_training_that_is_cancelled_stops_behind_its_micro_batch(runtime: Runtime, tiny_model: Path) -> None:
    await runtime.registration.register(request_for(tiny_model, "cancelled"))
    items = [PROMPT, {"role": "assistant", "content": "yes"}]
    endless = {"trajectories": [{"histories": [{"items": items}]}] * 2000, "config": TrainSFTConfig(batch_size=1)}
    request = TrainSFTRequest.model_validate({"job_id": "job-endless", **endless})
    before = [host["trainer"]["pid"] for host in (await runtime.health())["base_models"]]
    await runtime.training.train_sft("p", "cancelled", request)
    while (progress := (await runtime.jobs.status("job-endless")).progress) is None:
        await asyncio.sleep(0.05)
    assert progress.total == 2000
    await runtime.jobs.cancel("job-endless")
    last = await runtime.jobs.wait("job-endless", 600)
    assert last.state == "cancelled"
    assert last.progress is None
    assert checkpoints.list_steps(runtime.data_dir.model("p", "cancelled").checkpoints) == [0]
    after = [host["trainer"]["pid"] for host in (await runtime.health())["base_models"]]
    assert before == after, "the trainer did not have to be killed"
    request = await train_request(runtime, "cancelled", "job-after-cancelled")
    done = await ended(runtime, await runtime.training.train("p", "cancelled", request))
    assert (done.state, done.step) == ("succeeded", 1)


@in_module_loop
async def test_what_runs_can_be_watched(runtime: Runtime, tiny_model: Path) -> None:
    """Requests as they are sampled, the step that learns from them, and what the server is doing meanwhile."""
    await runtime.registration.register(request_for(tiny_model, "watched"))
    data: list[Any] = []

    async def watch() -> None:
        async for events in runtime.live.watch("p"):
            data.extend(event.data for event in events)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    request = await train_request(runtime, "watched", "job-watched")
    activity = runtime.overview.activity("p", "watched")
    assert activity is not None
    assert (activity.engine, activity.trainer, activity.num_requests) == ("up", "up", 0)
    assert activity.answered_s is not None
    assert activity.answered_s < 30
    job = await runtime.training.train("p", "watched", request)
    assert [one.kind for one in runtime.overview.activity("p", "watched").jobs] == ["train"]  # type: ignore[union-attr]
    done = await ended(runtime, job)
    async with asyncio.timeout(60):
        while not any(one.kind == "step" for one in data):
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    ends = {one.id: one for one in data if one.kind == "request_ended" and one.name == "watched"}
    assert len(ends) == 12
    texts = dict.fromkeys(ends, "")
    for event in data:
        for piece in event.pieces if event.kind == "tokens" else ():
            texts[piece.id] += piece.text
    recorded = runtime.gateway.recorder.get(list(ends))
    tokenizer = (await runtime.resolver.resolve("p/watched")).renderer.tokenizer
    assert texts == {one.id: tokenizer.text(one.completion_token_ids) for one in recorded}
    for one in ends.values():
        assert one.queue_s + one.prefill_s + one.decode_s <= one.total_s
    states = [one.state for one in data if one.kind == "job_progress" and one.job_id == "job-watched"]
    assert (states[0], states[-1]) == ("queued", "succeeded")
    (step,) = [one for one in data if one.kind == "step"]
    assert step.metrics["data/reward_mean"] == pytest.approx(done.metrics["data/reward_mean"])

    system = await runtime.overview.system(None)
    assert {part.kind for part in system.processes} == {"server", "engine", "trainer"}
    assert all((part.rss_bytes or 0) > 10_000_000 for part in system.processes if part.state == "up")
    assert {part.num_running for part in system.engines if part.base_model == str(tiny_model)} == {0}
    (tokens,) = [part for part in system.tokens if part.name == "watched"]
    assert tokens.sampled == sum(one.num_tokens for one in ends.values())
    assert tokens.trained == done.metrics["ledger/trained_tokens"]
    other = await runtime.overview.system("elsewhere")
    assert (other.is_whole, other.processes, other.tokens, other.jobs) == (False, [], [], [])
