"""A model `p/...` of a runtime that samples from the real vLLM: asked, and trained by what it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from art.config import TrainConfig
from art.engines.vllm.command import installed_vllm_python
from art.protocol.chat_completions import parse_chat_request
from art.protocol.training import JobStatus, TrainRequest
from art.runtime.runtime import Runtime

NEEDS_VLLM = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),  # vLLM takes half a minute to start on an idle machine
    pytest.mark.skipif(
        installed_vllm_python() is None,
        reason="vLLM is not installed: `make test-vllm`, or ART_VLLM_PYTHON=<interpreter that has it>",
    ),
]
PROMPT = {"role": "user", "content": "say yes, no or maybe"}
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def complete(runtime: Runtime, model: str) -> dict[str, Any]:
    chat = parse_chat_request({"model": model, "messages": [PROMPT], "n": 32, "max_tokens": 8})
    return await runtime.gateway.complete(chat)


async def train(runtime: Runtime, name: str, job_id: str, learning_rate: float = 2e-3) -> JobStatus:
    choices = (await complete(runtime, f"p/{name}"))["choices"]
    trajectories = [
        {"reward": REWARDS.get(choice["message"]["content"] or "", 0.0), "histories": [{"items": [PROMPT, {"choice": choice}]}]}
        for choice in choices
    ]  # fmt: skip
    config = TrainConfig(learning_rate=learning_rate)
    body = {"job_id": job_id, "groups": [{"trajectories": trajectories}], "config": config}
    status = await runtime.training.train("p", name, TrainRequest.model_validate(body))
    async with asyncio.timeout(120):
        while status.state in ("queued", "running"):
            status = await runtime.jobs.wait(status.job_id, 5.0)
    return status
