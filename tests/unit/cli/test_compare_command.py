"""`art compare`: table, files and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.cli.main import main
from art.cli.output import EXIT_NO_SCORE, EXIT_WORSE
from art.testing.scripted_server import ScriptedServer, failure
from art_recipes.comparing.model_comparison import read_comparison
from tests.support.parity import Server

TASK = "tests.support.parity:Parity"


def test_a_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(Server()) as good, ScriptedServer(Server(skill=0.5)) as weak:
        code = main(
            ["compare", TASK, "--models", f"good={good.base_url},weak={weak.base_url}", "--held-out", "20",
             "--price", "weak=1,2", "--data-dir", str(tmp_path)]
        )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    folder = tmp_path / "comparisons" / "parity-test-seed0"
    comparison = read_comparison(folder)
    weak_row = comparison.row("weak")
    assert weak_row.headline is not None
    assert weak_row.difference is not None
    for text in (weak_row.headline.text(), weak_row.difference.text(sign=True), "no price", "20 of 20", "art view"):
        assert text in out
    assert (comparison.reference, comparison.num_scenarios) == ("good", 20)


@pytest.mark.parametrize(("require", "code"), [("-1", 0), ("-0.1", EXIT_WORSE)])
def test_a_requirement_on_the_difference_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], require: str, code: int
) -> None:
    with ScriptedServer(Server()) as good, ScriptedServer(Server(skill=0.5)) as weak:
        models = f"good={good.base_url},weak={weak.base_url}"
        asked = ["compare", TASK, "--models", models, "--held-out", "20", f"--require={require}"]
        assert main([*asked, "--data-dir", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert ("weak minus good: " in out) == (code == EXIT_WORSE)
    assert ("the low end must be -0.1 or above" in out) == (code == EXIT_WORSE)


def test_a_model_without_a_score_is_a_row_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(Server()) as good, ScriptedServer(Server(lambda *_: failure(403, "not yours"))) as bad:
        models = [f"good={good.base_url}", f"bad={bad.base_url}"]
        code = main(
            [
                "compare",
                TASK,
                "--models",
                *models,
                "--held-out",
                "10",
                "--concurrency",
                "1",
                "--out",
                str(tmp_path / "o"),
            ]
        )
    out = capsys.readouterr().out
    assert code == EXIT_NO_SCORE
    assert "no score" in out
    assert "not yours" in out
    assert "art view" not in out  # the page shows data directories
    assert read_comparison(tmp_path / "o").row("good").num_rollouts == 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--price", "nobody=1,2"], "MODEL is one of m"),
        (["--price", "m=1"], "a price is two numbers"),
        (["--price", "m=cheap,2"], "a price is two numbers"),
        (["--held-out", "0"], "--held-out"),
    ],
)
def test_wrong_options_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    code = main(["compare", TASK, "--models", "m=http://127.0.0.1:9/v1", "--data-dir", str(tmp_path), *options])
    assert code == 1
    assert says in capsys.readouterr().err


def test_a_task_without_a_player_is_said_before_anybody_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    with ScriptedServer(server) as running:
        models = f"m={running.base_url},scripted"
        assert main(["compare", TASK, "--models", models, "--data-dir", str(tmp_path)]) == 1
    assert "no scripted player" in capsys.readouterr().err
    assert server.bodies == []
