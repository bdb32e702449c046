"""Read answers such as `A. kitchen` at the end of a text, and grade them in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
