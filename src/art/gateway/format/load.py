"""Choose the renderer of a model.

A hub id that the `renderers` package lists gets the package's hand-written renderer, which is tested there against the
model's own template. A local model gets one only if `config.json` names the architecture *and* the renderer passes
`proof.py`. All other models are rendered by their own chat template.
"""

from __future__ import annotations

import logging
from pathlib import Path

from art.config import RenderConfig
from art.errors import ArtError, ConfigError, InvalidRequestError
from art.gateway.format.fidelity import TOOL
from art.gateway.format.package_renderer import PackageRenderer
from art.gateway.format.renderer import RecordedTurn, Renderer, TemplateKwargs, template_messages
from art.gateway.format.template_renderer import TemplateRenderer
from art.gateway.format.tokenizer import Tokenizer
from art.protocol.chat import Message, Tool, tool_call

logger = logging.getLogger(__name__)

_CANDIDATES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
"""Renderers of the package to try for a local model, by `model_type` of its `config.json`."""


def load_renderer(source: str | Path, config: RenderConfig | None = None) -> Renderer:
    """Load the renderer of a model from a local directory or a hub id. Reads files; takes up to a second.

    Raises:
        ConfigError: there is no usable tokenizer or chat template, or the template does not know a setting.
    """
    config = config or RenderConfig()
    return build_renderer(Tokenizer.load(source), config.chat_template_kwargs, keep_reasoning=config.keep_reasoning)


def build_renderer(
    tokenizer: Tokenizer, template_kwargs: TemplateKwargs, *, keep_reasoning: bool | None = None
) -> Renderer:
    """Choose the renderer for a loaded tokenizer: a hand-written one if it is known to fit, else the chat template."""

    def build(kwargs: TemplateKwargs) -> Renderer:
        return build_renderer(tokenizer, kwargs, keep_reasoning=keep_reasoning)

    local = Path(tokenizer.name_or_path).is_dir()
    family = _CANDIDATES.get(tokenizer.model_type or "") if local else _hub_family(tokenizer.name_or_path)
    if family is not None and keep_reasoning is not False:
        try:
            renderer = PackageRenderer(tokenizer, family, template_kwargs, build, keep_reasoning=keep_reasoning)
        except (AssertionError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: a failed download
            if not local:
                raise ConfigError(
                    f"{tokenizer.name_or_path}: renderer {family!r} does not accept {template_kwargs}: {error}"
                ) from error
            logger.info("%s: renderer %r does not fit (%s)", tokenizer.name_or_path, family, error)
        else:
            mismatch = find_mismatch(renderer) if local else None
            if mismatch is None:
                return renderer
            logger.info(
                "%s: renderer %r differs from the chat template on %s", tokenizer.name_or_path, family, mismatch
            )
    return TemplateRenderer(tokenizer, template_kwargs, build, keep_reasoning=keep_reasoning)


def _hub_family(name: str) -> str | None:
    import renderers.base

    family: str | None = renderers.base.MODEL_RENDERER_MAP.get(name)
    return family


_FUNCTION = {**TOOL["function"], "description": 'Find "a" value, \u00e9 and <tags>.'}
_TOOLS: list[Tool] = [{"type": "function", "function": _FUNCTION}]


def _call(key: str) -> Message:
    return tool_call(f"call_{key}", "look_up", f'{{"key": "{key}"}}')


def _probes() -> list[tuple[str, list[Message], list[Tool] | None]]:
    system = {"role": "system", "content": "Be brief.\n\nAnswer in  English."}
    user = {"role": "user", "content": " What is 1+1? \u00e9\U0001f642\n"}
    answer = {"role": "assistant", "content": "2, of course\n"}
    bye = {"role": "user", "content": "And 2+2?"}
    call = {"role": "assistant", "content": "", "tool_calls": [_call("a")]}
    calls = {"role": "assistant", "content": "I look twice.", "tool_calls": [_call("b"), _call("c")]}
    results = [
        {"role": "tool", "tool_call_id": "call_b", "name": "look_up", "content": "1\n"},
        {"role": "tool", "tool_call_id": "call_c", "name": "look_up", "content": '{"x": [1, 2]}'},
    ]
    result = {"role": "tool", "tool_call_id": "call_a", "name": "look_up", "content": "found"}
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    thought_call = {**call, "reasoning_content": "I must look."}
    return [
        ("a user message", [user], None),
        ("a system message", [system, user], None),
        ("two turns", [system, user, answer, bye], None),
        ("tools", [system, user], _TOOLS),
        ("tools without system message", [user], _TOOLS),
        ("a tool call", [system, user, call, result], _TOOLS),
        ("two tool calls", [user, calls, *results, answer, bye], _TOOLS),
        ("reasoning", [user, thought, bye, thought, bye], None),
        ("reasoning and a tool call", [system, user, thought_call, result], _TOOLS),
    ]


_REQUIRED_PROBES = 3
"""Number of first probes that a template must accept. A later one that it refuses (parallel calls, say) is skipped."""


def find_mismatch(renderer: Renderer) -> str | None:
    """Name the first test conversation that a renderer and the chat template render differently; `None` if none is."""
    tokenizer, kwargs = renderer.tokenizer, renderer.template_kwargs
    for number, (name, messages, tools) in enumerate(_probes()):
        try:
            expected = tokenizer.apply_chat_template(
                template_messages(messages), tools=tools, add_generation_prompt=True, **kwargs
            )
        except InvalidRequestError:
            if number < _REQUIRED_PROBES:
                return name
            continue
        try:
            if renderer.render(messages, tools) != expected:
                return name
        except ArtError:
            return name
    return _bridge_mismatch(renderer)


def _bridge_mismatch(renderer: Renderer) -> str | None:
    system, user, answer, bye = _probes()[2][1]
    prompt = renderer.render([system, user], None)
    answer = {**answer, "content": "two"}
    completion = [*renderer.tokenizer.encode("two", add_special_tokens=False), renderer.stop_token_ids[0]]
    bridged = renderer.bridge(RecordedTurn([system, user, answer], prompt, completion), [bye], None)
    expected = renderer.tokenizer.apply_chat_template(
        [system, user, answer, bye], add_generation_prompt=True, **renderer.template_kwargs
    )
    return None if bridged == expected else "a bridge to the next turn"
