"""Rock, paper, scissors: six rounds against an opponent with a habit. Win at least four."""

import random

from art.task import Conversation, Task, derive_seed
from art.trajectory import Trajectory

SYSTEM = "Rock, paper, scissors. Answer R, P or S."
ROUNDS, HANDS = 6, "RPS"
HABITS = ("repeats", "cycles", "copies")


def beats(hand):
    return HANDS[(HANDS.index(hand) + 1) % 3]


def next_hand(habit, own, other, rng):
    """The opponent's next hand by its habit, one time in six at random."""
    if own is None or rng.random() < 1 / 6:
        return rng.choice(HANDS)
    return {"repeats": own, "cycles": beats(own), "copies": other}[habit]


class Rps(Task):
    name = "rps"
    description = "rock, paper, scissors against opponents with habits"
    headline_metric = "win"

    def scenarios(self, split, *, seed, count):
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, i, {"habit": rng.choice(HABITS)}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        rng = random.Random(derive_seed(scenario.seed, rollout_index, "opponent"))
        own = other = None
        wins, outcome = 0, None
        trajectory = Trajectory(
            messages_and_choices=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "go"}]
        )
        for turn in range(ROUNDS):
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(step),
                messages=trajectory.messages(),
                max_completion_tokens=4,
                seed=derive_seed(scenario.seed, rollout_index, turn),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            hand = (choice.message.content or "").strip()
            if hand not in HANDS or not hand:
                outcome = "invalid"
                break
            own = next_hand(scenario.inputs["habit"], own, other, rng)
            other = hand
            wins += hand == beats(own)
            trajectory.messages_and_choices.append({"role": "user", "content": own})
        outcome = outcome or ("win" if wins >= 4 else "loss")
        trajectory.reward = -0.5 if outcome == "invalid" else wins / ROUNDS
        trajectory.metrics |= {name: float(name == outcome) for name in ("win", "loss", "invalid")}
        return trajectory

    def play(self, rng, skill):
        habit, own, other = rng.choice(HABITS), None, None
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "go"}]
        for turn in range(ROUNDS):
            expected = None if own is None else next_hand(habit, own, other, random.Random(5))
            hand = beats(expected) if expected and rng.random() < skill else rng.choice(HANDS)
            own = next_hand(habit, own, other, rng)
            other = hand
            messages.append({"role": "assistant", "content": hand})
            if turn < ROUNDS - 1:
                messages.append({"role": "user", "content": own})
        return Conversation(messages=messages)
