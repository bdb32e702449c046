"""What a run has cost, from its `costs.jsonl`."""

from __future__ import annotations

import math

from art.costs.amount import Amount
from art.costs.by_step import StepAmounts
from art.viewer.answers.costs import CostsAnswer, CostsByStep, SourceCosts
from art.viewer.conversation import Row
from art.viewer.reads.followed_file import FollowedFile


class CostsFile(FollowedFile):
    """The booked costs of one run."""

    amounts: StepAmounts

    def reset(self) -> None:
        self.amounts = StepAmounts()

    def take(self, row: Row) -> None:
        self.amounts.fold(row)

    def total_usd(self) -> float | None:
        """Return all costs in USD; `None` if nothing with a price was booked."""
        amounts = self.amounts.totals().values()
        return math.fsum(amount.usd for amount in amounts) if any(amount.priced for amount in amounts) else None


def describe_costs(file: CostsFile) -> CostsAnswer:
    """Sum costs by source and by step."""
    totals, by_step = file.amounts.totals(), file.amounts.by_step()
    sources = sorted(totals, key=lambda source: (-totals[source].usd, source))
    steps = sorted(step for step, amounts in by_step.items() if any(amount.usd for amount in amounts.values()))
    paid = {source for step in steps for source, amount in by_step[step].items() if amount.usd}
    return CostsAnswer(
        total_usd=file.total_usd(),
        by_source=[_source(source, totals[source]) for source in sources],
        by_step=CostsByStep(
            steps=steps,
            by_source={
                source: [by_step[step].get(source, Amount()).usd for step in steps]
                for source in sources
                if source in paid
            },
        ),
        num_unreadable_lines=file.num_damaged,
    )


def _source(source: str, amount: Amount) -> SourceCosts:
    return SourceCosts(
        source=source,
        usd=amount.usd if amount.priced else None,
        num_unpriced=int(amount.unpriced),
        prompt_tokens=int(amount.prompt_tokens),
        completion_tokens=int(amount.completion_tokens),
        seconds=amount.seconds,
    )
