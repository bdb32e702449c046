"""Writes the folder of an export: the page as one script, its styles, and its answers as scripts that register them.

index.html  page.js  answers.js  icon.svg  styles/  vendor/  data/manifest.js  data/P/N/...
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.storage.atomic import write_file
from art.viewer.export.bundle import ENTRY, bundle
from art.viewer.export.options import MAX_RUNS, ExportOptions
from art.viewer.export.run_export import Counts, RunExport, comparison_answers
from art.viewer.page_files import INDEX, page_files
from art.viewer.viewer import Viewer

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
    write("answers.js", files("art.viewer.export").joinpath("answers.js").read_bytes())
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
