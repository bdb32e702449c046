"""opencode, which speaks Chat Completions to a provider that its settings name."""

from __future__ import annotations

import json

from art_agents.harness import HOME, INSTRUCTION, NO_KEY, PREFIX, Harness, Launch, Start, script


def launch(start: Start) -> Launch:
    about = {"tool_call": True, "limit": {"context": start.max_context, "output": start.max_context // 4}}
    providers = {
        name: {
            "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{address}/v1", "apiKey": NO_KEY},
            "models": {start.model: about},
        } for name, address in (("art", start.address), ("side", start.side_address))
    }  # fmt: skip
    model = f"art/{start.model}"
    config = {
        "model": model, "small_model": f"side/{start.model}", "provider": providers, "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
    }  # fmt: skip
    return Launch(
        script=script(f"{PREFIX}/bin/opencode", "run", "--model", model, INSTRUCTION),
        env={"OPENCODE_CONFIG": f"{HOME}/opencode.json", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={f"{HOME}/opencode.json": json.dumps(config)},
    )


HARNESS = Harness(
    name="opencode", installer="npm", package="opencode-ai", version="1.18.33", launch=launch, side_requests="titles"
)
