"""2048, as notebooks of 2025 wrote it: `in_process=True`, settings after construction, a client of one's own."""

import asyncio
import math
import random
import xml.etree.ElementTree as ET

from openai import AsyncOpenAI

import art
from art.local import LocalBackend

BASE_MODEL = "Qwen/Qwen2.5-3B-Instruct"
MAX_SEQ_LENGTH = 8192
WINNING_VALUE = 128
STEPS = 10
ROLLOUTS = 18
SYSTEM = (
    "You are an excellent 2048 player. Choose the move that leads to the highest tile. Return it as <move>left</move>"
)

random.seed(42)
model = None


def new_board():
    board = [[0] * 4 for _ in range(4)]
    add_cell(board)
    add_cell(board)
    return board


def add_cell(board):
    free = [(r, c) for r in range(4) for c in range(4) if board[r][c] == 0]
    if free:
        r, c = random.choice(free)
        board[r][c] = 2 if random.random() < 0.9 else 4


def render(board):
    return "\n".join("|".join(str(cell or "_") for cell in row) for row in board)


def squeeze(row):
    cells = [cell for cell in row if cell]
    for i in range(len(cells) - 1):
        if cells[i] == cells[i + 1]:
            cells[i], cells[i + 1] = cells[i] * 2, 0
    cells = [cell for cell in cells if cell]
    return cells + [0] * (4 - len(cells))


def apply_move(board, move):
    if move not in ("left", "right", "up", "down"):
        raise ValueError(f"unknown move {move}")
    rows = [list(column) for column in zip(*board, strict=True)] if move in ("up", "down") else board
    rows = [squeeze(row[::-1])[::-1] if move in ("right", "down") else squeeze(row) for row in rows]
    board[:] = [list(column) for column in zip(*rows, strict=True)] if move in ("up", "down") else rows
    add_cell(board)


@art.retry(exceptions=(ConnectionError,))
async def rollout(model: art.Model, step: int) -> art.Trajectory:
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    board, moves = new_board(), 0
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": SYSTEM}],
        metadata={"notebook-id": "2048", "step": step},
        reward=0,
    )
    while True:
        trajectory.messages_and_choices.append({"role": "user", "content": render(board)})
        completion = await client.chat.completions.create(
            max_completion_tokens=128,
            messages=trajectory.messages(),
            model=model.name,
            extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        )
        choice = completion.choices[0]
        answer = completion.model_dump()
        choice.prompt_token_ids = answer["prompt_token_ids"]  # notebooks of 2026 keep the exact tokens
        choice.token_ids = answer["choices"][0]["token_ids"]
        trajectory.messages_and_choices.append(choice)
        try:
            apply_move(board, ET.fromstring(choice.message.content).text)
            moves += 1
        except (ValueError, ET.ParseError):
            trajectory.reward = -1
            break
        if max(map(max, board)) >= WINNING_VALUE or all(cell for row in board for cell in row):
            best, total = max(map(max, board)), sum(map(sum, board))
            won = best >= WINNING_VALUE
            trajectory.metrics["win"] = won
            trajectory.metrics["max_value"] = best
            trajectory.reward = (
                2 if won else (math.log2(best) - 1) / (math.log2(WINNING_VALUE) - 1) + 0.2 * (math.log2(total) - 1) / 10
            )
            break
    trajectory.metrics["num_moves"] = moves
    return trajectory


async def main():
    global model
    model = art.TrainableModel(name="agent-001", project="2048-multi-turn", base_model=BASE_MODEL)
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=MAX_SEQ_LENGTH),
        engine_args=art.dev.EngineArgs(enforce_eager=True, gpu_memory_utilization=0.8, num_scheduler_steps=1),
    )
    backend = LocalBackend(in_process=True, path="./.art")
    await model.register(backend)
    for i in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, i) for _ in range(ROLLOUTS)) for _ in range(1)),
            pbar_desc="gather",
            max_exceptions=ROLLOUTS,
        )
        await model.delete_checkpoints()
        await model.train(
            train_groups, config=art.TrainConfig(learning_rate=3e-5), _config={"logprob_calculation_chunk_size": 8}
        )


if __name__ == "__main__":
    asyncio.run(main())
