"""`Model` and `TrainableModel`: a named policy, the clients to talk to it, and its log. A model owns no process.

model = art.TrainableModel(name="agent-1", project="tic-tac-toe", base_model="Qwen/Qwen3-0.6B")
await model.register(backend)
client = model.openai_client()
"""

from art.model.model import Model
from art.model.trainable import TrainableModel

__all__ = ["Model", "TrainableModel"]
