"""The table of notebooks in examples/notebooks/README.md: what each shows, and how long its last whole run took."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tools.notebooks.write import FOLDER, sources

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "images" / "notebooks"
TIMES = ROOT / "benchmarks" / "results" / "2026-11-23-cpu" / "notebooks.json"
ORDER = (
    "quick_start", "tic_tac_toe", "sft_then_rl", "game_2048", "temporal_clue", "codenames", "art_e", "auto_rl",
    "mcp_rl", "langgraph_agent",
)  # fmt: skip
"""Names in the order in which a newcomer may read them."""
_BLOCK = re.compile(r"(<!-- notebooks -->\n).*?(<!-- /notebooks -->)", re.DOTALL)


def titles() -> Mapping[str, str]:
    """The heading of each notebook, in the order of `ORDER`. Others come last."""
    known = {source.stem: source.read_text(encoding="utf-8").split("\n")[1] for source in sources()}
    return {name: known[name].removeprefix("# # ") for name in [*ORDER, *known] if name in known}


def rows() -> str:
    """The table of all notebooks."""
    times = json.loads(TIMES.read_text(encoding="utf-8"))
    lines = ["| notebook | what is learnt | wall s | CPU s |", "|---|---|---|---|"]
    for name, title in titles().items():
        measured = times.get(name, {"wall_s": "not measured yet", "cpu_s": ""})
        shown = f"{title}<br>{_curve(name)}" if (PICTURES / f"{name}.png").exists() else title
        lines.append(f"| [{name}]({name}.ipynb) | {shown} | {measured['wall_s']} | {measured['cpu_s']} |")
    return "\n".join(lines) + "\n"


def _curve(name: str) -> str:
    return f'<img src="../../docs/images/notebooks/{name}.png" alt="learning curve" width="360">'


def write_table() -> bool:
    """Write the table into the README, and return whether it has changed."""
    page = FOLDER / "README.md"
    old = page.read_text(encoding="utf-8")
    new = _BLOCK.sub(lambda match: f"{match[1]}\n{rows()}\n{match[2]}", old)
    page.write_text(new, encoding="utf-8")
    return new != old


def keep_times(name: str, wall_s: float, cpu_s: float) -> None:
    """Write the times of a run to the file, which keeps those of other notebooks."""
    times = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
    times[name] = {"wall_s": round(wall_s), "cpu_s": round(cpu_s)}
    TIMES.write_text(json.dumps(dict(sorted(times.items())), indent=2) + "\n", encoding="utf-8")
