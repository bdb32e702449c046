"""One rollout and one group, from the files and from the record."""

from __future__ import annotations

from typing import Any

import pytest

from art.errors import InvalidRequestError, NotFoundError
from art.storage.layout import DataDir
from art.trajectory import History, Trajectory, TrajectoryGroup
from art_page.rollout_answers import RolloutDetail, RolloutKey, RolloutTableQuery
from art_page.viewer import Viewer
from tests.support.viewer_dirs import RUN, choice, group_file, log, rollout

HOSTILE = "<script>alert(1)</script>\u202e"


def read(viewer: Viewer, index: int = 0, *, group: int = 0, step: int = 1) -> RolloutDetail:
    return viewer.rollout(*RUN, RolloutKey(split="train", step=step, group=group, index=index))


def test_a_conversation_is_shown_whole(viewer: Viewer, data_dir: DataDir) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    ]
    trajectory = Trajectory(
        messages_and_choices=[
            {"role": "system", "content": HOSTILE},
            {
                "role": "user",
                "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
            choice(
                "",
                "ex_00000000000001aaaaaaaaaaaa",
                finish_reason="tool_calls",
                tool_calls=[call],
                reasoning_content="Hm",
            ),
            {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
            choice("A tree."),
        ],
        tools=tools,
        additional_histories=[History(messages_and_choices=[{"role": "user", "content": "sub"}, choice("done")])],
        reward=1.0,
        metrics={"right": 1.0, "odd": float("nan")},
        metadata={"note": HOSTILE, "scenario_id": "s9"},
        logs=["first line"],
    )
    log(data_dir, [TrajectoryGroup([trajectory])], step=1)
    detail = read(viewer)
    main, further = detail.histories
    assert [item.role for item in main.items] == ["system", "user", "assistant", "tool", "assistant"]
    assert main.items[0].text == HOSTILE
    assert main.items[1].text == "See\n[image_url]"
    answer = main.items[2]
    assert (answer.is_sampled, answer.reasoning, answer.finish_reason) == (True, "Hm", "tool_calls")
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [("c1", "look", '{"at": 1}')]
    assert main.items[3].tool_call_id == "c1"
    assert (main.tools[0].name, main.tools[0].description, main.tools[0].parameters) == (
        "look",
        "Look.",
        {"type": "object"},
    )
    assert [item.text for item in further.items] == ["sub", "done"]
    assert detail.num_turns == 3
    assert detail.metrics == {"right": 1.0, "odd": None}
    assert detail.metadata == {"note": HOSTILE, "scenario_id": "s9"}
    assert detail.logs == ["first line"]
    assert "NaN" not in detail.model_dump_json()


def test_an_answer_has_what_the_record_knows_of_it(viewer: Viewer, data_dir: DataDir) -> None:
    recorded = choice("yes", "ex_1")
    recorded.exchange = {
        "policy_version": 7, "started_at": 1000.5, "ended_at": 1002.0, "prompt_tokens": 2, "completion_tokens": 3,
    }  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": "?"}, recorded, choice("no", "ex_gone")]
    log(data_dir, [TrajectoryGroup([Trajectory(messages_and_choices=messages)])], step=1)
    _, known, unknown = read(viewer).histories[0].items
    assert (known.policy_version, known.num_tokens, known.started_at, known.duration_s) == (7, 3, 1000.5, 1.5)
    assert (unknown.policy_version, unknown.started_at, unknown.duration_s) == (None, None, None)


def test_a_rollout_that_failed_has_its_exception(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0), RuntimeError("the tool server is down")])], step=1)
    detail = read(viewer, 1)
    assert detail.outcome == "infra_fault"
    assert detail.error is not None
    assert detail.error.startswith("RuntimeError: the tool server is down")
    assert detail.histories == []
    assert viewer.rollouts(*RUN, RolloutTableQuery(step=1, text="tool server")).total == 1


def test_neighbours_are_in_the_order_of_groups(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(0.0), rollout(1.0)]), TrajectoryGroup([rollout(0.5)])], step=1)
    detail = read(viewer, 1)
    assert detail.previous == RolloutKey(split="train", step=1, group=0, index=0)
    assert detail.next == RolloutKey(split="train", step=1, group=1, index=0)
    assert read(viewer, group=1).next is None


@pytest.mark.parametrize(("group", "index", "step"), [(0, 1, 1), (1, 0, 1), (0, 0, 2)])
def test_a_rollout_that_does_not_exist(viewer: Viewer, data_dir: DataDir, group: int, index: int, step: int) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    with pytest.raises(NotFoundError):
        read(viewer, index, group=group, step=step)


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "", "\0", ".viewer.db", "x" * 300])
def test_names_cannot_leave_the_directory(viewer: Viewer, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        viewer.run("games", name)
    with pytest.raises((InvalidRequestError, NotFoundError)):
        viewer.group("games", "agent-001", name, 1, 0)


def test_a_split_from_a_url_cannot_leave_the_directory(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    (data_dir.root / "0001.jsonl").write_bytes(group_file(data_dir, 1).read_bytes())
    with pytest.raises(NotFoundError):
        viewer.group(*RUN, "../../../..", 1, 0)


def test_a_group_has_the_best_first(viewer: Viewer, data_dir: DataDir) -> None:
    texts = {0.2: "Paris or Rome", 1.0: "Paris it is", 0.5: "Paris it is"}
    group = TrajectoryGroup([rollout(reward, text) for reward, text in texts.items()], metrics={"spread": 0.8})
    group.trajectories.append(rollout(0.1, "Paris it is", "Yes"))
    log(data_dir, [group], step=1)
    answer = viewer.group(*RUN, "train", 1, 0)
    assert [detail.reward for detail in answer.rollouts] == [1.0, 0.5, 0.2, 0.1]
    assert (answer.scenario, answer.num_rollouts, answer.metrics) == ("s1", 4, {"spread": 0.8})


def test_a_judge_is_shown_with_its_passes(viewer: Viewer, data_dir: DataDir) -> None:
    scores = {
        "independent_reward": 0.0,
        "ruler_score": 0.7,
        "ruler/pass_1": 0.8,
        "ruler/pass_2": 0.6,
        "ruler/tone": 0.9,
    }
    logs = ["own line", "RULER explanation: it is right"]
    judged = rollout(0.7, metrics=scores, logs=logs)
    log(data_dir, [TrajectoryGroup([judged], metrics={"judge_disagreement": 0.1})], step=1)
    answer = viewer.group(*RUN, "train", 1, 0)
    judge = answer.rollouts[0].judge
    assert judge is not None
    assert (judge.name, judge.score, judge.passes, judge.explanation) == ("ruler", 0.7, [0.8, 0.6], "it is right")
    assert judge.parts == {"tone": 0.9}
    assert judge.disagreement == pytest.approx(0.1 * 2**0.5)
    assert answer.metrics["judge_disagreement"] == 0.1
    assert answer.rollouts[0].judge_score == 0.7


def test_a_metric_called_score_is_no_judge(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(0.7, metrics={"game_score": 12.0})])], step=1)
    assert read(viewer).judge is None


def test_a_file_that_changed_under_the_index_is_said(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    read(viewer)
    viewer.indexer.survey_s = 60.0  # the change is not noticed
    group_file(data_dir, 1).write_text("")
    assert read(viewer).missing is not None
