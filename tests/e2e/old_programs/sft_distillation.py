"""Distillation: a teacher's answers, in chunks of batches, then a few more from a file."""

import asyncio
import json

from openai import AsyncOpenAI

import art
from art.local import LocalBackend
from art.utils.sft import create_sft_dataset_iterator, train_sft_from_file

BASE_MODEL = "Qwen/Qwen3-14B"
TEACHER = {"base_url": "https://openrouter.ai/api/v1", "api_key": "x"}
TEACHER_MODEL = "qwen/qwen3-235b-a22b-2507"
QUESTIONS = [f"Translate {word} to SQL" for word in ("users", "orders", "items", "prices", "names", "dates")]
FILE = "more.jsonl"


async def main():
    client = AsyncOpenAI(**TEACHER)
    trajectories = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model=TEACHER_MODEL, messages=messages, max_tokens=64)
        content = answer.choices[0].message.content
        trajectories.append(
            art.Trajectory(messages_and_choices=[*messages, {"role": "assistant", "content": content}], reward=0.0)
        )
    backend = LocalBackend()
    model = art.TrainableModel(name="distilled", project="sft", base_model=BASE_MODEL)
    await model.register(backend)
    for chunk in create_sft_dataset_iterator(
        trajectories, chunk_size=2, batch_size=2, peak_lr=1e-3, show_progress=False
    ):
        await model.train_sft(chunk.trajectories, chunk.config, verbose=False)
    await model.train_sft(
        trajectories[:2], config=art.TrainSFTConfig(learning_rate=1e-4, batch_size="auto"), _config={}
    )
    rows = [{"messages": trajectory.messages()} for trajectory in trajectories]
    with open(FILE, "w") as file:  # noqa: ASYNC230
        file.writelines(json.dumps(row) + "\n" for row in rows)
    await train_sft_from_file(model, FILE, epochs=1, batch_size=2, peak_lr=2e-4)


if __name__ == "__main__":
    asyncio.run(main())
