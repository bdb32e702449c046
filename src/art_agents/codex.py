"""Codex, the agent of OpenAI. It speaks the Responses API."""

from __future__ import annotations

import json

from art_agents.harness import HOME, INSTRUCTION, NO_KEY, PREFIX, Harness, Launch, Start, script


def launch(start: Start) -> Launch:
    config = f"""
model = {json.dumps(start.model)}
model_provider = "art"
model_context_window = {start.max_context}
[model_providers.art]
name = "art"
base_url = {json.dumps(f"{start.address}/v1")}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return Launch(
        script=script(
            f"{PREFIX}/bin/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            INSTRUCTION,
        ),
        env={"CODEX_HOME": HOME, "OPENAI_API_KEY": NO_KEY}, files={f"{HOME}/config.toml": config},
    )  # fmt: skip


HARNESS = Harness(name="codex", installer="npm", package="@openai/codex", version="0.171.0", launch=launch)
