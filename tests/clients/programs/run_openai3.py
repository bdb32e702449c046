"""openai-python 3: the Responses API, with and without a stream, and `.parse`."""

from __future__ import annotations

import json
from typing import Any

import openai
from common import KEY, MODEL, PARAMETERS, QUESTION, QUESTIONS, URL, Place, look_up_or_error, main

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
TOOL: Any = {"type": "function", "name": "look_up", "parameters": PARAMETERS, "strict": True}


def tools() -> str:
    items: Any = QUESTION
    previous: Any = openai.omit
    while True:
        response = client.responses.create(model=MODEL, input=items, tools=[TOOL], previous_response_id=previous)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        previous, items = response.id, [_result(call) for call in calls]


def streamed() -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.responses.stream(model=MODEL, input=items, tools=[TOOL]) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            output = stream.get_final_response().output
        calls = [item for item in output if item.type == "function_call"]
        if not calls:
            return "".join(pieces)
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in output]
        items += [_result(call) for call in calls]


def turns() -> str:
    items: list[Any] = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            response = client.responses.create(model=MODEL, input=items, tools=[TOOL])
            results = [_result(item) for item in response.output if item.type == "function_call"]
            items += [*response.output, *results]
            if not results:
                break
    return response.output_text


def structured() -> Any:
    return client.responses.parse(model=MODEL, input=QUESTION, text_format=Place).output_parsed.model_dump()


def structured_streamed() -> Any:
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Place) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(pieces) > 1
        return stream.get_final_response().output_parsed.model_dump()


def _result(call: Any) -> Any:
    return {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": look_up_or_error(**json.loads(call.arguments)),
    }


main(
    "openai",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
