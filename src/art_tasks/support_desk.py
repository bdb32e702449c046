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
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, TaskOptions, derive_seed, sample_answer
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

DESKS = ("billing", "shipping", "returns", "account", "sales")
CODES = ("desk A", "desk B", "desk C", "desk D", "desk E")
RIGHT, RIGHT_WITHIN_WORDS, WRONG, INVALID = 1.0, 0.6, 0.0, -0.5
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
    "account": (
        ["my password", "the login", "my account", "the app", "your website", "my user name", "the sign-up"],
        ["is refused", "is locked since Monday", "shows an old address", "cannot be opened", "forgets who I am"],
    ),
    "sales": (
        ["the blue sofa", "a larger desk", "the oak table", "a gift card", "this mirror", "the garden set", "a bed"],
        ["would suit me", "is what I look for", "might be in stock", "should be cheaper in June", "comes in green"],
    ),
}
"""For each desk, subjects and what may be said of them. A matter is a pair of these."""
_SPLITS: dict[int, Split] = {7: "val", 8: "test", 9: "test"}  # by a matter's hash; the others are for training


class SupportDeskOptions(TaskOptions):
    """What a user may choose about the support desk."""

    desks: int = Field(default=3, ge=2, le=5)
    """Number of desks, in this order: billing, shipping, returns, account, sales."""
    names: Literal["words", "codes"] = "words"
    """What the desks are called. With `codes` they are desk A, desk B, ... and the agent is not told what each is for:
    it has to find that out from the reward."""
    asides: float = Field(default=0.5, ge=0, le=1)
    """Share of messages that also mention something of another desk that was fine."""


class SupportDesk(Task):
    """A task: name the desk that a customer's message is for."""

    name: ClassVar[str] = "support_desk"
    description: ClassVar[str] = "name the desk that a customer's message is for"
    headline_metric: ClassVar[str] = "right"
    options_class: ClassVar[type[SupportDeskOptions]] = SupportDeskOptions
    options: SupportDeskOptions
    rubric: ClassVar[str | None] = (
        "A good answer names the one desk whose matter the customer's message is about, as the system prompt lists the "
        "desks, and says nothing else. Something that the customer only mentions and was fine does not count. The "
        "right desk within other words is less good, a wrong desk is bad, and an answer with no desk or with several "
        "is worst."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=25, num_minibatches=1, play_skill=0.4, warm_start_steps=300, tiny_vocab_size=512
    )

    @property
    def names(self) -> tuple[str, ...]:
        """What the agent may answer."""
        return (DESKS if self.options.names == "words" else CODES)[: self.options.desks]

    @property
    def system_prompt(self) -> str:
        listed = ", ".join(self.names[:-1]) + f" or {self.names[-1]}"
        return f"Name the desk that the message is for: {listed}. Answer with its name alone."

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` messages. No matter of a split is in another one."""
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, self._draw(split, rng)) for index in range(count)]

    def _draw(self, split: Split, rng: random.Random) -> dict[str, Any]:
        """Draw a message, with the desk that it is for. The split is that of its matter."""
        desk = rng.randrange(self.options.desks)
        matter = rng.choice(matters_of(desk, split))
        text = matter
        if rng.random() < self.options.asides:
            other = rng.choice([i for i in range(self.options.desks) if i != desk])
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
        said, right = choice.message.content or "", self.names[scenario.inputs["desk"]]
        named = [] if choice.finish_reason == "length" else self.named_in(said)
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
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": message}]

    def named_in(self, answer: str) -> list[str]:
        """The desks that an answer names as whole words. Example: "It is billing." has `["billing"]`."""
        return [name for name in self.names if re.search(rf"\b{name}\b", answer, re.IGNORECASE)]

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        right = self.names[scenario.inputs["desk"]]
        return lambda messages, tools: {"content": right}

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make one answer: with probability `skill` the right desk, else any."""
        message = self._draw("train", rng)
        answer = self.names[message["desk"]] if rng.random() < skill else rng.choice(self.names)
        return Conversation(messages=[*self._opening(message["message"]), {"role": "assistant", "content": answer}])


@cache
def matters_of(desk: int, split: Split) -> list[str]:
    """The matters of a desk in a split. A matter's hash decides its split, so adding matters does not move others."""
    subjects, problems = _PARTS[DESKS[desk]]
    composed = [f"{subject} {problem}" for subject, problem in itertools.product(subjects, problems)]
    matters = [*COMPLAINTS.get(DESKS[desk], ()), *composed]
    return [matter for matter in matters if _SPLITS.get(derive_seed(matter) % 10, "train") == split]
