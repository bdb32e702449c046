"""A task without tools: name the desk that a customer's message is for.

user       Good morning. The invoice was fine, but my package went to a neighbour. Can you help?
assistant  shipping                                                                reward 1

The reward is 1 for the name of the right desk and nothing else, 0.6 for the right desk within other words, and 0 for
another desk. An answer that names no desk or several has -0.5, so that guessing within the rules pays more than talking
around them.
"""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed, sample_answer
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

DESKS = ("billing", "shipping", "returns")
RIGHT, RIGHT_WITHIN_WORDS, INVALID = 1.0, 0.6, -0.5
ASIDES = 0.5
"""Share of messages that also mention something of another desk that was fine."""
COMPLAINTS = {
    "billing": [
        "the invoice shows a wrong sum", "you charged my card twice", "my payment was declined", "the bill has no date",
        "I need a receipt for my employer", "the price was lower in the ad", "your bank details seem wrong",
        "the discount is missing", "I would like to pay by instalments", "a fee was added without a word",
    ],
    "shipping": [
        "the courier has lost my parcel", "tracking has not moved since Monday", "nobody rang the bell",
        "the package went to a neighbour", "I have moved, send it elsewhere", "the driver left it in the rain",
        "delivery takes too long", "do you ship to Iceland", "half of the order has not arrived",
        "the van was at the wrong street",
    ],
    "returns": [
        "the zip broke after two days", "these shoes are too small", "I want to swap blue for green",
        "the lamp does not work", "two plates came in pieces", "how do I send a jacket back",
        "the colour is not as pictured", "the kettle leaks", "a seam has torn", "I changed my mind about the chair",
    ],
}  # fmt: skip
"""Matters that were written one by one. `_PARTS` makes many more."""
OPENINGS = ["", "Hello, ", "Good morning. ", "Hi there! ", "Sorry to bother you, but ", "Listen: ", "Dear team, "]
CLOSINGS = [
    "", " Can you help?", " Thanks a lot.", " Please answer soon.", " What now?", " I am quite annoyed.", " Best, Kim",
]  # fmt: skip
_PARTS: dict[str, tuple[list[str], list[str]]] = {
    "billing": (
        ["the invoice", "my bill", "the last payment", "your receipt", "the discount", "this fee", "the deposit"],
        ["has the wrong sum", "was booked twice", "has no date", "names another customer", "was never agreed on"],
    ),
    "shipping": (
        ["the parcel", "my package", "the courier", "the delivery", "your driver", "the crate", "the letter"],
        [
            "went to a neighbour",
            "has not come yet",
            "is at a wrong address",
            "got lost in Leeds",
            "was out in the rain",
        ],
    ),
    "returns": (
        ["the kettle", "this jacket", "my new lamp", "the chair", "the toaster", "that rug", "the clock"],
        ["broke after two days", "is too small for me", "does not work", "came in pieces", "is not as pictured"],
    ),
}
"""For each desk, subjects and what may be said of them. A matter is a pair of these."""
_SPLITS: dict[int, Split] = {7: "val", 8: "test", 9: "test"}  # by a matter's hash; the others are for training


SYSTEM = f"Name the desk that the message is for: {', '.join(DESKS[:-1])} or {DESKS[-1]}. Answer with its name alone."


class SupportDesk(Task):
    """A task: name the desk that a customer's message is for."""

    name: ClassVar[str] = "support_desk"
    description: ClassVar[str] = "name the desk that a customer's message is for"
    headline_metric: ClassVar[str] = "right"
    rubric: ClassVar[str | None] = (
        "A good answer names the one desk whose matter the customer's message is about, as the system prompt lists the "
        "desks, and says nothing else. Something that the customer only mentions and was fine does not count. The "
        "right desk within other words is less good, a wrong desk is bad, and an answer with no desk or with several "
        "is worst."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=25, num_minibatches=1, play_skill=0.4, warm_start_steps=300, tiny_vocab_size=512
    )

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` messages. No matter of a split is in another one."""
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, self._draw(split, rng)) for index in range(count)]

    def _draw(self, split: Split, rng: random.Random) -> dict[str, Any]:
        """Draw a message, with the desk that it is for. The split is that of its matter."""
        desk = rng.randrange(len(DESKS))
        matter = rng.choice(matters_of(DESKS[desk], split))
        text = matter
        if rng.random() < ASIDES:
            other = rng.choice([i for i in range(len(DESKS)) if i != desk])
            text = f"{rng.choice(_PARTS[DESKS[other]][0])} was fine, but {matter}"
        opening = rng.choice(OPENINGS)
        if opening.strip()[-1:] in ("", ".", "!"):
            text = text[0].upper() + text[1:]
        return {"message": f"{opening}{text}.{rng.choice(CLOSINGS)}", "desk": desk}

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trajectory = Trajectory(
            messages_and_choices=self._opening(scenario.inputs["message"]), metadata={"scenario_id": scenario.id}
        )
        choice = await sample_answer(
            model, trajectory, step=step, temperature=1.0, max_completion_tokens=16,
            seed=derive_seed(scenario.seed, rollout_index),
        )  # fmt: skip
        said, right = choice.message.content or "", DESKS[scenario.inputs["desk"]]
        named = [] if choice.finish_reason == "length" else named_in(said)
        is_right, is_plain = named == [right], said.strip().lower() == right.lower()
        valid = len(named) == 1
        trajectory.reward = (RIGHT if is_plain else RIGHT_WITHIN_WORDS) * is_right if valid else INVALID
        trajectory.metrics |= {
            "right": float(is_right), "invalid_answer": float(not valid),
            "reward/right": RIGHT_WITHIN_WORDS * is_right, "reward/plain": (RIGHT - RIGHT_WITHIN_WORDS) * is_plain,
            "reward/invalid": 0.0 if valid else INVALID,
        }  # fmt: skip
        why = f"{named[0]}, and {right} is right" if valid else f"the answer names {len(named)} desks; {right} is right"
        trajectory.metadata |= {"outcome": "ok" if valid else "policy_fault", "why": why}
        return trajectory

    def _opening(self, message: str) -> list[Any]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}]

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        right = DESKS[scenario.inputs["desk"]]
        return lambda messages, tools: {"content": right}

    def score_messages(self, messages: list[dict[str, Any]]) -> float:
        """Score an answer from 0 to 1: the right desk 0.9, another 0.3, none or several 0.1."""
        told = str(messages[-2]["content"]).rpartition(" was fine, but ")[2].lower()
        named = named_in(str(messages[-1].get("content") or ""))
        if len(named) != 1:
            return 0.1
        splits: tuple[Split, ...] = ("train", "val", "test")
        is_right = any(matter.lower() in told for split in splits for matter in matters_of(named[0], split))
        return 0.9 if is_right else 0.3

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make one answer: with probability `skill` the right desk, else any."""
        message = self._draw("train", rng)
        answer = DESKS[message["desk"]] if rng.random() < skill else rng.choice(DESKS)
        return Conversation(messages=[*self._opening(message["message"]), {"role": "assistant", "content": answer}])


def named_in(answer: str) -> list[str]:
    """The desks that an answer names as whole words. Example: "It is billing." has `["billing"]`."""
    return [name for name in DESKS if re.search(rf"\b{name}\b", answer, re.IGNORECASE)]


@cache
def matters_of(desk: str, split: Split) -> list[str]:
    """The matters of a desk in a split. A matter's hash decides its split, so adding matters does not move others."""
    subjects, problems = _PARTS[desk]
    composed = [f"{subject} {problem}" for subject, problem in itertools.product(subjects, problems)]
    return [
        matter for matter in (*COMPLAINTS[desk], *composed) if _SPLITS.get(derive_seed(matter) % 10, "train") == split
    ]
