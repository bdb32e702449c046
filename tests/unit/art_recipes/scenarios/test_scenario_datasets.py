"""Data sets: files, errors with their lines, splits, duplicates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.errors import ConfigError
from art_recipes.scenarios import Dataset, TaskText, WrittenScenario, split_of, with_splits
from art_recipes.scenarios.written import position, without_twins

TASK = TaskText(
    description="help", system_prompt="Be helpful.\nBe brief.", rubric="Right \"counts\" most.\nThen it's 'nice'"
)


def numbered(count: int) -> list[WrittenScenario]:
    return [WrittenScenario(input=f"question number {i}") for i in range(count)]


def write(folder: Path, *lines: Any) -> Path:
    Dataset(task=TASK, scenarios=numbered(1)).save(folder)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "scenarios.jsonl").write_text("\n".join(texts))
    return folder


# -- files --


def test_files_are_for_people_and_survive_a_round_trip(tmp_path: Path) -> None:
    dataset = Dataset(
        task=TASK, scenarios=with_splits([*numbered(3), WrittenScenario(input="größer\n ☃", difficulty=2)])
    )
    dataset.save(tmp_path / "new")
    assert Dataset.load(tmp_path / "new") == dataset
    text = (tmp_path / "new" / "task.toml").read_text()
    assert "system_prompt = '''\nBe helpful.\nBe brief.\n'''" in text, "prose without escapes"
    assert "# What the agent is told before each input.\n" in text
    lines = (tmp_path / "new" / "scenarios.jsonl").read_text().splitlines()
    assert json.loads(lines[0]).keys() == {"input", "split"}
    assert "größer" in lines[3]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip()))
def test_any_text_survives_the_toml(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    dataset = Dataset(task=TaskText(description="a", system_prompt=text, rubric=text), scenarios=numbered(1))
    dataset.save(folder)
    assert Dataset.load(folder).task == dataset.task


def test_lines_of_people_are_understood(tmp_path: Path) -> None:
    folder = write(tmp_path, '{"input": " a "}', "", '  {"input": "b", "split": "test", "difficulty": 5}  ', "")
    loaded = Dataset.load(folder)
    assert loaded.scenarios == [WrittenScenario(input="a"), WrittenScenario(input="b", split="test", difficulty=5)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "b"', r"scenarios.jsonl:2: this is not JSON"),
        ("[1]", r"scenarios.jsonl:2: expected an object like"),
        ({}, r"scenarios.jsonl:2: input: Field required"),
        ({"input": "  "}, r"scenarios.jsonl:2: input: .* at least 1 character, got '  '"),
        ({"input": 3}, r"scenarios.jsonl:2: input: .*string, got 3"),
        ({"input": "b", "difficulty": 9}, r"scenarios.jsonl:2: difficulty: .*less than or equal to 5, got 9"),
        ({"input": "b", "difficulty": "3"}, r"scenarios.jsonl:2: difficulty: .*integer, got '3'"),
        ({"input": "b", "split": "dev"}, r"scenarios.jsonl:2: split: .*'train', 'val' or 'test', got 'dev'"),
        ({"input": "b", "label": 1}, r"scenarios.jsonl:2: label: unknown; there are input, difficulty, split"),
        ({"input": "a\n"}, r"scenarios.jsonl:2: the input is in line 1 already: 'a'"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset.load(write(tmp_path, {"input": "a"}, line))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("description", "colour = 3\ndescription"), r"task.toml:4: colour: unknown; there are description, "),
        (("temperature = 1.0", "temperature = 'hot'"), r"task.toml:\d+: temperature: .*number"),
        (("temperature = 1.0", "temperature = 0"), r"task.toml:\d+: temperature: .*greater than 0"),
        (("temperature = 1.0", "temperature = "), r"task.toml:\d+: this is not TOML"),
        (("description = ", "# "), r"task.toml:1: description: Field required"),
        (("Be brief.\n'''", "Be brief.\n"), r"task.toml:\d+: this is not TOML"),
    ],
)
def test_errors_in_the_task_name_file_and_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = write(tmp_path, {"input": "a"}) / "task.toml"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match=message):
        Dataset.load(tmp_path)


def test_files_that_are_missing_empty_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.toml does not exist"):
        Dataset.load(tmp_path)
    with pytest.raises(ConfigError, match=r"scenarios.jsonl:1: there are no scenarios"):
        Dataset.load(write(tmp_path, "", ""))
    (tmp_path / "scenarios.jsonl").write_bytes(b'{"input": "a"}\n{"input": "\xff"}')
    with pytest.raises(ConfigError, match=r"scenarios.jsonl:2: this is not UTF-8"):
        Dataset.load(tmp_path)


# -- splits --


def test_a_split_depends_on_nothing_but_the_words() -> None:
    before = {scenario.input: split_of(scenario) for scenario in numbered(300)}
    more = numbered(600)
    random.Random(0).shuffle(more)
    after = {scenario.input: split_of(scenario) for scenario in more}
    assert {text: after[text] for text in before} == before
    assert all(split_of(WrittenScenario(input=f"{text.upper()}?")) == split for text, split in before.items())
    counts = [list(after.values()).count(split) for split in ("train", "val", "test")]
    assert 370 < counts[0] < 470
    assert 30 < counts[1] < 95
    assert 85 < counts[2] < 160


def test_a_given_split_wins() -> None:
    assert split_of(WrittenScenario(input="a", split="val")) == "val"
    placed = with_splits([WrittenScenario(input=f"q {i}", split="val") for i in range(3)] + numbered(20))
    assert [scenario.split for scenario in placed[:3]] == ["val"] * 3
    assert [s.split for s in placed[3:]] == [split_of(s) for s in numbered(20)]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_small_set_has_something_to_train_on_and_to_test_with(count: int) -> None:
    one_sided = [scenario for scenario in numbered(200) if split_of(scenario) == "train"][:count]
    splits = [scenario.split for scenario in with_splits(one_sided)]
    assert splits.count("test") == 1
    assert splits.count("train") == count - 1
    moved = one_sided[splits.index("test")]
    assert position(moved.input) == min(position(scenario.input) for scenario in one_sided)
    tests = [scenario for scenario in numbered(200) if split_of(scenario) == "test"][:count]
    assert [scenario.split for scenario in with_splits(tests)].count("train") == 1


# -- duplicates --


def test_twins() -> None:
    texts = ["Where is my parcel?", "where is MY parcel", "Where is my red parcel?", "Who is it?", "", "!"]
    assert without_twins(texts) == [0, 3, 4]
    assert without_twins(texts[3:], known=["who, is: it"]) == [1]


def test_the_summary_is_for_people() -> None:
    scenarios = [
        WrittenScenario(input=f"{word} {i}", difficulty=1 + i % 2, split="train") for i, word in enumerate("abc")
    ]
    summary = Dataset(task=TASK, scenarios=scenarios).summary()
    assert "3 scenarios: 3 train, 0 val, 0 test" in summary
    assert "difficulty: 2 of 1, 1 of 2" in summary
