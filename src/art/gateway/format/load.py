"""Choose the renderer of a model.

A hub id that the `renderers` package lists gets the package's hand-written renderer, which is tested there against the
model's own template. A local model gets one only if `config.json` names the architecture *and* the renderer passes
`proof.py`. All other models are rendered by their own chat template.
"""

from __future__ import annotations

import logging
from pathlib import Path

from art.config import RenderConfig
from art.errors import ConfigError
from art.gateway.format.package_renderer import PackageRenderer
from art.gateway.format.proof import find_mismatch
from art.gateway.format.renderer import Renderer, TemplateKwargs
from art.gateway.format.template_renderer import TemplateRenderer
from art.gateway.format.tokenizer import Tokenizer

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
