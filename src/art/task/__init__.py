"""The `Task` class: scenarios, a rollout with its reward, and defaults for training. `tasks/` has ready tasks.

    class Capitals(Task):
        name = "capitals"
        description = "name the capital of a country"
        headline_metric = "correct"

        def scenarios(self, split, *, seed, count):
            return [self.scenario(split, seed, i, {"country": "France", "capital": "Paris"}) for i in range(count)]

        async def rollout(self, model, scenario, *, rollout_index=0, step=None):
            ...

    register_task(Capitals())            # `get_task("capitals")` now returns it; the CLI takes `my_module:Capitals`

A rollout that fails because of the policy (an illegal move, a truncated answer) gets a reward. A rollout that fails for
any other reason (the server or a tool is down) raises an error, and never gets a reward of 0.
"""

from art.client.rollout_context import derive_seed
from art.task.interface import (
    Conversation,
    Cut,
    Player,
    Scenario,
    Split,
    Task,
    describe_messages,
    sample_answer,
    take_turn,
)
from art.task.names import describe_tasks, draw_conversations, draw_scenarios, get_task, list_tasks, register_task
from art.task.options import LEARNING_RATE, TINY_LEARNING_RATE, TINY_MODEL_FILE, TaskDefaults, TaskOptions

__all__ = [
    "LEARNING_RATE",
    "TINY_LEARNING_RATE",
    "TINY_MODEL_FILE",
    "Conversation",
    "Cut",
    "Player",
    "Scenario",
    "Split",
    "Task",
    "TaskDefaults",
    "TaskOptions",
    "derive_seed",
    "describe_messages",
    "describe_tasks",
    "draw_conversations",
    "draw_scenarios",
    "get_task",
    "list_tasks",
    "register_task",
    "sample_answer",
    "take_turn",
]
