from __future__ import annotations

import argparse
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from art.cli.main import StderrHandler, main
from art.config import ServerConfig, VllmConfig
from art.errors import ConfigError
from art.model import TrainableModel
from art.recipes import AutoConfig, McpRlConfig, RecipeConfig, TaskTrainingConfig
from art.storage.labels import read_labels
from art.storage.layout import DataDir
from art_recipes import auto_command, mcp_rl_command, train_command
from art_recipes.arguments import config_of


def test_a_message_beside_a_progress_bar_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, handler = logging.Logger("art.backend"), StderrHandler()
    logger.addHandler(handler)
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with Progress(console=Console(file=screen, force_terminal=True, width=60), refresh_per_second=0.1) as progress:
        progress.add_task("training", total=2)
        logger.warning("loss/entropy is low")
    assert screen.getvalue().count("loss/entropy is low\n") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stderr := io.StringIO())
        logger.warning("plain")
    assert stderr.getvalue() == "plain\n"


@pytest.mark.parametrize(("option", "weights"), [("--full-finetuning", "merged"), ("--lora-rank=8", "lora")])
def test_vllm_gets_whole_weights_where_all_are_trained(option: str, weights: str) -> None:
    parser = argparse.ArgumentParser()
    train_command.add_options(parser)
    args = parser.parse_args(["tic_tac_toe", "--engine", "vllm", option])
    settings = config_of(TaskTrainingConfig, args).model_settings()
    assert isinstance(settings.engine, VllmConfig)
    assert settings.engine.weights == weights
    assert (settings.lora is None) is (weights == "merged")


@pytest.mark.parametrize(
    ("add_options", "config", "others"),
    [
        (auto_command.add_options, AutoConfig, {"what", "out", "write_only"}),
        (mcp_rl_command.add_options, McpRlConfig, {"server", "out", "header", "server_env"}),
        (train_command.add_options, TaskTrainingConfig, {"task", "task_options", "json", "seeds"}),
    ],
)
def test_every_setting_of_a_recipe_is_an_option_with_help(
    add_options: Any, config: type[RecipeConfig], others: set[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    dests = {action.dest: action.help for action in parser._actions}
    passed_otherwise = {"headers", "env", "server_config"}  # own syntax, or in the file of --settings
    assert dests.keys() - others - {"help"} == config.model_fields.keys() - passed_otherwise
    assert all(text and text != "None" for text in dests.values())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--steps", "-3"], "`--steps` must be greater than or equal to 0, got -3"),
        (["--steps", "0"], "`--steps` = 0 trains nothing; give 1 or more, or `--held-out` to measure only"),
        (["--learning-rate", "-1"], "`--learning-rate` must be greater than 0, got -1.0"),
        (["--groups", "0"], "`--groups` must be greater than or equal to 1, got 0"),
        (["--rollouts", "1"], "`--rollouts` must be greater than or equal to 2, got 1"),
        (["--seed", "-1"], "`--seed` must be greater than or equal to 0, got -1"),
        (["--lora-rank", "0"], "`--lora-rank` must be greater than or equal to 1, got 0"),
        (["--budget", "3"], "--budget needs something that costs"),
    ],
)
def test_numbers_that_an_option_cannot_have_are_refused_before_anything_is_made(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "yes_no_maybe", *options]) == 1
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "making a tiny model" not in printed.out
    assert list(tmp_path.iterdir()) == []


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def read(*options: str) -> TaskTrainingConfig:
    parser = argparse.ArgumentParser()
    train_command.add_options(parser)
    return config_of(TaskTrainingConfig, parser.parse_args(["tic_tac_toe", *options]))


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    toml = 'steps = 9\ngroups = 3\njudge_price = [1, 2.5]\nreport = ["wandb"]\n[settings.trainer]\nnum_processes = 2\n'
    toml += '[server_config]\nalerts = "cat"\n'
    config = read("--settings", write(tmp_path / "a.toml", toml), "--steps", "5")
    assert (config.steps, config.groups, config.judge_price, config.report) == (5, 3, (1, 2.5), ("wandb",))
    assert config.model_settings().trainer.num_processes == 2
    assert config.server_config == ServerConfig(alerts="cat")
    assert read("--settings", write(tmp_path / "a.json", '{"steps": 9, "engine": "vllm"}')).steps == 9
    merged = '{"settings": {"lora": null, "engine": {"kind": "vllm", "weights": "merged"}}}'
    assert read("--settings", write(tmp_path / "b.json", merged)).serves_one_step


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.toml", "groups =\nsteps = 9", "a.toml is not valid: Invalid value (at line 1, column 9)"),
        ("a.json", '{"steps": 9,\n}', "a.json is not valid: Expecting property name enclosed in double quotes: line 2"),
        ("a.json", "[1]", "a.json: expected settings by name"),
        ("a.yaml", "steps: 9", "a.yaml: expected a file in TOML or JSON"),
        ("a.toml", "step = 9", "a.toml: `step` is no setting of TaskTrainingConfig; did you mean `steps`?"),
        ("a.toml", "groups = 0", "a.toml: `groups` must be greater than or equal to 1, got 0"),
        ("a.toml", "[settings.engine]\nmax_contxt = 9", "did you mean `max_context`?"),
        ("a.toml", "lora_rank = 8\n[settings.lora]\nrank = 8", "`lora_rank` is part of `settings`, which is given too"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read("--settings", write(tmp_path / name, text))


async def test_a_run_gets_its_labels_when_it_begins(tmp_path: Path) -> None:
    model = TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    paths = DataDir(tmp_path).model("p", "m")
    await read("--tag", "baseline", "--tag", "first try", "--notes", "before").record(model)
    assert (read_labels(paths).tags, read_labels(paths).notes) == (["baseline", "first try"], "before")
    await read("--notes", "after").record(model)
    assert (read_labels(paths).tags, read_labels(paths).notes) == (["baseline", "first try"], "after")
    await read().record(model)
    assert read_labels(paths).notes == "after"
    with pytest.raises(ConfigError, match="`--tag"):
        read("--tag", "a,b")


def test_a_mistake_on_the_command_line_is_not_one_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`--groups` must be"):
        read("--settings", write(tmp_path / "a.toml", "steps = 9"), "--groups", "0")


@pytest.mark.parametrize(
    "command",
    [["demo", "--task", "yes_no_maybe"], ["auto", "say yes", "--model", "m"], ["mcp-rl", "s", "--model", "m"]],
)
def test_other_commands_that_train_refuse_them_too(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--steps", "0"]) == 1
    assert "`--steps` must be greater than or equal to 1, got 0" in capsys.readouterr().err
    if command[0] == "demo":
        assert main([*command, "--held-out", "0"]) == 1
        assert "`--held-out` must be 1 or more, got 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
