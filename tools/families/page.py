"""Write docs/models.md by taking every family through every part.

This takes two minutes, and with vLLM one more minute per family. `--templates` and `--architectures` renew one section.
The section on architectures needs the source of vLLM, and without it stays as it is.

python -m tools.families.page > docs/models.md
python -m tools.families.page --vllm-python PATH > docs/models.md
python -m tools.families.page --templates
python -m tools.families.page --architectures --vllm-source FOLDER
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import transformers.utils.logging

from art.engines.vllm.command import find_installation
from tools.families import reach
from tools.families.architectures import ARCHITECTURES
from tools.families.build import FAMILIES, Family, build_family
from tools.families.real import render_section, run_templates
from tools.families.support import STAGES, Outcome, check_model_now

_INTRODUCTION = """\
# Model families

<!-- Made by `python -m tools.families.page`; a test repeats some rows. -->

You can train any Hugging Face causal language model with a chat template: `base_model` is its hub id or its folder.
Code that comes with a model is never run; a model that needs `trust_remote_code` is refused.

To train on from a LoRA adapter, merge it into its model first (peft's `merge_and_unload`), and name the folder of the
merged model, with its tokenizer and chat template. A model that does not exist is refused at once. The hub is asked
only for files that the server's cache lacks; `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are read by the server.

The table is the result of a run. It builds a small random model for each family, with the family's architecture and a
tokenizer and chat template in its style, and takes it through the whole loop on the CPU in float32. Each column
compares one part of ART with an independent computation:

| column | yes means |
|---|---|
| render | tokens of conversations are those of transformers' own `apply_chat_template` |
| parse | an answer's tokens give the message back |
| bridge | the next turn extends the exact tokens of this one; "branch": it does not, and is recorded as a branch |
| tools | tool calls come back as they were written |
| sample | the embedded engine's log-probs of what it samples are those of transformers' forward pass, to 1e-3 nats |
| train | the gradient of the prefix tree is that of peft, sequence by sequence, to 1e-3 of its largest number |
| publish | after a real step on the sampled tokens the engine reproduces the trainer's probe: the handshake |
| vLLM | sample and publish with a vLLM server as the engine |

A branch is trained as a separate path. Check your own model with `art doctor MODEL`, which uses its real template. The
chat template decides how every model is written. ART finds out by a trial how a model
writes tool calls: it knows JSON (Qwen and Hermes, Llama 3, Mistral, DeepSeek, Kimi, Phi-4, Granite, Command-R), XML
(Qwen3-Coder, Qwen3.5 and later, Nemotron-3, Seed, GLM, MiniMax-M2), LFM2's Python syntax, Gemma 4 and harmony
(gpt-oss), and takes the one that reads back what the chat template wrote.

In mixtures of experts (Qwen3-MoE, gpt-oss, DeepSeek, Kimi) LoRA adapts the attention; experts and router stay frozen.
"""

PAGE = Path(__file__).parents[2] / "docs/models.md"
Results = Mapping[str, Mapping[str, Outcome]]


def run_families(families: Iterable[Family], vllm_python: str | None = None) -> dict[str, dict[str, Outcome]]:
    """Run all stages for each family; return outcomes by family name and stage."""
    results = {}
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            path = build_family(family, Path(folder) / "model")
            results[family.name] = check_model_now(path, Path(folder) / "checkpoints", vllm_python)
    return results


_TEMPLATES, _REASONS = "## Tool calls of real templates\n", "## Why not\n"


def renew_templates(page: str, rows: list[list[str]]) -> str:
    """Replace the section on real templates."""
    before, after = page.index(_TEMPLATES), page.index(_REASONS)
    return f"{page[:before]}{render_section(rows)}\n{page[after:]}"


def renew_architectures(page: str, section: str) -> str:
    """Replace the section on what can be trained and sampled."""
    before, after = page.index(reach.SECTION), page.index(_TEMPLATES)
    return f"{page[:before]}{section}\n{page[after:]}"


def run_architectures(vllm: Path) -> str:
    """Run all architectures, and render their section. `vllm` is the folder of the package vllm, for its source."""
    results = {}
    for family in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            path = build_family(family, Path(folder) / "model")
            results[family.name] = reach.check_reach(path, Path(folder) / "checkpoints")
    return reach.render_section(results, {family.name: reach.takes_lora(family, vllm) for family in ARCHITECTURES})


def render_page(results: Results, section: str, rows: list[list[str]], versions: str) -> str:
    """Render the page as Markdown. `section` is that of architectures, `rows` are those of real templates."""
    reasons: list[str] = []
    families = [_row(family, results[family.name], reasons) for family in FAMILIES]
    heading = ["family", "architecture", *STAGES]
    table = "".join(f"| {' | '.join(line)} |\n" for line in (heading, ["---"] * len(heading), *families))
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    agrees = f"## What agrees\n\nWith {versions}.\n\n{table}"
    return f"{_INTRODUCTION}\n{agrees}\n{section}\n{render_section(rows)}\n{_REASONS}\n{notes}"


def row_of(family: Family, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the table cells of one family, without the numbers of its reasons."""
    return [family.name, f"`{family.architecture}`", *(outcomes[stage].status for stage in STAGES)]


def _row(family: Family, outcomes: Mapping[str, Outcome], reasons: list[str]) -> list[str]:
    """Return the cells of `row_of`, with the number of the reason beside each "no" and "branch"."""
    cells = row_of(family, outcomes)
    for place, stage in enumerate(STAGES, start=2):
        reason = outcomes[stage].reason
        if outcomes[stage].status in ("no", "branch") and reason:
            text = f"{stage}: {reason}"
            if text not in reasons:
                reasons.append(text)
            cells[place] += f" ({reasons.index(text) + 1})"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--templates", action="store_true", help="renew the section on real templates in docs/models.md"
    )
    parser.add_argument(
        "--architectures", action="store_true", help="renew the section on what can be trained and sampled, likewise"
    )
    parser.add_argument(
        "--vllm-source", metavar="FOLDER", type=Path, help="package folder of a vLLM, installed or unpacked"
    )
    arguments = parser.parse_args()
    python, source = arguments.vllm_python, arguments.vllm_source
    if arguments.architectures and source is None:
        parser.error("--architectures needs --vllm-source, the folder of the package vllm")
    page = PAGE.read_text()
    if arguments.templates:
        PAGE.write_text(renew_templates(page, run_templates()))
        return
    transformers.utils.logging.disable_progress_bar()
    if arguments.architectures:
        PAGE.write_text(renew_architectures(page, run_architectures(source)))
        return
    section = page[page.index(reach.SECTION) : page.index(_TEMPLATES)].removesuffix("\n")
    if source is not None:
        section = run_architectures(source)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft")]
    if python is not None:
        versions.append(f"vllm {find_installation(python).vllm}")
    sys.stdout.write(render_page(run_families(FAMILIES, python), section, run_templates(), ", ".join(versions)))


if __name__ == "__main__":
    main()
