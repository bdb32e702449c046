"""DSPy: ReAct with a tool, and a signature with a typed output through its JSONAdapter."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
from common import KEY, MODEL, QUESTION, URL, Place, look_up, main

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, cache=False, num_retries=0))


class Find(dspy.Signature):
    """Find where something is."""

    question: str = dspy.InputField()
    place: Place = dspy.OutputField()


def tools() -> str:
    return str(dspy.ReAct("question -> answer", tools=[look_up])(question=QUESTION).answer)


def streamed() -> str:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    return str(_last(dspy.ReAct("question -> answer", tools=[look_up]), listener).answer)


def structured() -> Any:
    with dspy.context(adapter=dspy.JSONAdapter()):
        return dspy.Predict(Find)(question=QUESTION).place.model_dump()


def structured_streamed() -> Any:
    with dspy.context(adapter=dspy.JSONAdapter()):
        return _last(dspy.Predict(Find), dspy.streaming.StreamListener(signature_field_name="place")).place.model_dump()


def _last(program: Any, listener: Any) -> Any:
    async def run() -> list[Any]:
        return [part async for part in dspy.streamify(program, stream_listeners=[listener])(question=QUESTION)]

    parts = asyncio.run(run())
    assert any(isinstance(part, dspy.streaming.StreamResponse) for part in parts)
    assert isinstance(parts[-1], dspy.Prediction)
    return parts[-1]


main("dspy", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
