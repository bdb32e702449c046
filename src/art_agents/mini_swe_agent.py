"""mini-swe-agent, a loop of one tool, `bash`, over Chat Completions (litellm)."""

from __future__ import annotations

from art_agents.harness import HOME, INSTRUCTION, NO_KEY, PREFIX, Harness, Launch, Start, script


def launch(start: Start) -> Launch:
    return Launch(
        script=script(
            f"{PREFIX}/bin/mini", "--yolo", "--exit-immediately", "--cost-limit", "0", "--model",
            f"openai/{start.model}", "--output", f"{HOME}/trajectory.json", "--task", INSTRUCTION,
        ),
        env={
            "OPENAI_BASE_URL": f"{start.address}/v1", "OPENAI_API_BASE": f"{start.address}/v1",
            "OPENAI_API_KEY": NO_KEY, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_GLOBAL_CONFIG_DIR": HOME,
        },
    )  # fmt: skip


HARNESS = Harness(name="mini-swe-agent", installer="pip", package="mini-swe-agent", version="2.4.6", launch=launch)
