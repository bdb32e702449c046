"""A copy of the page that needs no server: a folder that a browser opens from the disk.

    copy/index.html, page.js, page.css       the page itself
    copy/answers/all.js                      lists of runs and comparisons
    copy/answers/PROJECT/NAME/run.js         curves, checkpoints, costs, ledgers
                             /rollouts.js    the table of rollouts
                             /step-3.js      one step and its prefix tree
                             /train-3-0.js   one group: its rollouts with their exact tokens

A browser reads no other files from a page on the disk, but it runs scripts: each file of answers is a script that hands
JSON to the page, which loads it when a view asks for it. `static/lib/page_copy.js` is the other side.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlencode

import orjson

import art
from art.errors import ArtError, ConfigError
from art.server.state import HiddenPaths
from art_page.bundle import page_files
from art_page.page import PageSession
from art_page.rollout_answers import MAX_TOKENS, PageAnswer, RolloutKey, RolloutTableQuery, TokensQuery, TreeQuery
from art_page.run_answers import CompareQuery, SeriesQuery
from art_page.viewer import Viewer

_PAGE = 1000
"""Rows of one answer of the table."""
_COMPARED = 100
"""Scenarios that the page asks for at once when it compares checkpoints."""
_METRICS = 64
_MARK = "art-copy.txt"
_POLICY = "connect-src 'none'; object-src 'none'; base-uri 'none'; form-action 'none'"
Answers = dict[str, PageAnswer]
"""Answers by the address that the page asks for, below `view/api/`."""


def export_page(viewer: Viewer, folder: Path, progress: Callable[[int, int, str], None]) -> int:
    """Write the copy, and return the number of its files. An earlier copy in the folder is replaced.

    Args:
        progress: called with the numbers of files that are written and planned, and what comes next.

    Raises:
        ConfigError: the folder holds something else than a copy.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        problem = f"{folder} is not empty and holds no earlier copy of the page; name a new folder"
        raise ConfigError(problem, param="export")
    shutil.rmtree(folder / "answers", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(
        f"A copy of ART's page. Open index.html in a browser. ART {art.__version__}\n", encoding="utf-8"
    )
    _write_page(folder)
    hide = HiddenPaths(viewer.data_dir.root).hide
    plan = list(_plan(viewer))
    for number, (name, make) in enumerate(plan):
        progress(number, len(plan), name)
        answers = {address: orjson.loads(answer.model_dump_json()) for address, answer in make().items()}
        text = hide(orjson.dumps(answers).decode())
        path = folder / "answers" / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON in a text: an object would be read as code, in which some keys mean something.
        path.write_bytes(b"artCopy.take(" + orjson.dumps(text) + b");\n")
    progress(len(plan), len(plan), "")
    return len(plan)


def _write_page(folder: Path) -> None:
    page = page_files()
    session = PageSession(
        key_id="", project=None, scopes=[], has_server=False, base_url=None, version=art.__version__
    ).model_dump_json()  # fmt: skip
    for name, data in page.content.items():
        (folder / name).write_bytes(data)
    code = f"globalThis.artCopySession = JSON.parse({orjson.dumps(session).decode()});\n"
    (folder / "copy.js").write_text(code, encoding="utf-8")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    document = page.document("").replace("<title>", f'{policy}\n<script src="copy.js"></script>\n<title>')
    (folder / "index.html").write_text(document, encoding="utf-8")


def _plan(viewer: Viewer) -> Iterator[tuple[str, Callable[[], Answers]]]:
    """Yield the name of each file and what makes its answers."""
    viewer.complete()
    runs = viewer.runs()
    yield "all", lambda: {"runs": runs, **_comparisons(viewer)}
    for run in runs.runs:
        project, name = run.project, run.name
        base = f"{project}/{name}"
        yield f"{base}/run", partial(_run, viewer, project, name)
        yield f"{base}/rollouts", partial(_table, viewer, project, name)
        files = viewer.run_files(project, name)
        rows = files.indexer.store.read(
            "SELECT split, step, num_groups FROM files WHERE run = ? ORDER BY step, split", (files.number,)
        )
        for step in sorted({*files.steps().tolist(), *(step for _, step, _ in rows)}):
            yield f"{base}/step-{step}", partial(_step, viewer, project, name, step)
        for split, step, num_groups in rows:
            for group in range(num_groups):
                yield f"{base}/{split}-{step}-{group}", partial(_group, viewer, (project, name), (split, step, group))


def _address(path: str, /, **query: object) -> str:
    """Return an address as the page writes it."""
    given = urlencode([(name, str(value)) for name, value in query.items() if value is not None])
    return "/".join(quote(part, safe="!'()*~") for part in path.split("/")) + (f"?{given}" if given else "")


def _comparisons(viewer: Viewer) -> Answers:
    listed = viewer.comparisons()
    single = {f"comparisons/{one.id}": viewer.comparison(one.id) for one in listed.comparisons}
    return {"comparisons": listed, **single}


def _run(viewer: Viewer, project: str, name: str) -> Answers:
    path = f"runs/{project}/{name}"
    detail, checkpoints = viewer.run(project, name), viewer.checkpoints(project, name)
    metrics = [metric.name for metric in detail.metrics]
    answers: Answers = {
        path: detail, f"{path}/checkpoints": checkpoints, f"{path}/costs": viewer.costs(project, name),
        f"{path}/ledger": viewer.ledger(project, name),
    }  # fmt: skip
    for number, first in enumerate(range(0, len(metrics), _METRICS)):
        query = SeriesQuery(metric=metrics[first : first + _METRICS])
        answers[f"{path}/series?part={number}"] = viewer.series(project, name, query)
    for step in viewer.run_files(project, name).steps().tolist():
        answers[_address(f"{path}/ledger", first=step, last=step)] = viewer.ledger(project, name, step, step)
    if (compared := checkpoints.compared) is not None:
        for split in dict.fromkeys(["val", *(one.split for one in detail.splits)]):
            for offset in itertools.count(0, _COMPARED):
                asked = CompareQuery(a=compared.a, b=compared.b, split=split, offset=offset, limit=_COMPARED)
                answer = viewer.compare(project, name, asked)
                answers[_address(f"{path}/checkpoints/compare", **asked.model_dump())] = answer
                if offset + _COMPARED >= answer.num_scenarios:
                    break
    return answers


def _table(viewer: Viewer, project: str, name: str) -> Answers:
    """All rows of the table in one answer."""
    whole = viewer.rollouts(project, name, RolloutTableQuery(limit=_PAGE))
    for offset in range(_PAGE, whole.total, _PAGE):
        whole.rows += viewer.rollouts(project, name, RolloutTableQuery(limit=_PAGE, offset=offset)).rows
    return {f"runs/{project}/{name}/rollouts": whole}


def _step(viewer: Viewer, project: str, name: str, step: int) -> Answers:
    path, answers = f"runs/{project}/{name}/steps/{step}", Answers()
    known: Mapping[str, Callable[[], PageAnswer]] = {
        path: lambda: viewer.step(project, name, step),
        f"{path}/tree": lambda: viewer.tree(project, name, step, TreeQuery()),
    }
    for address, ask in known.items():
        try:
            answers[address] = ask()
        except ArtError:
            continue  # nothing is known, e.g. no tree of a step that only evaluated
    return answers


def _group(viewer: Viewer, run: tuple[str, str], place: tuple[str, int, int]) -> Answers:
    split, step, group = place
    path = f"runs/{run[0]}/{run[1]}"
    answers: Answers = {f"{path}/groups/{split}/{step}/{group}": viewer.group(*run, split, step, group)}
    query = RolloutTableQuery(split=split, step=step, group=group, limit=_PAGE)
    for row in viewer.rollouts(*run, query).rows:
        key = RolloutKey(split=split, step=step, group=group, index=row.index)
        own = f"{path}/rollouts/{split}/{step}/{group}/{row.index}"
        answers[own] = viewer.rollout(*run, key)
        branches = viewer.tokens(*run, key, TokensQuery(path=0, first=0, last=0))
        answers[_address(f"{own}/tokens", path=0, first=0, last=0)] = branches
        sizes = {path.path: path.num_tokens for path in branches.paths} or {0: 0}
        for number, num_tokens in sizes.items():
            for first in range(0, max(1, num_tokens), MAX_TOKENS):
                asked = TokensQuery(path=number, first=first, last=first + MAX_TOKENS)
                answers[_address(f"{own}/tokens", **asked.model_dump())] = viewer.tokens(*run, key, asked)
    return answers
