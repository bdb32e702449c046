"""The formats in which models write tool calls.

Calls are enclosed by special tokens, or are the whole answer (Llama 3). A model's format is not guessed from its name
or its vocabulary: `format/renderer.py` picks the one that reads what the model's own template has written.

Formats that put each argument between tags of its own; the values are typed by the tool's schema:

    <function=f> <parameter=key> value </parameter> </function>          Qwen3-Coder, Qwen3.5 and later, Nemotron-3
    f <arg_key>key</arg_key> <arg_value>value</arg_value>                GLM
    <invoke name="f"> <parameter name="key">value</parameter> </invoke>  MiniMax-M2

Nothing in a value is escaped. A value may contain its own closing tag; it ends where that tag is followed by what the
format writes next. A list or an object ends where its JSON ends. Strings are written as they are and other values as
JSON, or as Python's `str` writes them (`True`, `None`, `{'x': [1]}`): only the schema tells "5" from the number 5.

Formats with a notation of values of their own:

    [f(key='value', more={"x": 1}), g()]              LFM2: the syntax of Python
    call:f{key:<|"|>text<|"|>,more:{x:[1,null]}}       Gemma 4: only strings are in quotation tokens

Strings are escaped as in Python.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from art.gateway.calls import (
    DECODER,
    CallFormat,
    Reader,
    Schemas,
    ToolCall,
    all_calls,
    load_json,
    make_call,
    read_calls,
    read_float,
)
from art.protocol.chat import Message

_MAX_LITERAL_CHARS = 20_000
"""Longest text that is read as a Python literal; `ast` needs much memory for longer ones."""


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of `text`. Text that fits no declared type stays text, so that the tool can complain about it."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    value = load_literal(text)
    is_null = value is None and text.strip() in ("null", "None")
    if not kinds:  # nothing is declared; text in quotation marks is text, since strings are written without them
        return value if is_null or not (value is None or isinstance(value, str)) else text
    if any(_FITS[kind](value) for kind in kinds - {"string", "null"}):
        return value
    return None if "null" in kinds and is_null else text


def load_literal(text: str) -> Any:
    """Decode JSON or a Python literal of JSON's types; `None` for other text, too."""
    with contextlib.suppress(ValueError, RecursionError):
        return _STRICT.decode(text)
    with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        if len(text) <= _MAX_LITERAL_CHARS:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
            return value
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=read_float)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FITS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
}


def kinds_of(schema: Mapping[str, Any] | None) -> set[str]:
    """Types that a schema allows; empty if it does not say, e.g. because a branch of it is a reference."""
    if schema is None:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    kinds = {name for name in names if isinstance(name, str) and name in _FITS}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            of_branch = kinds_of(branch) if isinstance(branch, dict) else set()
            if not of_branch:
                return set()
            kinds |= of_branch
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
    if not kinds:
        kinds = {kind for value in values for kind, fits in _FITS.items() if fits(value)}
    if kinds and schema.get("nullable") is True:
        kinds.add("null")
    return kinds


Arguments = tuple[dict[str, Any], int]
"""The arguments of a call, and the place in the text after the call."""


def _markup_reader(call: str, argument: str, argument_end: str, call_end: str, *, own_lines: bool = False) -> Reader:
    """Make a reader of calls whose parts are found by regular expressions.

    Args:
        call: beginning of a call. Its group is the name.
        argument: beginning of an argument. Its group is the key.
        argument_end: end of a value, where the next argument or the end of the call follows.
        own_lines: whether a line break separates a value from its tags.
    """
    begin, end = re.compile(argument), re.compile(call_end)
    value_end = re.compile(rf"{argument_end}\s*(?={argument}|{call_end})")

    def find_end(text: str, start: int, schema: Mapping[str, Any] | None) -> re.Match[str] | None:
        """The end of a value: of its JSON if it is a list or an object, else the first closing tag that can be one."""
        value = _after_space(text, start)
        if text[value : value + 1] in ("[", "{") and kinds_of(schema) != {"string"}:
            with contextlib.suppress(ValueError, RecursionError):
                after = DECODER.raw_decode(text, value)[1]
                if (tag := value_end.match(text, _after_space(text, after))) is not None:
                    return tag
        return value_end.search(text, start)

    def read_arguments(text: str, place: int, schemas: Mapping[str, Mapping[str, Any]]) -> Arguments | None:
        arguments: dict[str, Any] = {}
        while (done := end.match(text, place := _after_space(text, place))) is None:
            key = begin.match(text, place)
            closing = None if key is None else find_end(text, key.end(), schemas.get(key[1]))
            if key is None or closing is None or key[1] in arguments:
                return None
            value = text[key.end() : closing.start()]
            if own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key[1]] = typed(value, schemas.get(key[1]))
            place = closing.end()
        return arguments, done.end()

    head = re.compile(call)
    return lambda text, schemas: read_calls(
        text, head, lambda text, place, name: read_arguments(text, place, schemas.get(name, {}))
    )


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


_FUNCTION, _PARAMETER = r"<function=([^>\s]+)>", r"<parameter=([^>\n]+)>"
_INVOKE, _NAMED = r"<invoke name=\"([^\"\n]+)\">", r"<parameter name=\"([^\"\n]+)\">"
_OF_FUNCTIONS = (_FUNCTION, _PARAMETER, "</parameter>", rf"</function>\s*(?={_FUNCTION}|\Z)")
read_functions = _markup_reader(*_OF_FUNCTIONS, own_lines=True)
read_inline_functions = _markup_reader(*_OF_FUNCTIONS)
read_invokes = _markup_reader(_INVOKE, _NAMED, "</parameter>", rf"</invoke>\s*(?={_INVOKE}|\Z)")
read_glm = _markup_reader(r"([^\s<>{}\"]+)\s*", r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>", r"\Z")

_MAX_TRIES = 100
"""Largest number of places at which the end of one value is tried."""
_STRING = re.compile(r"(['\"])((?:\\.|(?!\1)[^\\])*)\1\s*", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_NAME = re.compile(r"\s*([\w.-]+)\(\s*")
_KEY = re.compile(r"([\w-]+)\s*=\s*")
_VALUE_END = re.compile(r",\s*(?=[\w-]+\s*=)|\)\s*(?:,(?=\s*[\w.-]+\()|\Z)")
"""What follows a value: the next argument, or the end of the call and then the next call or nothing."""


def _read_python_arguments(text: str, place: int, _name: str) -> Arguments | None:
    """Read keyword arguments up to the end of their call."""
    arguments: dict[str, Any] = {}
    if (end := _VALUE_END.match(text, place)) is not None and ")" in end[0]:
        return arguments, end.end()
    while (key := _KEY.match(text, place)) is not None and key[1] not in arguments:
        if (read := _read_value(text, key.end())) is None:
            return None
        arguments[key[1]], end = read
        place = end.end()
        if ")" in end[0]:
            return arguments, place
    return None


def read_python(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read a list of calls with keyword arguments."""
    text = text.strip()
    return read_calls(text[1:-1], _NAME, _read_python_arguments) if text[:1] == "[" and text[-1:] == "]" else None


def _read_value(text: str, place: int) -> tuple[Any, re.Match[str]] | None:
    """The value at `place`, and the match of what follows it: the first place at which the text before is a value."""
    if (string := _STRING.match(text, place)) is not None:
        end = _VALUE_END.match(text, string.end())
        value = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), string[2], flags=re.DOTALL)
        return None if end is None else (value, end)
    for end in itertools.islice(_VALUE_END.finditer(text, place), _MAX_TRIES + 1):
        written = text[place : end.start()].rstrip()
        if (value := load_literal(written)) is not None or written in ("None", "null"):
            return value, end
    return None


def write_python(calls: list[ToolCall]) -> str:
    """Write calls as LFM2's own later templates do."""

    def write(value: Any) -> str:
        if isinstance(value, str):
            escaped = re.sub(r"[\\']", r"\\\g<0>", value).replace("\n", "\\n").replace("\r", "\\r")
            return f"'{escaped}'"
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)

    pairs = [[f"{key}={write(value)}" for key, value in json.loads(call.arguments).items()] for call in calls]
    written = [f"{call.name}({', '.join(own)})" for call, own in zip(calls, pairs, strict=True)]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|call:[^{}\s]+(?=\{)|([^{}\[\],:<>\s][^{}\[\],:<>]*)(:)?', re.DOTALL)
"""A string, the head of a call, or a key or another value in Gemma's notation."""


def read_gemma(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read calls whose arguments are objects in Gemma's notation, which is written as JSON first."""

    def to_json(part: re.Match[str]) -> str:
        if part[1] is not None:
            return json.dumps(part[1])
        if part[2] is None:  # the head
            return part[0]
        if part[3] is not None:
            return f"{json.dumps(part[2].rstrip())}:"
        value = load_literal(part[2])  # a word that is no value stays as it is, and then the whole is no JSON
        return part[0] if value is None and part[2].strip() != "None" else json.dumps(value)

    return _read_gemma_json(_GEMMA.sub(to_json, text), _schemas)


def read_object(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read `{"name": ..., "arguments": {...}}`."""
    return all_calls([make_call(load_json(text))])


def write_tagged(calls: list[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def read_list(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read a JSON list of objects with name and arguments."""
    values = load_json(text)
    return all_calls([make_call(value) for value in values]) if isinstance(values, list) else None


def write_granite(calls: list[ToolCall]) -> str:
    return f"<|tool_call|>[{', '.join(_object(call, 'arguments') for call in calls)}]"


def read_actions(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read Cohere's JSON list of objects with `tool_name` and `parameters`."""
    values = load_json(text)
    if not isinstance(values, list):
        return None
    named = [{**value, "name": value.get("tool_name")} if isinstance(value, dict) else None for value in values]
    return all_calls([make_call(value, "parameters") for value in named])


def read_plugin(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read InternLM's call: the tag of its kind, then one JSON object with `parameters`."""
    kind, _, call = text.lstrip().partition(">")
    return all_calls([make_call(load_json(call), "parameters")]) if kind == "<|plugin|" else None


def read_objects(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read JSON objects with `parameters` (Llama) or `arguments`, one after another, with or without semicolons."""
    decoder, rest, calls = DECODER, text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        is_llama = isinstance(value, dict) and "parameters" in value
        calls.append(make_call(value, "parameters" if is_llama else "arguments"))
        rest = rest[end:].lstrip("; \n")
    return all_calls(calls)


def write_objects(calls: list[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _object(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}}}'


def _sequence_reader(head: str, tail: str = r"\s*") -> Reader:
    """Make a reader of calls that each consist of `head` (whose group is the name), a JSON object, and `tail`."""
    after = re.compile(tail)

    def read_arguments(text: str, place: int, _name: str) -> tuple[Any, int] | None:
        try:
            arguments, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        end = after.match(text, place)
        return None if end is None else (arguments, end.end())

    begin = re.compile(head)
    return lambda text, _schemas: read_calls(text, begin, read_arguments)


read_deepseek = _sequence_reader(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<｜]+?)\s*(?:<｜tool▁sep｜>|\n```json\n)\s*",
    r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*",
)
read_kimi = _sequence_reader(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^:\s<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
    r"\s*<\|tool_call_end\|>\s*",
)
_read_gemma_json = _sequence_reader(r"\s*call:([^{}\s]+)(?=\{)")
_read_mistral_names = _sequence_reader(r"\s*(?:\[TOOL_CALLS\])?([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]\s*")


def read_mistral(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read a JSON list (older tokenizers), or `name[ARGS]{...}` with [TOOL_CALLS] before each further call."""
    return (read_list if text.lstrip().startswith("[{") else _read_mistral_names)(text, schemas)


def _mistral_id(_name: str, _number: int, call_id: str) -> str:
    """Make an id of nine letters and digits; Mistral's templates accept no other."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _kimi_id(name: str, number: int, _call_id: str) -> str:
    return f"functions.{name}:{number}"


_XML_TAGS = ("<tool_call>", "</tool_call>")
TAGGED = CallFormat("tagged", read_object, *_XML_TAGS, write=write_tagged, described_by=re.compile(r"<tool_call>\s*\{"))
"""The format of Qwen, Hermes and many other models: one JSON object between `<tool_call>` and `</tool_call>`."""

OBJECTS = CallFormat("objects", read_objects, beginnings=("{", "<|python_tag|>"), write=write_objects)
"""The format of Llama 3. It has no special tokens, so it also reads the text of other formats."""

CALL_FORMATS = (
    TAGGED,
    CallFormat("functions", read_functions, *_XML_TAGS),
    CallFormat("glm", read_glm, *_XML_TAGS),
    CallFormat("seed", read_inline_functions, "<seed:tool_call>", "</seed:tool_call>"),
    CallFormat("minimax-m2", read_invokes, "<minimax:tool_call>", "</minimax:tool_call>"),
    CallFormat("mistral", read_mistral, "[TOOL_CALLS]", call_id=_mistral_id),
    CallFormat("deepseek", read_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    CallFormat("kimi", read_kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", call_id=_kimi_id),
    CallFormat("phi-4", read_list, "<|tool_call|>", "<|/tool_call|>"),
    CallFormat("granite", read_list, "<|tool_call|>", write=write_granite,
               described_by=re.compile(r"<\|tool_call\|> followed by a JSON list")),
    CallFormat("internlm", read_plugin, "<|action_start|>", "<|action_end|>"),
    CallFormat("cohere", read_actions, "<|START_ACTION|>", "<|END_ACTION|>"),
    CallFormat("lfm2", read_python, "<|tool_call_start|>", "<|tool_call_end|>", write=write_python,
               described_by=re.compile("List of tools: ")),
    CallFormat("gemma-4", read_gemma, "<|tool_call>", "<tool_call|>"),
    CallFormat("tool-calls", read_list, "<tool_calls>", "</tool_calls>"),
    CallFormat("toolcall", read_list, "<TOOLCALL>", "</TOOLCALL>"),
    OBJECTS,  # last, since it reads other formats too
)  # fmt: skip


def has_unread_call(message: Message) -> bool:
    """Whether the content of an answer has the opening of a tool call, i.e. a call that could not be read."""
    content = message.get("content") or ""
    return any(form.opening in content for form in CALL_FORMATS if form.opening is not None)
