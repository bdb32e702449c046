"""`art.types` and `art.trajectories`: messages, trajectories, settings and results of older code."""

from typing import Literal

from art.backend import TrainResult
from art.config import TrainConfig, TrainSFTConfig
from art.messages import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools, get_messages
from art.trajectory import History, MetadataValue, PydanticException, Trajectory, TrajectoryGroup

LegacyHistory = History
LocalTrainResult = ServerlessTrainResult = TrainResult
Verbosity = Literal[0, 1, 2]

__all__ = [
    "History", "LegacyHistory", "LocalTrainResult", "Message", "MessageOrChoice", "Messages", "MessagesAndChoices",
    "MetadataValue", "PydanticException", "ServerlessTrainResult", "Tools", "TrainConfig", "TrainResult",
    "TrainSFTConfig", "Trajectory", "TrajectoryGroup", "Verbosity", "get_messages",
]  # fmt: skip
