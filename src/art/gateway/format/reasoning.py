"""Switch a model's reasoning on or off, for dialects that have a parameter for it."""

from __future__ import annotations

from art.errors import InvalidRequestError
from art.gateway.format.renderer import Renderer, TemplateKwargs
from art.gateway.parsing import harmony

_SETTING = "enable_thinking"
"""The setting by which chat templates of models with both modes choose one."""


def reasoning_settings(renderer: Renderer, *, reasons: bool, param: str) -> TemplateKwargs:
    """Settings of the chat template that make the model reason or not; none if the template leaves no choice.

    Raises:
        InvalidRequestError: the model should reason, and never does.
    """
    template = renderer.tokenizer.template
    if template is not None and _SETTING in template.settings:
        return {_SETTING: reasons}
    if reasons and renderer.tokenizer.token_id("<think>") is None and not harmony.is_in(renderer.tokenizer):
        raise InvalidRequestError(
            f"this model does not reason: its chat template has no setting `{_SETTING}`, and its vocabulary no "
            f"`<think>`; leave `{param}` out",
            param=param,
        )
    return {}
