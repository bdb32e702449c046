"""How much the texts of a set differ from each other, in three numbers.

mean_distance      Mean Jaccard distance of the words of two texts, over all pairs. It is low when all texts follow one
                   template.
nearest_distance   Mean Jaccard distance of a text to the most similar other one. It is low when a few texts are
                   reworded again and again, which the first number does not show.
distinct_bigrams   Share of different ones among all pairs of neighbouring words: distinct-2 of J. Li et al., "A
                   Diversity-Promoting Objective Function for Neural Conversation Models" (NAACL 2016). It is low when
                   phrases repeat. It also falls with the number and length of the texts, so there is no bound for it.

Values of sets of 12 to 28 short texts. The bounds lie between the second row and the rest:

    mean  nearest  distinct
    0.93   0.82     0.90    instructions on all subjects (the first seed tasks of Self-Instruct, Wang et al. 2023)
    0.95   0.86     0.97    questions to one shop, written by hand
    0.87   0.07     0.36    eight of these, each three times with a word more
    0.51   0.28     0.29    a name, a thing and what is wrong with it, put into one sentence
    0.29   0.29     0.27    "What is the capital of ...?"
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from art.scenarios.words import position, similarity, word_list, words_of

LOW_MEAN_DISTANCE = 0.7
LOW_NEAREST_DISTANCE = 0.5
MAX_COMPARED = 1000
"""Most texts that are compared, which takes about a second. A larger set is sampled, with the same result each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Three measures of how much the texts of a set differ, each from 0 to 1. They are low when texts are alike."""

    mean_distance: float
    nearest_distance: float
    distinct_bigrams: float

    def warnings(self) -> list[str]:
        """Say which measures are too low and what to do about it; empty if none is."""
        warnings = []
        if self.mean_distance < LOW_MEAN_DISTANCE:
            warnings.append(
                f"two inputs share {1 - self.mean_distance:.0%} of their words on average: they seem to follow one "
                "template, and what is learnt may not go beyond it. Say in the description which kinds of inputs there "
                "are, or take a stronger generator"
            )
        if self.nearest_distance < LOW_NEAREST_DISTANCE:
            warnings.append(
                f"an input shares {1 - self.nearest_distance:.0%} of its words with the one that is most like it: the "
                "same few inputs come again and again. Ask for fewer, or delete lines"
            )
        return warnings

    def __str__(self) -> str:
        return (
            f"mean distance {self.mean_distance:.2f}, to the nearest {self.nearest_distance:.2f}, distinct bigrams "
            f"{self.distinct_bigrams:.2f}"
        )


def measure_diversity(texts: Sequence[str]) -> Diversity | None:
    """Measure how much the texts of a set differ from each other; `None` for fewer than two."""
    if len(texts) < 2:
        return None
    if len(texts) > MAX_COMPARED:
        texts = sorted(texts, key=position)[:MAX_COMPARED]
    words = [words_of(text) for text in texts]
    nearest = [0.0] * len(words)
    total = 0.0
    for i, a in enumerate(words):
        for j in range(i):
            shared = similarity(a, words[j])
            total += shared
            nearest[i], nearest[j] = max(nearest[i], shared), max(nearest[j], shared)
    bigrams = [pair for text in texts for pair in pairwise(word_list(text))]
    return Diversity(
        mean_distance=1 - total / (len(words) * (len(words) - 1) / 2),
        nearest_distance=1 - statistics.fmean(nearest),
        distinct_bigrams=len(set(bigrams)) / len(bigrams) if bigrams else 0.0,
    )
