"""Write every generated page of docs/ except docs/models.md, which takes a run (`python -m tools.families.page`).

python -m tools.pages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.pages import api, cli, errors, metrics, settings, tasks

DOCS = Path(__file__).parents[2] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    **api.pages(),
    **cli.pages(),
    "errors.md": errors.render_page,
    "metrics.md": metrics.render_page,
    **settings.pages(),
    "tasks.md": tasks.render_page,
}


def main() -> None:
    for name, render in PAGES.items():
        page, text = DOCS / name, render()
        is_current = page.exists() and page.read_text() == text
        page.write_text(text)
        print(f"docs/{name}: {'is current' if is_current else 'written'}")


if __name__ == "__main__":
    main()
