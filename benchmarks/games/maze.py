"""Walk from @ to * on a 4x4 map with walls, one step per message, ten steps at most."""

import random

from art.task import Conversation, Task, derive_seed
from art.trajectory import Trajectory

SYSTEM = "Walk from @ to *. Answer N, S, E or W."
SIZE, STEPS = 4, 10
MOVES = {"N": (-1, 0), "S": (1, 0), "E": (0, 1), "W": (0, -1)}


class Maze:
    def __init__(self, seed):
        rng = random.Random(seed)
        while True:
            cells = [(r, c) for r in range(SIZE) for c in range(SIZE)]
            rng.shuffle(cells)
            self.me, self.goal, *rest = cells
            self.walls = set(rest[:4])
            if self.distances().get(self.me, 0) >= 2:
                return

    def open(self, move, at=None):
        r, c = at or self.me
        there = (r + MOVES[move][0], c + MOVES[move][1])
        return there if 0 <= there[0] < SIZE and 0 <= there[1] < SIZE and there not in self.walls else None

    def distances(self):
        found, queue = {self.goal: 0}, [self.goal]
        for at in queue:
            for move in MOVES:
                there = self.open(move, at)
                if there and there not in found:
                    found[there] = found[at] + 1
                    queue.append(there)
        return found

    def legal(self):
        return [move for move in MOVES if self.open(move)]

    def good(self):
        distances = self.distances()
        return [move for move in self.legal() if distances[self.open(move)] < distances[self.me]]

    def __str__(self):
        sign = {self.me: "@", self.goal: "*"} | {wall: "#" for wall in self.walls}
        return "\n".join("".join(sign.get((r, c), ".") for c in range(SIZE)) for r in range(SIZE))


class MazeTask(Task):
    name = "maze"
    description = "walk to a goal on a small map"
    headline_metric = "win"

    def scenarios(self, split, *, seed, count):
        return [self.scenario(split, seed, i, {}) for i in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        maze, outcome = Maze(scenario.seed), "loss"
        trajectory = Trajectory(messages_and_choices=[{"role": "system", "content": SYSTEM}])
        for turn in range(STEPS):
            trajectory.messages_and_choices.append({"role": "user", "content": str(maze)})
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(step),
                messages=trajectory.messages(),
                max_completion_tokens=4,
                seed=derive_seed(scenario.seed, rollout_index, turn),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            move = (choice.message.content or "").strip()
            if move not in maze.legal():
                outcome = "invalid"
                break
            maze.me = maze.open(move)
            if maze.me == maze.goal:
                outcome = "win"
                break
        trajectory.reward = {"win": 1.0, "loss": 0.0, "invalid": -0.5}[outcome]
        trajectory.metrics |= {name: float(name == outcome) for name in ("win", "loss", "invalid")}
        return trajectory

    def play(self, rng, skill):
        maze = Maze(rng.random())
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(STEPS):
            move = rng.choice(maze.good() if rng.random() < skill else maze.legal())
            messages += [{"role": "user", "content": str(maze)}, {"role": "assistant", "content": move}]
            maze.me = maze.open(move)
            if maze.me == maze.goal:
                break
        return Conversation(messages=messages)
