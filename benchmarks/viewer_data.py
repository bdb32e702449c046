"""Make a large data directory with the writers of ART itself: what a long training leaves behind, without the training.

Each step has groups of an agent that searches mails: 3 to 7 answers with tool calls, about 11 kB per rollout in the
file of trajectories. History, costs, jobs, plan records and checkpoints are written too. The record of exchanges has
the last steps only, as on a server whose older record was deleted.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.config import ModelSettings, TrainConfig
from art.costs import Ledger
from art.credit.plan import StepPlan
from art.messages import load_choice
from art.metrics.catalogue import TRAINER_METRICS
from art.model.run_log import RunLog
from art.record.recorder import Exchange, Recorder, new_exchange_id
from art.runtime.jobs.job import Done, Job, JobStore, TrainPayload
from art.runtime.registry import RegisteredModel, Registry
from art.storage.checkpoints import write_checkpoint
from art.storage.database import Database
from art.storage.layout import DataDir, ModelPaths
from art.storage.step_files import GroupPlan, PlanRecord, RolloutPlan, write_plan
from art.trajectory import Trajectory, TrajectoryGroup

PROJECT, NAME = "mails", "agent-001"
GROUP_SIZE = 8
_VALIDATION_EVERY = 10
_VALIDATION_SCENARIOS = 64
_CHECKPOINT_EVERY = 50
_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{text} Returns at most ten results, the newest first, each with its id and subject.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words that the mail must contain."},
                    "sender": {"type": "string", "description": "Address of the sender, or a part of it."},
                    "after": {"type": "string", "description": "First day, as YYYY-MM-DD."},
                },
                "required": ["query"],
            },
        },
    }
    for name, text in (("search_mails", "Search the mailbox."), ("read_mail", "Read one mail by its id."))
]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the directory is."""

    steps: int
    rollouts: int
    """Rollouts of each step, in groups of `GROUP_SIZE`."""
    recorded_steps: int = 20
    """Last steps whose exchanges are still in the record."""


class Writer:
    """Writes the steps of one run, one after the other."""

    def __init__(self, folder: Path, size: Size, seed: int = 0) -> None:
        self.size = size
        self.data_dir = DataDir(folder)
        self.paths: ModelPaths = self.data_dir.model(PROJECT, NAME)
        self._rng = random.Random(seed)
        self._words = self.vocabulary(seed)
        self._weights = list(_accumulated(len(self._words)))
        self._database = Database(self.data_dir.database)
        self._recorder = Recorder(self._database)
        self._jobs = JobStore(self._database)
        self._log = RunLog()
        self._ledger = Ledger(path=self.paths.costs)

    async def start(self) -> None:
        """Create the tables, and register the model."""
        registry = Registry(self._database)
        for part in (registry, self._recorder, self._jobs):
            await part.start()
        await registry.save_model(RegisteredModel(PROJECT, NAME, "Qwen/Qwen3-4B", ModelSettings(), 0, time.time()))

    async def write_all(self) -> None:
        """Write all steps."""
        await self.start()
        for step in range(1, self.size.steps + 1):
            await self.write_step(step)
        self.close()

    def close(self) -> None:
        self._database.close()

    async def write_step(self, step: int) -> None:
        """Write one step, as a server and a training script do."""
        recorded = step > self.size.steps - self.size.recorded_steps
        skill = 1 / (1 + math.exp(-4 * (step / max(self.size.steps, 1) - 0.4)))
        groups = [
            self._group(f"mail-{self._rng.randrange(4000)}", skill) for _ in range(self.size.rollouts // GROUP_SIZE)
        ]
        job_id, metrics = f"job-{step:08d}", self._metrics(step)
        record = self._plan(step, job_id, groups)
        metrics |= record.ledger
        if recorded:
            await self._record(groups)
        write_plan(self.paths.step(step), record)
        await self._finish_job(job_id, step, metrics)
        self._ledger.book("judge/ruler", usd=0.002, prompt_tokens=9000, completion_tokens=800)
        self._ledger.book("gpu/trainer", usd=0.0004, seconds=2.5)
        await self._log.append(self.paths, self._ledger, groups, metrics, "train", step)
        if step % _VALIDATION_EVERY == 0:
            held_out = [self._group(f"held-out-{i}", skill, size=2) for i in range(_VALIDATION_SCENARIOS)]
            await self._log.append(self.paths, self._ledger, held_out, {}, "val", step)
        if step % _CHECKPOINT_EVERY == 0 or step == self.size.steps:
            self._checkpoint(step, metrics)

    # -- rollouts --

    def _group(self, scenario: str, skill: float, size: int = GROUP_SIZE) -> TrajectoryGroup:
        question = self.text(40)
        return TrajectoryGroup([self._trajectory(scenario, question, skill) for _ in range(size)])

    def _trajectory(self, scenario: str, question: str, skill: float) -> Trajectory:
        system = "You answer questions about a mailbox. Search it, read what you find, and answer in one sentence."
        items: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        turns = self._rng.randint(3, 7)
        for turn in range(turns):
            last = turn == turns - 1
            items.append(self._choice(turn, last=last))
            if not last:
                call = items[-1].message.tool_calls[0].id
                items.append({"role": "tool", "tool_call_id": call, "content": self.text(130)})
        right = self._rng.random() < skill
        return Trajectory(
            messages_and_choices=items,
            tools=_TOOLS,
            reward=(1.0 if right else 0.0) - 0.02 * turns,
            metrics={
                "right": float(right),
                "num_turns": turns,
                "duration": self._rng.uniform(2, 20),
                "ruler_score": 0.5,
            },
            metadata={"scenario_id": scenario},
        )

    def _choice(self, turn: int, *, last: bool) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": self.text(60), "reasoning_content": self.text(50)}
        if not last:
            arguments = json.dumps({"query": self.text(4), "sender": self.text(1)})
            function = {"name": "search_mails", "arguments": arguments}
            message["tool_calls"] = [
                {"id": f"call_{os.urandom(9).hex()}_{turn}", "type": "function", "function": function}
            ]
        reason = "stop" if last else "tool_calls"
        return load_choice(
            {
                "index": 0,
                "finish_reason": reason,
                "logprobs": None,
                "message": message,
                "exchange_id": new_exchange_id(),
            }
        )

    def text(self, words: int) -> str:
        """Make a text of words that are as frequent as those of a language."""
        return " ".join(self._rng.choices(self._words, cum_weights=self._weights, k=words))

    @staticmethod
    def vocabulary(seed: int) -> list[str]:
        """The words of all texts, the most frequent first."""
        rng, letters = random.Random(seed), "etaoinshrdlucmfwypvbgk"
        return ["".join(rng.choices(letters, weights=range(22, 0, -1), k=rng.randint(2, 10))) for _ in range(20_000)]

    # -- what the server writes --

    def _plan(self, step: int, job_id: str, groups: list[TrajectoryGroup]) -> PlanRecord:
        plans, trained, dropped = [], 0, 0
        for number, group in enumerate(groups):
            mean = sum(trajectory.reward for trajectory in group) / len(group)
            alike = len({trajectory.reward for trajectory in group}) == 1
            rollouts = []
            for index, trajectory in enumerate(group):
                ids = [item.exchange_id for item in trajectory.messages_and_choices if hasattr(item, "exchange_id")]
                tokens = 110 * len(ids)
                trained, dropped = trained + (0 if alike else tokens), dropped + (tokens if alike else 0)
                rollouts.append(
                    RolloutPlan(
                        index=index,
                        label=f"groups[{number}].trajectories[{index}]",
                        reward=trajectory.reward,
                        advantage=None if alike else trajectory.reward - mean,
                        exchange_ids=[ids],
                        trained_tokens=0 if alike else tokens,
                        dropped_tokens={"no_reward_spread": tokens} if alike else {},
                    )
                )
            plans.append(GroupPlan(index=number, left_out="equal_rewards" if alike else None, rollouts=rollouts))
        ledger = {
            "ledger/sampled_tokens": float(trained + dropped), "ledger/trained_tokens": float(trained),
            "ledger/context_tokens": 0.0, "ledger/dropped_tokens/no_reward_spread": float(dropped),
        }  # fmt: skip
        return PlanRecord(
            job_id=job_id, kind="train", created_at=time.time(), from_step=step - 1, step=step, trained=True,
            ledger=ledger, groups=plans,
        )  # fmt: skip

    def _metrics(self, step: int) -> dict[str, float]:
        metrics = {name: self._rng.random() for name in TRAINER_METRICS}
        metrics |= {f"data/reward_hist/{i}": float(self._rng.randrange(40)) for i in range(10)}
        return metrics | {"time/step_trainer_s": 2.0 + self._rng.random(), "time/publish_s": 0.1}

    async def _finish_job(self, job_id: str, step: int, metrics: dict[str, float]) -> None:
        payload = TrainPayload(config=TrainConfig(), plan=StepPlan())
        await self._jobs.add(Job(job_id, "train", PROJECT, NAME, "training", payload, step - 1), job_id)
        await self._jobs.move(job_id, "running", from_step=step - 1)
        findings = [f"loss/entropy is 0.1: {self.text(20)}"] if step % 7 == 0 else []
        changes = {"trained": True, "metrics": metrics, "findings": findings, "step": step}
        await self._jobs.finish(job_id, Done(changes, published_step=step))

    async def _record(self, groups: list[TrajectoryGroup]) -> None:
        waiting = []
        for trajectory in (trajectory for group in groups for trajectory in group):
            parent: Exchange | None = None
            messages: list[Any] = []
            for item in trajectory.messages_and_choices:
                if isinstance(item, dict):
                    messages.append(item)
                    continue
                before = [] if parent is None else [*parent.prompt_token_ids, *parent.completion_token_ids]
                exchange = Exchange(
                    id=item.exchange_id, rollout_id=None, project=PROJECT, name=NAME, policy_version=0,
                    parent_id=None if parent is None else parent.id, branch_reason=None,
                    prompt_token_ids=[*before, *self._rng.choices(range(30_000), k=200)],
                    completion_token_ids=self._rng.choices(range(30_000), k=110), sampling_logprobs=[-0.5] * 110,
                    temperature=1.0, top_p=1.0, seed=0, finish_reason=item.finish_reason,
                    message=item.message.model_dump(exclude_unset=True), request_messages=list(messages), tools=None,
                    created_at=time.time(),
                )  # fmt: skip
                waiting.append(self._recorder.append(exchange, conversation=os.urandom(32), parent=parent))
                messages.append(exchange.message)
                parent = exchange
        await asyncio.gather(*waiting)

    def _checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        state = {
            "step": step, "job_id": f"job-{step:08d}", "base_model": "Qwen/Qwen3-4B", "lora": {}, "config": {},
            "num_updates": step, "rng": "", "metrics": metrics,
        }  # fmt: skip
        probe = {"token_ids": [1, 2], "logprobs": [-1.0], "base_logprobs": [-1.0]}
        files = {"state.json": json.dumps(state).encode(), "probe.json": json.dumps(probe).encode()}
        weights = {name: os.urandom(1000) for name in ("adapter_model.safetensors", "optimizer.safetensors")}
        write_checkpoint(self.paths.checkpoint(step), {**files, **weights, "adapter_config.json": b"{}"})


def _accumulated(count: int) -> list[float]:
    """Accumulated weights of words by rank: the n-th is 1 / n as frequent as the first (Zipf's law)."""
    total, sums = 0.0, []
    for rank in range(1, count + 1):
        total += 1 / rank
        sums.append(total)
    return sums
