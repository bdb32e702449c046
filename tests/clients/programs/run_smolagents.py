"""smolagents: a ToolCallingAgent, and a CodeAgent that asks for its steps in a `response_format`."""

from __future__ import annotations

from typing import Any

from common import KEY, MODEL, QUESTION, URL, Place, main
from common import look_up as find
from smolagents import ChatMessageStreamDelta, CodeAgent, FinalAnswerStep, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=400)
SETTINGS: Any = {"verbosity_level": 0, "max_steps": 3}


@tool
def look_up(key: str) -> str:
    """Find a value by its key.

    Args:
        key: what to look for
    """
    return find(key)


def tools() -> str:
    return str(ToolCallingAgent(tools=[look_up], model=model, **SETTINGS).run(QUESTION))


def streamed() -> str:
    agent = ToolCallingAgent(tools=[look_up], model=model, **SETTINGS, stream_outputs=True)
    return str(_last(agent))


def structured() -> Any:
    agent = CodeAgent(tools=[], model=model, **SETTINGS, use_structured_outputs_internally=True)
    return Place.model_validate(agent.run(QUESTION)).model_dump()


def structured_streamed() -> Any:
    agent = CodeAgent(tools=[], model=model, **SETTINGS, use_structured_outputs_internally=True, stream_outputs=True)
    return Place.model_validate(_last(agent)).model_dump()


def _last(agent: Any) -> Any:
    steps = list(agent.run(QUESTION, stream=True))
    assert sum(isinstance(step, ChatMessageStreamDelta) for step in steps) > 2
    assert isinstance(steps[-1], FinalAnswerStep)
    return steps[-1].output


main("smolagents", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
