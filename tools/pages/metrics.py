"""Generate docs/metrics.md from the catalogue of metrics and the table of rules for findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from art.metrics.catalogue import (
    ALWAYS,
    FAULT_METRICS,
    JOB_METRICS,
    LOG_METRICS,
    PIPELINE_METRICS,
    PLAN_METRICS,
    SFT_METRICS,
    TRAINER_METRICS,
    Metric,
)
from art.metrics.findings import BEFORE, RULES, Limit, Rule

_INTRODUCTION = """\
# Metrics and findings

<!-- Made by `make pages`; a test compares. -->

Read the metrics of a step, and the findings that explain what is unusual about them:

<!-- not run: shows how to read a result -->

```python
result = await model.train(groups)
result.metrics["loss/entropy"]  # a flat dictionary of numbers
result.findings  # sentences: what was observed, what it means, what to do
```

Logged metrics are rows of `history.jsonl`. The metrics that the trainer measures are stored in the checkpoint too.
Findings are also written to the server's log, and shown as a warning by your program: once when a finding is new, then
once in 20 steps. `model.log` adds the means of your rollouts' rewards and metrics, named by their split, e.g.
`train/reward`.

A *target* is a token that is trained on. Its *importance ratio* is its probability under the trained policy divided by
the probability that it was sampled with. If a step makes several updates, each target is measured in its own update,
before that update changes the weights.
"""

_FINDINGS = """\
## Findings

A step has the finding of a row if the condition in the second column is true. Its metrics then include
`findings/<name>`. `art demo` is the tic-tac-toe agent that comes with ART.
"""

_SECTIONS: Sequence[tuple[str, Mapping[str, Metric]]] = (
    ("What the trainer measures", TRAINER_METRICS),
    ("What the server adds to a step of reinforcement learning", PLAN_METRICS),
    ("What the server adds to a step with supervised data", SFT_METRICS),
    ("What the server adds when the step is published", JOB_METRICS),
    ("What `art.pipeline` adds", PIPELINE_METRICS),
    ("Costs and sums, which `model.log` adds (see [costs](costs.md))", LOG_METRICS),
    ("Failures, counted by `FaultWatch` and `GroupScorer`", FAULT_METRICS),
)


def render_page() -> str:
    """Return the page of metrics and findings as Markdown."""
    rules = (_rule_row(name, rule) for name, rule in RULES.items())
    parts = [
        _INTRODUCTION,
        _FINDINGS,
        _table(
            ("name", "condition", "meaning and advice", "reason for the bound"),
            rules,
        ),
    ]
    for title, metrics in _SECTIONS:
        rows = ((f"`{name}`", m.meaning, "" if m.when == ALWAYS else m.when) for name, m in metrics.items())
        parts += [f"## {title}\n", _table(("metric", "meaning", "reported only in"), rows)]
    return "\n".join(parts)


def _rule_row(name: str, rule: Rule) -> tuple[str, ...]:
    broken = ", or ".join(_outside(limit) for limit in rule.limits)
    conditions = " and ".join(_inside(limit) for limit in rule.only_if)
    when = f"{broken}; only if {conditions}" if conditions else broken
    meaning = rule.meaning[0].upper() + rule.meaning[1:]
    return name, when, f"{meaning}. {rule.advice}.", rule.source


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
