"""The index of rollouts: what it takes from files, as they grow, are damaged, are replaced or vanish."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from art.errors import StorageError
from art.storage.layout import DataDir
from art.trajectory import TrajectoryGroup
from art_page.databases import IndexStore
from art_page.index_files import trajectory_entry
from art_page.rollout_answers import RolloutKey, RolloutTable, RolloutTableQuery
from art_page.viewer import Viewer
from tests.support.viewer_dirs import RUN, group_file, log, rollout


def page(viewer: Viewer, **query: object) -> RolloutTable:
    answer = viewer.rollouts(*RUN, RolloutTableQuery.model_validate(query))
    for _ in range(100):
        if answer.is_total_exact:
            break
        answer = viewer.rollouts(*RUN, RolloutTableQuery.model_validate(query))
    return answer


def test_rows_have_what_the_trajectories_say(viewer: Viewer, data_dir: DataDir) -> None:
    good = rollout(0.75, "Paris", "Yes", metrics={"duration": 2.5}, initial_policy_version=3)
    bad = rollout(0.0, "Rome", metrics={"invalid_move": 1.0})
    log(data_dir, [TrajectoryGroup([good, bad, RuntimeError("the tool server is down")])], step=4)
    rows = page(viewer).rows
    assert [(row.group, row.index, row.reward, row.num_turns, row.outcome) for row in rows] == [
        (0, 0, 0.75, 2, "ok"), (0, 1, 0.0, 1, "policy_fault"), (0, 2, None, 0, "infra_fault"),
    ]  # fmt: skip
    first = rows[0]
    assert (first.split, first.step, first.scenario, first.stop) == ("train", 4, "s1", "stop")
    assert (first.duration_s, first.policy_version) == (2.5, 3)
    assert first.started_at == pytest.approx(good.start_time.timestamp())


def test_a_growing_file(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    assert page(viewer).total == 1
    log(data_dir, [TrajectoryGroup([rollout(0.0), rollout(0.5)])], step=1)
    rows = page(viewer, step=1).rows
    assert [(row.group, row.index, row.reward) for row in rows] == [(0, 0, 1.0), (1, 0, 0.0), (1, 1, 0.5)]


def test_a_line_that_a_crash_cut_off_waits_and_damaged_lines_are_left_out(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    file = group_file(data_dir, 1)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"not": "a group"}\n\x00\xff garbage\n' + whole[: len(whole) // 2])
    assert page(viewer).total == 1
    assert page(viewer).is_total_exact, "an incomplete last line must not keep the index busy"
    file.write_bytes(file.read_bytes() + whole[len(whole) // 2 :])
    assert page(viewer).total == 2


def test_a_file_that_was_replaced_or_deleted_is_read_again(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0, "Paris")])], step=1)
    log(data_dir, [TrajectoryGroup([rollout(0.5, "Rome")])], step=2)
    assert page(viewer, text="Paris").total == 1
    shutil.copy(group_file(data_dir, 2), group_file(data_dir, 1))
    assert [row.reward for row in page(viewer).rows] == [0.5, 0.5]
    assert page(viewer, text="Paris").total == 0
    group_file(data_dir, 1).unlink()
    assert [row.step for row in page(viewer).rows] == [2]


def test_nothing_is_read_twice_after_a_restart_or_a_copy(viewer: Viewer, data_dir: DataDir, tmp_path: Path) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    page(viewer)
    viewer.close()
    copy = DataDir(tmp_path / "copy")
    shutil.copytree(data_dir.root, copy.root)
    again = Viewer(copy)
    ids = again.store.read("SELECT id FROM rollouts")
    assert page(again).total == 1
    assert again.store.read("SELECT id FROM rollouts") == ids
    again.close()


@pytest.mark.parametrize("content", [b"this is no database" * 500, b""])
def test_a_damaged_index_is_made_again(data_dir: DataDir, content: bytes) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    data_dir.viewer_index.write_bytes(content)
    viewer = Viewer(data_dir)
    assert page(viewer).total == 1
    viewer.close()


def test_an_index_that_is_damaged_or_deleted_while_it_is_used_is_named(viewer: Viewer, data_dir: DataDir) -> None:
    for step in range(1, 30):
        log(data_dir, [TrajectoryGroup([rollout(1.0, "word " * 300)])], step=step)
    assert page(viewer).total == 29
    viewer.close()
    size = data_dir.viewer_index.stat().st_size
    with data_dir.viewer_index.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(size - 8192))
    with pytest.raises(StorageError, match="delete it, and restart"):
        page(Viewer(data_dir), text="word")
    for path in data_dir.root.glob(".viewer.db*"):
        path.unlink()
    with pytest.raises(StorageError, match=r"\.viewer\.db was deleted or replaced"):
        viewer.store.read("SELECT 1")
    again = Viewer(data_dir)
    assert page(again, text="word").total == 29
    again.close()


def test_an_index_of_an_older_form_is_made_again(data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    viewer = Viewer(data_dir)
    page(viewer)
    viewer.store.write(lambda db: db.execute("PRAGMA user_version=2"))
    viewer.close()
    again = Viewer(data_dir)
    assert again.store.read("SELECT count(*) FROM rollouts") == [(0,)]
    assert page(again).total == 1
    again.close()


def test_a_directory_that_cannot_be_written_gets_its_index_in_the_cache(
    data_dir: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data_dir.root.mkdir()
    (data_dir.root / ".viewer.db").mkdir()  # nobody can open this as a file, not even root
    store = IndexStore(data_dir.viewer_index)
    assert store.path.is_relative_to(tmp_path / "cache")
    assert stat.S_IMODE(store.path.stat().st_mode) & 0o077 == 0, "trajectories are nobody else's business"
    store.close()


def test_many_threads_ask_while_a_script_logs(viewer: Viewer, data_dir: DataDir) -> None:
    problems: list[BaseException] = []
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)

    def ask() -> None:
        try:
            for _ in range(15):
                viewer.rollouts(*RUN, RolloutTableQuery(text="capital"))
                viewer.runs()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(2, 12):
        log(data_dir, [TrajectoryGroup([rollout(1.0), rollout(0.0)])], step=step)
    for thread in threads:
        thread.join()
    assert problems == []
    assert page(viewer).total == 21
    assert viewer.store.read("SELECT count(DISTINCT id) FROM rollouts") == [(21,)]


def test_two_viewers_share_one_index(data_dir: DataDir) -> None:
    for step in range(1, 9):
        log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=step)
    viewers = [Viewer(data_dir), Viewer(data_dir)]
    threads = [threading.Thread(target=page, args=(viewer,)) for viewer in viewers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [page(viewer).total for viewer in viewers] == [8, 8]
    for viewer in viewers:
        viewer.close()


def test_trajectories_of_unexpected_form_are_no_error(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    strange = (
        b'{"trajectories": [{"messages_and_choices": [3, {"content": [{"type": "image_url"}, {"text": "hi"}]}], '
        b'"reward": "high", "metrics": {"duration": [], "m": null}, "metadata": 5, "logs": "x", "start_time": 12, '
        b'"additional_histories": 7}], "exceptions": [{"type": 1}], "metadata": []}\n'
        b'{"trajectories": [{"messages_and_choices": [{"role": "user", "content": "\\ud800"}]}]}\n'
    )
    with group_file(data_dir, 1).open("ab") as file:
        file.write(strange)
    assert page(viewer).total == 4
    detail = viewer.rollout(*RUN, RolloutKey(split="train", step=1, group=1, index=0))
    assert detail.histories[0].items[0].text == "[image_url]\nhi"
    assert viewer.rollout(*RUN, RolloutKey(split="train", step=1, group=2, index=0)).model_dump_json()


def test_a_rollout_takes_from_its_first_request_to_its_last_answer() -> None:
    choices = [
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "a"},
         "exchange": {"started_at": start, "ended_at": start + 2.0}}
        for start in (100.0, 105.0)
    ]  # fmt: skip
    trajectory = {"messages_and_choices": choices, "reward": 1.0}
    assert trajectory_entry(trajectory, {}).values.duration_s == 7.0
    assert trajectory_entry(trajectory | {"metrics": {"duration": 3.5}}, {}).values.duration_s == 3.5
    assert trajectory_entry({"messages_and_choices": [], "reward": 1.0}, {}).values.duration_s is None


def test_files_that_are_links_are_not_read(viewer: Viewer, data_dir: DataDir, tmp_path: Path) -> None:
    """A data directory may come from somebody else, and a link in it lead to a private file of the reader."""
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1, secret=1.0)
    log(data_dir, [TrajectoryGroup([rollout(0.5)])], step=2)
    for path in (data_dir.model(*RUN).history, group_file(data_dir, 1)):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert [row.step for row in page(viewer).rows] == [2]
    assert viewer.run(*RUN).splits[0].steps == [(2, 2)]
    assert "secret" not in viewer.run(*RUN).model_dump_json()
