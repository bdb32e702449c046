"""aider, which asks for edits as text over Chat Completions (litellm), and has no tools."""

from __future__ import annotations

from art_agents.harness import INSTRUCTION, NO_KEY, PREFIX, Harness, Launch, Start, script


def launch(start: Start) -> Launch:
    return Launch(
        script=script(
            f"{PREFIX}/bin/aider", "--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes",
            "--analytics-disable", "--no-show-model-warnings", "--no-pretty", "--model", f"openai/{start.model}",
        ) + f" --message-file {INSTRUCTION}",
        env={
            "OPENAI_API_BASE": f"{start.address}/v1", "OPENAI_API_KEY": NO_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )  # fmt: skip


HARNESS = Harness(name="aider", installer="pip", package="aider-chat", version="0.86.2", launch=launch)
