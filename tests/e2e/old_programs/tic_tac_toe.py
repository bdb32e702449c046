"""Tic-tac-toe against a random opponent, as the script of 2025: a backend as a context, `model.log`, a benchmark."""

import asyncio
import math
import random
import xml.etree.ElementTree as ET

import openai

import art
from art.local import LocalBackend

BASE_MODEL = "meta-llama/Meta-Llama-3.1-8B-Instruct"
MAX_SEQ_LENGTH = 8192
STEPS = 50
SIMULTANEOUS_GAMES = 96
VAL_GAMES = 12
SYSTEM = "You are a tic-tac-toe player. You play as x. Answer with your move as <move>A1</move>"
CELLS = [row + column for row in "ABC" for column in "123"]
LINES = ["A1A2A3", "B1B2B3", "C1C2C3", "A1B1C1", "A2B2C2", "A3B3C3", "A1B2C3", "A3B2C1"]


def render(board):
    rows = ["  1 2 3"] + [f"{r} " + " ".join(board.get(r + c, "_") for c in "123") for r in "ABC"]
    return "\n".join(rows)


def winner(board):
    for line in LINES:
        marks = {board.get(line[i : i + 2]) for i in (0, 2, 4)}
        if len(marks) == 1 and None not in marks:
            return marks.pop()
    return "draw" if len(board) == 9 else None


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def rollout(model: art.Model, iteration: int, is_validation: bool) -> art.Trajectory:
    board, turns = {}, 0
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": SYSTEM}], reward=0, metrics={"test": 5}, iteration=iteration
    )
    client = model.openai_client()
    if random.random() < 0.5:
        board[random.choice(CELLS)] = "o"
    while winner(board) is None:
        trajectory.messages_and_choices.append({"role": "user", "content": render(board)})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=128
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        turns += 1
        try:
            square = ET.fromstring(choice.message.content).text
            if square not in CELLS or square in board:
                raise ValueError(square)
        except (ValueError, ET.ParseError):
            trajectory.reward = -1 + math.log(turns + 1) / math.log(100)
            trajectory.metrics["invalid_move"] = 1
            return trajectory
        board[square] = "x"
        if winner(board) is None:
            board[random.choice([cell for cell in CELLS if cell not in board])] = "o"
    outcome = winner(board)
    trajectory.reward = {"x": 1.0, "draw": 0.5}.get(outcome, 0.0)
    trajectory.metrics["win"] = outcome == "x"
    trajectory.metrics["invalid_move"] = 0
    trajectory.metrics["num_moves"] = turns
    return trajectory


async def main():
    model = art.TrainableModel(
        name="llama-8b-007",
        project="tic-tac-toe",
        base_model=BASE_MODEL,
        _internal_config={"init_args": {"max_seq_length": MAX_SEQ_LENGTH}, "trainer_args": {"max_grad_norm": 0.1}},
    )
    with LocalBackend(gpu_cost_per_hour_usd=3.0) as backend:
        await model.register(backend)
        for i in range(await model.get_step(), STEPS):
            train_groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, i, False) for _ in range(SIMULTANEOUS_GAMES)) for _ in range(1)),
                pbar_desc="gather",
            )
            await model.delete_checkpoints()
            await model.train(train_groups, config=art.TrainConfig(learning_rate=5e-5, beta=0.0))
        val = await art.gather_trajectories(
            (rollout(model, STEPS, True) for _ in range(VAL_GAMES)), pbar_desc="val", max_exceptions=VAL_GAMES
        )
        await model.log(val)


if __name__ == "__main__":
    asyncio.run(main())
