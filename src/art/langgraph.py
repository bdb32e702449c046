"""Shorter name of `art.integrations.langgraph`, which uses LangGraph agents as rollouts."""

from art.integrations.langgraph import init_chat_model, wrap_rollout

__all__ = ["init_chat_model", "wrap_rollout"]
