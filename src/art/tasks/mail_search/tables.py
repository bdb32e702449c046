"""Read rows of parquet, JSON lines and CSV files: a file, a folder, or a data set on the hub."""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art.errors import ConfigError

SUFFIXES = (".parquet", ".jsonl", ".csv")


def find_files(source: str, option: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a local path, or of a data set on the hub."""
    path = Path(source).expanduser()
    if not path.exists():
        path = _download(source, option)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    if not (files := [file for file in files if file.name.endswith(suffixes)]):
        raise ConfigError(f"{option}={source}: no file ends in {', '.join(suffixes)}")
    return files


def _download(source: str, option: str) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ConfigError(f"{option}={source}: there is no such file or folder, and it is no id of a data set")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        problem = f"{option}={source} is not a local path; to load it from the hub: pip install huggingface_hub"
        raise ConfigError(problem) from error
    try:
        return Path(snapshot_download(source, repo_type="dataset"))
    except Exception as error:
        raise ConfigError(
            f"{option}={source} is not a local path, and could not be loaded from the hub: {error}. Download it "
            f"elsewhere and give its folder: {option}=PATH"
        ) from error


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError(f"{file} is a parquet file: pip install pyarrow, or convert it to JSON lines") from error
        for batch in parquet.ParquetFile(file).iter_batches(1_000):
            yield from batch.to_pylist()
        return
    with file.open(encoding="utf-8", newline="") as lines:
        if file.suffix == ".csv":
            csv.field_size_limit(10_000_000)
            yield from csv.DictReader(lines)
        else:
            yield from (json.loads(line) for line in lines if line.strip())


def split_texts(value: Any) -> list[str]:
    """A list of texts: a list, or as CSV files have it: `["a", "b"]`, `['a', 'b']`, `a, b`."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = re.split(r"\s*[,;]\s*", value)
        value = [value] if isinstance(value, str) else value
    return [str(item).strip() for item in (value if value is not None else ()) if item and str(item).strip()]
