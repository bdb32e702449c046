"""The generated pages of the documentation say what the code says now."""

from __future__ import annotations

import pytest

import art
from art.cli.main import COMMANDS
from art.config import TrainConfig
from art.errors import ArtError, DiskFullError, ProcessError, error_from_code
from tools.pages.__main__ import DOCS, PAGES
from tools.pages.cli import parsers
from tools.pages.errors import ADVICE, error_classes, status_of
from tools.pages.markdown import escaped, prose
from tools.pages.settings import settings_classes, settings_of
from tools.pages.source import limits_text, own_docstring, type_text


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), f"docs/{name} is stale; renew it with: python -m tools.pages"


def pages(prefix: str) -> str:
    """All pages of one kind, one after the other."""
    return "".join((DOCS / name).read_text() for name in PAGES if name.startswith(prefix))


def test_every_public_name_has_a_section_or_a_row() -> None:
    page = pages("api")
    assert [
        n for n in art.__all__ if f"### {n}\n" not in page and f"### art.{n}\n" not in page and f"| `{n}` |" not in page
    ] == []


def test_every_setting_has_a_row_with_its_default() -> None:
    page = pages("settings")
    rows = {name: (kind, default) for name, kind, default, _ in settings_of(TrainConfig)}
    assert rows.keys() == TrainConfig.model_fields.keys()
    assert rows["learning_rate"] == ("float or ScheduleConfig", "`1e-05`")
    assert rows["num_minibatches"] == ("int, at least 1", "`1`")
    assert "| `learning_rate` | `float or ScheduleConfig` | `1e-05` |" in page
    assert all(f"\n## {cls.__name__}\n" in page for cls in settings_classes())


def test_every_command_and_every_option_has_its_place() -> None:
    page = pages("cli")
    assert {f"art {name}" for name in COMMANDS} | {"art-server"} <= {parser.prog for parser, _ in parsers()}
    for parser, level in parsers():
        _, _, section = page.partition(f"\n{'#' * level} {parser.prog}\n")
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        assert section, parser.prog
        assert [option for option in options if f"`{option}" not in section.partition("\n## ")[0]] == []


def test_every_error_has_a_status_and_advice() -> None:
    classes = [cls for cls, _ in error_classes()]
    assert set(classes) == set(ADVICE)
    assert (status_of(DiskFullError), status_of(ProcessError), status_of(ArtError)) == (507, 503, 500)
    page = (DOCS / "errors.md").read_text()
    assert [cls.code for cls in classes if f"| `{cls.__name__}` | `{cls.code}` |" not in page] == []
    assert [cls.__name__ for cls in classes if not own_docstring(cls)] == []


def test_the_code_of_an_error_names_its_class_and_no_subclass() -> None:
    class SpecialError(ProcessError):
        """A subclass with the code of its parent."""

    assert SpecialError.code == ProcessError.code
    named = {cls: type(error_from_code(cls.code, "no")) for cls, _ in error_classes()}
    assert [cls for cls, kind in named.items() if cls is not kind] == []
    assert type(error_from_code("of the future", "no")) is ArtError


def test_docstrings_become_markdown() -> None:
    docstring = (
        "First <line>,\nwith `<code>`.\n\n    an example\n\nArgs:\n    one: of a\n        longer text\nRaises:\n    two"
    )
    text = prose(docstring.replace("\nRaises", "\n\nRaises"))
    assert text == (
        "First &lt;line>,\nwith `<code>`.\n\n```text\nan example\n```\n\n"
        "*Args*\n\n- `one`: of a longer text\n\n*Raises*\n\n- two"
    )
    assert escaped("a [b] *c* `[d]`") == "a \\[b\\] \\*c\\* `[d]`"


def test_types_and_limits_in_words() -> None:
    assert type_text(int | None) == "int or None"
    assert type_text(tuple[float, ...]) == "tuple[float, ...]"
    assert limits_text(TrainConfig.model_fields["num_minibatches"].metadata) == "at least 1"
