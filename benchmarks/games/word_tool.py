"""The hidden word as a tool call."""

import json
import random

from art.task import Conversation, Task, TaskDefaults, derive_seed, take_turn
from art.trajectory import Trajectory
from benchmarks.games.word import TRIES, WORDS, feedback, fits

SYSTEM = "Guess a word of three letters."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the word",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


class WordTool(Task):
    name = "word_tool"
    description = "guess a hidden word by tool calls"
    headline_metric = "win"
    defaults = TaskDefaults(play_skill=0.7)

    def scenarios(self, split, *, seed, count):
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, i, {"word": rng.choice(WORDS)}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        word = scenario.inputs["word"]
        trajectory = Trajectory(
            messages_and_choices=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "begin"}],
            tools=TOOLS,
        )
        outcome = "loss"
        for n in range(TRIES):
            calls = await take_turn(
                model,
                trajectory,
                step=step,
                temperature=1.0,
                max_completion_tokens=40,
                seed=derive_seed(scenario.seed, rollout_index, n),
            )
            try:
                guess = (
                    json.loads(calls[0].function.arguments)["word"] if not isinstance(calls, str) and calls else None
                )
            except (ValueError, KeyError, TypeError):
                guess = None
            if guess not in WORDS:
                outcome = "invalid"
                break
            if guess == word:
                outcome = "win"
                break
            trajectory.messages_and_choices.append(
                {"role": "tool", "tool_call_id": calls[0].id, "content": feedback(guess, word)}
            )
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
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "guess", "arguments": json.dumps({"word": guess})},
                        }
                    ],
                }
            )
            if guess == word:
                break
            history.append((guess, feedback(guess, word)))
            messages.append({"role": "tool", "tool_call_id": "1", "content": history[-1][1]})
        if messages[-1]["role"] == "tool":
            messages.pop()
        return Conversation(messages=messages, tools=TOOLS)
