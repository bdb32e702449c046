"""A copied page: it has what was asked for, says what it lacks, and answers from files."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError, NotFoundError
from art.storage.layout import DataDir
from art.viewer.export import ExportOptions, ExportResult, choose_steps, export_folder, parse_ranges, spread
from art.viewer.viewer import Viewer
from tests.support.logged_run import HOSTILE, log_run

node = pytest.mark.skipif(shutil.which("node") is None, reason="node answers as the page does")
ASK = """
const fs = require("fs"), vm = require("vm");
const document = { createElement: () => ({ addEventListener(kind, act) { this[kind] = act; } }),
  head: { append(script) { load(script.src); script.load(); } } };
const context = vm.createContext({ document, URLSearchParams, Map, Set, Promise, Error, console });
vm.runInContext("globalThis.globalThis = globalThis", context);
const load = (name) => vm.runInContext(fs.readFileSync(name, "utf8"), context);
load("answers.js"); load("data/manifest.js");
(async () => {
  const out = [];
  for (const address of JSON.parse(process.argv[2]))
    out.push(await context.artExport.get(address).then((answer) => ({ answer }), (error) => ({ error: error.message })));
  console.log(JSON.stringify(out));
})();
"""


@pytest.fixture
async def viewer(tmp_path: Path) -> AsyncIterator[Viewer]:
    await log_run(tmp_path / "data")
    with contextlib.closing(Viewer(DataDir(tmp_path / "data"))) as viewer:
        viewer.indexer.ensure("games", "agent", wait_s=60)
        yield viewer


def export(viewer: Viewer, folder: Path, **options: Any) -> ExportResult:
    return export_folder(viewer, folder, ExportOptions(**options), lambda text: text.replace(str(folder.parent), ""))


def ask(folder: Path, *addresses: str) -> list[Any]:
    """What the page gets for addresses; errors as texts."""
    done = subprocess.run(
        ["node", "-e", ASK, "x", json.dumps(addresses)], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [one.get("answer", one.get("error")) for one in json.loads(done.stdout)]


async def test_files_that_are_links_are_not_published(tmp_path: Path) -> None:
    """A data directory may come from somebody else, and a link in it lead to a private file of the reader."""
    private, data = tmp_path / "private", tmp_path / "data"
    await log_run(private, name="mine")
    await log_run(data)
    paths = DataDir(data).model("games", "agent")
    mine = DataDir(private).model("games", "mine")
    mine.history.write_text('{"step": 1, "split": "train", "metrics": {"SECRETMETRIC": 1.0}}\n')
    for path, target in [(paths.history, mine.history), (paths.trajectories("train", 1), mine.trajectories("val", 1))]:
        path.unlink()
        path.symlink_to(target)
    with contextlib.closing(Viewer(DataDir(data))) as viewer:
        viewer.indexer.ensure("games", "agent", wait_s=60)
        export(viewer, tmp_path / "out", num_rollouts=10)
    published = "".join(path.read_text() for path in (tmp_path / "out").rglob("*.js"))
    assert "SECRETMETRIC" not in published
    assert "answer of step 2" in published
    assert '"split":"train","step":1' not in published.replace(" ", "")


def test_the_page_needs_nothing_from_outside_and_says_what_it_is(viewer: Viewer, tmp_path: Path) -> None:
    result = export(viewer, tmp_path / "out", num_rollouts=4)
    page = (tmp_path / "out/index.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src" not in policy[1]
    assert 'type="module"' not in page
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert (tmp_path / "out" / name).is_file(), name
    assert "made by art view --export" in page
    assert "--rollouts" in page
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) == result.size_bytes
    assert result.compressed_bytes < result.size_bytes / 2
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.js"))


def test_what_is_left_out_is_counted(viewer: Viewer, tmp_path: Path) -> None:
    whole = export(viewer, tmp_path / "whole")
    assert (whole.counts.num_rollouts, whole.counts.num_all_rollouts) == (42, 42)
    assert whole.counts.num_steps == 6
    part = export(viewer, tmp_path / "part", num_rollouts=4, steps=((2, 3),))
    assert part.counts.num_rollouts == 12
    assert any("30 of 42 rollouts" in sentence for sentence in part.left_out)
    tiny = export(viewer, tmp_path / "tiny", max_bytes=1)
    assert tiny.counts.num_steps == 1
    assert (tmp_path / "tiny/data/games/agent/run.js").is_file(), "curves are there however little place rollouts have"


@node
def test_answers_of_the_copy_are_those_of_the_server(viewer: Viewer, tmp_path: Path) -> None:
    export(viewer, tmp_path / "out")
    base = "runs/games/agent"
    run, detail, group, checkpoints, step, runs = ask(
        tmp_path / "out", base, f"{base}/rollouts/train/2/1/3", f"{base}/groups/train/2/1", f"{base}/checkpoints",
        f"{base}/steps/2", "runs",
    )  # fmt: skip
    assert run["splits"] == json.loads(viewer.run("games", "agent").model_dump_json())["splits"]
    assert detail["reward"] == 0.5
    assert HOSTILE in json.dumps(detail, ensure_ascii=False)
    assert sorted(rollout["index"] for rollout in group["rollouts"]) == [0, 1, 2, 3]
    assert checkpoints["checkpoints"] == []
    assert step["num_rollouts"] == 12
    assert [(run["project"], run["name"]) for run in runs["runs"]] == [("games", "agent")]


@node
def test_the_table_filters_sorts_pages_and_searches_as_the_server_does(viewer: Viewer, tmp_path: Path) -> None:
    export(viewer, tmp_path / "out")
    from art.viewer.paths import find_path

    def same(query: str, *, in_order: bool = True) -> None:
        address = f"runs/games/agent/rollouts?{query}"
        row, asked = find_path(address)
        expected = json.loads(row.read(viewer, asked).model_dump_json())
        (got,) = ask(tmp_path / "out", address)
        assert got["total"] == expected["total"], query
        keys = [[(r["split"], r["step"], r["group"], r["index"]) for r in answer["rows"]] for answer in (got, expected)]
        assert (keys[0] == keys[1]) if in_order else (sorted(keys[0]) == sorted(keys[1])), query

    for query in (
        "limit=1000", "split=val&limit=1000", "step=2&limit=1000", "split=train&step=2&group=1", "min_reward=0.3&limit=1000",
        "max_reward=0.2&limit=1000", "text=needle", "text=%22held+out%22", 'text="out+held"', "text=answ*&limit=1000",
        "outcome=ok&limit=1000", "outcome=policy_fault", "scenario=s1", "dropped=any",
    ):  # fmt: skip
        same(query, in_order=False)
    (found,) = ask(tmp_path / "out", "runs/games/agent/rollouts?text=NEEDLE&limit=1")
    snippet = found["rows"][0]["snippet"]
    assert snippet["text"][snippet["start"] : snippet["end"]] == "needle"
    for sort in ("reward", "step"):
        (page,) = ask(tmp_path / "out", f"runs/games/agent/rollouts?sort={sort}&descending=false&limit=5&offset=3")
        assert len(page["rows"]) == 5
        values = [row[sort] for row in page["rows"]]
        assert values == sorted(values)


@node
def test_curves_and_comparisons(viewer: Viewer, tmp_path: Path) -> None:
    export(viewer, tmp_path / "out")
    base = "runs/games/agent"
    whole, part, none, compared, ledger = ask(
        tmp_path / "out", f"{base}/series?metric=train/reward&metric=val/reward", f"{base}/series?metric=train%2Freward&first=2",
        f"{base}/series?metric=none", f"{base}/checkpoints/compare?a=1&b=3&split=val", f"{base}/ledger?first=2&last=2",
    )  # fmt: skip
    assert [one["steps"] for one in whole["series"]] == [[1, 2, 3]] * 2
    assert part["series"][0]["steps"] == [2, 3]
    assert none["series"][0]["steps"] == []
    assert compared["difference"]["mean"] == pytest.approx(0.2)
    assert ledger["ledger"] is None


@node
def test_what_is_not_there_says_how_to_get_it(viewer: Viewer, tmp_path: Path) -> None:
    export(viewer, tmp_path / "out", num_rollouts=4)
    asked = ("runs/games/agent/rollouts/train/2/2/0", "system", "runs/games/other", "runs/games/agent/steps/2/tree")
    rollout, system, other, tree = ask(tmp_path / "out", *asked)
    assert "--rollouts" in rollout
    assert "running server" in system
    assert "games/other is not in this export" in other
    assert "prefix tree" in tree
    (session,) = ask(tmp_path / "out", "session")
    assert session["has_server"] is False
    assert session["scopes"] == []


def test_folders_and_runs_that_are_refused(viewer: Viewer, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match="has other files"):
        export(viewer, tmp_path / "full")
    with pytest.raises(NotFoundError):
        export(viewer, tmp_path / "out", runs=(("games", "nobody"),))
    assert not (tmp_path / "out").exists()
    export(viewer, tmp_path / "out")
    export(viewer, tmp_path / "out")  # over an earlier export


def test_choosing_steps() -> None:
    steps = list(range(1, 101))
    assert choose_steps(steps, ExportOptions(num_steps=3)) == [1, 51, 100]
    assert choose_steps(steps, ExportOptions(steps=((3, 4), (200, 300)))) == [3, 4]
    assert spread([4, 7], 5) == [4, 7]
    assert spread(steps, 1) == [100]
    assert parse_ranges("1-10, 50") == ((1, 10), (50, 50))
    for text in ("", "a", "1-", "-3", "1-2-3", "1..4"):
        with pytest.raises(ConfigError, match="--steps"):
            parse_ranges(text)


@node
async def test_the_comparison_that_the_page_begins_with_is_there(tmp_path: Path) -> None:
    """Held-out rollouts are of the split `test`, and more of them were logged than the export compares with each other."""
    model: art.Model = art.Model(name="agent", project="games", base_path=str(tmp_path / "data"))
    for step in range(10):
        rollouts = [
            art.Trajectory(reward=step + i, metadata={"scenario_id": f"s{i + 9 * (step == 0)}"}) for i in range(3)
        ]
        await model.log(rollouts, split="test", step=step)
    with contextlib.closing(Viewer(DataDir(tmp_path / "data"))) as viewer:
        viewer.indexer.ensure("games", "agent", wait_s=60)
        export(viewer, tmp_path / "out")
    (listed,) = ask(tmp_path / "out", "runs/games/agent/checkpoints")
    first = listed["compared"]
    assert (first["split"], first["a"], first["b"]) == ("test", 1, 9)
    address = "runs/games/agent/checkpoints/compare?a=1&b=9"
    compared, other = ask(tmp_path / "out", f"{address}&split=test", f"{address}&split=val")
    assert (compared["num_scenarios"], compared["difference"]["mean"]) == (3, 8.0)
    assert (other["num_scenarios"], other["splits"]) == (0, ["test"])
