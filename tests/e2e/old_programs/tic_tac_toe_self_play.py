"""Tic-tac-toe against itself: each game gives two trajectories, gathered into one group per seat."""

import asyncio
import math
import re
from collections.abc import Awaitable, Iterable
from contextlib import nullcontext

from tqdm import auto as tqdm

import art
from art.gather import GatherContext, set_gather_context, wrap_group_awaitable
from art.local.backend import LocalBackend
from art.trajectories import TrajectoryGroup

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
STEPS = 300
GAMES_PER_STEP = 96
CELLS = [row + column for row in "ABC" for column in "123"]
LINES = ["A1A2A3", "B1B2B3", "C1C2C3", "A1B1C1", "A2B2C2", "A3B3C3", "A1B2C3", "A3B2C1"]


async def gather_trajectory_groups_by_index(
    games: Iterable[Awaitable[Iterable[art.Trajectory]]],
    *,
    pbar_desc: str,
    max_exceptions: int = 0,
    trajectories_per_rollout: int = 2,
) -> list[TrajectoryGroup]:
    games = list(games)
    context = GatherContext(pbar=None, max_exceptions=max_exceptions)
    with set_gather_context(context), nullcontext():
        context.pbar = tqdm.tqdm(desc=pbar_desc, total=len(games))
        results = await asyncio.gather(*[wrap_group_awaitable(game) for game in games])
        context.pbar.close()
    played = [list(result) for result in results if result is not None]
    return [TrajectoryGroup(game[seat] for game in played) for seat in range(trajectories_per_rollout)]


def won(board, mark):
    return any(all(board.get(line[i : i + 2]) == mark for i in (0, 2, 4)) for line in LINES)


def render(board):
    rows = ["  1 2 3"] + [f"{r} " + " ".join(board.get(r + c, "_") for c in "123") for r in "ABC"]
    return "\n".join(rows)


async def play(model: art.TrainableModel) -> list[art.Trajectory]:
    client = model.openai_client()
    board = {}
    seats = {
        mark: art.Trajectory(
            messages_and_choices=[
                {
                    "role": "system",
                    "content": f"You are a tic-tac-toe player. You play as {mark}. Answer with your move as <move>A1</move>",
                }
            ],
            reward=0,
            metrics={"invalid_move": 0},
        )
        for mark in "xo"
    }
    moves = 0
    while len(board) < 9:
        mark = "xo"[moves % 2]
        trajectory, other = seats[mark], seats["ox"[moves % 2]]
        trajectory.messages_and_choices.append({"role": "user", "content": render(board)})
        completion = await client.chat.completions.create(
            messages=trajectory.messages(), model=model.get_inference_name(), max_completion_tokens=128
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        moves += 1
        match = re.search(r"<move>([ABC][123])</move>", choice.message.content or "")
        if match is None or match[1] in board:
            trajectory.reward = -2 + math.log10(moves + 1)
            trajectory.metrics["invalid_move"] = 1
            other.reward = 0.5
            break
        board[match[1]] = mark
        if won(board, mark):
            trajectory.reward, other.reward = 1 - moves / 40, moves / 40
            break
    else:
        seats["x"].reward = seats["o"].reward = 0.5
    for trajectory in seats.values():
        trajectory.metrics["num_moves"] = moves
        trajectory.messages_and_choices.append({"role": "user", "content": "Game over"})
    return [seat.finish() for seat in seats.values()]


async def main():
    backend = LocalBackend()
    model = art.TrainableModel(name="001", project="tic-tac-toe-self-play", base_model=BASE_MODEL)
    await model.register(backend)
    for i in range(await model.get_step(), STEPS):
        groups = await gather_trajectory_groups_by_index(
            (play(model) for _ in range(GAMES_PER_STEP)), pbar_desc="train", max_exceptions=10
        )
        await model.delete_checkpoints()
        await model.train(groups, config=art.TrainConfig(learning_rate=2e-5))


if __name__ == "__main__":
    asyncio.run(main())
