"""Steps at the serverless service in trouble: each is trained once, whatever is lost, late, refused or killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    NothingTrainableError,
    OverloadedError,
    ProcessError,
    StorageError,
    TrainingError,
    TrajectoryError,
)
from tests.support.fake_serverless import (
    KEY,
    FakeServerless,
    Trouble,
    cut_answer,
    damage_answer,
    lose_answer,
    lose_request,
    status,
    web_page,
)
from tests.support.serverless_runs import QUICK, group, new_model, open_backend, rollout

ROOT = Path(__file__).parents[4]
JOBS = "/preview/training-jobs"


@pytest.fixture
async def fake() -> AsyncIterator[FakeServerless]:
    async with FakeServerless().running() as fake:
        yield fake


@contextlib.asynccontextmanager
async def script(
    fake: FakeServerless, folder: Path, **times: float
) -> AsyncIterator[tuple[art.ServerlessBackend, art.TrainableModel]]:
    """What a script does at its start."""
    async with open_backend(fake, folder, replace(QUICK, **times)) as backend:
        model = new_model(folder)
        await model.register(backend)
        yield backend, model


def sent_jobs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "shop/models/agent/sent_jobs.json").read_text())["jobs"]


async def test_a_step_with_pages_of_events(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0), await group(model, 0.5, 0.5)]
        result = await backend.train(model, groups, learning_rate=2e-5, loss="ppo")
    assert (result.step, result.trained) == (1, True)
    assert result.metrics["loss/train"] == 2.0  # the mean of 1, 2 and 3
    assert result.metrics["data/step_num_gradient_steps"] == 3.0
    assert result.metrics["data/step_num_groups_submitted"] == 2.0
    assert result.metrics["data/step_num_groups_trainable"] == 1.0
    assert result.findings == ["groups [1] of 2 have equal rewards: they teach nothing and were not sent"]
    (job,) = fake.jobs.values()
    assert job.body["experimental_config"]["learning_rate"] == 2e-5
    (sent,) = job.body["trajectory_groups"]
    assert [one["reward"] for one in sent["trajectories"]] == [0.0, 1.0]
    choice = sent["trajectories"][0]["messages_and_choices"][1]
    assert choice["logprobs"]["content"][0]["logprob"] == -1.1
    assert sum(request.endswith("/events") for request in fake.requests) == 3  # 5 events in pages of 2


@pytest.mark.parametrize(
    "trouble",
    [
        status(429, Retry_After="0"),
        status(429, {"error": {"message": "Concurrency limit reached for requests"}}, Retry_After="0.01"),
    ],
)
async def test_a_job_refused_by_a_429_is_sent_again(fake: FakeServerless, tmp_path: Path, trouble: Trouble) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.trouble[JOBS] = [trouble, trouble]
        result = await backend.train(model, [await group(model, 0.0, 1.0)])
    assert (result.step, len(fake.jobs)) == (1, 1)
    assert fake.requests.count(f"POST {JOBS}") == 3


@pytest.mark.parametrize("trouble", [lose_answer, cut_answer, damage_answer])
async def test_a_job_whose_answer_was_lost_is_found_by_its_step(
    fake: FakeServerless, tmp_path: Path, trouble: Trouble
) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.trouble[JOBS] = [trouble]
        result = await backend.train(model, [await group(model, 0.0, 1.0)])
        assert (result.step, len(fake.jobs)) == (1, 1), "it was not sent twice"
        assert result.findings[-1] == "the answer to the submission was lost: the job was found by its checkpoint"
        again = await backend.train(model, [await group(model, 0.0, 1.0)])
    assert (again.step, len(fake.jobs)) == (2, 2)


@pytest.mark.parametrize("trouble", [lose_request, status(500), status(502), status(503), status(408)])
async def test_a_job_that_may_have_been_taken_is_never_sent_again(
    fake: FakeServerless, tmp_path: Path, trouble: Trouble
) -> None:
    async with script(fake, tmp_path, lost_job_s=0.02) as (backend, model):
        fake.trouble[JOBS] = [trouble]
        groups = [await group(model, 0.0, 1.0)]
        with pytest.raises(ProcessError, match=r"no checkpoint after step 0 was listed .* not sent again"):
            await backend.train(model, groups, job_id="my-step-1")
        assert fake.requests.count(f"POST {JOBS}") == 1
        with pytest.raises(ProcessError, match="not sent again"):  # the same call is the same job
            await backend.train(model, groups, job_id="my-step-1")
        assert fake.requests.count(f"POST {JOBS}") == 1
        assert (await backend.train(model, groups)).step == 1


async def test_what_the_service_refuses_is_told_with_the_field(fake: FakeServerless, tmp_path: Path) -> None:
    detail = {"detail": [{"loc": ["body", "experimental_config", "epsilon"], "msg": "too large", "type": "x"}]}
    async with script(fake, tmp_path) as (backend, model):
        fake.trouble[JOBS] = [status(422, detail)]
        groups = [await group(model, 0.0, 1.0)]
        with pytest.raises(InvalidRequestError, match=r"422: body\.experimental_config\.epsilon: too large"):
            await backend.train(model, groups, job_id="my-step-1")
        assert sent_jobs(tmp_path) == []
        assert (await backend.train(model, groups, job_id="my-step-1")).step == 1


async def test_a_job_that_fails_says_why_and_the_policy_is_unchanged(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.outcome = ["fails"]
        groups = [await group(model, 0.0, 1.0)]
        with pytest.raises(TrainingError, match="CUDA out of memory"):
            await backend.train(model, groups)
        assert await model.get_step() == 0
        assert (await backend.train(model, groups)).step == 1


async def test_a_job_that_never_ends_meets_its_deadline_and_can_be_followed_later(
    fake: FakeServerless, tmp_path: Path
) -> None:
    async with script(fake, tmp_path, job_s=0.02) as (backend, model):
        fake.outcome = ["never ends"]
        groups = [await group(model, 0.0, 1.0)]
        with pytest.raises(ProcessError, match=r"has not ended .*follow_train_job\(model, 'my-step-1'\)"):
            await backend.train(model, groups, job_id="my-step-1")
        (job,) = fake.jobs.values()
        fake._happen(job, "training_ended", {})
        fake.add_checkpoint(job.model_id)
        result = await (await backend.follow_train_job(model, "my-step-1"))
    assert (result.step, len(fake.jobs)) == (1, 1)


async def test_a_page_of_a_proxy_is_no_answer(fake: FakeServerless, tmp_path: Path) -> None:
    fake.trouble["/preview/models"] = [web_page]
    fake.trouble["/checkpoints"] = [web_page, web_page]
    fake.trouble["/events"] = [web_page]
    async with script(fake, tmp_path) as (backend, model):
        assert (await backend.train(model, [await group(model, 0.0, 1.0)])).step == 1
    fake.trouble["/preview/models"] = [web_page] * 10_000
    with pytest.raises(ProcessError, match=r"no usable answer .*Please wait"):
        async with script(fake, tmp_path, answer_s=0.05):
            pass


async def test_safe_calls_survive_all_passing_trouble(fake: FakeServerless, tmp_path: Path) -> None:
    fake.trouble["/preview/models"] = [lose_answer, status(503), status(429, Retry_After="0")]
    fake.trouble["/checkpoints"] = [status(500), lose_request, cut_answer]
    fake.trouble["/events"] = [status(504), lose_answer, cut_answer, damage_answer]
    async with script(fake, tmp_path) as (backend, model):
        assert (await backend.train(model, [await group(model, 0.0, 1.0)])).step == 1
    assert len(fake.models) == 1


async def test_what_an_answer_that_was_lost_has_deleted_is_deleted(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        for _ in range(3):
            await backend.train(model, [await group(model, 0.0, 1.0)])
        assert len(fake.checkpoints[next(iter(fake.models))]) == 3

        async def lose_deletion(fake: FakeServerless, request: Any, go_on: Any) -> Any:
            return await (lose_answer(fake, request, go_on) if request.method == "DELETE" else go_on())

        fake.trouble["/checkpoints"] = [lose_deletion] * 9
        assert await backend.delete_checkpoints(model) == [2]


@pytest.mark.parametrize("path", ["/preview/models", JOBS])
async def test_a_wait_that_is_longer_than_the_patience_is_told_as_such(
    fake: FakeServerless, tmp_path: Path, path: str
) -> None:
    fake.trouble[path] = [status(429, Retry_After="3600")]
    with pytest.raises(OverloadedError, match=r"It is busy: it asks to wait for 3600 s more") as caught:
        async with script(fake, tmp_path) as (backend, model):
            await backend.train(model, [await group(model, 0.0, 1.0)])
    assert caught.value.retry_after_s == 3600
    assert fake.jobs == {}


async def test_metrics_that_are_no_numbers_do_no_harm(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.outcome = ["never ends"]
        groups = [await group(model, 0.0, 1.0)]
        groups[0].trajectories[0].metrics |= {"speed": float("nan"), "turns": 3}
        running = await backend.train(model, groups, wait=False)
        (job,) = fake.jobs.values()
        metrics = {"policy_loss": float("nan"), "grad_norm": "nan", "entropy": None, "tokens": 5}
        fake._happen(job, "gradient_step", metrics)
        fake._happen(job, "training_ended", {})
        fake.add_checkpoint(job.model_id)
        fake.checkpoints[job.model_id][0]["metrics"] |= {"loss/train": float("nan")}
        result = await running
        assert result.metrics["tokens"] == 5.0
        assert "loss/train" not in result.metrics
        assert job.body["trajectory_groups"][0]["trajectories"][0]["metrics"] == {"turns": 3}
        assert [one.step for one in await backend.list_checkpoints(model)] == [1]
        assert (await backend.train(model, [await group(model, 0.0, 1.0)])).step == 2


async def test_what_cannot_be_sent_leaves_no_job_to_wait_for(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        groups[0].trajectories[0].messages_and_choices[0]["content"] = "half a character: \ud83d"  # type: ignore[index,typeddict-unknown-key]
        with pytest.raises(TrajectoryError, match="cannot be sent as JSON"):
            await backend.train(model, groups)
        assert sent_jobs(tmp_path) == []
        groups = [await group(model, 0.0, float("nan"))]
        with pytest.raises(TrajectoryError, match=r"trajectory 1 of group 0 has reward nan"):
            await backend.train(model, groups)


async def test_a_job_of_a_model_that_was_deleted_is_no_job_of_its_successor(
    fake: FakeServerless, tmp_path: Path
) -> None:
    async with script(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        await backend.train(model, groups, job_id="my-step-1")
    fake.models.clear()  # by hand, at the service
    async with script(fake, tmp_path) as (backend, model):
        assert (await backend.train(model, groups, job_id="my-step-1")).step == 1
    assert len(fake.jobs) == 2


async def test_a_key_that_is_revoked_midway_loses_no_step(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.trouble["/events"] = [status(401)]
        groups = [await group(model, 0.0, 1.0)]
        with pytest.raises(AuthenticationError):
            await backend.train(model, groups, job_id="my-step-1")
    async with script(fake, tmp_path) as (backend, model):
        assert await model.get_step() == 1
        assert (await backend.train(model, groups, job_id="my-step-1")).step == 1
    assert len(fake.jobs) == 1


async def test_a_wrong_key_is_told_at_once_and_never_shown(fake: FakeServerless, tmp_path: Path) -> None:
    backend = art.ServerlessBackend("secret-of-somebody", fake.base_url, path=tmp_path, patience=QUICK)
    async with backend:
        with pytest.raises(AuthenticationError, match="Invalid API key") as caught:
            await new_model(tmp_path).register(backend)
    assert "secret" not in f"{caught.value}{backend!r}"
    assert len(fake.requests) == 1


async def test_a_script_killed_after_sending_finds_its_job_and_goes_on(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.outcome = ["never ends"]
        groups = [await group(model, 0.0, 1.0)]
        job = await backend.train(model, groups, wait=False, job_id="my-step-1")
        job._task.cancel()  # the script ends without waiting
    (sent,) = fake.jobs.values()
    fake._happen(sent, "gradient_step", {"loss": 4.0})
    fake._happen(sent, "training_ended", {})
    fake.add_checkpoint(sent.model_id)
    async with script(fake, tmp_path) as (backend, model):  # registration has waited for the job
        assert await model.get_step() == 1
        known = await backend.train(model, groups, job_id="my-step-1")  # a program that repeats its call
        assert (known.step, known.metrics["loss/train"]) == (1, 4.0)
        assert (await backend.train(model, [await group(model, 0.0, 1.0)])).step == 2
    assert len(fake.jobs) == 2


def everything_in(folder: Path) -> bytes:
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"sent_at" in content
    return content


SCRIPT = """
import asyncio, sys
from pathlib import Path
import art
from tests.support.fake_serverless import KEY
from tests.support.serverless_runs import QUICK, group, new_model

async def main(url, folder):
    async with art.ServerlessBackend(KEY, url, path=folder, patience=QUICK) as backend:
        model = new_model(Path(folder))
        await model.register(backend)
        for step in range(await model.get_step(), 2):
            result = await model.train([await group(model, 0.0, 1.0)], loss="cispo")
            print("trained", result.step, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_process_that_is_killed_in_the_middle_of_a_step(fake: FakeServerless, tmp_path: Path) -> None:
    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, fake.base_url, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )

    fake.outcome = ["never ends"]
    first = await start()
    async with asyncio.timeout(120):
        while not any(request.endswith("/events") for request in fake.requests):
            await asyncio.sleep(0.01)
        first.kill()
        await first.communicate()
    (job,) = fake.jobs.values()
    fake._happen(job, "gradient_step", {"loss": 1.0})
    fake._happen(job, "training_ended", {})
    fake.add_checkpoint(job.model_id)
    second = await start()
    printed, _ = await second.communicate()
    assert (second.returncode, printed.decode().split("\n")[0]) == (0, "trained 2")
    assert (len(fake.jobs), len(fake.checkpoints[job.model_id])) == (2, 2)
    assert KEY.encode() not in await asyncio.to_thread(everything_in, tmp_path), "the key is in no file"


async def test_a_pipeline_trains_while_rollouts_run(fake: FakeServerless, tmp_path: Path) -> None:
    async def one(model: Any, number: int, rollout_index: int) -> art.Trajectory:
        return await rollout(model, float(rollout_index))

    async with script(fake, tmp_path) as (_, model):
        pipeline = art.pipeline(
            model, scenarios=[1, 2, 3], rollout=one, groups_per_step=1, rollouts_per_group=2, max_concurrent=4
        )
        numbers = [step.number async for step in pipeline.train(3, loss="ppo")]
    assert numbers == [1, 2, 3]
    steps = {body["model"].rpartition(":")[2] for body in fake.asked}
    assert "step0" in steps
    assert steps & {"step1", "step2"}, "each rollout asks the checkpoint that it began with"


async def test_a_script_killed_while_sending_finds_its_checkpoint(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        fake.trouble[JOBS] = [lose_answer]
        fake.outcome = ["never ends"]
        call = asyncio.ensure_future(backend.train(model, [await group(model, 0.0, 1.0)]))
        while not fake.jobs or fake.trouble[JOBS]:
            await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    assert [(job["service_job_id"], job["status"]) for job in sent_jobs(tmp_path)] == [(None, None)]
    fake.add_checkpoint(next(iter(fake.models)))
    async with script(fake, tmp_path) as (_, model):
        assert await model.get_step() == 1
    assert (len(fake.jobs), sent_jobs(tmp_path)[0]["status"]["step"]) == (1, 1)


async def test_a_job_id_names_one_job(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        first = await backend.train(model, groups, job_id="my-step-1")
        assert await backend.train(model, groups, job_id="my-step-1") == first
        with pytest.raises(ConflictError, match="my-step-1"):
            await backend.train(model, groups, job_id="my-step-1", learning_rate=1e-4)
        with pytest.raises(NotFoundError, match="no-such-job"):
            await backend.follow_train_job(model, "no-such-job")
    assert len(fake.jobs) == 1


async def test_steps_run_one_after_the_other(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        jobs = [await backend.train(model, groups, wait=False) for _ in range(3)]
        assert [(await job).step for job in jobs] == [1, 2, 3]
        assert (await jobs[0].status()).state == "succeeded"
    assert [job["from_step"] for job in sent_jobs(tmp_path)] == [0, 1, 2]


async def test_groups_without_spread_are_not_sent(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        result = await backend.train(model, [await group(model, 1.0, 1.0)])
        assert (result.step, result.trained, len(fake.jobs)) == (0, False, 0)
        assert result.findings[0] == "every group (1) has equal rewards: there is nothing to learn from"
        fake.outcome = ["nothing to learn"]
        result = await backend.train(model, [await group(model, 0.0, 1.0)])
        assert (result.step, result.trained) == (0, False)
        assert result.findings[0].startswith("the service made no update")


async def test_groups_whose_rollouts_all_failed_are_told_apart(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        failed = await group(model, 0.0, 1.0)
        for trajectory in failed:
            trajectory.metadata["outcome"] = "infra_fault"
        result = await backend.train(model, [failed, await group(model, 0.0, 1.0)])
        assert result.findings[0] == "groups [0] of 2 have failed rollouts only: they teach nothing and were not sent"
        result = await backend.train(model, [failed, await group(model, 1.0, 1.0)])
        assert not result.trained
        assert "groups [1] of 2 have equal rewards" in result.findings[0]
        with pytest.raises(NothingTrainableError, match="2 failed rollouts"):
            await backend.train(model, [failed], on_nothing="raise")


async def test_a_damaged_list_of_jobs_is_not_replaced(fake: FakeServerless, tmp_path: Path) -> None:
    async with script(fake, tmp_path) as (backend, model):
        await backend.train(model, [await group(model, 0.0, 1.0)])
    path = tmp_path / "shop/models/agent/sent_jobs.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(StorageError, match=r"sent_jobs\.json cannot be read"):
        async with script(fake, tmp_path):
            pass
