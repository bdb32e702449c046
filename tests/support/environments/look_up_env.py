"""An environment of verifiers: the name of a key is asked, and a tool knows it. Its agent runs in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf

NUM_TASKS = 40
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


class LookUpData(vf.TaskData):
    answer: str


class LookUpTask(vf.Task[LookUpData]):
    @vf.reward(weight=2.0)
    async def named(self, task: LookUpData, trace: vf.Trace) -> float:
        if trace.last_reply == "break the judge":
            raise OSError("no more disk")
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LookUpTaskset(vf.Taskset[LookUpTask]):
    def load(self) -> Iterable[LookUpTask]:
        for key in range(NUM_TASKS):
            yield LookUpTask(LookUpData(prompt=f"what is {key}?", answer=f"name of {key}"))


class LookUpHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    result = f"name of {json.loads(call.function.arguments)['key']}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


__all__ = ["LookUpHarness", "LookUpTaskset"]
