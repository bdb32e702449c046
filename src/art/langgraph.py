"""`art.integrations.langgraph` under a shorter name."""

from art.integrations.langgraph import init_chat_model, wrap_rollout

__all__ = ["init_chat_model", "wrap_rollout"]
