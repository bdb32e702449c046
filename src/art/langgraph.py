"""The shorter name of `art.integrations.langgraph`."""

from art.integrations.langgraph import init_chat_model, wrap_rollout

__all__ = ["init_chat_model", "wrap_rollout"]
