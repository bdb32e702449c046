"""Checks of a model's text format, in words for its user."""

from __future__ import annotations

from art.gateway.format.fidelity import (
    Examined,
    examine,
    plain_conversations,
    reasoning_conversation,
    tool_conversations,
)
from art.gateway.format.renderer import Renderer
from art.protocol.preflight import CheckResult

_DETACHED = "the template writes answers in a way that does not follow the prompt for them, so none could be tried"
_REPORT = "use the model's own current chat template; if it is, report the model"


def check_template(renderer: Renderer) -> CheckResult:
    """Whether a later turn extends the earlier one or is a declared branch, and answers come back as they were."""
    plain = [examine(renderer, conversation) for conversation in plain_conversations()]
    reasoning = examine(renderer, reasoning_conversation())
    name = "chat template"
    if plain[0].refused is not None:
        remedy = "use an instruction-tuned model, or mend its chat template"
        return CheckResult(name=name, status="failure", found=plain[0].refused, remedy=remedy)
    if problem := _problem([*plain, reasoning]):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if plain[0].detached:
        return CheckResult(
            name=name,
            status="warning",
            found=_DETACHED,
            remedy="reinforcement learning works, each turn as a branch; supervised fine-tuning needs another template",
        )
    if plain[0].branch is not None:
        return CheckResult(
            name=name,
            status="warning",
            found=f"each turn is a branch ({plain[0].branch}): a later turn does not extend the tokens of the earlier",
            remedy="it trains correctly, but computes every turn of a conversation anew; a template that appends to a "
            "conversation is faster",
        )
    notes = []
    if reasoning.branch is not None:
        notes.append(f"turns with reasoning are branches ({reasoning.branch}), unless `render.keep_reasoning` is set")
    notes += [f"it takes no {item.name.removeprefix('a ')}" for item in plain[1:] if item.refused]
    return CheckResult(
        name=name, status="ok", found="; ".join(["later turns extend earlier ones; answers come back", *notes])
    )


def check_tools(renderer: Renderer) -> CheckResult:
    """Whether a tool call that the template writes is parsed as the same call."""
    name = "tool parser"
    if not renderer.handles_tools:
        template = renderer.tokenizer.template
        takes_tools = template is not None and template.handles_tools
        why = "writes tool calls in a way that is not known here" if takes_tools else "has no place for tools"
        return CheckResult(
            name=name,
            status="warning",
            found=f"the chat template {why}, so requests with `tools` are refused",
            remedy="describe tools in a message and parse the answer yourself, or use another base model",
        )
    examined = [examine(renderer, conversation) for conversation in tool_conversations()]
    if refused := [item.refused for item in examined if item.refused]:
        return CheckResult(name=name, status="failure", found=refused[0], remedy=_REPORT)
    if problem := _problem(examined):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if any(item.detached for item in examined):
        return CheckResult(
            name=name, status="warning", found=_DETACHED, remedy="look at a rollout's tool calls yourself"
        )
    branches = sorted({item.branch for item in examined if item.branch})
    note = f"; what follows a tool's answer is a branch ({', '.join(branches)})" if branches else ""
    return CheckResult(name=name, status="ok", found=f"calls come back as they were written{note}")


def _problem(examined: list[Examined]) -> str | None:
    for item in examined:
        if problem := item.extend_problem or item.parse_problem:
            return f"{item.name}: {problem}"
    return None
