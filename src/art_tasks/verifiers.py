"""Use environments of Prime Intellect's `verifiers` as tasks, with their tasks as scenarios and their rewards.

    task = VerifiersTask("my-env-v1")                                  # art train verifiers:my-env-v1
    trajectory = await task.rollout(model, task.scenarios("train", seed=0, count=1)[0])

The environment runs its own agent program with its own tools. The program calls a proxy of verifiers, which calls ART
under the base URL of the rollout. So the trajectory is the server's record of exact exchanges, with tool calls and
histories, and verifiers is not patched. Needs the extra `verifiers` with verifiers 0.4.
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

from pydantic import Field

from art.capture import capture
from art.errors import ConfigError, ToolServerError
from art.task import Scenario, Split, TaskDefaults, TaskOptions, derive_seed
from art.task.interface import PlacedTask

if TYPE_CHECKING:
    from art.model import Model
    from art.trajectory import Trajectory

logger = logging.getLogger(__name__)

INSTALL = "pip install 'agent-reinforcement-trainer[verifiers]'"
MAX_TASKS = 10_000
"""Largest number of tasks to load from an environment. Some environments have endless tasks."""
_TENTHS: dict[int, Split] = {8: "val", 9: "test"}
"""Split by the last digit of a task's hash. The other eight tenths of the tasks are for training."""
_CONTEXT_FULL = "context_length_exceeded"


class VerifiersOptions(TaskOptions):
    """Options of an environment of verifiers on the command line."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer of the model."""


class VerifiersTask(PlacedTask):
    """Trains on the tasks of an environment of verifiers.

    A hash of a task's `key` decides its split; eight tenths of the tasks are for training. A trajectory has the
    environment's metrics, and each of its rewards as the metric `reward/<name>`. Its reward is their weighted sum.
    """

    name: ClassVar[str] = "verifiers"
    description: ClassVar[str] = "an environment of verifiers"
    place_word: ClassVar[str] = "NAME"
    place_help: ClassVar[str] = "an installed environment of verifiers"
    options_class = VerifiersOptions
    options = VerifiersOptions()
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=100, num_minibatches=1, schedule="constant")

    def __init__(
        self,
        env: str | Mapping[str, Any] | Any,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            env: id of an installed taskset, or an environment configuration of verifiers, such as
                `{"taskset": {"id": "my-env-v1"}, "agent": {"runtime": {"type": "subprocess"}}}`.
            sampling: sampling settings of each request. The temperature is 1 by default.
            max_tokens: most tokens of an answer of the model.

        Raises:
            ConfigError: verifiers 0.4 is not installed.
        """
        self._vf = _load_verifiers()
        config = {"taskset": {"id": env}} if isinstance(env, str) else env
        self._env = self._vf.load_environment(self._vf.resolve_env_config(config))
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._sampling = {"temperature": 1.0, **limit, **(sampling or {})}
        self._tasks: dict[str, Any] = {}
        """The environment's tasks by key, in their order."""
        self._serving = _Serving(self._env)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw tasks of a split at random, with repetition.

        Raises:
            ConfigError: the environment has no task in this split.
        """
        keys = [key for key in self._load_tasks() if _TENTHS.get(derive_seed(key) % 10, "train") == split]
        if not keys:
            raise ConfigError(
                f"none of the environment's {len(self._tasks)} tasks is in split {split!r}: a hash of its key decides "
                "the split of a task, and an environment needs some dozens of tasks to have all three"
            )
        rng = random.Random(derive_seed(self.name, split, seed))
        return [self.scenario(split, seed, index, {"key": rng.choice(keys)}) for index in range(count)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Run one episode of the environment.

        Raises:
            ConfigError: the model is not trainable, or the environment has several agents.
            ToolServerError: the environment's program, tools or rewards failed, or the model's server did.
        """
        task = self._load_tasks()[scenario.inputs["key"]]
        async with capture(model) as captured, self.serving():
            # verifiers reads keys from the environment only. The variable depends on the key, so that models of several
            # servers can be used at once. Its name has `API_KEY`, so verifiers does not pass it to the agent's program.
            key = model.inference_api_key or ""
            variable = f"ART_ROLLOUT_API_KEY_{derive_seed(key):X}"
            os.environ[variable] = key
            client = self._vf.EvalClientConfig(base_url=captured.base_url, api_key_var=variable)
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
        """Keep the environment's servers running: the proxy, and tools that rollouts share.

        Each rollout does this itself. Around a whole training, it saves restarting the servers for every step.
        """
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
    """Keeps `env.serving()` open while it has users.

    One asyncio task opens and closes it, since its cancel scopes must be left by the task that entered them.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._num_users = 0
        self._holder: asyncio.Task[None] | None = None
        """The task that holds `env.serving()` open, or held it last."""
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()

    async def enter(self) -> None:
        self._num_users += 1
        if self._num_users == 1 or self._ready is None:
            self._ready, self._stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._holder = asyncio.create_task(self._hold(self._holder, self._ready, self._stop))
        try:
            await asyncio.shield(self._ready)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        self._num_users -= 1
        if self._num_users == 0 and self._holder is not None:
            self._stop.set()
            await asyncio.shield(self._holder)

    async def _hold(
        self, previous: asyncio.Task[None] | None, ready: asyncio.Future[None], stop: asyncio.Event
    ) -> None:
        if previous is not None and not previous.done():  # the environment can have one set of servers at a time
            await asyncio.wait({previous})
        try:
            async with self._env.serving():
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(ToolServerError(f"the environment did not start: {type(error).__name__}: {error}"))
            else:  # the rollouts have ended and have their rewards
                logger.warning("the servers of an environment failed while they were closed", exc_info=True)


def _score(trajectory: Trajectory, episode: Any) -> None:
    """Set reward and metrics of a trajectory from the trace of the episode's agent."""
    if len(episode.traces) > 1:
        agents = ", ".join(trace.agent.name for trace in episode.traces)
        raise ConfigError(
            f"environment {episode.env.id!r} has several agents ({agents}), but a trajectory has one reward; use an "
            "environment with one agent"
        )
    trace = episode.traces[0] if episode.traces else None
    # A conversation that filled the context is the policy's fault, so the rollout counts.
    is_full = bool(trace and trace.num_turns and trace.errors and _CONTEXT_FULL in trace.errors[-1].message)
    if trace is None or not (episode.ok or is_full):
        errors = (trace.errors if trace is not None else None) or episode.errors
        what = f"it ended with {getattr(trace, 'stop_condition', None)}"
        if errors:
            what = f"{errors[-1].type}: {errors[-1].message}"
        raise ToolServerError(f"environment {episode.env.id!r} failed: {what}")
    trajectory.reward = trace.reward
    trajectory.metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    trajectory.metrics |= {f"reward/{name}": reward.value for name, reward in rewards.items()}
    trajectory.metrics["num_turns"] = trace.num_turns
    trajectory.metadata["outcome"] = "policy_fault" if is_full else "ok"
    trajectory.metadata["ending"] = trace.stop_condition or ""


def _load_verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(f"verifiers environments need verifiers 0.4 or later: {INSTALL}") from error
    return vf
