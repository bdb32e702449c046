"""A training request of one project, with names and ids of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art.config import DistillConfig, DpoConfig, ModelSettings, TrainConfig
from art.engine import EngineInfo
from art.errors import ConfigError, NothingTrainableError, TrajectoryError, TrajectoryMismatchError
from art.protocol.training import PreflightRequest, TrainRequest, WireGroup, WireTrajectory
from art.record.recorder import Exchange
from art.runtime.jobs.job import TrainPayload
from art.runtime.registry import RegisteredModel
from art.runtime.submission import Submission
from art.storage.layout import DataDir
from tests.support.recorded_exchanges import FIRST, SECOND, USER, Recorded, choice, group, trajectory

SECRET = "the launch code is 0000"
FOREIGN = replace(FIRST, id="foreign", project="q", message={"role": "assistant", "content": SECRET})


class Store(Recorded):
    def find(self, ids: list[str]) -> dict[str, Exchange]:
        return {id: self._by_id[id] for id in ids if id in self._by_id}


class Engine:
    async def info(self) -> EngineInfo:
        return EngineInfo(vocab_size=32, max_context=64, dtype="float32", device="cpu")

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


class Setup:
    """The model `p/m`, and around it only what a submission asks."""

    def __init__(self, root: Path) -> None:
        self.marked: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.resolved: list[str] = []
        model = RegisteredModel(project="p", name="m", base_model="base", settings=ModelSettings(), step=3)
        host = SimpleNamespace(engine=Engine(), renderer=self.renderer)
        recorder = Store(FIRST, SECOND, FOREIGN)
        recorder.usage = self  # type: ignore[attr-defined]
        self.submission: Any = Submission(
            models=SimpleNamespace(  # type: ignore[arg-type]
                find=lambda project, name: (model, host), data_dir=DataDir(root), checkpoint=lambda model, step: root
            ),
            gateway=SimpleNamespace(recorder=recorder, rollouts=self),  # type: ignore[arg-type]
            resolver=self,  # type: ignore[arg-type]
            jobs=self,  # type: ignore[arg-type]
        )
        self.submission._preflight = self

    async def renderer(self) -> Any:
        if not hasattr(self, "_renderer"):
            raise AssertionError("nothing is rendered in a step without supervised data")
        return self._renderer

    async def ensure(self, *model: Any) -> list[str]:
        return []

    # -- the usage of the project
    def check_training(self, project: str, num_queued: int) -> None:
        self.asked_quota = (project, num_queued)

    def num_steps_left(self, project: str) -> int:
        return 2

    # -- the rollouts
    async def mark_trained(self, exchange_ids: list[str], job_id: str, project: str) -> None:
        self.marked.append((job_id, project))

    async def mark_refused(self, exchange_ids: list[str], refused: list[str], reason: str, project: str) -> None:
        self.refused.append((reason, project))

    # -- the resolver: both projects have a model `teacher`
    def name_in(self, project: str, model: str) -> str | None:
        return f"{project}/{model}" if model == "teacher" else None

    async def resolve(self, model: str) -> Any:
        self.resolved.append(model)
        project, _, name = model.partition("/")
        return SimpleNamespace(project=project, name=name, policy_version=0, engine=Engine(), adapter=None)

    # -- the jobs
    async def known(self, job_id: str, fingerprint: int) -> None:
        return None

    async def submit(self, *job: Any) -> str:
        self.payload = TrainPayload.model_validate_json(job[3].model_dump_json())
        return "queued"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def train(*groups: WireGroup, **config: Any) -> TrainRequest:
    return TrainRequest(job_id="job-0001", groups=list(groups), config=TrainConfig(**config))


class Letters:
    """A chat template that writes the first letter of each message after its role, one token per letter."""

    def render(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        return [*(ord(letter) - 97 for m in messages for letter in (m["role"][0], m["content"][0])), 0]

    def completions(self, messages: list[dict[str, Any]], tools: Any) -> Iterator[tuple[int, list[int], list[int]]]:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                yield i, self.render(messages[:i], tools), [ord(message["content"][0]) - 97]


GIVEN = {"histories": [{"items": [USER, {"role": "assistant", "content": "yes"}]}]}


async def test_supervised_data_is_queued_with_the_step(setup: Setup) -> None:
    setup._renderer = Letters()
    request = train(group(1.0, 0.0)).model_copy(update={"sft": [WireTrajectory.model_validate(GIVEN)]})
    await setup.submission.train("p", "m", request)
    (path,) = setup.payload.sft
    assert (path.sample_id, path.learnt) == ("sft[0].histories[0].messages[1]", [(3, 4)])
    assert len(setup.payload.plan.samples) == 2
    assert setup.payload.plan.metrics["data/step_num_sft_trajectories"] == 1
    assert setup.payload.plan.metrics["ledger/retokenised_messages"] == 1
    assert setup.payload.plan.ledger["ledger/sampled_tokens"] == 8, "what was not sampled is not in the ledger"


async def test_a_step_of_supervised_data_alone_trains(setup: Setup) -> None:
    setup._renderer = Letters()
    flat = train(group(1.0, 1.0))
    await setup.submission.train("p", "m", flat)
    assert setup.payload.is_empty
    assert "no step was trained" in setup.payload.plan.findings[0]
    await setup.submission.train(
        "p", "m", flat.model_copy(update={"sft": [WireTrajectory.model_validate(GIVEN)], "job_id": "job-0002"})
    )
    assert not setup.payload.is_empty
    equal, repeated = setup.payload.plan.findings
    assert equal == "groups[0]: all rewards are equal, nothing to learn"
    assert repeated.startswith("groups[0].trajectories[1]: the same recorded answers as an earlier trajectory")


@pytest.mark.parametrize("groups", [[], [WireGroup(trajectories=[])]])
async def test_a_step_without_any_trajectory_is_refused(setup: Setup, groups: list[WireGroup]) -> None:
    with pytest.raises(NothingTrainableError, match=r"nothing to train on: `groups` has [01] groups and no trajectory"):
        await setup.submission.train("p", "m", train(*groups))
    given = [WireTrajectory.model_validate(GIVEN)]
    with pytest.raises(NothingTrainableError):  # supervised data alone has a call of its own, `train_sft`
        await setup.submission.train("p", "m", train(*groups).model_copy(update={"sft": given}))


async def test_supervised_data_that_cannot_be_mixed_in(setup: Setup) -> None:
    setup._renderer = Letters()
    given = [WireTrajectory.model_validate(GIVEN)]
    with pytest.raises(ConfigError, match="dpo is a loss of pairs alone and takes no supervised data"):
        await setup.submission.train(
            "p", "m", train(group(1.0, 0.0), loss=DpoConfig()).model_copy(update={"sft": given})
        )
    nothing = WireTrajectory.model_validate({"histories": [{"items": [USER]}]})
    with pytest.raises(
        NothingTrainableError, match="no assistant message to learn from in the 1 trajectories of `sft`"
    ):
        await setup.submission.train("p", "m", train(group(1.0, 0.0)).model_copy(update={"sft": [nothing]}))
    named = WireTrajectory.model_validate({"histories": [{"answers": [{"exchange_id": "e1"}]}]})
    with pytest.raises(TrajectoryError, match=r"sft\[0\]\.histories\[0\] names its answers"):
        await setup.submission.train("p", "m", train(group(1.0, 0.0)).model_copy(update={"sft": [named]}))


@pytest.mark.parametrize("text", ["guessed", SECRET])
async def test_an_exchange_of_another_project_is_not_recorded(setup: Setup, text: str) -> None:
    foreign = WireGroup(trajectories=[{"reward": 1.0, "histories": [{"items": [USER, choice("foreign", text)]}]}])  # type: ignore[list-item]
    for ask in (
        setup.submission.train("p", "m", train(foreign)),
        setup.submission.preflight("p", "m", PreflightRequest(quick=False, trial=False, groups=[foreign])),
    ):
        with pytest.raises(TrajectoryMismatchError, match="'foreign' of project p is not recorded") as caught:
            await ask
        assert SECRET not in caught.value.message


async def test_a_bare_teacher_is_a_model_of_the_own_project(setup: Setup) -> None:
    await setup.submission.train("p", "m", train(group(1.0, 0.0), loss=DistillConfig(teacher="teacher")))
    await setup.submission.train("p", "m", train(group(1.0, 0.0), loss=DistillConfig(teacher="q/teacher")))
    assert setup.resolved == ["p/teacher", "q/teacher"]


async def test_rollouts_are_marked_as_trained_in_the_own_project(setup: Setup) -> None:
    await setup.submission.train("p", "m", train(WireGroup(trajectories=[trajectory(1.0), trajectory(0.0)])))
    assert setup.marked == [("job-0001", "p")]
