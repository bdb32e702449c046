"""What the page says about tokens and the prefix tree of real steps, with `LocalBackend`."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.config import TrainConfig
from art.storage.layout import DataDir
from art.storage.step_files import NAME, read_plans, remove_old_token_files
from art.tasks.yes_no_maybe import parse_answer
from art_page.rollout_answers import RolloutKey, RolloutTokens, TokensQuery, TreeQuery
from art_page.viewer import Viewer
from tests.support.model_folder import paths_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUESTION = {"role": "user", "content": "say yes, no or maybe"}
NAMES = ("token-views", "agent")


async def rollout(model: art.TrainableModel, reward: float | None = None) -> art.Trajectory:
    """Two answers, and between them a message of the environment."""
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[QUESTION])
    for turn in range(2):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=4, logprobs=True
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        if turn == 0:
            trajectory.reward = float(parse_answer(completion.choices[0].message.content) == "maybe")
            trajectory.messages_and_choices.append({"role": "user", "content": "maybe maybe"})
    trajectory.reward = trajectory.reward if reward is None else reward
    return trajectory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def steps(shared_backend: art.LocalBackend, tiny_model: Path) -> tuple[Viewer, list[art.TrainResult]]:
    """Three steps of which the newest two keep their token files, a request that trained nothing, and held-out rollouts."""
    model = art.TrainableModel(name=NAMES[1], project=NAMES[0], base_model=str(tiny_model))
    await model.register(shared_backend)
    results = []
    for _ in range(3):
        groups = [
            art.TrajectoryGroup([await rollout(model, number % 2) for number in range(4)]),
            art.TrajectoryGroup([await rollout(model, 0.5) for _ in range(2)]),
        ]
        results.append(await model.train(groups, TrainConfig(learning_rate=1e-3, observation_weight=0.1)))
    results.append(await model.train(groups[1:]))
    await model.log([art.TrajectoryGroup([await rollout(model)])], split="val")
    data_dir = DataDir(Path(paths_of(model).root).parents[2])
    remove_old_token_files(data_dir.model(*NAMES).steps, newest=3, keep=2)
    return Viewer(data_dir), results


def tokens(viewer: Viewer, split: str, step: int, group: int, index: int) -> RolloutTokens:
    return viewer.tokens(*NAMES, RolloutKey(split=split, step=step, group=group, index=index), TokensQuery())


async def test_every_token_of_a_trained_rollout_is_explained(steps: tuple[Viewer, list[art.TrainResult]]) -> None:
    viewer, _ = steps
    answer = tokens(viewer, "train", 3, 0, 1)
    assert answer.missing is None
    assert (answer.step, len(answer.paths)) == (3, 1)
    assert [span.role for span in answer.spans] == ["prompt", "policy", "user", "policy"]
    assert [span.policy_version for span in answer.spans if span.sampled] == [2, 2]
    assert [(span.reason, span.trained) for span in answer.spans if not span.sampled] == [
        ("prompt", False),
        ("learnt as observation", True),
    ]
    text = "".join(text or "" for text in answer.texts)
    assert "say yes, no or maybe" in text
    assert text.startswith("<|im_start|>")
    assert answer.is_special[0]
    for span in (span for span in answer.spans if span.sampled):
        for place in range(span.start, span.end):
            ratio, sampler, policy = (
                answer.values[name][place] for name in ("importance_ratio", "sampling_logprob", "policy_logprob")
            )
            assert ratio == pytest.approx(math.exp(policy - sampler), abs=5e-3)
            assert ratio == pytest.approx(1, abs=5e-3)  # the engine sampled with the weights that were trained
            assert answer.values["advantage"][place] == pytest.approx(0.5, abs=1e-3)
            assert answer.values["entropy"][place] >= 0
    assert {place for span in answer.spans if span.sampled for place in range(span.start, span.end)} == {
        place for place, value in enumerate(answer.values["sampling_logprob"]) if value is not None
    }


async def test_a_dropped_rollout_says_why(steps: tuple[Viewer, list[art.TrainResult]]) -> None:
    answer = tokens(steps[0], "train", 3, 1, 0)
    reasons = {span.reason for span in answer.spans if span.sampled}
    assert reasons == {"dropped: no spread of rewards in the group"}
    assert {"sampling_logprob"} <= answer.values.keys()
    assert "importance_ratio" not in answer.values or all(
        answer.values["importance_ratio"][place] is None for span in answer.spans if span.sampled
        for place in range(span.start, span.end)
    )  # fmt: skip


async def test_held_out_rollouts_have_their_tokens_and_the_samplers_log_probs(
    steps: tuple[Viewer, list[art.TrainResult]],
) -> None:
    answer = tokens(steps[0], "val", 3, 0, 0)
    assert answer.step is None
    assert {span.reason for span in answer.spans if span.sampled} == {"no step is known that was given this rollout"}
    assert list(answer.values) == ["sampling_logprob"]
    assert all(isinstance(text, str) for text in answer.texts)


async def test_the_records_add_up_to_the_ledger(steps: tuple[Viewer, list[art.TrainResult]]) -> None:
    viewer, results = steps
    paths = viewer.data_dir.model(*NAMES)
    for result in results[:3]:
        plan = next(plan for plan in read_plans(paths.step(result.step)) if plan.trained)
        rollouts = [rollout for group in plan.groups for rollout in group.rollouts]
        dropped = sum((Counter(rollout.dropped_tokens) for rollout in rollouts), Counter())
        assert sum(rollout.trained_tokens for rollout in rollouts) == result.metrics["ledger/trained_tokens"]
        for reason, count in dropped.items():
            assert count == result.metrics[f"ledger/dropped_tokens/{reason}"]
        assert [group.left_out for group in plan.groups] == [None, "equal_rewards"]
    untrained = [plan for plan in read_plans(paths.step(3)) if not plan.trained]
    assert [(plan.from_step, plan.step, len(plan.groups)) for plan in untrained] == [(3, 3, 1)]


async def test_the_tree_is_what_the_trainer_computed(steps: tuple[Viewer, list[art.TrainResult]]) -> None:
    viewer, results = steps
    tree = viewer.tree(*NAMES, 3, TreeQuery())
    assert tree.missing is None
    assert tree.num_computed == results[2].metrics["data/step_trainer_tokens"]
    assert tree.num_path_tokens <= results[2].metrics["data/step_tokens_unshared"]
    root = tree.nodes[0]
    assert (root.num_paths, root.parent, root.kind) == (tree.num_paths, None, "context")
    assert "say yes, no or maybe" in (root.text or "")
    assert {(key.split, key.step) for key in root.rollouts} == {("train", 3)}
    assert len(root.rollouts) == 5  # at most; the observations of the dropped group are in the tree too


async def test_older_token_files_are_deleted_and_the_page_says_so(steps: tuple[Viewer, list[art.TrainResult]]) -> None:
    viewer, _ = steps
    paths = viewer.data_dir.model(*NAMES)
    assert [(paths.step(step) / NAME).exists() for step in (1, 2, 3)] == [False, True, True]
    assert "only newer steps keep theirs" in (viewer.tree(*NAMES, 1, TreeQuery()).missing or "")
    answer = tokens(viewer, "train", 1, 0, 1)
    assert "have been deleted" in (answer.missing or "")
    assert {span.reason for span in answer.spans if span.sampled} == {
        "trained; which of its tokens were masked is not known any more"
    }


async def test_a_step_without_a_record_is_not_taken_for_one_that_learnt_nothing(
    steps: tuple[Viewer, list[art.TrainResult]],
) -> None:
    viewer, _ = steps
    for plan in viewer.data_dir.model(*NAMES).step(1).glob("plan-*"):
        plan.write_text("damaged")
    answer = tokens(viewer, "train", 1, 0, 1)
    assert answer.step is None
    assert "What the step learnt from this rollout is not known" in (answer.missing or "")
    assert "sampling_logprob" in answer.values
    assert "is damaged" in (viewer.tree(*NAMES, 1, TreeQuery()).missing or "")
    assert "before training" in (viewer.tree(*NAMES, 0, TreeQuery()).missing or "")


async def test_when_the_record_is_gone_the_page_says_so(
    steps: tuple[Viewer, list[art.TrainResult]], tmp_path: Path
) -> None:
    viewer, _ = steps
    with sqlite3.connect(viewer.data_dir.database) as source, sqlite3.connect(tmp_path / "art.db") as copy:
        source.backup(copy)
        copy.execute("DELETE FROM exchanges")
    (tmp_path / NAMES[0]).symlink_to(viewer.data_dir.root / NAMES[0])
    later = Viewer(DataDir(tmp_path))
    answer = tokens(later, "train", 3, 0, 1)
    later.close()
    assert "are not in the record" in (answer.missing or "")
    assert (answer.step, answer.paths, answer.token_ids) == (3, [], [])
