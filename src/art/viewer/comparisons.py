"""Reads the comparisons of models in a data directory."""

from __future__ import annotations

from pathlib import Path

from art.errors import NotFoundError
from art.report.comparison_text import JSON_FILE, read_comparison, remarks
from art.report.model_comparison import ModelComparison
from art.storage.layout import DataDir, validate_name
from art.viewer.answers.model_comparisons import ComparisonAnswer, ComparisonLine, ComparisonList


def comparison_files(data_dir: DataDir) -> list[Path]:
    """Return the files of all comparisons. A link is not followed, since it may lead to a private file."""
    return sorted(path for path in data_dir.comparisons.glob(f"*/{JSON_FILE}") if not path.is_symlink())


def list_comparisons(data_dir: DataDir) -> ComparisonList:
    """List all comparisons."""
    lines, unreadable = [], []
    for file in comparison_files(data_dir):
        try:
            lines.append(_line(read_comparison(file.parent)))
        except (OSError, ValueError):
            unreadable.append(file.parent.name)
    lines.sort(key=lambda line: -line.updated_at)
    return ComparisonList(comparisons=lines, unreadable=unreadable)


def read_one(data_dir: DataDir, name: str) -> ComparisonAnswer:
    """Return one comparison.

    Raises:
        NotFoundError: there is none of this name, or its file cannot be read.
    """
    folder = data_dir.comparisons / validate_name(name, param="comparison")
    try:
        comparison = read_comparison(folder)
    except OSError:
        raise NotFoundError(f"there is no comparison {name!r} in this data directory", param="comparison") from None
    except ValueError:
        raise NotFoundError(
            f"the file {JSON_FILE} of the comparison {name!r} is damaged, or of another version of ART",
            param="comparison",
        ) from None
    return ComparisonAnswer(comparison=comparison, remarks=remarks(comparison))


def _line(comparison: ModelComparison) -> ComparisonLine:
    scored = [row for row in comparison.models if row.headline is not None]
    best = max(scored, key=lambda row: row.headline.mean if row.headline else 0.0, default=None)
    return ComparisonLine(
        id=comparison.id, task=comparison.task, description=comparison.description,
        models=[row.label for row in comparison.models], best=None if best is None else best.label,
        headline_metric=comparison.headline_metric, num_scenarios=comparison.num_scenarios,
        updated_at=comparison.updated_at, is_complete=comparison.is_complete,
    )  # fmt: skip
