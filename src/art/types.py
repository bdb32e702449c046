"""The module from which older code imports types of messages, settings and results."""

from typing import Literal

from art.backend import TrainResult
from art.config import TrainConfig, TrainSFTConfig
from art.messages import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools

LocalTrainResult = ServerlessTrainResult = TrainResult
Verbosity = Literal[0, 1, 2]

__all__ = [
    "LocalTrainResult",
    "Message",
    "MessageOrChoice",
    "Messages",
    "MessagesAndChoices",
    "ServerlessTrainResult",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "Verbosity",
]
