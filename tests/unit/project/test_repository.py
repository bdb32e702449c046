"""What a public repository has beside its code: workflows, constraints, citation, navigation of the site, releases."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

import art
from tools.constraints import installed_versions, requirements
from tools.release_notes import release_notes, version_of_source
from tools.site_hooks import first_sentence, on_page_markdown, on_post_build

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text())
PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def workflow(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return read


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_continuous_integration_runs_lint_types_and_tests() -> None:
    script = (ROOT / ".ci/run").read_text()
    ran = {word for line in re.findall(r"^make (.+)$", script, re.MULTILINE) for word in line.split()}
    assert {"lint", "types", "test"} <= ran <= TARGETS


def test_the_workflow_runs_the_same_on_the_oldest_and_newest_python() -> None:
    job = workflow("checks")["jobs"]["test"]
    assert commands(job) == [".ci/run"]
    versions = job["strategy"]["matrix"]["python"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert [versions[0], versions[-1]] == [claimed[0], claimed[-1]]
    assert commands(workflow("checks")["jobs"]["docs"]) == ["make docs"]


def test_a_workflow_runs_the_notebooks_whole() -> None:
    assert commands(workflow("notebooks")["jobs"]["run"]) == ["make test-notebooks"]
    assert "test-notebooks" in TARGETS


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/art/__init__.py"
    assert version_of_source() == art.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_constraints_pin_what_the_extras_ask_for() -> None:
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate():
            assert name in PINS, f"{name} has no pin; renew constraints.txt with: python -m tools.constraints"
            assert requirement.specifier.contains(PINS[name]), f"{name}=={PINS[name]} is not {requirement.specifier}"


def test_constraints_hold_what_the_requirements_bring() -> None:
    installed = installed_versions(requirements(("local",)))
    assert installed["torch"] == importlib.metadata.version("torch").partition("+")[0]
    missing = {name for name in installed.keys() - PINS.keys() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert not missing, "renew constraints.txt with: python -m tools.constraints"


def test_the_lock_of_uv_belongs_to_these_requirements() -> None:
    (package,) = [each for each in LOCK["package"] if each["name"] == PROJECT["project"]["name"]]
    locked = {(each["name"], each.get("specifier", "")) for each in package["metadata"]["requires-dist"]}
    asked = {(canonicalize_name(each.name), str(each.specifier)) for each in requirements()}
    assert {(name, normal(specifier)) for name, specifier in asked} <= {(n, normal(s)) for n, s in locked}, "uv lock"


def normal(specifier: str) -> frozenset[str]:
    """The bounds of a specifier, whatever their order."""
    return frozenset(specifier.replace(" ", "").split(","))


MAX_PAGES = 60
"""Most pages of the documentation site. It leaves out the decisions, which the repository lists."""


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"([\w/.-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(page for page in pages if not page.startswith("decisions/"))
    assert len(named) <= MAX_PAGES


@pytest.mark.parametrize(
    ("repo_url", "shown"),
    [("", "[a](b.md) README"), ("https://x/y", "[a](b.md) [README](https://x/y/blob/main/README.md)")],
)
def test_links_that_leave_the_site_lead_to_the_repository(repo_url: str, shown: str) -> None:
    class Named:
        src_uri = "guide.md"

    class Page:
        file = Named

    class Config:
        pass

    config = Config()
    config.repo_url = repo_url  # type: ignore[attr-defined]
    assert on_page_markdown("[a](b.md) [README](../README.md)", page=Page, config=config) == shown
    decision = shown.replace("README.md", "docs/decisions/0001.md")
    assert on_page_markdown("[a](b.md) [README](decisions/0001.md)", page=Page, config=config) == decision


def test_the_site_has_its_pages_for_language_models(tmp_path: Path) -> None:
    nav = yaml.safe_load("nav:" + (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])["nav"]
    config = SimpleNamespace(
        nav=nav, docs_dir=ROOT / "docs", site_dir=tmp_path, site_name="ART", site_description="trains agents",
        site_url="https://x/",
    )  # fmt: skip
    on_post_build(config=config)
    listing, whole = (tmp_path / "llms.txt").read_text(), (tmp_path / "llms-full.txt").read_text()
    assert listing.startswith("# ART\n\n> trains agents\n\n## ")
    assert [
        line for line in listing.splitlines() if not re.match(r"$|# |> |## |- \[[^\]]+\]\(https://x/.+\.md\)", line)
    ] == []
    listed = re.findall(r"\]\(https://x/(.+?\.md)\)", listing)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(page for page in pages if not page.startswith("decisions/"))
    for page in listed:
        text = (ROOT / "docs" / page).read_text()
        assert (tmp_path / page).read_text() == text
        assert text.strip() in whole


def test_a_page_is_described_by_its_first_sentence() -> None:
    page = "# Title\n\n    art demo\n\n<!-- a marker -->\n\nTrains [agents](x.md),\nby reward. And more.\n"
    assert first_sentence(page) == "Trains agents, by reward."
    assert first_sentence("# Title\n\n- a list\n") == ""


def test_release_notes_are_the_section_of_the_version() -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-12-01\n\n- one\n- two\n\n## [0.1.0]\n\n- old\n"
    )
    assert release_notes("v0.2.0", changelog, "0.2.0") == "- one\n- two\n"
    with pytest.raises(ValueError, match=r"the tag is v0\.3\.0 and the source says 0\.2\.0"):
        release_notes("v0.3.0", changelog, "0.2.0")
    with pytest.raises(ValueError, match=r"no section \[0\.3\.0\]"):
        release_notes("v0.3.0", changelog, "0.3.0")
