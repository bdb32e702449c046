"""instructor: an answer's `response_model` is a tool call, so that a round trip is two of them."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import KEY, MODEL, QUESTION, URL, Place, look_up, main
from pydantic import BaseModel

client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY))
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}


class LookUp(BaseModel):
    """Find a value by its key."""

    key: str


class Answer(BaseModel):
    """Say the answer."""

    text: str


def tools() -> str:
    asked, completion = client.chat.completions.create_with_completion(response_model=LookUp, **ASKED)
    [call] = completion.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": look_up(asked.key)}
    messages = [*ASKED["messages"], completion.choices[0].message.model_dump(), result]
    return str(client.chat.completions.create(response_model=Answer, **{**ASKED, "messages": messages}).text)


def streamed() -> str:
    *_, asked = client.chat.completions.create_partial(response_model=LookUp, **ASKED)
    messages = [*ASKED["messages"], {"role": "user", "content": look_up(asked.key)}]
    *_, answer = client.chat.completions.create_partial(response_model=Answer, **{**ASKED, "messages": messages})
    return str(answer.text)


def structured() -> Any:
    return client.chat.completions.create(response_model=Place, **ASKED).model_dump()


def structured_streamed() -> Any:
    *_, last = client.chat.completions.create_partial(response_model=Place, **ASKED)  # literals are not partial
    return last.model_dump()


main("instructor", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
