"""CrewAI: a crew of one agent with a tool, and one whose task has an `output_pydantic`."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}

from common import KEY, MODEL, QUESTION, URL, Place, main
from common import look_up as find
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def look_up(key: str) -> str:
    """Find a value by its key."""
    return find(key)


def tools() -> str:
    return str(_crew(stream=False, tools=[look_up]).kickoff().raw)


def streamed() -> str:
    streaming = _crew(stream=True, tools=[look_up]).kickoff()
    assert len(list(streaming)) > 2
    return str(streaming.result.raw)


def structured() -> Any:
    return _crew(stream=False, output_pydantic=Place).kickoff().pydantic.model_dump()


def structured_streamed() -> Any:
    streaming = _crew(stream=True, output_pydantic=Place).kickoff()
    assert len(list(streaming)) > 2
    return streaming.result.pydantic.model_dump()


def _crew(*, stream: bool, tools: Any = (), output_pydantic: Any = None) -> Any:
    llm = LLM(model=f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY, stream=stream)
    agent = Agent(role="clerk", goal="find things", backstory="You know the shelves.", llm=llm, tools=list(tools))
    task = Task(description=QUESTION, expected_output="a short answer", agent=agent, output_pydantic=output_pydantic)
    return Crew(agents=[agent], tasks=[task], stream=stream)


main("crewai", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
