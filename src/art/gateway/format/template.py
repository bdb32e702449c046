"""Render a model's chat template: Jinja in a sandbox, with the helpers that Hugging Face templates expect."""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from art.errors import ConfigError, InvalidRequestError
from art.protocol.chat import Message, Tool

_OUR_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}


class ChatTemplate:
    """Renders messages to text. A template is code of the model's author, so it runs in an immutable sandbox."""

    def __init__(self, named: dict[str, str], special_tokens: dict[str, str], *, name: str) -> None:
        """
        Args:
            named: Jinja sources by name: `default`, and optionally `tool_use` for requests with tools.
            name: directory of the model, for error messages.

        Raises:
            ConfigError: a template is not valid Jinja, or there is no `default`.
        """
        if "default" not in named:
            raise ConfigError(f"{name}: the chat templates are {sorted(named)}, but one must be called 'default'")
        environment = _environment()
        try:
            self._templates = {key: environment.from_string(source) for key, source in named.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}: invalid chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = special_tokens
        variables = set()
        for source in named.values():
            variables |= jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.handles_tools = "tools" in variables
        self.settings = frozenset(variables - _OUR_VARIABLES - set(environment.globals) - set(special_tokens))
        """Variables that the template reads besides the conversation, e.g. `enable_thinking`."""

    def render(
        self, messages: list[Message], tools: list[Tool] | None, *, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        """Render a conversation to text.

        Raises:
            InvalidRequestError: the template does not accept these messages (many check the order of roles).
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates["default"]
        values = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text: str = template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequestError(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return text


class _GenerationTag(jinja2.ext.Extension):  # type: ignore[misc] # jinja2 is not followed
    """Renders the body of `{% generation %}`, a tag that marks assistant text for training masks, as plain output."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON. Jinja's own filter escapes HTML characters, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
