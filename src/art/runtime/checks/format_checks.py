"""Checks of a model's chat template and tool parser."""

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

_DETACHED = "the template writes answers in a form that does not continue their prompt, so none could be checked"
_REPORT = "use the model's own current chat template; if you do already, report the model"


def check_template(renderer: Renderer) -> CheckResult:
    """Check the chat template: the prompt of a later turn must begin with the exact tokens of the earlier turn, or be
    a declared branch, and an answer must come back unchanged when its tokens are parsed."""
    plain = [examine(renderer, conversation) for conversation in plain_conversations()]
    reasoning = examine(renderer, reasoning_conversation())
    name = "chat template"
    if plain[0].refused is not None:
        remedy = "use an instruction-tuned model, or correct its chat template"
        return CheckResult(name=name, status="failure", found=plain[0].refused, remedy=remedy)
    if problem := _problem([*plain, reasoning]):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if plain[0].detached:
        remedy = "reinforcement learning works, each turn as a branch; supervised fine-tuning needs another template"
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy=remedy)
    if plain[0].branch is not None:
        problem = f"each turn is a branch ({plain[0].branch}): it does not extend the tokens of the turn before"
        remedy = (
            "it trains correctly, but recomputes every turn of a conversation; a template that only appends is faster"
        )
        return CheckResult(name=name, status="warning", found=problem, remedy=remedy)
    notes = []
    if reasoning.branch is not None:
        notes.append(f"turns with reasoning are branches ({reasoning.branch}), unless `render.keep_reasoning` is set")
    notes += [f"it does not support {item.name}" for item in plain[1:] if item.refused]
    works = "; ".join(["later turns extend earlier ones; answers come back", *notes])
    return CheckResult(name=name, status="ok", found=works)


def check_tools(renderer: Renderer) -> CheckResult:
    """Check that a tool call that the template writes is parsed as the same call."""
    name = "tool parser"
    if not renderer.handles_tools:
        template = renderer.tokenizer.template
        takes_tools = template is not None and template.handles_tools
        why = "writes tool calls in an unknown form" if takes_tools else "has no place for tools"
        refusal = f"the chat template {why}, so requests with `tools` are refused"
        remedy = "describe tools in a message and parse the answer yourself, or use another base model"
        return CheckResult(name=name, status="warning", found=refusal, remedy=remedy)
    examined = [examine(renderer, conversation) for conversation in tool_conversations()]
    if refused := [item.refused for item in examined if item.refused]:
        return CheckResult(name=name, status="failure", found=refused[0], remedy=_REPORT)
    if problem := _problem(examined):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if any(item.detached for item in examined):
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy="inspect the tool calls of a rollout")
    branches = sorted({item.branch for item in examined if item.branch})
    note = f"; the turn after a tool's answer is a branch ({', '.join(branches)})" if branches else ""
    return CheckResult(name=name, status="ok", found=f"calls come back as they were written{note}")


def _problem(examined: list[Examined]) -> str | None:
    for item in examined:
        if problem := item.extend_problem or item.parse_problem:
            return f"{item.name}: {problem}"
    return None
