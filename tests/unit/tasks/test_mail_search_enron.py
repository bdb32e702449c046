"""Enron emails and questions from local files in the schemas of the data sets on the hub, and from CMU's archive."""

from __future__ import annotations

import csv
import datetime
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art.errors import ConfigError
from art.task import Split
from art.tasks.mail_search.enron import load_questions, open_emails
from art.tasks.mail_search.mail_search_task import MailSearch
from art.tasks.mail_search.mailbox import Search
from art.testing.scripted_model import ScriptedModel

KAY, JEFF = "kay.mann@enron.com", "jeff.dasovich@enron.com"


def email(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "message_id": f"<{number}.JavaMail.evans@thyme>", "subject": f"Turbine {number}",
        "from": "Ben.Jacoby@enron.com", "to": ["Kay.Mann@enron.com"], "cc": [""], "bcc": [],
        "date": datetime.datetime(2000, 5, 1 + number, 14, 30), "body": f"Turbine {number} costs {number}00 USD.",
        "file_name": "mann-k/inbox/12.", **fields,
    }  # fmt: skip


EMAILS = [
    *(email(number) for number in range(1, 7)),
    email(7, subject="Turbine 1", body="Turbine 1 costs 100 USD."),  # a copy
    email(8, body="long " * 2000),
    email(9, to=[f"p{i}@enron.com" for i in range(40)]),
    email(10, to=["jeff.dasovich@enron.com"], cc=["x@y.com"], file_name="dasovich-j/_sent_mail/3.", **{"from": None}),
]


def question(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": number, "question": f"What does turbine {number} cost?", "answer": f"Turbine {number} costs {number}00 USD",
        "message_ids": [f"<{number}.JavaMail.evans@thyme>"], "how_realistic": 0.9, "inbox_address": KAY,
        "query_date": "2000-06-01", **fields,
    }  # fmt: skip


def spell(value: Any) -> Any:
    return value.isoformat(sep=" ") if isinstance(value, datetime.datetime) else value


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(json.dumps(row, default=spell) for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows({key: spell(value) for key, value in row.items()} for row in rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_emails.cache_clear()
    load_questions.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet])
async def test_the_task_on_local_files(tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]) -> None:
    emails = write(tmp_path / "emails", EMAILS)
    rows = [question(number, split="train" if number < 5 else "test") for number in range(1, 10)]
    questions = write(tmp_path / "questions", rows)
    task = MailSearch(mailbox="enron", emails=str(emails), questions=str(questions))
    scenarios = task.scenarios("test", seed=0, count=50)
    texts = {scenario.inputs["question"]["text"] for scenario in scenarios}
    assert texts == {"What does turbine 5 cost?", "What does turbine 6 cost?"}, "the others are about no email here"
    trajectory = await ScriptedModel(task).play(scenarios[0])
    assert trajectory.metrics["correct"] == trajectory.metrics["cited"] == 1.0
    system, user = trajectory.messages()[:2]
    assert f"the mailbox of {KAY}. Today is Thursday, 2000-06-01." in str(system["content"])
    assert user["content"] == scenarios[0].inputs["question"]["text"]
    assert len(task.scenarios("train", seed=0, count=50)) == 50
    assert task.prompt_scenario("who?").inputs["inbox"] == KAY
    (database,) = (tmp_path / "cache" / "art" / "mail_search").iterdir()
    assert database.suffix == ".sqlite"


def test_what_is_kept_of_the_emails(tmp_path: Path, cache: Path) -> None:
    mailbox = open_emails(str(write_jsonl(tmp_path / "emails", EMAILS)))
    emails = {each.message_id.split(".")[0]: each for each in mailbox.all()}
    assert [*emails] == ["<1", "<2", "<3", "<4", "<5", "<6", "<10"]
    first, sent = emails["<1"], emails["<10"]
    assert (first.from_address, first.to, first.cc, first.date) == (
        "ben.jacoby@enron.com",
        (KAY,),
        (),
        "2000-05-02 14:30",
    )
    assert (first.folder, sent.folder, sent.from_address, sent.cc) == ("inbox", "sent", "", ("x@y.com",))
    assert [hit.email for hit in mailbox.search(Search(keywords=["turbines"], to_addr=JEFF))] == [sent]
    written = next((cache / "art" / "mail_search").iterdir())
    before = written.stat().st_mtime_ns
    open_emails.cache_clear()
    open_emails(str(tmp_path / "emails.jsonl"))
    assert written.stat().st_mtime_ns == before, "the second use opens what the first has written"


def test_an_archive_of_maildirs(tmp_path: Path) -> None:
    text = (
        "Message-ID: <1.thyme>\nDate: Mon, 14 May 2001 16:39:00 -0700 (PDT)\nFrom: Phillip.Allen@enron.com\n"
        'To: "Belden, Tim" <tim.belden@enron.com>,\n\tbob@enron.com\nSubject: Forecast\nCc: eve@enron.com\n\nHere is it.\n'
    )
    files = {"maildir/allen-p/_sent_mail/1.": text, "maildir/allen-p/inbox/2.": "no email", "README": "\n\nx"}
    with tarfile.open(tmp_path / "enron.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    (only,) = open_emails(str(tmp_path / "enron.tar.gz")).all()
    assert (only.message_id, only.date, only.folder, only.body) == (
        "<1.thyme>",
        "2001-05-14 16:39",
        "sent",
        "Here is it.\n",
    )
    assert (only.to, only.cc) == (("tim.belden@enron.com", "bob@enron.com"), ("eve@enron.com",))


def texts_of(source: Path) -> dict[Split, set[str]]:
    load_questions.cache_clear()
    return {split: {row["question"]["text"] for row in rows} for split, rows in load_questions(str(source)).items()}


def test_splits_come_from_the_column_the_file_or_a_hash(tmp_path: Path) -> None:
    many = [question(number) for number in range(400)]
    hashed = texts_of(write_jsonl(tmp_path / "all", many))
    assert all(20 <= len(hashed[split]) <= 60 for split in ("val", "test"))
    assert sum(map(len, hashed.values())) == len(set.union(*hashed.values())) == 400

    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train-00000-of-00001", many[:300])
    write_jsonl(folder / "test-00000-of-00001", many[290:])
    by_file = texts_of(folder)
    assert by_file["test"] == {row["question"] for row in many[290:]}, "a question that is in both stays in test"
    assert 15 <= len(by_file["val"]) <= 50
    assert by_file["val"] | by_file["train"] == {row["question"] for row in many[:290]}

    named = [{**row, "split": split} for row, split in zip(many, ("train", "validation", "test"), strict=False)]
    assert [len(texts) for texts in texts_of(write_csv(tmp_path / "named", named)).values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("emails", "message"),
    [
        ("nowhere", "no such file or folder"),
        ("empty", "no file ends in .parquet, .jsonl, .csv"),
        ("rows.jsonl", "a row has no column 'from'"),
        ("none.jsonl", "no emails are in it"),
    ],
)
def test_emails_that_cannot_be_loaded(tmp_path: Path, emails: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"message_id": "1"}')
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ConfigError, match=message):
        open_emails(str(tmp_path / emails))
    assert not list(tmp_path.rglob("*.sqlite")) or emails == "none.jsonl"


def test_questions_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "questions", [{"question": "?", "inbox_address": KAY}])
    with pytest.raises(ConfigError, match=r"no column 'answer'; it needs question, answer, message_ids"):
        load_questions(str(path))
    emails = write_jsonl(tmp_path / "emails", EMAILS)
    write_jsonl(tmp_path / "questions", [question(99)])
    load_questions.cache_clear()
    with pytest.raises(ConfigError, match="is about these emails"):
        MailSearch(mailbox="enron", emails=str(emails), questions=str(path)).scenarios("train", seed=0, count=1)


def test_without_network_the_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"could not be loaded from the hub: no network.*emails=PATH"):
        open_emails("corbt/enron-emails")


def test_the_hub_s_copy_is_read_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str]] = []

    def download(name: str, *, repo_type: str) -> str:
        asked.append((name, repo_type))
        return str(tmp_path / "copy")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "copy" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "copy" / "data" / "train-00000-of-00001", EMAILS[:2])
    assert len(open_emails("corbt/enron-emails").all()) == 2
    assert asked == [("corbt/enron-emails", "dataset")]
