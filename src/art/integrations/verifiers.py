"""Environments of Prime Intellect's `verifiers` as tasks: its tasks are the scenarios, its rewards the rewards.

    task = VerifiersTask("my-env-v1")                                  # art train my_module:task
    trajectory = await task.rollout(model, task.scenarios("train", seed=0, count=1)[0])

The environment runs its own program for the agent, with its own tools. That program asks a proxy of verifiers, and the
proxy asks ART under the base URL of the rollout. So the trajectory is the server's record of exact exchanges, tool
calls and histories included, and nothing of verifiers is patched. Needs the extra `verifiers`, of verifiers 0.4.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from art.capture import capture
from art.errors import ConfigError, ToolServerError
from art.task import Scenario, Split, Task, TaskDefaults, derive_seed

if TYPE_CHECKING:
    from art.model import Model
    from art.trajectory import Trajectory

logger = logging.getLogger(__name__)

INSTALL = "pip install 'agent-reinforcement-trainer[verifiers]'"
MAX_TASKS = 10_000
"""Of an environment that has no end of them."""
_TENTHS: dict[int, Split] = {8: "val", 9: "test"}
"""The other eight tenths of an environment's tasks are for training."""
_CONTEXT_FULL = "context_length_exceeded"


class VerifiersTask(Task):
    """
    Each task of the environment belongs to one split, by a hash of its `key`: eight tenths are for training.

    Metrics of a trajectory are those of the environment, and its rewards by name as `reward/<name>`; the trajectory's
    reward is their weighted sum.
    """

    name: ClassVar[str] = "verifiers"
    description: ClassVar[str] = "an environment of verifiers"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=100, num_minibatches=1, schedule="constant")

    def __init__(self, env: str | Mapping[str, Any] | Any, *, sampling: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            env: id of an installed taskset, or what verifiers takes as an environment's configuration, such as
                `{"taskset": {"id": "my-env-v1"}, "agent": {"runtime": {"type": "subprocess"}}}`.
            sampling: settings of each request, `max_tokens` and the like. The temperature is 1 unless given.

        Raises:
            ConfigError: verifiers 0.4 is missing.
        """
        self._vf = _load_verifiers()
        config = {"taskset": {"id": env}} if isinstance(env, str) else env
        self._env = self._vf.load_environment(self._vf.resolve_env_config(config))
        self._sampling = {"temperature": 1.0, **(sampling or {})}
        self._tasks: dict[str, Any] = {}
        """By key, in the environment's order."""
        self._serving = _Serving(self._env)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Tasks of the split, drawn at random; one may come up again.

        Raises:
            ConfigError: the environment has no task of this split.
        """
        keys = [key for key in self._load_tasks() if _TENTHS.get(derive_seed(key) % 10, "train") == split]
        if not keys:
            raise ConfigError(
                f"none of the environment's {len(self._tasks)} tasks is of the split {split!r}, which a hash of each "
                "task's key decides; an environment needs some dozens of tasks for all three splits"
            )
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, {"key": rng.choice(keys)}) for index in range(count)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """
        Raises:
            ConfigError: the model is not trainable, or the environment has several agents.
            ToolServerError: the environment failed: its program, its tools, its rewards or the model's server.
        """
        task = self._load_tasks()[scenario.inputs["key"]]
        async with capture(model) as captured, self.serving():
            client = self._vf.EvalClientConfig(base_url=captured.base_url, api_key_var=_key_variable(model))
            context = self._vf.ModelContext(
                model=model.get_inference_name(step), client=client,
                sampling=self._vf.SamplingConfig.model_validate(self._sampling),
            )  # fmt: skip
            episode = await self._env.run_episode(task, context)
        trajectory = captured.trajectory
        trajectory.metadata["scenario_id"] = scenario.id
        _score(trajectory, episode)
        return trajectory

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the environment's servers up: the proxy, and tools that rollouts share. Each rollout does so for itself;
        around a whole training it saves starting them anew for every step."""
        await self._serving.enter()
        try:
            yield
        finally:
            await self._serving.leave()

    def _load_tasks(self) -> dict[str, Any]:
        if not self._tasks:
            self._tasks = {task.key: task for task in islice(self._env.taskset, MAX_TASKS)}
        return self._tasks


class _Serving:
    """`env.serving()` while somebody is inside. A task of its own opens and closes it, as its cancel scopes want."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._num_inside = 0
        self._holder: asyncio.Task[None] | None = None
        """Of those who are inside now, or were last."""
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()

    async def enter(self) -> None:
        self._num_inside += 1
        if self._num_inside == 1 or self._ready is None:
            self._ready, self._stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._holder = asyncio.create_task(self._hold(self._holder, self._ready, self._stop))
        try:
            await asyncio.shield(self._ready)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        self._num_inside -= 1
        if self._num_inside == 0 and self._holder is not None:
            self._stop.set()
            await asyncio.shield(self._holder)

    async def _hold(self, before: asyncio.Task[None] | None, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        if before is not None and not before.done():  # the environment holds one set of servers at a time
            await asyncio.wait({before})
        try:
            async with self._env.serving():
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(ToolServerError(f"the environment did not start: {type(error).__name__}: {error}"))
            else:  # the rollouts are over, and have their rewards
                logger.warning("the servers of an environment did not end well", exc_info=True)


def _score(trajectory: Trajectory, episode: Any) -> None:
    """Reward and metrics of the one agent's trace.

    Raises:
        ConfigError, ToolServerError: as `rollout` says.
    """
    if len(episode.traces) > 1:
        agents = ", ".join(trace.agent.name for trace in episode.traces)
        raise ConfigError(
            f"environment {episode.env.id!r} has several agents ({agents}); a trajectory has one reward, so only "
            "environments of one agent can be trained on"
        )
    trace = episode.traces[0] if episode.traces else None
    is_full = trace is not None and _ended_with_full_context(trace)
    if trace is None or not (episode.ok or is_full):
        error = (trace.errors if trace is not None and trace.errors else episode.errors)[-1:]
        what = (
            f"{error[0].type}: {error[0].message}" if error else f"it ended by {getattr(trace, 'stop_condition', None)}"
        )
        raise ToolServerError(f"environment {episode.env.id!r} failed: {what}")
    trajectory.reward = trace.reward
    trajectory.metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    trajectory.metrics |= {
        f"reward/{name}": reward.value for name, reward in trace.rewards.items() if reward is not None
    }
    trajectory.metrics["num_turns"] = trace.num_turns
    trajectory.metadata["outcome"] = "policy_fault" if is_full else "ok"
    trajectory.metadata["ending"] = trace.stop_condition or ""


def _ended_with_full_context(trace: Any) -> bool:
    """The policy has said and called for so much that nothing more fits: its own fault, so the rollout counts."""
    return bool(trace.num_turns and trace.errors and _CONTEXT_FULL in trace.errors[-1].message)


def _key_variable(model: Model[Any, Any]) -> str:
    """The environment variable with the model's key: verifiers takes keys from there only.

    Its name says which key it is, so that models of several servers do not meet, and has `API_KEY` in it, which
    verifiers keeps from the agent's program.
    """
    key = model.inference_api_key or ""
    name = f"ART_ROLLOUT_API_KEY_{derive_seed(key):X}"
    os.environ[name] = key
    return name


def _load_verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(f"environments of verifiers need verifiers 0.4 or later: {INSTALL}") from error
    return vf
