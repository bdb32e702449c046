"""Groups and trajectories as the service takes them. What it could not learn from is left out or refused here."""

from __future__ import annotations

import importlib
import json
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.backends.serverless.wire import ServiceModel
from art.config.training import SPREAD_TOLERANCE
from art.errors import ConfigError, NothingTrainableError, ProcessError, TrajectoryError
from art.messages import is_choice, parse_item, to_message
from art.trajectory import History, Trajectory, TrajectoryGroup, finite_number, infra_fault, to_plain

FILE_NAME = "train.jsonl"
UPLOAD_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class SentGroups:
    """The groups of a step, ready to be sent."""

    groups: list[dict[str, Any]]
    """Groups whose rewards differ."""
    without_spread: list[int]
    """Indices of the submitted groups that teach nothing, because their rewards are equal."""
    failed: list[int]
    """Indices of the submitted groups in which all rollouts failed, so that none has a score."""
    num_submitted: int

    @property
    def findings(self) -> list[str]:
        """What a person should know about the groups that were left out."""
        if not (self.groups or self.failed):
            return [f"every group ({self.num_submitted}) has equal rewards: there is nothing to learn from"]
        findings = []
        for groups, why in ((self.without_spread, "have equal rewards"), (self.failed, "have failed rollouts only")):
            if groups:
                findings.append(f"groups {groups} of {self.num_submitted} {why}: they teach nothing and were not sent")
        return findings

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "data/step_num_groups_submitted": float(self.num_submitted),
            "data/step_num_groups_trainable": float(len(self.groups)),
        }


def sent_groups(groups: Sequence[TrajectoryGroup]) -> SentGroups:
    """Make what is sent of the groups of a step.

    Raises:
        TrajectoryError: the service cannot learn from an answer or a reward as it is.
        NothingTrainableError: no trajectory has an answer that the model sampled.
    """
    sent: list[dict[str, Any]] = []
    without_spread, failed, num_answers = [], [], 0
    for i, group in enumerate(groups):
        trajectories = [trajectory for trajectory in group if infra_fault(trajectory) is None]
        for j, trajectory in enumerate(trajectories):
            num_answers += _check(trajectory, f"trajectory {j} of group {i}")
        if not trajectories:
            failed.append(i)
        elif _has_spread([trajectory.reward for trajectory in trajectories]):
            sent.append(wire_group(group, trajectories))
        else:
            without_spread.append(i)
    if not num_answers:
        raise NothingTrainableError(
            "no trajectory has an answer that the model sampled; append the `Choice` objects that "
            "`model.openai_client()` returns to `messages_and_choices`"
        )
    return SentGroups(sent, without_spread, failed, len(groups))


def wire_group(group: TrajectoryGroup, trajectories: Iterable[Trajectory] | None = None) -> dict[str, Any]:
    """Return a group as JSON. `trajectories` are the ones to send; by default all."""
    chosen = group.trajectories if trajectories is None else trajectories
    return {
        "trajectories": [_wire_trajectory(trajectory) for trajectory in chosen],
        "exceptions": [error.model_dump() for error in group.exceptions],
        "metadata": to_plain(group.metadata),
        "metrics": _without_nan(group.metrics),
        "logs": list(group.logs),
    }


def sft_lines(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the data of supervised fine-tuning: for each conversation a line of JSON with `messages` and `tools`.

    Raises:
        NothingTrainableError: no conversation has an assistant message.
    """
    lines = []
    for trajectory in trajectories:
        for history in (trajectory, *trajectory.additional_histories):
            messages = [to_message(item) for item in history.messages_and_choices]
            if any(message["role"] == "assistant" for message in messages):
                tools = {"tools": history.tools} if history.tools else {}
                lines.append(json.dumps({"messages": messages} | tools, ensure_ascii=False))
    if not lines:
        raise NothingTrainableError("no trajectory has an assistant message to learn")
    return lines


def _has_spread(rewards: list[float]) -> bool:
    mean = sum(rewards) / len(rewards)
    return any(abs(reward - mean) > SPREAD_TOLERANCE for reward in rewards)


def _check(trajectory: Trajectory, what: str) -> int:
    """Check that the service can learn from a trajectory. Returns the number of its sampled answers.

    Raises:
        TrajectoryError: it cannot; the message says why.
    """
    for name in ("turn_rewards", "token_rewards"):
        if getattr(trajectory, name):
            raise TrajectoryError(f"{what} has {name}: the service knows only one reward per trajectory, `reward`")
    if finite_number(trajectory.reward) is None:
        raise TrajectoryError(
            f"{what} has reward {trajectory.reward!r}; it must be a finite number. Check the reward function"
        )
    num_answers = 0
    for history in (trajectory, *trajectory.additional_histories):
        for choice in filter(is_choice, map(parse_item, history.messages_and_choices)):
            num_answers += 1
            if getattr(choice, "exchange_id", None) is not None:
                raise TrajectoryError(
                    f"{what} has an answer that an ART server sampled and recorded: its tokens are known only there. "
                    "Register the model with ServerlessBackend, and sample through its `openai_client()`"
                )
            if choice.logprobs is None or not (choice.logprobs.content or choice.logprobs.refusal):
                raise TrajectoryError(
                    f"{what} has an answer without log-probs, which training needs. Clients of "
                    "`model.openai_client()` ask for them; any other client must send `logprobs=True`"
                )
    return num_answers


def _wire_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return _wire_history(trajectory) | {
        "additional_histories": [_wire_history(history) for history in trajectory.additional_histories],
        "reward": float(trajectory.reward),
        "initial_policy_version": trajectory.initial_policy_version,
        "final_policy_version": trajectory.final_policy_version,
        "metrics": _without_nan(trajectory.metrics),
        "metadata": to_plain(trajectory.metadata),
        "logs": list(trajectory.logs),
        "start_time": trajectory.start_time.isoformat(),
    }


def _without_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that JSON has words for."""
    return {
        name: value
        for name, value in to_plain(metrics).items()
        if not (isinstance(value, float) and finite_number(value) is None)
    }


def _wire_history(history: History) -> dict[str, Any]:
    items = [parse_item(item) for item in history.messages_and_choices]
    return {
        "messages_and_choices": [
            item.model_dump(mode="json", exclude_unset=True, warnings=False) if is_choice(item) else item
            for item in items
        ],
        "tools": history.tools,
    }


def upload(lines: Sequence[str], model: ServiceModel, api_key: str) -> str:
    """Upload the lines of `sft_lines` as a new artifact in W&B, by the package `wandb`, and wait until it is there.

    Returns:
        The address of the artifact, `wandb-artifact:///entity/project/name:v0`.

    Raises:
        ConfigError: `wandb` is not installed.
        ProcessError: W&B did not take the data.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "train_sft on ServerlessBackend uploads its data by the package wandb; install it with `pip install wandb`"
        ) from error
    name = f"{model.name}-sft-data-{uuid.uuid4().hex[:12]}"  # an artifact of the same name would get another version
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE_NAME
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            run = wandb.init(
                entity=model.entity, project=model.project, name=model.name, id=model.run_id or model.name,
                resume="allow", reinit="create_new", dir=folder,
                settings=wandb.Settings(api_key=api_key, console="off", silent=True),
            )  # fmt: skip
            try:
                artifact = wandb.Artifact(name, type="dataset", metadata={"num_conversations": len(lines)})
                artifact.add_file(str(file), name=FILE_NAME)
                run.log_artifact(artifact).wait(timeout=UPLOAD_TIMEOUT_S)
            finally:
                run.finish()
        except Exception as error:  # wandb raises many kinds of errors, and none of them is ours
            raise ProcessError(f"W&B did not take the training data: {type(error).__name__}: {error}") from error
    return f"wandb-artifact:///{model.entity}/{model.project}/{name}:v0"
