"""Nim with three heaps against a random opponent: who takes the last piece wins."""

import random

from art.task import Conversation, Task, derive_seed
from art.trajectory import Trajectory

SYSTEM = "Nim. Answer with a heap and how many to take. The last piece wins."


class Heaps:
    def __init__(self, sizes):
        self.sizes = list(sizes)

    def moves(self):
        return [(h, n) for h, size in enumerate(self.sizes) for n in range(1, size + 1)]

    def take(self, move):
        self.sizes[move[0]] -= move[1]

    def best(self):
        total = self.sizes[0] ^ self.sizes[1] ^ self.sizes[2]
        return [(h, n) for h, n in self.moves() if total and (self.sizes[h] - n) == self.sizes[h] ^ total]

    def __str__(self):
        return " ".join(f"{name}{size}" for name, size in zip("ABC", self.sizes, strict=True))


def parse(text, heaps):
    text = (text or "").strip()
    if len(text) != 2 or text[0] not in "ABC" or not text[1].isdigit():
        return None
    move = ("ABC".index(text[0]), int(text[1]))
    return move if move in heaps.moves() else None


def say(move):
    return f"{'ABC'[move[0]]}{move[1]}"


class Nim(Task):
    name = "nim"
    description = "nim with three heaps against a random opponent"
    headline_metric = "win"

    def scenarios(self, split, *, seed, count):
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, i, {"heaps": [rng.randint(1, 5) for _ in range(3)]}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        opponent = random.Random(derive_seed(scenario.seed, rollout_index))
        heaps = Heaps(scenario.inputs["heaps"])
        trajectory = Trajectory(messages_and_choices=[{"role": "system", "content": SYSTEM}])
        outcome, n = None, 0
        while outcome is None:
            trajectory.messages_and_choices.append({"role": "user", "content": str(heaps)})
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(step),
                messages=trajectory.messages(),
                max_completion_tokens=5,
                temperature=1.0,
                seed=derive_seed(scenario.seed, rollout_index, n),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            move = parse(choice.message.content, heaps)
            n += 1
            if move is None:
                outcome = "invalid"
                break
            heaps.take(move)
            if not heaps.moves():
                outcome = "win"
                break
            heaps.take(opponent.choice(heaps.moves()))
            if not heaps.moves():
                outcome = "loss"
        trajectory.reward = {"win": 1.0, "loss": 0.0, "invalid": -0.5}[outcome]
        trajectory.metrics |= {k: float(k == outcome) for k in ("win", "loss", "invalid")}
        return trajectory

    def play(self, rng, skill):
        heaps = Heaps(rng.randint(1, 5) for _ in range(3))
        messages = [{"role": "system", "content": SYSTEM}]
        while True:
            good = heaps.best()
            move = rng.choice(good if good and rng.random() < skill else heaps.moves())
            messages += [{"role": "user", "content": str(heaps)}, {"role": "assistant", "content": say(move)}]
            heaps.take(move)
            if not heaps.moves():
                break
            heaps.take(rng.choice(heaps.moves()))
            if not heaps.moves():
                break
        return Conversation(messages=messages)
