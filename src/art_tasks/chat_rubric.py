"""Answer prompts from a file, with a judge as the only reward.

    art train chat_rubric -o prompts=questions.txt --judge openai/o3 --base-model Qwen/Qwen2.5-7B-Instruct

    prompts.txt      one prompt a line
    prompts.jsonl    {"prompt": "..."}, perhaps with "split"

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
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.errors import ConfigError
from art.task import Conversation, Player, Scenario, Split, TaskDefaults, TaskOptions
from art_recipes.dataset_task import DatasetTask
from art_recipes.scenarios import Dataset, TaskText, WrittenScenario
from art_recipes.scenarios.written import with_splits

SAMPLE = "sample"
NAMES = ("Ada", "Basil", "Cora", "Felix", "Greta", "Hugo", "Iris", "Jasper", "Leonie", "Norbert", "Petra", "Rufus")
GIFTS = (
    "lamp", "kettle", "scarf", "teapot", "ladder", "drum", "candle", "basket", "mirror", "saddle", "pillow", "whistle",
)  # fmt: skip
_POLITE, _CURT = ("Dear ", "many thanks"), ("", "thanks")
_LETTER = re.compile(r"(Dear )?(\w+), (many )?thanks for the (\w+)\.")


class Prompt(BaseModel):
    """A prompt of a file."""

    model_config = ConfigDict(str_strip_whitespace=True)

    prompt: str = Field(min_length=1)
    split: Split | None = None


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
        prompts.setdefault(prompt.prompt, prompt)
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
        text = TaskText(
            description=self.description,
            system_prompt=self.options.system_prompt.strip() or "-",  # not shown; see `opening`
            max_completion_tokens=self.options.max_completion_tokens,
        )
        written = [WrittenScenario(input=prompt.prompt, split=prompt.split) for prompt in prompts]
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
        asked = {"role": "user", "content": prompt}
        return [{"role": "system", "content": system}, asked] if system else [asked]

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
        name = name if rng.random() < skill else rng.choice(NAMES)
        gift = gift if rng.random() < skill else rng.choice(GIFTS)
        answer = {"role": "assistant", "content": f"{opening}{name}, {thanks} for the {gift}."}
        messages: Any = [*self._after_system(line.input), answer]
        return Conversation(messages=messages)

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A player that writes the best letter for a built-in request."""
        if self.options.prompts != SAMPLE:
            return super().player(scenario)
        opening, thanks = _POLITE
        name, gift = _wanted(scenario.inputs["input"])
        return lambda messages, tools: {"content": f"{opening}{name}, {thanks} for the {gift}."}

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
    texts = [f"Thank {name} for the {gift}." for name, gift in itertools.product(NAMES, GIFTS)]
    return [Prompt(prompt=text) for text in texts]


def _wanted(request: str) -> tuple[str, str]:
    """The name and the gift of a built-in request."""
    words = request.rstrip(".").split()
    return words[1], words[-1]
