"""Use LangGraph agents as rollouts. Two lines change: the import of `init_chat_model` and the call of the rollout.

    from art.langgraph import init_chat_model, wrap_rollout

    async def rollout(model, scenario) -> art.Trajectory:
        graph = create_agent(init_chat_model("gpt-4.1"), tools)
        result = await graph.ainvoke({"messages": [("user", scenario.question)]})
        return art.Trajectory(reward=grade(result))

    trajectory = await wrap_rollout(model, rollout)(model, scenario)

`init_chat_model` returns LangChain's own `ChatOpenAI`, so streams, tools, retries and sub-graphs work as in LangChain.
A sub-agent with its own messages becomes an additional history. Needs the extra `langgraph`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, overload

from art.capture import Captured, capture, current_capture, without_step
from art.errors import ConfigError
from art.model import Model
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

P = ParamSpec("P")

_SET_BY_ART = {
    "base_url", "openai_api_base", "api_key", "openai_api_key", "openai_proxy", "organization", "openai_organization",
    "client", "async_client", "root_client", "root_async_client", "http_client", "http_async_client",
    "http_socket_options", "model_name",
}  # fmt: skip
"""Arguments that set the address or the connection, which are those of the captured model."""

Rollout = Callable[P, Awaitable[Trajectory]]


@overload
def wrap_rollout(model: Model[Any, Any], fn: Rollout[P]) -> Rollout[P]: ...
@overload
def wrap_rollout(model: Model[Any, Any]) -> Callable[[Rollout[P]], Rollout[P]]: ...
def wrap_rollout(model: Model[Any, Any], fn: Any = None) -> Any:
    """Wrap a rollout function so that every `init_chat_model` inside it uses `model`. Without `fn`, return a decorator.

    The trajectory that `fn` returns keeps its reward, metrics, metadata and logs. The conversations with the model are
    added: the longest one as the trajectory's own, others as additional histories.

    Raises:
        ConfigError: the rollout did not call the model, or did not return a trajectory. Raised by the wrapped rollout.
    """
    if fn is None:
        return functools.partial(wrap_rollout, model)

    @functools.wraps(fn)
    async def rollout(*args: Any, **kwargs: Any) -> Trajectory:
        async with capture(model) as captured:
            trajectory = await fn(*args, **kwargs)
        if not isinstance(trajectory, Trajectory):
            raise ConfigError(f"a wrapped rollout must return an `art.Trajectory`, got {type(trajectory).__name__}")
        return _fill(trajectory, captured.trajectory)

    return rollout


def _fill(trajectory: Trajectory, captured: Trajectory) -> Trajectory:
    if trajectory is captured:  # the rollout returned `art.auto_trajectory()`
        return trajectory
    if not captured.messages_and_choices:
        raise ConfigError(
            "the wrapped rollout did not call the model: make its chat models inside the rollout with "
            "`art.langgraph.init_chat_model(...)`" + "".join(f"; {line}" for line in captured.logs)
        )
    trajectory.messages_and_choices = captured.messages_and_choices
    trajectory.tools = captured.tools
    trajectory.additional_histories = captured.additional_histories
    trajectory.initial_policy_version = captured.initial_policy_version
    trajectory.final_policy_version = captured.final_policy_version
    trajectory.metadata = captured.metadata | trajectory.metadata
    trajectory.metrics = captured.metrics | trajectory.metrics
    trajectory.logs += captured.logs
    return trajectory


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: Any = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatOpenAI:
    """Make a `ChatOpenAI` that calls the model of the enclosing `wrap_rollout` or `art.capture(model)`.

    Structured output of a trainable model is a tool that the model may call, since nothing may constrain what it
    samples. An answer without that call gives `None`, as with LangChain's parsers.

    Args:
        model: the model that the agent used before, e.g. `"gpt-4.1"`. The policy answers in its place, so the name has
            no effect, except the name of a step, `model.get_inference_name(step)`. `model_provider` has no effect.
        **kwargs: arguments of `ChatOpenAI`. By default `temperature` is 1, as training assumes, and `timeout` and
            `max_retries` are those of `model.openai_client()`, which survive a restart of the server.

    Raises:
        ConfigError: no capture of a model encloses the call, an argument cannot be honoured, or the extra is missing.
    """
    refused = sorted(_SET_BY_ART & kwargs.keys())
    if configurable_fields is not None or config_prefix is not None:
        refused += ["configurable_fields", "config_prefix"]
    if refused:
        raise ConfigError(
            f"init_chat_model does not support {', '.join(refused)}: it uses the address and client of the captured "
            "model, and its settings cannot change later; call it inside the rollout with the values that you need"
        )
    captured = current_capture()
    policy = None if captured is None else captured.model
    if captured is None or policy is None:
        raise ConfigError(
            "call init_chat_model inside a rollout, and run the rollout with `wrap_rollout(model, rollout)(...)` or in "
            "`async with art.capture(model)`"
        )
    name = without_step(policy.get_inference_name())
    is_step = model is not None and model != name and without_step(model) == name
    kwargs = {"temperature": 1.0, "model": model if is_step else policy.get_inference_name()} | kwargs
    # Of another server, the capture can read chat completions only.
    if not policy.is_recorded and kwargs.setdefault("use_responses_api", False):
        raise ConfigError("use_responses_api=True: only chat completions are captured from a server other than ART's")
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise ConfigError(
            "art.langgraph needs LangChain's client: pip install 'agent-reinforcement-trainer[langgraph]'"
        ) from error
    return ChatOpenAI(**kwargs, **_clients(captured, kwargs))


def _clients(captured: Captured, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI clients of the captured model, with time-out, retries, headers and query from `kwargs`."""
    names = ("timeout", "request_timeout", "max_retries", "default_headers", "default_query")
    options = {key.removeprefix("request_"): kwargs[key] for key in names if kwargs.get(key) is not None}
    if captured.model.is_recorded:
        options["base_url"] = captured.base_url  # also works in threads, which do not see the capture's context
    client = captured.model.openai_client().with_options(**options)
    blocking = captured.model.blocking_openai_client().with_options(**options)
    return {
        "root_async_client": client, "async_client": client.chat.completions,
        "root_client": blocking, "client": blocking.chat.completions,
    }  # fmt: skip
