"""Solve a murder by deduction: who, where, when, with what and why, in one answer.

    user       Suspects: Ada, Hugo
               Rooms: attic, study, cellar
               ...
               Questions:
               A. Where did the murder happen?
               B. Who is the murderer?
    assistant  ... At six, Hugo must have been in the attic, so ...
               A. study
               B. Ada

Exactly one answer to each question follows from the clues; `clue_puzzle.py` makes them and proves it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError
from art.task import Conversation, Player, Scenario, Split, Task, TaskDefaults, derive_seed, sample_answer
from art.trajectory import Trajectory
from art_tasks.clue_puzzle import (
    CaseClue,
    ClueOptions,
    DraftCase,
    Style,
    choose_clues,
    draw_draft,
    write,
)
from art_tasks.clue_solver import VICTIM

if TYPE_CHECKING:
    from art.model import Model

SYSTEM = f"""\
Solve the murder of {VICTIM} by deduction. These rules hold in every case:
- At each hour, everybody is in one room. From one hour to the next, a person stays or goes through one door.
- Each room has a door to the next one in the list, and the last room has one to the first. There are no other doors.
- Each suspect carries one weapon all the time and is driven by one motive. No two suspects share a weapon or a motive.
- At the hour of the murder, the murderer was alone with {VICTIM}, who stayed in that room from then on.
- The murderer used the weapon that he or she carried, for the motive that he or she was driven by.
Think for as long as you need. End with one line for each question: its letter, a full stop and one word of the lists.
For example:
A. kitchen
Only the last line of each letter counts."""
_QUESTIONS: dict[Style, dict[str, str]] = {
    "sentences": {
        "where": "Where did the murder happen?",
        "when": "At which hour did it happen?",
        "who": "Who is the murderer?",
        "what": "With which weapon was it done?",
        "why": "Which motive did the murderer have?",
        "room": "Where was {p} at {h}?",
    },
    "short": {"where": "where", "when": "when", "who": "who", "what": "what", "why": "why", "room": "{p} {h}"},
}
_LISTS = ("Suspects", "Rooms", "Hours", "Weapons", "Motives")
LABELS = ascii_uppercase


def write_prompt(case: DraftCase, clues: Sequence[CaseClue], style: Style) -> str:
    """Write the message of the user. Lists without words are left out."""
    cast = case.model.cast
    lists = (cast.suspects, cast.rooms, cast.hours, cast.weapons, cast.motives)
    lines = [f"{name}: {', '.join(words)}" for name, words in zip(_LISTS, lists, strict=True) if words]
    told = [f"- {write(clue, cast, style)}" for clue in clues]
    asked = [
        f"{label}. {_QUESTIONS[style][one.fact].format(p=cast.people[one.person], h=cast.hours[one.hour])}"
        for label, one in zip(LABELS, case.questions, strict=False)
    ]
    return "\n".join([*lines, "Clues:", *told, "Questions:", *asked])


_SPLIT_OF_TENTH: dict[int, Split] = {8: "val", 9: "test"}  # the other eight tenths are for training
_MAX_TRIES = 300


class TemporalClue(Task):
    """A task: solve a murder case, with all questions answered in one message.

    The tiny form has cases of one hour, with all that can be said of who was where and with whom: two regular
    expressions solve it, and a tiny model learns these look-ups. It does not learn in minutes to look up what it has
    found, such as the weapon of the suspect, and it cannot rule out suspects or follow people through the house.
    """

    name: ClassVar[str] = "temporal_clue"
    description: ClassVar[str] = "solve murder cases by deduction: who, where, when, with what and why"
    headline_metric: ClassVar[str] = "solved"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=45, play_skill=0.75, warm_start_steps=800)
    options_class: ClassVar[type[ClueOptions]] = ClueOptions
    options: ClueOptions
    tiny_options: ClassVar[dict[str, Any]] = {
        "suspects": 3, "rooms": 3, "hours": 1, "weapons": 0, "motives": 0, "words": 6, "questions": 2,
        "statements": "company", "redundant": 100, "style": "short", "max_completion_tokens": 24,
    }  # fmt: skip
    rubric: ClassVar[str] = (
        "The agent solves a murder case by deduction and ends with one line for each question, such as `A. kitchen`. "
        "Rank by the number of right answers: work the case out from the clues and compare. An answer that leaves out "
        "a question, or names a word that is not in the lists, is worse than any complete one. Between equal answers, "
        "prefer sound and short reasoning. Claims that no clue supports are faults even if the answer is right."
    )

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Make `count` cases. The hash of a case's words, questions and answers decides its split.

        Raises:
            ConfigError: even all clues leave an answer open in every case of this size.
        """
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, self._inputs(*self._draw(split, rng))) for index in range(count)]

    def _draw(self, split: Split, rng: random.Random) -> tuple[DraftCase, list[CaseClue]]:
        """Draw a case, and clues from which its answers follow."""
        for _ in range(_MAX_TRIES):
            case = draw_draft(self.options, rng)
            while _SPLIT_OF_TENTH.get(derive_seed(case.content) % 10, "train") != split:
                case = draw_draft(self.options, rng)
            if (clues := choose_clues(case, self.options, rng)) is not None:
                return case, clues
        raise ConfigError(f"task {self.name!r}: found no puzzle in {_MAX_TRIES} tries; choose `statements=all`")

    def _inputs(self, case: DraftCase, clues: Sequence[CaseClue]) -> dict[str, Any]:
        return {
            "prompt": write_prompt(case, clues, self.options.style),
            "facts": {label: question.fact for label, question in zip(LABELS, case.questions, strict=False)},
            "options": _options_of(case),
            "answers": dict(zip(LABELS, case.answers, strict=False)),
            "num_clues": len(clues),
        }

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        inputs = scenario.inputs
        trajectory = Trajectory(messages_and_choices=_opening(inputs["prompt"]), metadata={"scenario_id": scenario.id})
        choice = await sample_answer(
            model, trajectory, step=step, temperature=1.0, max_completion_tokens=self.options.max_completion_tokens,
            seed=derive_seed(scenario.seed, rollout_index),
        )  # fmt: skip
        graded = grade(choice.message.content, inputs["answers"], inputs["options"])
        rights: dict[str, list[bool]] = {}
        for label, fact in inputs["facts"].items():
            rights.setdefault(fact, []).append(graded.is_right[label])
        trajectory.reward = graded.reward
        trajectory.metrics |= {
            "solved": float(graded.is_solved),
            "accuracy": graded.accuracy,
            "malformed_answer": float(not graded.is_readable),
            "cut_short": float(choice.finish_reason == "length"),
            **{f"reward/{part}": value for part, value in graded.parts.items()},
            **{f"right/{fact}": sum(right) / len(right) for fact, right in rights.items()},
        }
        trajectory.metadata |= {"outcome": "ok" if graded.is_readable else "policy_fault", "why": graded.why}
        return trajectory

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Answer a case of the training split. An answer is right with probability `skill`, else any of its list."""
        case, clues = self._draw("train", rng)
        answers = [
            f"{label}. {answer if rng.random() < skill else rng.choice(words)}"
            for (label, words), answer in zip(_options_of(case).items(), case.answers, strict=True)
        ]
        opening = _opening(write_prompt(case, clues, self.options.style))
        return Conversation(messages=[*opening, {"role": "assistant", "content": "\n".join(answers)}])

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        lines = [f"{label}. {answer}" for label, answer in scenario.inputs["answers"].items()]
        return lambda messages, tools: {"role": "assistant", "content": "\n".join(lines)}

    def render_trajectory(self, trajectory: Trajectory) -> str:
        user, answer = (str(message.get("content") or "") for message in trajectory.messages()[1:3])
        why = trajectory.metadata.get("why", "unfinished")
        shown = [f"-> {line}" for line in answer.splitlines()]
        return "\n".join([user, *shown, f"{why}; reward {trajectory.reward:g}"])


def _opening(prompt: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


def _options_of(case: DraftCase) -> dict[str, list[str]]:
    pairs = zip(LABELS, case.questions, strict=False)
    return {label: list(question.options(case.model.cast)) for label, question in pairs}


SHARE, ALL_RIGHT, UNREADABLE = 0.8, 0.2, -0.2
_ANSWER = re.compile(r"^[\s>*_#-]*([A-Z])[.):][\s*_`\"]*(.*?)[\s*_`\".]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How an answer was graded. Example: two of three right has the parts `{"answers": 0.533, "all_right": 0.0}`."""

    words: dict[str, str | None]
    """The answer to each question; `None` if it is missing or no word of the list."""
    is_right: dict[str, bool]
    parts: dict[str, float]
    """What each part adds to the reward."""
    why: str
    """One sentence for people."""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())

    @property
    def accuracy(self) -> float:
        return sum(self.is_right.values()) / len(self.is_right)

    @property
    def is_solved(self) -> bool:
        return all(self.is_right.values())

    @property
    def is_readable(self) -> bool:
        return None not in self.words.values()


def parse_answers(text: str | None, options: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """Read the last line of each letter.

    Args:
        options: the possible answers by letter.

    Returns:
        The answer by letter, as the options write it; `None` if it is missing or no option.
    """
    last = {label: value.lower().removeprefix("the ") for label, value in _ANSWER.findall(text or "")}
    words = {label: {word.lower(): word for word in options[label]} for label in options}
    return {label: words[label].get(last.get(label, "")) for label in options}


def grade(text: str | None, answers: Mapping[str, str], options: Mapping[str, Sequence[str]]) -> Grading:
    """Grade a text.

    The reward is 0.8 times the share of right answers, and 0.2 more if all are right: guessing four of five is not
    nearly as good as solving the case. If an answer is missing or no word of its list, the reward is -0.2 whatever the
    others are. Otherwise a policy could leave out what it does not know, and a broken format would cost nothing.
    """
    words = parse_answers(text, options)
    is_right = {label: words[label] == answer for label, answer in answers.items()}
    if unreadable := [label for label, word in words.items() if word is None]:
        parts = {"format": UNREADABLE}
        why = f"no readable answer to {', '.join(unreadable)}"
    else:
        share = sum(is_right.values()) / len(answers)
        parts = {"answers": SHARE * share, "all_right": ALL_RIGHT * (share == 1)}
        wrong = [f"{label} is {answers[label]}, not {words[label]}" for label in answers if not is_right[label]]
        why = "; ".join(wrong) or "all answers are right"
    zero = {"answers": 0.0, "all_right": 0.0, "format": 0.0}
    return Grading(words=words, is_right=is_right, parts=zero | parts, why=why)
