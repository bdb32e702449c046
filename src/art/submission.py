"""What is sent to be trained: checked for the usual mistakes in the words of the caller, then put into wire types."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

from art.errors import NothingTrainableError, TrajectoryError
from art.messages import is_choice, parse_item
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from art.trajectory import History, Trajectory, TrajectoryGroup, close_unstarted, infra_fault, is_policy_fault, to_plain

logger = logging.getLogger(__name__)

GATHER = "`groups = await art.gather_trajectory_groups(...)`"


def check_groups(groups: Any) -> list[TrajectoryGroup]:
    """The groups to train on, as a list.

    Raises:
        TrajectoryError: it is something else; the message says what it is and how to make groups of it.
    """
    if isinstance(groups, TrajectoryGroup):
        raise TrajectoryError("`trajectory_groups` is one TrajectoryGroup; put it into a list: `[group]`")
    return _check_items(groups, TrajectoryGroup, "trajectory_groups", _how_to_make_groups)


def check_trajectories(trajectories: Any) -> list[Trajectory]:
    """The trajectories to fine-tune on, as a list.

    Raises:
        TrajectoryError: it is something else; the message says what it is and how to make trajectories of it.
    """
    if isinstance(trajectories, TrajectoryGroup):
        return list(trajectories)
    if isinstance(trajectories, Trajectory):
        raise TrajectoryError("`trajectories` is one Trajectory; put it into a list: `[trajectory]`")
    return _check_items(trajectories, Trajectory, "trajectories", _how_to_make_trajectories)


def _check_items(items: Any, kind: type, name: str, hint: Callable[[Any], str]) -> list[Any]:
    if isinstance(items, (Awaitable, str, bytes, Mapping, Trajectory)) or not isinstance(items, Iterable):
        _discard(items)
        raise TrajectoryError(f"`{name}` is {_describe(items)}, not a list of {kind.__name__}: {hint(items)}")
    listed = list(items)
    wrong = next((i for i, item in enumerate(listed) if not isinstance(item, kind)), None)
    if wrong is not None:
        close_unstarted(listed)
        item = listed[wrong]
        raise TrajectoryError(f"`{name}[{wrong}]` is {_describe(item)}, not a {kind.__name__}: {hint(item)}")
    return listed


def _discard(item: Any) -> None:
    """Close a coroutine that nobody will await, and those in lists that it was given: Python warns of each."""
    if inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(item).values():
            close_unstarted(argument if isinstance(argument, (list, tuple)) else ())
    close_unstarted([item])


def _describe(item: Any) -> str:
    """What an argument is, in a few words."""
    if item is None:
        return "None"
    if isinstance(item, Awaitable):
        kind = "group" if hasattr(item, "_num_trajectories") else "coroutine"
        return f"a {kind} that was not awaited"
    name = type(item).__name__
    text = f": {item!r}" if isinstance(item, (str, int, float, BaseException)) else ""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{text[:60]}"


def _how_to_make_groups(item: Any) -> str:
    if isinstance(item, Awaitable):
        return f"run the rollouts first, by {GATHER}"
    if isinstance(item, Trajectory):
        return "put the rollouts of one scenario into a group, `[art.TrajectoryGroup(trajectories)]`"
    if isinstance(item, BaseException):
        return "a rollout that failed belongs into its group, `art.TrajectoryGroup([*trajectories, error])`"
    if isinstance(item, list):
        return "make each list of trajectories a group, `art.TrajectoryGroup(trajectories)`"
    return f"pass what {GATHER} gives"


def _how_to_make_trajectories(item: Any) -> str:
    if isinstance(item, Awaitable):
        return "run the rollouts first, by `trajectories = await art.gather_trajectories(...)`"
    if isinstance(item, TrajectoryGroup):
        return "pass the trajectories of the groups, `[trajectory for group in groups for trajectory in group]`"
    if isinstance(item, BaseException):
        return "leave rollouts out that failed"
    return (
        'make a trajectory of each conversation, `art.Trajectory(messages_and_choices=[{"role": "user", "content": '
        '...}, {"role": "assistant", "content": ...}])`'
    )


def wire_groups(groups: Iterable[TrajectoryGroup]) -> list[WireGroup]:
    """Groups as they are sent.

    Raises:
        NothingTrainableError: there is no trajectory at all.
        TrajectoryError: these are no groups, a reward is not a number, or a trajectory is empty.
    """
    groups = check_groups(groups)
    wired = [
        WireGroup(
            trajectories=[
                wire_trajectory(trajectory, f"trajectory {j} of group {i}")
                for j, trajectory in enumerate(group)
                if infra_fault(trajectory) is None  # said so after the group was made
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


def check_recorded(groups: Iterable[WireGroup]) -> None:
    """
    Raises:
        TrajectoryError: an answer whose tokens and log-probs the server has no record of.
    """
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group.trajectories):
            for item in (item for history in trajectory.histories for item in history.items):
                choice = item.get("choice")
                if (item.get("role") == "assistant") if choice is None else choice.get("exchange_id") is None:
                    raise TrajectoryError(
                        f"allow_training_without_logprobs=True: trajectory {j} of group {i} holds an answer that "
                        "ART has no record of, so its tokens are not known. Append the `Choice` objects that "
                        "`model.openai_client()` returned, whose log-probs are always recorded; answers from elsewhere "
                        "can be learnt by `train_sft`"
                    )


def _describe_failures(groups: list[TrajectoryGroup]) -> str:
    failures = [f"{error.type}: {error.message}" for group in groups for error in group.exceptions]
    failures += [str(fault) for group in groups for item in group if (fault := infra_fault(item)) is not None]
    return f"{len(failures)} failed rollouts" + (f"; the last of them: {failures[-1]}" if failures else "")


def wire_trajectory(trajectory: Trajectory, what: str) -> WireTrajectory:
    """A trajectory as it is sent; `what` names it in errors.

    Raises:
        TrajectoryError: a reward is not a number, or there are no messages.
    """
    histories = [history for history in (trajectory, *trajectory.additional_histories) if history.messages_and_choices]
    if not histories:
        raise TrajectoryError(f"{what} has no messages; append the messages and choices of its conversation")
    if histories[0] is not trajectory:
        histories.insert(0, trajectory)  # the first one is what turn and token rewards are about, empty or not
    reward = _number(trajectory.reward, what)
    return WireTrajectory(
        reward=reward if "reward" in trajectory.model_fields_set else None,
        turn_rewards=[_number(value, what) for value in _list(trajectory.turn_rewards, what)],
        token_rewards=[
            [_number(value, what) for value in _list(values, what)] for values in _list(trajectory.token_rewards, what)
        ],
        histories=[_wire_history(history, what) for history in histories],
        policy_fault=is_policy_fault(trajectory),
    )


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TrajectoryError(f"{what} has reward {value!r}; it must be a finite number. Check the reward function")
    return number


def _list(value: Any, what: str) -> list[Any]:
    plain = to_plain(value)
    if not isinstance(plain, list):
        raise TrajectoryError(
            f"{what} has rewards {value!r}; turn_rewards is a list with a number per choice, token_rewards one with a "
            "list of numbers per choice"
        )
    return plain


def _wire_history(history: History, what: str) -> WireHistory:
    items = []
    for i, item in enumerate(history.messages_and_choices):
        try:
            items.append(_wire_item(item))
        except ValueError as error:
            raise TrajectoryError(f"{what}, messages_and_choices[{i}]: {error}") from error
    return WireHistory(items=items, tools=cast(list[dict[str, Any]] | None, history.tools))


def _wire_item(item: Any) -> dict[str, Any]:
    """A message stays as it is. Log-probs of a recorded choice stay behind: the server has the exact ones."""
    item = parse_item(item)
    if not is_choice(item):
        return cast(dict[str, Any], item)
    recorded = getattr(item, "exchange_id", None) is not None
    return {"choice": item.model_dump(mode="json", exclude={"logprobs"} if recorded else None, warnings=False)}
