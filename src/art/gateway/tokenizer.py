"""A light tokenizer: `tokenizer.json` and a chat template, without transformers and without torch.

It knows the exact bytes of each token, for streaming and log-prob reports.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
from array import array
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson
import tokenizers

from art.errors import ConfigError, InvalidRequestError
from art.protocol.chat import Message, Tool

_OUR_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}


class ChatTemplate:
    """Renders messages to text. A template is code of the model's author, so it runs in an immutable sandbox."""

    def __init__(self, named: dict[str, str], special_tokens: dict[str, str], *, name: str) -> None:
        """`named` has Jinja sources by name: `default`, and optionally `tool_use` for requests with tools. `name` is
        the directory of the model, for error messages."""
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
        """Render a conversation to text. That the template does not accept these messages (many check the order of
        roles) is an `InvalidRequestError`."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates["default"]
        values: dict[str, Any] = {**self._special_tokens, **kwargs, "messages": messages, "tools": tools or None}
        values |= {"documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            problem = f"the model's chat template does not accept these messages: {error}"
            raise InvalidRequestError(problem, param="messages") from error
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
    # Plain JSON. Jinja's own filter escapes HTML characters, which models were not trained on.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
_SHORT, _MAX_SHORT = 2**10, 2**12
"""Encodings of texts of at most `_SHORT` characters are cached, up to `_MAX_SHORT` of them, in at most 20 MB. Rollouts
of a group begin alike, and observations return."""
_LONG = 2**14
"""Above this number of characters a text is encoded without noting the place of each token in it, which nobody here
reads. That takes half the time and a quarter of the memory."""
NO_TEMPLATE = (
    "has no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); use an instruction-tuned "
    "model, or add a template"
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back, for one model.

    Example:
        tokenizer = Tokenizer.load("Qwen/Qwen3-0.6B")       # or a local directory
        tokenizer.encode("hello", add_special_tokens=False)   # [14990]
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name_or_path: str,
        special_tokens: dict[str, str],
        template: ChatTemplate | None,
        generation_stop_ids: tuple[int, ...] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._encode_short = functools.lru_cache(_MAX_SHORT)(lambda text: array("I", self._encode(text)))
        self.name_or_path = name_or_path
        self.template = template
        self.generation_stop_ids = generation_stop_ids
        """`eos_token_id` of `generation_config.json`: tokens that end a completion besides the tokenizer's own EOS."""
        eos = special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else self.token_id(eos)
        self.token_bytes: dict[int, bytes] = _TokenBytes(backend)
        """The bytes of each token, filled on demand. A completion's text is its tokens' bytes decoded as UTF-8."""

    @functools.cached_property
    def has_whole_pieces(self) -> bool:
        """Whether no token is merged from smaller ones: each is a whole word or phrase, as in ART's tiny models."""
        return '"merges":[]' in self.backend.to_str()

    @classmethod
    def load(cls, source: str | Path, *, may_download: bool = True) -> Tokenizer:
        """Load from a local directory or a Hugging Face hub id. No code of the repository is run. With
        `may_download=False` a hub id is looked up in the hub's cache on this machine only."""
        directory = _local_directory(str(source), may_download)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{source}: no tokenizer.json. ART reads only the format of the `tokenizers` library; convert the "
                "tokenizer once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(directory)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        special_tokens = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)  # a string, or an object with `content`
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special_tokens[name] = text
        path = directory / "chat_template.jinja"
        source_text = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source_text, list):  # several named templates in one file
            named = {entry["name"]: entry["template"] for entry in source_text}
        else:
            named = {} if source_text is None else {"default": source_text}
        ends = _read_json(directory / "generation_config.json").get("eos_token_id")
        return cls(
            backend,
            name_or_path=str(source),
            special_tokens=special_tokens,
            template=ChatTemplate(named, special_tokens, name=str(directory)) if source_text is not None else None,
            generation_stop_ids=tuple(i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)),
        )

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode text to token ids. `add_special_tokens` adds the post-processor's tokens (BOS), as in transformers."""
        if len(text) <= _SHORT and not add_special_tokens:
            return self._encode_short(text).tolist()
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) > _LONG:
            encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; `None` if the vocabulary does not have it."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def text(self, token_ids: list[int]) -> str:
        """Return the exact text of sampled tokens, special tokens included. Invalid UTF-8 bytes are replaced."""
        table = self.token_bytes
        return b"".join([table[i] for i in token_ids]).decode("utf-8", "replace")

    def render_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        if self.template is None:
            raise InvalidRequestError(f"{self.name_or_path} {NO_TEMPLATE}", param="model")
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)


class TextStream:
    """Decodes streamed bytes to text. A character is returned once all of its bytes have arrived."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return replacement characters for the bytes that never became a character."""
        return self._decoder.decode(b"", final=True)


class _TokenBytes(dict[int, bytes]):
    """A dictionary of token id to bytes that computes an entry on first use.

    It knows byte-level BPE (GPT-2 style), and SentencePiece style with byte fallback.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        decoder = backend.decoder
        kinds = _decoder_kinds(orjson.loads(decoder.__getstate__())) if decoder is not None else set()
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            supported = "ByteLevel, and Metaspace or ByteFallback (SentencePiece style)"
            problem = f"cannot map tokens to bytes: the tokenizer's decoder is {sorted(kinds) or 'missing'}"
            raise ConfigError(f"{problem}; supported are {supported}")
        self._backend = backend
        self._alphabet: dict[str, int] | None = None
        if "ByteLevel" in kinds:  # printable Latin-1 is itself, other bytes follow in order from U+0100
            printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
            others = [byte for byte in range(256) if byte not in set(printable)]
            self._alphabet = {chr(byte): byte for byte in printable}
            self._alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
        self._added = set(backend.get_added_tokens_decoder())

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:  # models pad their vocabulary; such an id decodes to nothing
            data = b""
        elif token_id in self._added:
            data = token.encode()
        elif (alphabet := self._alphabet) is not None:
            data = bytes([alphabet[char] for char in token])
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            data = bytes([int(token[3:5], 16)])
        else:
            data = token.replace("\u2581", " ").encode()
        self[token_id] = data
        return data


def _decoder_kinds(state: dict[str, Any]) -> set[str]:
    nested = (_decoder_kinds(child) for child in state.get("decoders", []))
    return {str(state.get("type")), *(kind for kinds in nested for kind in kinds)}


def _local_directory(source: str, may_download: bool) -> Path:
    directory = Path(source)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # here because it is slow to import and rarely needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=_FILES, local_files_only=not may_download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        problem = "is not a local directory, and the Hugging Face hub does not provide it"
        raise ConfigError(f"base model {source!r} {problem}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return content
