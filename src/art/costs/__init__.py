"""Costs of a run by source, and the budget that limits them.

model = art.TrainableModel(..., budget_usd=20, prices=Prices(device_usd_per_hour=2.5))
judge = Ruler("openai/o3", settings=JudgeSettings(budget=model.costs))      # the judge spends the same budget
"""

from art.costs.ledger import Amount, Ledger
from art.costs.prices import Prices, TokenPrice

__all__ = ["Amount", "Ledger", "Prices", "TokenPrice"]
