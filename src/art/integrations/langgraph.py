"""LangGraph agents as rollouts: two lines change, the import of `init_chat_model` and the call of the rollout.

    from art.langgraph import init_chat_model, wrap_rollout

    async def rollout(model, scenario) -> art.Trajectory:
        graph = create_agent(init_chat_model("gpt-4.1"), tools)
        result = await graph.ainvoke({"messages": [("user", scenario.question)]})
        return art.Trajectory(reward=grade(result))

    trajectory = await wrap_rollout(model, rollout)(model, scenario)

What `init_chat_model` gives is LangChain's own `ChatOpenAI`, so streams, tools, retries and sub-graphs are LangChain's.
A sub-agent with messages of its own becomes an additional history. Needs the extra `langgraph`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, overload

from art.capture import Captured, capture, current_capture
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
"""Arguments that say where to ask and how to connect."""


Rollout = Callable[P, Awaitable[Trajectory]]


@overload
def wrap_rollout(model: Model[Any, Any], fn: Rollout[P]) -> Rollout[P]: ...
@overload
def wrap_rollout(model: Model[Any, Any]) -> Callable[[Rollout[P]], Rollout[P]]: ...
def wrap_rollout(model: Model[Any, Any], fn: Any = None) -> Any:
    """`fn` with `model` behind every `init_chat_model` that is called inside; without `fn` the decorator that does so.

    The trajectory that `fn` returns keeps its reward, metrics, metadata and logs, and gets the conversations: the
    longest as its own, others as additional histories.

    Raises:
        ConfigError: from the rollout, when it has asked the model nothing, or returns something else.
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
    if trajectory is captured:  # that of `art.auto_trajectory()`
        return trajectory
    if not captured.messages_and_choices:
        raise ConfigError(
            "the wrapped rollout has asked the model nothing: make its chat models inside of it, by "
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
    """A `ChatOpenAI` that asks the model of the surrounding `wrap_rollout` or `art.capture(model)`.

    Args:
        model: what the agent used until now, `"gpt-4.1"`. It and `model_provider` have no effect: that the policy
            answers in its place is what this function is for. Only a step of it, `model.get_inference_name(step)`, is
            asked as it says.
        **kwargs: of `ChatOpenAI`. Unlike there, `temperature` is 1 by default, as training assumes, and `timeout` and
            `max_retries` are those of `model.openai_client()`, which outlast a restart of the server.

    Structured output of a trainable model is a tool that it may call: nothing forces what it samples. An answer without
    that call gives `None`, as LangChain's parsers do.

    Raises:
        ConfigError: no capture of a model surrounds the call, an argument cannot be honoured, or the extra is missing.
    """
    refused = sorted(_SET_BY_ART & kwargs.keys())
    if configurable_fields is not None or config_prefix is not None:
        refused += ["configurable_fields", "config_prefix"]
    if refused:
        raise ConfigError(
            f"init_chat_model cannot honour {', '.join(refused)}: the captured model's address and client are used, "
            "and settings are fixed when the chat model is made; make it inside of the rollout with the values it needs"
        )
    captured = current_capture()
    policy = None if captured is None else captured.model
    if captured is None or policy is None:
        raise ConfigError(
            "init_chat_model is to be called inside of a rollout: run that by `wrap_rollout(model, rollout)(...)`, or "
            "in `async with art.capture(model)`"
        )
    is_step = model is not None and model.startswith(f"{policy.get_inference_name()}@")
    kwargs = {"temperature": 1.0, "model": model if is_step else policy.get_inference_name()} | kwargs
    return _chat_class(policy.trainable)(**kwargs, **_clients(captured, kwargs), **_routes(policy.trainable, kwargs))


def _clients(captured: Captured, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI clients of the captured model, with the given time-out, retries, headers and query."""
    names = {
        "timeout": "timeout", "request_timeout": "timeout", "max_retries": "max_retries",
        "default_headers": "default_headers", "default_query": "default_query",
    }  # fmt: skip
    options = {names[key]: value for key, value in kwargs.items() if key in names and value is not None}
    if captured.model.trainable:
        options["base_url"] = captured.base_url  # also holds in threads that have no context
    client = captured.model.openai_client().with_options(**options)
    blocking = captured.model.blocking_openai_client().with_options(**options)
    return {
        "root_async_client": client, "async_client": client.chat.completions,
        "root_client": blocking, "client": blocking.chat.completions,
    }  # fmt: skip


def _routes(is_trainable: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What keeps LangChain to the requests that the endpoint answers, or the capture can read."""
    if is_trainable:
        return {} if "disabled_params" in kwargs else {"disabled_params": {"parallel_tool_calls": None}}
    if kwargs.get("use_responses_api"):
        raise ConfigError("use_responses_api=True: of an endpoint other than ART's only chat completions are captured")
    return {"use_responses_api": False} if "use_responses_api" not in kwargs else {}


@functools.cache
def _chat_class(is_trainable: bool) -> Any:
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise ConfigError(
            "art.langgraph needs LangChain's client: pip install 'agent-reinforcement-trainer[langgraph]'"
        ) from error

    class PolicyChat(ChatOpenAI):  # type: ignore[misc]
        """A `ChatOpenAI` for a model that learns from what it samples, and therefore samples without constraints."""

        def with_structured_output(
            self, schema: Any = None, *, method: str | None = None, include_raw: bool = False, **kwargs: Any
        ) -> Any:
            if method not in (None, "function_calling"):
                raise ConfigError(
                    f"method={method!r}: a trainable model's answer is not forced into a format; leave `method` out, "
                    "and the schema is offered as a tool"
                )
            kwargs = {key: value for key, value in kwargs.items() if key != "strict"}
            return super().with_structured_output(
                schema, method="function_calling", include_raw=include_raw, **({"tool_choice": "auto"} | kwargs)
            )

    return PolicyChat if is_trainable else ChatOpenAI
