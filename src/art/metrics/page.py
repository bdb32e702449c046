"""docs/metrics.md, made from the catalogue of metrics and the table of rules.

python -m art.metrics.page > docs/metrics.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from art.metrics.catalogue import (
    ALWAYS,
    FAULT_METRICS,
    JOB_METRICS,
    LOG_METRICS,
    PLAN_METRICS,
    SFT_METRICS,
    TRAINER_METRICS,
    TREND_METRICS,
    Metric,
)
from art.metrics.findings import BEFORE, RULES, Limit, Rule

_INTRODUCTION = """\
# Metrics and findings

<!-- Made by `python -m art.metrics.page`; a test compares. -->

Every training step reports flat numbers: `TrainResult.metrics`, and a row of `history.jsonl` once they are logged.
What the trainer measured is in the checkpoint too. What is out of range is said in plain words:
`TrainResult.findings`, the server's log, and a warning where your code runs, once when it is new and then once in 20
steps. `model.log` adds means of your rollouts' rewards and metrics under the name of their split, e.g. `train/reward`.

A *target* is a token that is learnt. Its importance ratio is the probability that the trained policy gives it over the
one that it was sampled with. Where a step makes several updates, each target is measured in its own update, before that
changes the weights.
"""

_FINDINGS = """\
## Findings

One for each row whose number is outside of its range. The step's metrics then have `findings/<name>`.
"""

_SECTIONS: Sequence[tuple[str, Mapping[str, Metric]]] = (
    ("What the trainer measures", TRAINER_METRICS),
    ("What the server adds to a step of reinforcement learning", PLAN_METRICS),
    ("What the server adds from the steps before, to a step of reinforcement learning", TREND_METRICS),
    ("What the server adds to a step of supervised fine-tuning", SFT_METRICS),
    ("What the server adds when the step is published", JOB_METRICS),
    ("Costs and sums, which `model.log` adds (see [costs](costs.md))", LOG_METRICS),
    ("Failures, counted by `FaultWatch` and `GroupScorer`", FAULT_METRICS),
)


def render_page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION, _FINDINGS, _table(("name", "found when", "meaning", "why there"), map(_rule_row, RULES))]
    for title, metrics in _SECTIONS:
        rows = ((f"`{name}`", m.meaning, "" if m.when == ALWAYS else m.when) for name, m in metrics.items())
        parts += [f"## {title}\n", _table(("metric", "meaning", "only in"), rows)]
    return "\n".join(parts)


def _rule_row(rule: Rule) -> tuple[str, ...]:
    found = ", or ".join(_outside(limit) for limit in rule.limits)
    conditions = " and ".join(_inside(limit) for limit in rule.only_if)
    when = f"{found}; only where {conditions}" if conditions else found
    meaning = rule.meaning[0].upper() + rule.meaning[1:]
    return rule.name, when, f"{meaning}. {rule.advice}.", rule.source


def _outside(limit: Limit) -> str:
    sides = [f"below {limit.low:g}"] * math.isfinite(limit.low) + [f"above {limit.high:g}"] * math.isfinite(limit.high)
    return f"{_compared(limit)} {' or '.join(sides)}"


def _inside(limit: Limit) -> str:
    sides = [f"at least {limit.low:g}"] * math.isfinite(limit.low)
    sides += [f"at most {limit.high:g}"] * math.isfinite(limit.high)
    return f"{_compared(limit)} is {' and '.join(sides) or 'reported'}"


def _compared(limit: Limit) -> str:
    if limit.over is None:
        return f"`{limit.metric}`"
    return f"`{limit.metric}` / {limit.over if limit.over == BEFORE else f'`{limit.over}`'}"


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(render_page())
