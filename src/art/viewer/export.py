"""Writes a folder with the page and its answers, which opens in a browser without any server.

    index.html  page.js  answers.js  icon.svg  styles/  vendor/  data/manifest.js
    data/P/N/run.js                 the run, its curves, checkpoints, comparisons, costs
    data/P/N/steps.js               numbers of steps
    data/P/N/rows.js                the table of the exported rollouts
    data/P/N/<split>-<step>.js      rollouts and groups of a step
    data/P/N/<split>-<step>-tokens.js
    data/P/N/tree-<step>.js         the prefix tree of a step

The modules of the page become one classic script, because browsers load no modules from `file://`:

    import { h as make } from "../lib/dom.js";          const { h: make } = module_lib_dom;
    export function table() { ... }                     function table() { ... }  ...  return { table };

Each module becomes a function that is called once, after those that it imports. The modules are written for it: named
imports and exports on one line, no default exports, no `export let`, and no circle of imports.
"""

from __future__ import annotations

import json
import posixpath
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from art.errors import ArtError, ConfigError
from art.storage.atomic import write_file
from art.viewer.page_files import INDEX, page_files
from art.viewer.rollout_answers import Answer, RolloutKey, RolloutQuery, RolloutRow, TokensQuery, TreeQuery
from art.viewer.run_answers import CompareQuery, RunDetail, SeriesQuery, SplitSteps
from art.viewer.runs import ranges
from art.viewer.viewer import Viewer

MAX_RUNS = 10
MAX_STEP_DETAILS = 300
"""Steps of which the numbers (metrics, ledger, findings) are exported; with more, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Choices for an export. What is left out is counted, and said in the page and by the command."""

    runs: tuple[tuple[str, str], ...] = ()
    """Project and name of each run; none means the newest `MAX_RUNS`."""
    steps: tuple[tuple[int, int], ...] | None = None
    """Ranges of steps whose rollouts are exported, ends included. `None`: the first, the newest, and evenly spaced ones
    between them, `num_steps` in all."""
    num_steps: int = 12
    num_rollouts: int = 64
    """Rollouts of each split and step, by whole groups."""
    num_tokens: int = 16
    """Rollouts of each split and step that have their exact tokens."""
    max_bytes: int = 100 * 2**20
    """Size of the rollouts' files before compression. The newest steps come first; what is above it is left out."""


def choose_steps(steps: Sequence[int], options: ExportOptions) -> list[int]:
    """Choose the steps whose rollouts are exported, of those that have any."""
    if options.steps is not None:
        return [step for step in steps if any(first <= step <= last for first, last in options.steps)]
    return spread(steps, options.num_steps)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Choose at most `count` of the steps: the first, the last and evenly spaced ones between them."""
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ranges of steps: `parse_ranges("1-10,50")` is `((1, 10), (50, 50))`.

    Raises:
        ConfigError: the text has another form.
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ConfigError(f"--steps takes steps and ranges of steps, e.g. `1-10,50`; got {text!r}")
        ranges.append((int(first), int(last) if dash else int(first)))
    return tuple(ranges)


ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{ ?([^}]*?),? ?\} from "([^"]+)";[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=((?:async )?function\*?|const|class) ([\w$]+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle(files: Mapping[str, bytes]) -> str:
    """Return the script that does what `main.js` and the modules that it imports do.

    Args:
        files: content by name, e.g. `lib/dom.js`.

    Raises:
        ConfigError: a module has a form that cannot be joined, or imports what is not there.
    """
    parts: dict[str, str] = {}
    _add(ENTRY, files, parts, [])
    return '"use strict";\n(() => {\n' + "\n".join(parts.values()) + "})();\n"


def _add(name: str, files: Mapping[str, bytes], parts: dict[str, str], importing: list[str]) -> None:
    """Add the script of a module to `parts`, after those that it imports."""
    if name in importing:
        raise ConfigError(f"modules import each other in a circle: {' -> '.join([*importing, name])}")
    if name in parts:
        return
    text = files[name].decode()
    for names, target in _IMPORT.findall(text):
        module = _resolve(name, target, files)
        _add(module, files, parts, [*importing, name])
        _check_exported(name, names, module, files)
    body = _EXPORT.sub("", _IMPORT.sub(lambda match: _assignment(name, match, files), text))
    if (left := _LEFT.search(body)) is not None:
        raise ConfigError(f"the module {name} has a form that cannot be joined: {left[0][:80]!r}")
    exports = ", ".join(_exports(text))
    parts[name] = f"const {_variable(name)} = (() => {{\n{body.strip()}\nreturn {{ {exports} }};\n}})();\n"


def _assignment(name: str, match: re.Match[str], files: Mapping[str, bytes]) -> str:
    fields = match[1].replace(" as ", ": ")
    return f"const {{ {fields} }} = {_variable(_resolve(name, match[2], files))};"


def _check_exported(name: str, names: str, module: str, files: Mapping[str, bytes]) -> None:
    missing = {part.split(" as ")[0] for part in re.split(r",\s*", names.strip()) if part}
    missing -= set(_exports(files[module].decode()))
    if missing:
        raise ConfigError(f"the module {name} imports {sorted(missing)[0]!r} from {module}, which does not export it")


def _exports(text: str) -> list[str]:
    return [match[2] for match in _EXPORT.finditer(text)]


def _resolve(name: str, target: str, files: Mapping[str, bytes]) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if not target.startswith(".") or path not in files:
        raise ConfigError(f"the module {name} imports {target!r}, which is no file of the page")
    return path


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


SERIES_PER_QUERY = 64
MAX_COMPARED = 6
"""Steps of a split that are compared with each other."""
MAX_PATHS = 8
MAX_TREE_NODES = 1500
PAGE = 1000

Write = Callable[[str, dict[str, Any]], int]
"""Writes a file of answers, and returns its size."""


@dataclass(slots=True)
class Counts:
    """What an export has, and what it lacks."""

    num_rollouts: int = 0
    num_all_rollouts: int = 0
    num_steps: int = 0
    num_all_steps: int = 0
    num_tokens: int = 0
    """Rollouts with exact tokens."""
    num_bytes: int = 0
    """Size of the files of rollouts."""
    problems: list[str] = field(default_factory=list)
    """What could not be read."""


class RunExport:
    """Exports one run of a viewer."""

    def __init__(self, viewer: Viewer, run: tuple[str, str], options: ExportOptions, write: Write) -> None:
        self._viewer = viewer
        self._run = run
        self._options = options
        self._write = write
        self._base = "/".join(("runs", *run))
        self._rows: list[dict[str, Any]] = []

    def export(self, counts: Counts) -> None:
        """Write the files of the run. The newest steps come first, until `max_bytes` are written."""
        detail = self._viewer.run(*self._run)
        places = [(split.split, step) for split in detail.splits for step in choose_steps(_steps(split), self._options)]
        counts.num_all_rollouts += detail.num_rollouts
        counts.num_all_steps += sum(len(_steps(split)) for split in detail.splits)
        written: dict[str, list[int]] = {}
        for split, step in sorted(places, key=lambda place: -place[1]):
            if counts.num_bytes >= self._options.max_bytes:
                break
            counts.num_bytes += self._export_step(split, step, counts)
            written.setdefault(split, []).append(step)
        for step in sorted({step for steps in written.values() for step in steps}):
            self._export_tree(step, counts)
        counts.num_steps += sum(map(len, written.values()))
        detail.splits = [SplitSteps(split=split, steps=ranges(steps)) for split, steps in written.items()]
        self._write_file("rows.js", {f"{self._base}/rollouts": self._rows})
        self._write_file("steps.js", dict(self._step_answers(detail)))
        self._write_file("run.js", dict(self._run_answers(detail)))

    def _write_file(self, name: str, answers: dict[str, Any]) -> int:
        return self._write("/".join(("data", *self._run, name)), answers)

    def _run_answers(self, detail: RunDetail) -> Iterator[tuple[str, Any]]:
        viewer, run = self._viewer, self._run
        yield self._base, _plain(detail)
        names = [metric.name for metric in detail.metrics]
        series = []
        for start in range(0, len(names), SERIES_PER_QUERY):
            query = SeriesQuery(metric=names[start : start + SERIES_PER_QUERY])
            series += [_plain(one) for one in viewer.series(*run, query).series]
        yield f"{self._base}/series", series
        yield f"{self._base}/checkpoints", _plain(viewer.checkpoints(*run))
        yield f"{self._base}/costs", _plain(viewer.costs(*run))
        yield f"{self._base}/ledger", _plain(viewer.ledger(*run))
        first = detail.headline
        for split in detail.splits:
            steps = spread(_steps(split), MAX_COMPARED)
            pairs = {(a, b) for a in steps for b in steps if a != b}
            if first is not None and first.split == split.split and first.a != first.b:
                pairs.add((first.a, first.b))  # the comparison that the page begins with
            for a, b in sorted(pairs):
                comparison = viewer.compare(*run, CompareQuery(a=a, b=b, split=split.split, limit=PAGE))
                yield f"{self._base}/checkpoints/compare?{split.split}&{a}&{b}", _plain(comparison)

    def _step_answers(self, detail: RunDetail) -> Iterator[tuple[str, Any]]:
        main = [detail.main_metric] if detail.main_metric else [metric.name for metric in detail.metrics[:1]]
        series = self._viewer.series(*self._run, SeriesQuery(metric=main, max_points=5000)).series
        logged = {step for split in detail.splits for step in _steps(split)}
        steps = logged | {step for one in series for step in one.steps}
        for step in spread(sorted(steps), MAX_STEP_DETAILS):
            try:
                yield f"{self._base}/steps/{step}", _plain(self._viewer.step(*self._run, step))
            except ArtError:  # a point of a curve that joins several steps, and has no step of its own
                continue

    def _export_step(self, split: str, step: int, counts: Counts) -> int:
        """Export whole groups of a split and step, up to the number of rollouts that the options say."""
        answers: dict[str, Any] = {}
        tokens: dict[str, Any] = {}
        groups: set[int] = set()
        num_rollouts = 0
        for row in self._rows_of(split, step):
            if row.group not in groups and num_rollouts >= self._options.num_rollouts:
                break
            key = RolloutKey(split=split, step=step, group=row.group, index=row.index)
            place = f"{split}/{step}/{row.group}"
            try:
                answers[f"{self._base}/rollouts/{place}/{row.index}"] = _plain(self._viewer.rollout(*self._run, key))
                if row.group not in groups:
                    group = _plain(self._viewer.group(*self._run, split, step, row.group))
                    group["rollouts"] = [rollout["index"] for rollout in group["rollouts"]]
                    answers[f"{self._base}/groups/{place}"] = group
                if num_rollouts < self._options.num_tokens:
                    tokens |= dict(self._token_answers(key))
                    counts.num_tokens += 1
            except ArtError as error:
                counts.problems.append(f"{'/'.join(self._run)} {place}/{row.index}: {error}")
                continue
            groups.add(row.group)
            num_rollouts += 1
            self._rows.append(_plain(row))
        counts.num_rollouts += num_rollouts
        size = self._write_file(f"{split}-{step}.js", answers)
        return size + (self._write_file(f"{split}-{step}-tokens.js", tokens) if tokens else 0)

    def _rows_of(self, split: str, step: int) -> list[RolloutRow]:
        rows: list[RolloutRow] = []
        while True:
            query = RolloutQuery(split=split, step=step, offset=len(rows), limit=PAGE)
            page = self._viewer.rollouts(*self._run, query)
            rows += page.rows
            if not page.rows or len(rows) >= page.total:
                return sorted(rows, key=lambda row: (row.group, row.index))

    def _token_answers(self, key: RolloutKey) -> Iterator[tuple[str, Any]]:
        base = f"{self._base}/rollouts/{key.split}/{key.step}/{key.group}/{key.index}/tokens"
        first = self._viewer.tokens(*self._run, key, TokensQuery())
        yield f"{base}?0", _plain(first)
        for path in first.paths[1:MAX_PATHS]:
            yield f"{base}?{path.path}", _plain(self._viewer.tokens(*self._run, key, TokensQuery(path=path.path)))

    def _export_tree(self, step: int, counts: Counts) -> None:
        try:
            tree = self._viewer.tree(*self._run, step, TreeQuery(limit=MAX_TREE_NODES))
        except ArtError:  # the split was not trained, or its file has been removed
            return
        counts.num_bytes += self._write_file(f"tree-{step}.js", {f"{self._base}/steps/{step}/tree": _plain(tree)})


def comparison_answers(viewer: Viewer) -> dict[str, Any]:
    """Return the answers about comparisons of models, by path."""
    listed = viewer.comparisons()
    answers = {f"comparisons/{one.id}": _plain(viewer.comparison(one.id)) for one in listed.comparisons}
    return {"comparisons": _plain(listed), **answers}


def _plain(answer: Answer) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(answer.model_dump_json())  # numbers that JSON lacks are null
    return plain


def _steps(split: SplitSteps) -> list[int]:
    return [step for first, last in split.steps for step in range(first, last + 1)]


POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data:; base-uri 'none'; "
    "form-action 'none'"
)
"""The page's own policy. `file:` is for browsers that do not count files of a folder as its own. It may not connect to
anything."""
_MARK = "data/manifest.js"


@dataclass(slots=True)
class ExportResult:
    """What was written."""

    num_runs: int
    counts: Counts
    num_files: int = 0
    size_bytes: int = 0
    compressed_bytes: int = 0
    """Size of all files, each compressed as a zip file does."""
    left_out: list[str] = field(default_factory=list)
    """What the export lacks, and how to include it."""


def export_folder(
    viewer: Viewer, folder: Path, options: ExportOptions, hide_paths: Callable[[str], str],
    on_progress: Callable[[str], None] = lambda text: None,
) -> ExportResult:  # fmt: skip
    """Write an export into a new or empty folder, or over an earlier export.

    Args:
        hide_paths: removes folders of this machine from a text. The export is for others.
        on_progress: called after each file with how far the export is, in words.

    Raises:
        ConfigError: the folder has other files, or there is no run.
        NotFoundError: a run that the options name does not exist.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).exists()):
        raise ConfigError(f"--export needs a new folder, an empty one, or an earlier export; {folder} has other files")
    listed = viewer.runs()
    runs = list(options.runs) or [(run.project, run.name) for run in listed.runs[:MAX_RUNS]]
    if not runs:
        raise ConfigError(f"there is no run in {viewer.data_dir.root} to export")
    result = ExportResult(len(runs), Counts())
    names: list[str] = []

    def write(name: str, content: bytes) -> int:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        names.append(name)
        result.num_files += 1
        result.size_bytes += len(content)
        result.compressed_bytes += len(zlib.compress(content, 6))
        on_progress(f"exported file {result.num_files}, {result.size_bytes / 2**20:.1f} MiB so far: {name}")
        return len(content)

    def write_answers(name: str, answers: dict[str, Any]) -> int:
        for answer in answers.values():
            if isinstance(answer, dict) and isinstance(answer.get("error"), str):
                answer["error"] = hide_paths(answer["error"])  # the traceback of a rollout that failed
        text = json.dumps(answers, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        if name.endswith(("run.js", "steps.js", "comparisons.js")):
            text = hide_paths(text)
        return write(name, f"artAnswers({text});\n".encode())

    for run in runs:
        viewer.run(*run)  # a run that does not exist is said before anything is written
    for run in runs:
        RunExport(viewer, run, options, write_answers).export(result.counts)
    if not options.runs:  # a comparison can have models of any run
        write_answers("data/comparisons.js", comparison_answers(viewer))
    kept = [run for run in listed.runs if (run.project, run.name) in runs]
    listed = listed.model_copy(update={"runs": kept})
    result.left_out = _left_out(result, options, num_runs=len(runs), num_all=len(viewer.runs().runs))
    manifest = {"files": names, "runs": json.loads(hide_paths(listed.model_dump_json())), "left_out": result.left_out}
    write(_MARK, f"artManifest({json.dumps(manifest, ensure_ascii=True)});\n".encode())
    _write_page(write, viewer, result)
    return result


def _left_out(result: ExportResult, options: ExportOptions, *, num_runs: int, num_all: int) -> list[str]:
    counts, sentences = result.counts, []
    if num_runs < num_all:
        sentences.append(f"{num_all - num_runs} of {num_all} runs: name runs with --run PROJECT/NAME.")
    if counts.num_rollouts < counts.num_all_rollouts:
        sentences.append(
            f"{counts.num_all_rollouts - counts.num_rollouts} of {counts.num_all_rollouts} rollouts: choose steps with "
            f"--steps (now {counts.num_steps} of {counts.num_all_steps}), and their number with --rollouts "
            f"(now {options.num_rollouts} per step) and --max-mb (now {options.max_bytes // 2**20})."
        )
    if counts.num_tokens < counts.num_rollouts:
        sentences.append(
            f"The exact tokens of {counts.num_rollouts - counts.num_tokens} of the {counts.num_rollouts} exported "
            f"rollouts: --tokens says of how many per step (now {options.num_tokens})."
        )
    sentences += [f"Not readable: {problem}" for problem in counts.problems[:10]]
    return sentences


def _write_page(write: Callable[[str, bytes], int], viewer: Viewer, result: ExportResult) -> None:
    content = page_files().content
    for name, data in content.items():
        if (not name.endswith(".js") and name != INDEX) or name.startswith("vendor/"):
            write(name, data)
    write("page.js", bundle(content).encode())
    write("answers.js", files("art.viewer").joinpath("export_answers.js").read_bytes())
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    note = f"A copy of {result.num_runs} run{'s' * (result.num_runs > 1)}, made by art view --export on {made}."
    note = " ".join([note, *(["Left out are:"] if result.left_out else []), *result.left_out])
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    index = content[INDEX].decode()
    scripts = "\n".join(f'<script src="{name}" defer></script>' for name in ("answers.js", _MARK, "page.js"))
    index = index.replace(f'<script src="{ENTRY}" type="module"></script>', scripts)
    index = index.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)
    index = index.replace("</body>", f'<footer class="soft export-note">{escape(note)}</footer>\n</body>', 1)
    write(INDEX, index.encode())
