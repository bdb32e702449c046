"""Guess a number from 10 to 41 in five tries; the answer is higher or lower."""

import random

from art.task import Conversation, Task, derive_seed
from art.trajectory import Trajectory

SYSTEM = "Find the number from 10 to 41."
LOW, HIGH, TRIES = 10, 41, 5


def hint(guess, number):
    return f"{guess} {'<' if guess < number else '>'}"


class Higher(Task):
    name = "higher"
    description = "find a number by higher and lower"
    headline_metric = "win"

    def scenarios(self, split, *, seed, count):
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, i, {"number": rng.randint(LOW, HIGH)}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        number, outcome = scenario.inputs["number"], "loss"
        trajectory = Trajectory(
            messages_and_choices=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}]
        )
        for turn in range(TRIES):
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(step),
                messages=trajectory.messages(),
                max_completion_tokens=5,
                seed=derive_seed(scenario.seed, rollout_index, turn),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            text = (choice.message.content or "").strip()
            if not (text.isdigit() and LOW <= int(text) <= HIGH):
                outcome = "invalid"
                break
            if int(text) == number:
                outcome = "win"
                break
            trajectory.messages_and_choices.append({"role": "user", "content": hint(int(text), number)})
        trajectory.reward = {"win": 1.0, "loss": 0.0, "invalid": -0.5}[outcome]
        trajectory.metrics |= {name: float(name == outcome) for name in ("win", "loss", "invalid")}
        return trajectory

    def play(self, rng, skill):
        number, low, high = rng.randint(LOW, HIGH), LOW, HIGH
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}]
        for turn in range(TRIES):
            guess = (low + high) // 2 if rng.random() < skill else rng.randint(LOW, HIGH)
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                break
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            if turn < TRIES - 1:
                messages.append({"role": "user", "content": hint(guess, number)})
        return Conversation(messages=messages)
