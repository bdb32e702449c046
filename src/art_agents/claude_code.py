"""Claude Code, the agent of Anthropic. It speaks the Messages API.

What it asks besides the task (titles, summaries, a cheap model) is turned off, as far as it has a switch. What is left
of it is answered by the trained model too, and is a branch of the rollout. Compaction of a full context begins a branch
with its summary.
"""

from __future__ import annotations

from art_agents.harness import INSTRUCTION, NO_KEY, PREFIX, Harness, Launch, Start, script


def launch(start: Start) -> Launch:
    return Launch(
        script=script(
            f"{PREFIX}/bin/claude", "-p", INSTRUCTION, "--model", start.model, "--dangerously-skip-permissions"
        ),
        env={
            "ANTHROPIC_BASE_URL": start.address, "ANTHROPIC_API_KEY": NO_KEY,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": start.model, "ANTHROPIC_SMALL_FAST_MODEL": start.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(start.max_context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
        },
    )  # fmt: skip


HARNESS = Harness(
    name="claude-code", installer="npm", package="@anthropic-ai/claude-code", version="2.1.332", launch=launch
)
