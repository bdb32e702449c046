"""Answer prompts from a file, with a judge as the only reward.

    art train chat_rubric -o prompts=questions.txt --judge openai/o3 --base-model Qwen/Qwen2.5-7B-Instruct

`-o prompts=sample` takes small requests that are built in, to try it with a tiny model and a scripted judge:

    user       Thank Ada for the lamp.
    assistant  Dear Ada, many thanks for the lamp.
"""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from art.errors import ConfigError
from art.scenarios import Dataset, TaskText
from art.scenarios.written import with_splits
from art.task import Conversation, Scenario, Split, TaskDefaults, TaskOptions
from art.tasks.chat_prompts import Prompt, read_prompts
from art.tasks.dataset import DatasetTask

SAMPLE = "sample"
_NAMES = ("Ada", "Basil", "Cora", "Felix", "Greta", "Hugo", "Iris", "Jasper", "Leonie", "Norbert", "Petra", "Rufus")
_GIFTS = (
    "lamp", "kettle", "scarf", "teapot", "ladder", "drum", "candle", "basket", "mirror", "saddle", "pillow", "whistle",
)  # fmt: skip
_POLITE, _CURT = ("Dear ", "many thanks"), ("", "thanks")
_LETTER = re.compile(r"(Dear )?(\w+), (many )?thanks for the (\w+)\.")


class ChatRubricOptions(TaskOptions):
    prompts: str = ""
    """File with the prompts: .txt (one a line), .jsonl or .csv. `sample` takes small requests that are built in."""
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
        prompts = self._read()
        self._messages = {prompt.text: prompt.messages for prompt in prompts}
        text = TaskText(
            description=self.description,
            system_prompt=self.options.system_prompt.strip() or "-",  # not shown; see `opening`
            max_completion_tokens=self.options.max_completion_tokens,
        )
        written = [prompt.written() for prompt in prompts]
        if not any(prompt.split for prompt in prompts):
            written = with_splits(written)  # moves a prompt if there would be none to train on or to test with
        self.dataset = Dataset(task=text, scenarios=written)

    def _read(self) -> list[Prompt]:
        chosen = self.options.prompts
        if not chosen:
            return []
        prompts = _sample() if chosen == SAMPLE else read_prompts(Path(chosen).expanduser())
        if self.options.system_prompt and any(prompt.messages[0]["role"] == "system" for prompt in prompts):
            raise ConfigError(
                f"prompts={chosen}: some `messages` have a system prompt already; leave out `system_prompt`"
            )
        return prompts

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        if not self.dataset.scenarios:
            raise ConfigError(
                f"task {self.name!r} needs prompts: -o prompts=FILE, which ends in .txt (one a line), .jsonl or .csv; "
                f"-o prompts={SAMPLE} takes built-in ones"
            )
        return super().scenarios(split, seed=seed, count=count)

    def opening(self, scenario: Scenario) -> list[dict[str, str]]:
        text = scenario.inputs["input"]
        said = self._messages.get(text, ({"role": "user", "content": text},))
        return self._after_system(said)

    def _after_system(self, said: tuple[dict[str, str], ...]) -> list[dict[str, str]]:
        system = self.options.system_prompt
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
        messages: Any = [*self._after_system(self._messages[line.input]), answer]
        return Conversation(messages=messages)

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Score the answer to a built-in request: 0.1, and 0.3 each for the right name, gift and politeness.

        Raises:
            ConfigError: the prompts are the user's own.
        """
        if self.options.prompts != SAMPLE:
            raise ConfigError(
                f"task {self.name!r} knows no scores for prompts of your own; serve the judge with --prefer or --score"
            )
        name, gift = _wanted(next(message["content"] for message in messages if message["role"] == "user"))
        letter = _LETTER.fullmatch(str(messages[-1].get("content") or "").strip())
        if letter is None:
            return 0.0, "It is no letter of thanks."
        good = {
            "the name": letter[2] == name, "the gift": letter[4] == gift, "politeness": bool(letter[1] and letter[3])
        }  # fmt: skip
        lacking = [what for what, is_good in good.items() if not is_good]
        return (
            1 + 3 * sum(good.values())
        ) / 10, f"It lacks {' and '.join(lacking)}." if lacking else "It lacks nothing."


def _sample() -> list[Prompt]:
    texts = [f"Thank {name} for the {gift}." for name, gift in itertools.product(_NAMES, _GIFTS)]
    return [Prompt(messages=({"role": "user", "content": text},)) for text in texts]


def _wanted(request: str) -> tuple[str, str]:
    """The name and the gift of a built-in request."""
    words = request.rstrip(".").split()
    return words[1], words[-1]
