"""Converts LiteLLM's answers to OpenAI's types. LiteLLM itself is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


def convert_litellm_choice_to_openai(litellm_choice: Any) -> Choice:
    """Convert `litellm_response.choices[0]` to an OpenAI `Choice`.

    LiteLLM moves unknown fields into `provider_specific_fields`. The `exchange_id`, by which training finds the exact
    tokens, is moved back.

    Raises:
        ValueError: the choice holds no assistant message.
    """
    from openai.types.chat.chat_completion import Choice

    data: dict[str, Any] = litellm_choice.model_dump(exclude_none=True)
    message = data.get("message")
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise ValueError(f"expected a choice with an assistant message, got {data}")
    for holder in (data, message):
        extra = holder.pop("provider_specific_fields", None) or {}
        for key, value in extra.items():
            holder.setdefault(key, value)
    if "exchange_id" in message:
        data.setdefault("exchange_id", message.pop("exchange_id"))
    for call in message.get("tool_calls") or ():
        call.setdefault("type", "function")
    message.setdefault("content", None)
    return Choice.model_validate(data)
