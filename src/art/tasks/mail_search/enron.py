"""Load the Enron emails and questions about them from local files or from the hub.

    emails       message_id, date, from, to, cc, bcc, subject, body, file_name    (`corbt/enron-emails`)
    questions    question, answer, message_ids, inbox_address, query_date, split
                                                                  (`corbt/enron_emails_sample_questions`)

Both are read from parquet, JSON lines or CSV: one file, a folder of files, or the id of a data set on the hub. The
emails may also be CMU's archive of maildirs (`enron_mail_20150507.tar.gz`). The first use writes them to a database in
`~/.cache/art/mail_search`, which takes minutes for all 500,000.
"""

from __future__ import annotations

import ast
import csv
import datetime
import hashlib
import json
import logging
import os
import re
import sqlite3
import tarfile
from collections.abc import Iterable, Iterator
from email import message_from_bytes, policy
from email.utils import getaddresses, parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.task import Split, derive_seed
from art.tasks.mail_search.mailbox import Email, Mailbox
from art.tasks.mail_search.questions import Question

EMAILS, QUESTIONS = "corbt/enron-emails", "corbt/enron_emails_sample_questions"
MAX_BODY, MAX_RECIPIENTS = 5_000, 30
"""Longer emails, and those to more people, are left out. ART-E has the same limits."""
VAL_SHARE, TEST_SHARE = 10, 10
"""Percent of questions in the splits `val` and `test`, if the questions' file does not say."""
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_NAMES: tuple[Split, ...] = ("train", "val", "test")
_SPLITS: dict[str, Split] = {"train": "train", "test": "test", "val": "val", "validation": "val", "dev": "val"}

logger = logging.getLogger(__name__)


@lru_cache(maxsize=4)
def open_emails(source: str) -> Mailbox:
    """Open a database of emails, and write it first if this source has not been used yet.

    Raises:
        ConfigError: there is no such source, or it has no emails.
    """
    files = find_files(source, "emails", (*SUFFIXES, *_ARCHIVES))
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art" / "mail_search"
    path = folder / f"{hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()}.sqlite"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.unlink(missing_ok=True)
        logger.info("writing the emails of %s to %s", source, path)
        emails = _distinct(email for file in files for email in _read_emails(file))
        Mailbox.create(emails, str(partial)).database.close()
        partial.replace(path)
    mailbox = Mailbox(sqlite3.connect(path, check_same_thread=False))
    if not mailbox.database.execute("SELECT count(*) FROM emails").fetchone()[0]:
        raise ConfigError(f"emails={source}: no emails are in it")
    return mailbox


@lru_cache(maxsize=4)
def load_questions(source: str) -> dict[Split, list[dict[str, Any]]]:
    """Load questions by split: `{"inbox": ..., "today": ..., "question": Question as a dict}`.

    The split is that of the file: its column `split`, or its name (`train-00000.parquet`). If no question is for `val`,
    a part of the training questions is; if there is no split at all, a hash of the question decides. A question that
    is in several splits stays in `test`, else in `val`.

    Raises:
        ConfigError: there is no such source, or a row lacks a column.
    """
    by_text: dict[str, tuple[Split, dict[str, Any]]] = {}
    rows = [
        (row, _split_of(row, file)) for file in find_files(source, "questions", SUFFIXES) for row in read_rows(file)
    ]
    splits = {split for _, split in rows} - {None}
    for row, named in rows:
        try:
            text, inbox = row["question"], row["inbox_address"].lower()
            question = Question(
                text=text, kind="text", answer=row["answer"], sources=split_texts(row["message_ids"]), level="medium",
                keywords=re.findall(r"\w{5,}", text),
            )  # fmt: skip
            today = str(row["query_date"])[:10]
        except KeyError as error:
            columns = "question, answer, message_ids, inbox_address and query_date"
            raise ConfigError(f"questions={source}: a row has no column {error}; it needs {columns}") from None
        split = named or _hashed_split(text, TEST_SHARE)
        if split == "train" and "val" not in splits and named:
            split = _hashed_split(text, 0)
        key = f"{inbox} {text.lower()}"
        inputs = {"inbox": inbox, "today": today, "question": question.model_dump()}
        if key not in by_text or _NAMES.index(split) > _NAMES.index(by_text[key][0]):
            by_text[key] = (split, inputs)
    return {name: [inputs for split, inputs in by_text.values() if split == name] for name in _NAMES}


def questions_about(emails: str, questions: str) -> dict[Split, list[dict[str, Any]]]:
    """Load the questions, by split, whose sources are all among the emails."""
    rows = open_emails(emails).database.execute("SELECT message_id FROM emails").fetchall()
    known = {message_id for (message_id,) in rows}
    return {
        split: [inputs for inputs in asked if known.issuperset(inputs["question"]["sources"])]
        for split, asked in load_questions(questions).items()
    }


def _hashed_split(text: str, test_share: int) -> Split:
    percent = derive_seed("mail_search", text.lower()) % 100
    return "test" if percent < test_share else "val" if percent < test_share + VAL_SHARE else "train"


def _split_of(row: dict[str, Any], file: Path) -> Split | None:
    named = row.get("split") or re.split(r"[-_.]", file.name)[0]
    return _SPLITS.get(str(named).lower())


def _addresses(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(address.lower() for address in split_texts(value)))


def _read_emails(file: Path) -> Iterator[Email]:
    if file.suffix in SUFFIXES:
        for row in read_rows(file):
            try:
                yield _email(row, row["from"])
            except KeyError as error:
                raise ConfigError(f"{file}: a row has no column {error}; see `art.tasks.mail_search.enron`") from None
        return
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and (email := _parse(content.read(), member.name)) is not None:
                yield email


def _email(row: dict[str, Any], sender: Any) -> Email:
    message_id = str(row["message_id"])
    return Email(
        message_id=message_id, thread_id=message_id, date=_minute(row["date"]), from_address=str(sender or "").lower(),
        folder=_folder(str(row.get("file_name") or "")), subject=row["subject"] or "", body=row["body"] or "",
        to=_addresses(row["to"]), cc=_addresses(row.get("cc")), bcc=_addresses(row.get("bcc")),
    )  # fmt: skip


def _parse(content: bytes, name: str) -> Email | None:
    """Read an email of a maildir. `None` if it has no id or no date."""
    message = message_from_bytes(content, policy=policy.compat32)
    body = message.get_payload(decode=True)
    if not message["Message-ID"] or not message["Date"] or not isinstance(body, bytes):
        return None
    fields = {kind: [address for _, address in getaddresses([message.get(kind, "")])] for kind in ("to", "cc", "bcc")}
    try:
        date = parsedate_to_datetime(message["Date"])
    except ValueError:
        return None
    row = {
        "message_id": message["Message-ID"].strip(), "date": date, "subject": str(message.get("Subject", "")),
        "body": body.decode("utf-8", "replace"), "file_name": name.partition("maildir/")[2] or name, **fields,
    }  # fmt: skip
    return _email(row, getaddresses([message.get("From", "")])[0][1])


def _minute(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    return str(value).replace("T", " ")[:16]


def _folder(file_name: str) -> str:
    """Folder of a file such as `allen-p/_sent_mail/12.`: `sent`."""
    parts = file_name.lower().split("/")
    name = parts[-2] if len(parts) > 2 else "inbox"
    return "sent" if "sent" in name else name


def _distinct(emails: Iterable[Email]) -> Iterator[Email]:
    """Leave out emails that are long, go to many people, or are copies of another."""
    ids: set[str] = set()
    contents: set[int] = set()
    for email in emails:
        content = derive_seed(email.from_address, email.subject, email.body)
        num_recipients = len(email.to) + len(email.cc) + len(email.bcc)
        if (
            len(email.body) > MAX_BODY
            or num_recipients > MAX_RECIPIENTS
            or content in contents
            or email.message_id in ids
        ):
            continue
        ids.add(email.message_id)
        contents.add(content)
        yield email


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
