"""Scenarios without a data set: a language model writes inputs, a system prompt and a rubric from one sentence.

    dataset = await generate_dataset("answer questions about our opening hours", num=64, generator="openai/gpt-4.1")
    dataset.save("opening-hours")          # task.toml and scenarios.jsonl, to be read and edited
    train = Dataset.load("opening-hours").split("train")

`art auto` does this from the command line, and trains.
"""

from art_recipes.scenarios.dataset import Dataset
from art_recipes.scenarios.generate import generate_dataset, generate_inputs, write_task_text
from art_recipes.scenarios.writer import Writer
from art_recipes.scenarios.written import TaskText, WrittenScenario, split_of, with_splits

__all__ = [
    "Dataset",
    "TaskText",
    "Writer",
    "WrittenScenario",
    "generate_dataset",
    "generate_inputs",
    "split_of",
    "with_splits",
    "write_task_text",
]
