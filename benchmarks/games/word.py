"""A hidden word of three letters, five tries, feedback per letter."""

import itertools
import random

from art.task import Conversation, Task, derive_seed
from art.trajectory import Trajectory

WORDS = ["".join(w) for w in itertools.product("abc", repeat=3)]
SYSTEM = "Guess a word of three letters."
TRIES = 5


def feedback(guess, word):
    return " ".join(g + ("+" if g == w else "?" if g in word else "-") for g, w in zip(guess, word, strict=True))


def fits(guess, history):
    return all(feedback(g, guess) == f for g, f in history)


class Word(Task):
    name = "word"
    description = "guess a hidden word"
    headline_metric = "win"

    def scenarios(self, split, *, seed, count):
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, i, {"word": rng.choice(WORDS)}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        word = scenario.inputs["word"]
        trajectory = Trajectory(
            messages_and_choices=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "begin"}]
        )
        outcome = "loss"
        for n in range(TRIES):
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(step),
                messages=trajectory.messages(),
                max_completion_tokens=8,
                temperature=1.0,
                seed=derive_seed(scenario.seed, rollout_index, n),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            guess = (choice.message.content or "").strip()
            if guess not in WORDS:
                outcome = "invalid"
                break
            if guess == word:
                outcome = "win"
                break
            trajectory.messages_and_choices.append({"role": "user", "content": feedback(guess, word)})
        trajectory.reward = {"win": 1.0, "loss": 0.0, "invalid": -0.5}[outcome]
        trajectory.metrics |= {k: float(k == outcome) for k in ("win", "loss", "invalid")}
        return trajectory

    def play(self, rng, skill):
        word = rng.choice(WORDS)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "begin"}]
        history = []
        for _ in range(TRIES):
            good = [w for w in WORDS if fits(w, history)] if rng.random() < skill else WORDS
            guess = rng.choice(good)
            messages.append({"role": "assistant", "content": guess})
            if guess == word:
                break
            history.append((guess, feedback(guess, word)))
            messages.append({"role": "user", "content": history[-1][1]})
        if messages[-1]["role"] == "user":
            messages.pop()
        return Conversation(messages=messages)
