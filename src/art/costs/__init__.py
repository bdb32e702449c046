"""What a run costs, by source, and what it may cost.

model = art.TrainableModel(..., budget_usd=20, prices=Prices(device_usd_per_hour=2.5))
judge = Ruler("openai/o3", settings=JudgeSettings(budget=model.costs))      # books there, and stops there
"""

from art.costs.amount import Amount
from art.costs.ledger import Ledger
from art.costs.prices import Prices, TokenPrice

__all__ = ["Amount", "Ledger", "Prices", "TokenPrice"]
