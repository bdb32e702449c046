"""Answer prompts from a file, with a judge as the only reward.

    art train chat_rubric -o prompts=questions.txt --judge openai/o3 --base-model Qwen/Qwen2.5-7B-Instruct

    prompts.txt      one prompt a line
    prompts.jsonl    {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, perhaps with "split"

`-o prompts=sample` takes small requests that are built in, to try it with a tiny model and a scripted judge:

    user       Thank Ada for the lamp.
    assistant  Dear Ada, many thanks for the lamp.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from art.errors import ConfigError
from art.task import Conversation, Scenario, Split, TaskDefaults, TaskOptions
from art_recipes.dataset_task import DatasetTask
from art_recipes.scenarios import Dataset, TaskText, WrittenScenario
from art_recipes.scenarios.written import with_splits

SAMPLE = "sample"
_NAMES = ("Ada", "Basil", "Cora", "Felix", "Greta", "Hugo", "Iris", "Jasper", "Leonie", "Norbert", "Petra", "Rufus")
_GIFTS = (
    "lamp", "kettle", "scarf", "teapot", "ladder", "drum", "candle", "basket", "mirror", "saddle", "pillow", "whistle",
)  # fmt: skip
_POLITE, _CURT = ("Dear ", "many thanks"), ("", "thanks")
_LETTER = re.compile(r"(Dear )?(\w+), (many )?thanks for the (\w+)\.")


class _Message(BaseModel, extra="forbid"):
    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(BaseModel):
    """A prompt of a file: a text, or the messages before the answer that is to be trained."""

    prompt: str = ""
    messages: list[_Message] = []
    split: Split | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if bool(self.prompt.strip()) == bool(self.messages):
            raise ValueError("expected either `prompt` or `messages`")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError(f"the last of the `messages` must be the user's, got {self.messages[-1].role!r}")
        return self

    def said(self) -> list[dict[str, str]]:
        return [m.model_dump() for m in self.messages] or [{"role": "user", "content": self.prompt.strip()}]

    @property
    def text(self) -> str:
        """The messages as one text: what the user says, and what was said before, if anything."""
        said = self.said()
        if len(said) == 1:
            return said[0]["content"].strip()
        return "\n".join(f"{message['role']}: {message['content']}" for message in said).strip()


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file, by the ending of its name. A prompt that comes twice counts once.

    Raises:
        ConfigError: the file cannot be read, or has no prompt or a line that is none. The message names the line.
    """
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise ConfigError(f"prompts={path}: expected a file that ends in .txt or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix.lower() == ".jsonl" else {"prompt": line}
            prompt = Prompt.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the line"
            raise ConfigError(f"{path}:{number}: {place}: {first['msg']}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: this is not JSON: {error}") from None
        prompts.setdefault(prompt.text, prompt)
    if not prompts:
        raise ConfigError(f"prompts={path}: there is no prompt in it")
    return list(prompts.values())


class ChatRubricOptions(TaskOptions):
    prompts: str = ""
    """File with the prompts: .txt (one a line) or .jsonl. `sample` takes small requests that are built in."""
    system_prompt: str = ""
    """What the agent is told before each prompt; empty for no system message."""
    max_completion_tokens: int = Field(512, ge=1, le=131072)
    """Longest answer in tokens."""


class ChatRubric(DatasetTask):
    """A task of any prompts: the agent answers each in one message, and a judge compares the answers.

    A tiny model knows no language, so there is scripted play for the built-in requests only.
    """

    name: ClassVar[str] = "chat_rubric"
    description: ClassVar[str] = "answer prompts from a file, as a judge likes it"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=30, groups_per_step=8, num_minibatches=2)
    options_class: ClassVar[type[ChatRubricOptions]] = ChatRubricOptions
    options: ChatRubricOptions
    tiny_options: ClassVar[dict[str, Any]] = {"prompts": SAMPLE, "max_completion_tokens": 24}

    def __init__(self, **options: Any) -> None:
        super(DatasetTask, self).__init__(**options)
        chosen = self.options.prompts
        prompts = _sample() if chosen == SAMPLE else read_prompts(Path(chosen).expanduser()) if chosen else []
        if self.options.system_prompt and any(prompt.said()[0]["role"] == "system" for prompt in prompts):
            raise ConfigError(
                f"prompts={chosen}: some `messages` have a system prompt already; leave out `system_prompt`"
            )
        self._messages = {prompt.text: prompt.said() for prompt in prompts}
        text = TaskText(
            description=self.description,
            system_prompt=self.options.system_prompt.strip() or "-",  # not shown; see `opening`
            max_completion_tokens=self.options.max_completion_tokens,
        )
        written = [WrittenScenario(input=prompt.text, split=prompt.split) for prompt in prompts]
        if not any(prompt.split for prompt in prompts):
            written = with_splits(written)  # moves a prompt if there would be none to train on or to test with
        self.dataset = Dataset(task=text, scenarios=written)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        if not self.dataset.scenarios:
            raise ConfigError(
                f"task {self.name!r} needs prompts: -o prompts=FILE, which ends in .txt (one a line) or .jsonl; "
                f"-o prompts={SAMPLE} takes built-in ones"
            )
        return super().scenarios(split, seed=seed, count=count)

    def opening(self, scenario: Scenario) -> list[dict[str, str]]:
        return self._after_system(scenario.inputs["input"])

    def _after_system(self, prompt: str) -> list[dict[str, str]]:
        system = self.options.system_prompt
        said = self._messages.get(prompt, [{"role": "user", "content": prompt}])
        return [*([{"role": "system", "content": system}] if system else []), *said]

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Answer a built-in request: each of name, gift and politeness is right with probability `skill`."""
        if self.options.prompts != SAMPLE:
            raise ConfigError(
                f"task {self.name!r}: a tiny model cannot answer your own prompts. Name a pretrained model by "
                f"--base-model, or try the task with -o prompts={SAMPLE}"
            )
        line = rng.choice(self.dataset.split("train"))
        name, gift = _wanted(line.input)
        opening, thanks = _POLITE if rng.random() < skill else _CURT
        name = name if rng.random() < skill else rng.choice(_NAMES)
        gift = gift if rng.random() < skill else rng.choice(_GIFTS)
        answer = {"role": "assistant", "content": f"{opening}{name}, {thanks} for the {gift}."}
        messages: Any = [*self._after_system(line.input), answer]
        return Conversation(messages=messages)

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Score the answer to a built-in request: 0.1, and 0.3 each for the right name, gift and politeness.

        Raises:
            ConfigError: the prompts are the user's own.
        """
        if self.options.prompts != SAMPLE:
            raise ConfigError(
                f"task {self.name!r} knows no scores for prompts of your own; serve the judge with --score"
            )
        name, gift = _wanted(next(message["content"] for message in messages if message["role"] == "user"))
        letter = _LETTER.fullmatch(str(messages[-1].get("content") or "").strip())
        if letter is None:
            return 0.0, "It is no letter of thanks."
        good = {
            "the name": letter[2] == name, "the gift": letter[4] == gift, "politeness": bool(letter[1] and letter[3])
        }  # fmt: skip
        lacking = " and ".join(what for what, is_good in good.items() if not is_good) or "nothing"
        return (1 + 3 * sum(good.values())) / 10, f"It lacks {lacking}."


def _sample() -> list[Prompt]:
    texts = [f"Thank {name} for the {gift}." for name, gift in itertools.product(_NAMES, _GIFTS)]
    return [Prompt(prompt=text) for text in texts]


def _wanted(request: str) -> tuple[str, str]:
    """The name and the gift of a built-in request."""
    words = request.rstrip(".").split()
    return words[1], words[-1]
