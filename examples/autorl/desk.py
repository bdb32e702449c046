"""A small job for AutoRL (which desk is a customer's message for?), with a scripted generator and a scripted judge.

user       Hello, the courier has lost my parcel. Can you help?
assistant  shipping

art tiny-model ./tiny --task desk:Desk        makes a model that knows the format and some of the desks
python desk.py                                serves the generator and the judge until Ctrl-C
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from typing import Any, ClassVar

from art.scenarios import Dataset, TaskText, WrittenScenario
from art.task import Conversation, TaskDefaults
from art.testing.judge import ScriptedJudge
from art_recipes.dataset_task import DatasetTask
from art_recipes.scripted_generator import ScriptedGenerator
from art_tasks.support_desk import CLOSINGS, COMPLAINTS, OPENINGS

DESCRIPTION = "Say which desk a customer's message is for: billing, shipping or returns"
SYSTEM_PROMPT = "Name the desk: billing, shipping or returns."
STANDARDS = ["The desk is the one that the message is about.", "The answer is the name of the desk and nothing else."]
_GUESSES = [*COMPLAINTS, "billing or returns", "shipping or billing", "sorry"]
"""Answers in the warm start that do not depend on the message."""
KNOWN = 0.4
"""Share of warm-start answers that are always right. Without them the model learns to name a desk, but not which."""


def messages() -> dict[str, str]:
    """Messages with their desks, in random order."""
    rng = random.Random(0)
    desks = {
        f"{opening}{complaint}.{closing}": desk
        for desk, complaints in COMPLAINTS.items()
        for complaint in complaints
        for opening, closing in zip(rng.sample(OPENINGS, 4), rng.sample(CLOSINGS, 4), strict=True)
    }
    return dict(rng.sample(list(desks.items()), len(desks)))


MESSAGES = messages()


class Desk(DatasetTask):
    """The job with scripted play, for the warm start of a tiny model."""

    name: ClassVar[str] = "desk"
    description: ClassVar[str] = DESCRIPTION
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_minibatches=1,
        warm_start_steps=200,
        tiny_vocab_size=512,
    )

    def __init__(self) -> None:
        task = TaskText(description=DESCRIPTION, system_prompt=SYSTEM_PROMPT)
        super().__init__(Dataset(task=task, scenarios=[WrittenScenario(input=text) for text in MESSAGES]))

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Show the format and a hint of the job: about half of the answers name the right desk."""
        conversations = []
        for text, desk in rng.choices(list(MESSAGES.items()), k=count):
            answer = desk if rng.random() < KNOWN else rng.choice(_GUESSES)
            conversations.append(
                Conversation(
                    messages=[
                        {"role": "system", "content": SYSTEM_PROMPT},
                        {"role": "user", "content": text},
                        {"role": "assistant", "content": answer},
                    ]
                )
            )
        return conversations


def grade(trajectory: dict[str, Any]) -> float:
    """Score 0.95 for just the right desk, 0.6 for the right desk with more text, 0.3 for another desk, else 0.1."""
    messages = [*trajectory.get("context", []), *trajectory["messages"]]
    right = MESSAGES.get(next(m["content"] for m in messages if m["role"] == "user"))
    answer = str(messages[-1]["content"]).strip()
    if right is not None and right in answer:
        return 0.95 if answer == right else 0.6
    return 0.3 if answer in COMPLAINTS else 0.1


def scripted_generator(**options: Any) -> ScriptedGenerator:
    return ScriptedGenerator(inputs=list(MESSAGES), system_prompt=SYSTEM_PROMPT, standards=STANDARDS, **options)


def scripted_judge(**options: Any) -> ScriptedJudge:
    """A judge that favours the first trajectory and makes errors."""
    return ScriptedJudge(grade, **{"position_bias": 0.1, "noise": 0.1, **options})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8020, help="port of the generator; the judge uses the next one")
    args = parser.parse_args()
    with scripted_generator(port=args.port) as generator, scripted_judge(port=args.port + 1) as judge:
        sys.stdout.write(f"generator at {generator.base_url}, judge at {judge.base_url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
