"""Converts trajectories to the wire types that are sent for training.

The server has recorded every answer with the messages before it. So reinforcement learning sends only the ids of the
answers, each with a digest of its conversation, by which the server notices an edited one. It sends the texts if the
server asks for them, to say which message differs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

from art.client.arguments import check_groups, check_trajectories
from art.errors import ArtError, NothingTrainableError, TrajectoryError
from art.messages import is_choice, parse_item
from art.protocol.chat import conversation_digest, message_digest
from art.protocol.training import WireAnswer, WireGroup, WireHistory, WireTrajectory
from art.trajectory import History, Trajectory, TrajectoryGroup, finite_number, infra_fault, is_policy_fault, to_plain

logger = logging.getLogger(__name__)

_SAID = {"role", "content", "name", "tool_calls"}
"""What the digest of an answer is made of."""


def wire_groups(groups: Iterable[TrajectoryGroup], *, with_texts: bool = True) -> list[WireGroup]:
    """Convert groups to wire types.

    Args:
        with_texts: send the messages. Without them conversations are named by their answers, as far as possible.

    Raises:
        NothingTrainableError: there is no trajectory at all.
        TrajectoryError: these are not groups, a reward is not a number, or a trajectory is empty.
    """
    groups = check_groups(groups)
    wired = [
        WireGroup(
            trajectories=[
                wire_trajectory(trajectory, f"trajectory {j} of group {i}", with_texts=with_texts)
                for j, trajectory in enumerate(group)
                if infra_fault(trajectory) is None  # may be set after the group was made
            ]
        )
        for i, group in enumerate(groups)
    ]
    empty = [i for i, group in enumerate(wired) if not group.trajectories]
    if len(empty) == len(groups):
        raise NothingTrainableError(
            f"nothing to train on: {len(groups)} groups with no trajectory and {_describe_failures(groups)}. "
            "Check the rollout, or leave this step out"
        )
    for i in empty:
        logger.warning("group %d of %d has no trajectory and %s", i, len(groups), _describe_failures([groups[i]]))
    return wired


def _describe_failures(groups: list[TrajectoryGroup]) -> str:
    failures = [f"{error.type}: {error.message}" for group in groups for error in group.exceptions]
    failures += [str(fault) for group in groups for item in group if (fault := infra_fault(item)) is not None]
    return f"{len(failures)} failed rollouts" + (f"; the last of them: {failures[-1]}" if failures else "")


def wire_trajectory(trajectory: Trajectory, what: str, *, with_texts: bool = True) -> WireTrajectory:
    """Convert a trajectory to its wire type; `what` names it in errors. `with_texts` is that of `wire_groups`.

    Raises:
        TrajectoryError: a reward is not a number, or there are no messages.
    """
    histories = [history for history in (trajectory, *trajectory.additional_histories) if history.messages_and_choices]
    if not histories:
        raise TrajectoryError(f"{what} has no messages; append the messages and choices of its conversation")
    if histories[0] is not trajectory:
        histories.insert(0, trajectory)  # turn and token rewards refer to the first conversation, even if it is empty
    reward = _number(trajectory.reward, what)
    turn_rewards, token_rewards = to_plain(trajectory.turn_rewards), to_plain(trajectory.token_rewards)
    for rewards in (turn_rewards, token_rewards, *(token_rewards if isinstance(token_rewards, list) else ())):
        if not isinstance(rewards, list):
            raise TrajectoryError(
                f"{what} has rewards {rewards!r}; turn_rewards is a list with a number per choice, token_rewards one "
                "with a list of numbers per choice"
            )
    return WireTrajectory(
        reward=reward if "reward" in trajectory.model_fields_set else None,
        turn_rewards=[_number(value, what) for value in turn_rewards],
        token_rewards=[[_number(value, what) for value in values] for values in token_rewards],
        histories=[_wire_history(history, what, with_texts=with_texts) for history in histories],
        policy_fault=is_policy_fault(trajectory),
    )


def wire_trajectories(trajectories: Iterable[Trajectory], name: str) -> list[WireTrajectory]:
    """Convert the trajectories of the argument `name`, with their texts. Errors are those of `wire_trajectory`."""
    return [wire_trajectory(item, f"{name}[{i}]") for i, item in enumerate(check_trajectories(trajectories, name))]


def _number(value: Any, what: str) -> float:
    number = finite_number(value)
    if number is None:
        raise TrajectoryError(f"{what} has reward {value!r}; it must be a finite number. Check the reward function")
    return number


def _wire_history(history: History, what: str, *, with_texts: bool) -> WireHistory:
    parsed = []
    for i, item in enumerate(history.messages_and_choices):
        try:
            parsed.append(parse_item(item))
        except ValueError as error:
            raise TrajectoryError(f"{what}, messages_and_choices[{i}]: {error}") from error
    if not with_texts and (named := _name_answers(parsed)) is not None:
        return named
    tools = cast(list[dict[str, Any]] | None, history.tools)
    items: list[dict[str, Any]] = []
    for item in parsed:
        if is_choice(item):  # log-probs of a recorded choice are not sent, because the server has them
            recorded = getattr(item, "exchange_id", None) is not None
            hidden = {"logprobs"} if recorded else None
            items.append({"choice": item.model_dump(mode="json", exclude=hidden, warnings=False)})
        else:
            items.append(cast(dict[str, Any], item))
    return WireHistory(items=items, tools=tools)


def _name_answers(items: list[Any]) -> WireHistory | None:
    """A conversation without its texts; `None` if it has a message that only the server can judge, e.g. with images."""
    digests, answers, num_copied = list[bytes](), list[WireAnswer](), 0
    for item in items:
        message = item.message.model_dump(mode="json", include=_SAID, warnings=False) if is_choice(item) else item
        try:
            digests.append(message_digest(message))
        except ArtError:
            return None
        if is_choice(item):
            exchange_id = getattr(item, "exchange_id", None)
            digest = "" if exchange_id is None else conversation_digest(digests)
            answers.append(WireAnswer(exchange_id=exchange_id, digest=digest))
        else:
            num_copied += message.get("role") == "assistant"
    return WireHistory(answers=answers, num_copied_answers=num_copied)
