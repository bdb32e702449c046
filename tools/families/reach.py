"""Find out by a run which architectures can be trained and sampled, and how.

prefixes    the log-probs of answers to one prompt are those of transformers' forward pass, sequence by sequence, and
            the gradient is peft's. "shared": over a prefix tree. "repeated": one sequence at a time
step        a training step's checkpoint, loaded by peft, gives the log-probs that the trainer stored with it
engine      the embedded engine samples with transformers' log-probs and reproduces the checkpoint's: the handshake
vLLM LoRA   vLLM's own declaration that the architecture takes a LoRA, read from its source
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from art.config import TrainConfig, TrainerConfig
from art.errors import ArtError
from art.gateway.fidelity import plain_conversations
from art.gateway.renderer import Renderer, load_renderer
from art.kernels.base_model import other_layers
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.storage import checkpoints
from art.trainer.policy.base_model import FrozenModel, load_base_model, run_backbone
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import make_micro_batch, target_logprobs_in_order
from art.trainer.trainer import Trainer
from art.trainer.tree import check_samples
from tools.families import support
from tools.families.architectures import ARCHITECTURES
from tools.families.build import Family
from tools.families.engine import InProcessEngine

HEADING = ("family", "class", "prefixes", "step", "engine", "vLLM LoRA", "adapted layers")
TOLERANCE = 1e-4
"""Nats, in float32."""


@dataclass(slots=True)
class Reach:
    """What can be done with one architecture. `reasons` explains cells, by name."""

    prefixes: str = "no"
    step: str = "no"
    engine: str = "no"
    adapted: str = ""
    reasons: dict[str, str] = field(default_factory=dict)


def check_reach(path: Path, work: Path) -> Reach:
    """Take the model in folder `path` through trainer and embedded engine. `work` is a folder for checkpoints."""
    reach = Reach()
    renderer = load_renderer(path)
    stage = "prefixes"
    base = load_base_model(str(path), TrainerConfig(device="cpu"))
    try:
        reach.adapted = ", ".join(_adapted_layers(base))
        samples = _compare_logprobs(path, base, renderer)
        support.check_gradient(path, work / "gradient", renderer)
        reach.prefixes = "repeated" if base.one_by_one else "shared"
        if base.one_by_one:
            reach.reasons["prefixes"] = other_layers(base.model.config) or "its layers do not run over a prefix tree"
        stage = "step"
        _check_step(path, work / "step", samples)
        reach.step = "yes"
        stage = "engine"
        asyncio.run(_check_engine(path, work / "engine", renderer))
        reach.engine = "yes"
    except (ArtError, support.DisagreementError) as error:
        reach.reasons[stage] = str(error).replace(f" {str(path)!r} ({type(base.model).__name__})", "")
    return reach


def _adapted_layers(base: FrozenModel) -> list[str]:
    policy = LoraPolicy(base, support.LORA)
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in policy.tensors})
    policy.remove()
    return names


def _compare_logprobs(path: Path, base: FrozenModel, renderer: Renderer) -> list[TrainingSample]:
    """Compare log-probs of three answers to one prompt. Return them as training samples."""
    prompt = renderer.render(plain_conversations()[0].asked, None)
    model = _load(path)
    samples = []
    for number, text in enumerate(("It is 2.", "It was 3", "No")):
        answer = renderer.tokenizer.encode(text, add_special_tokens=False)
        sample = support.make_sample(str(number), prompt, answer, "rl")
        with torch.no_grad():
            theirs = support.own_logprobs(model, sample.token_ids)[-len(answer) :].tolist()
        padding = [0.0] * len(prompt)
        advantages = [*padding, *[1.0 if number % 2 else -1.0] * len(answer)]
        samples.append(replace(sample, sampling_logprobs=[*padding, *theirs], advantages=advantages))
    batch = make_micro_batch(check_samples(samples, vocab_size=base.vocab_size), base)
    with torch.no_grad():
        ours = target_logprobs_in_order(batch, base, lambda layout: run_backbone(base, layout))
    worst = float(abs(ours - batch.targets.sampling_logprobs).max())
    if not worst <= TOLERANCE:
        raise support.DisagreementError(f"log-probs differ from transformers' by {worst:.2g} nats")
    return samples


def _check_step(path: Path, work: Path, samples: list[TrainingSample]) -> None:
    """Train one step, and compare the probe in its checkpoint with transformers and peft."""
    first, second = work / "0000", work / "0001"
    trainer = Trainer(str(path), TrainerConfig(device="cpu", num_threads=torch.get_num_threads()))
    trainer.init_checkpoint(first, support.LORA)
    config = TrainConfig(learning_rate=1e-2)
    trainer.train(Train(samples=samples, config=config, from_checkpoint=first, to_checkpoint=second, job_id="reach"))
    probe = checkpoints.read_probe(second)
    adapted = peft.PeftModel.from_pretrained(_load(path), str(second))
    with torch.no_grad():
        theirs = support.own_logprobs(adapted, probe.token_ids)
    worst = float((torch.tensor(probe.logprobs) - theirs).abs().max())
    if not worst <= support.LOGPROB_TOLERANCE:
        raise support.DisagreementError(f"after a step, log-probs differ from peft's by {worst:.2g} nats")
    if probe.logprobs == probe.base_logprobs:
        raise support.DisagreementError("the step changed nothing that the probe shows")


async def _check_engine(path: Path, work: Path, renderer: Renderer) -> None:
    engine = InProcessEngine(str(path))
    samples = await support.sample_answers(engine, renderer)
    support.check_logprobs(path, samples)
    await support.check_publish(path, work, engine, samples)


def _load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()


# -- vLLM --


@cache
def lora_classes(vllm: Path) -> set[str]:
    """Names of the classes in the package folder `vllm` that inherit `SupportsLoRA`, also through other classes."""
    bases: dict[str, set[str]] = {}
    for folder in ("model_executor/models", "models"):
        for file in sorted((vllm / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    names = {n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in node.bases}
                    bases.setdefault(node.name, set()).update(names)
    able = {"SupportsLoRA"}
    while more := {name for name, parents in bases.items() if name not in able and parents & able}:
        able |= more
    return able


@cache
def registered_classes(vllm: Path) -> dict[str, str]:
    """Class that vLLM runs for each architecture that a `config.json` may name."""
    tree = ast.parse((vllm / "model_executor/models/registry.py").read_text())
    pairs: dict[str, str] = {}
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            match key, value:
                case ast.Constant(value=str(name)), ast.Tuple(elts=[_, ast.Constant(value=str(runs))]):
                    pairs[name] = runs
    return pairs


def takes_lora(family: Family, vllm: Path) -> str:
    """Return "yes", "no", or "unknown class", for the class that published models of `family` name."""
    name = published_class(family)
    registered = registered_classes(vllm)
    if name not in registered:
        return "unknown class"
    return "yes" if registered[name] in lora_classes(vllm) else "no"


def published_class(family: Family) -> str:
    """Return the class that the `config.json` of published models of `family` names."""
    return f"{family.architecture}For{'CausalLM' if family.vision is None else 'ConditionalGeneration'}"


# -- the page --

SECTION = "## What can be trained and sampled\n"
_TEXT = """\
{section}
This table is the result of a run, too. It builds each architecture as a small random model with its real structure
(latent attention, experts, gated delta nets, convolutions, windows, softcaps, multipliers) and compares it with
transformers and peft on a CPU in float32.

| column | what it says |
|---|---|
| prefixes | log-probs of answers to one prompt are transformers' own to 1e-4 nats, and the gradient is peft's |
| step | after a training step, the checkpoint loaded by peft gives the log-probs that the trainer stored with it |
| engine | the embedded engine samples with transformers' log-probs and reproduces the checkpoint's: the handshake |
| vLLM LoRA | vLLM declares that the class takes a LoRA (`SupportsLoRA`); read from its source, not run |

"Shared": tokens that sequences share are computed once, in a prefix tree. "Repeated": the model runs one sequence at a
time, with transformers' own attention. That is exact and needs no setting, but costs more: a prompt that 16 answers
share is computed 16 times. A turn that extends the turn before it is still computed once. Such a model cannot be split
by `shard_base`. The trainer's log says at the start that a model runs so, and why. Layers that carry a state from token
to token, or choose their keys by an index, do not run over a tree; the embedded engine's cache cannot hold them either,
and it refuses them by name.

{table}
{notes}
Kimi K2.5 is refused at the start: transformers has no class for its text model alone. Its text model is DeepSeek-V3's.
In models that also read images or sound, ART adapts the text decoder and nothing else. transformers loads the text
model of Qwen3.5 without its wrapper, so an adapter's names lack the `language_model` that vLLM's
`ForConditionalGeneration` class has in its own. That pair has not been run: vLLM would probably not apply the
adapter, and the handshake then refuses it before anything is trained.

### Experts

In mixtures of experts LoRA adapts attention and whatever else lies outside of the experts; the experts are stacked in
tensors of three dimensions, and naming them in `target_modules` is refused. Routers, and the indexers of sparse
attention, are never adapted: their choice has no gradient.

Trainer and engine each choose a token's experts from their own rounding. Where two experts are about as good, they may
choose differently, and the token's log-probs differ by more than rounding. The gate measures this and masks the
rollouts, see [objectives.md](objectives.md). vLLM 0.32 can report its choice: with `--enable-return-routed-experts` an
answer carries `routed_experts`, one expert id for each token, layer and expert per token. ART does not ask for it. It
neither records the choice with an exchange nor replays it in the trainer, so there is no router replay.
"""


def render_section(results: Mapping[str, Reach], vllm: Mapping[str, str]) -> str:
    """Render the section as Markdown. `vllm` is the cell "vLLM LoRA" by family name."""
    reasons: list[str] = []

    def numbered(reach: Reach, name: str) -> str:
        if (reason := reach.reasons.get(name)) is None:
            return str(getattr(reach, name))
        text = f"{name}: {reason}"
        if text not in reasons:
            reasons.append(text)
        return f"{getattr(reach, name)} ({reasons.index(text) + 1})"

    rows = [HEADING, ("---",) * len(HEADING)]
    for family in ARCHITECTURES:
        reach = results[family.name]
        cells = [numbered(reach, name) for name in ("prefixes", "step", "engine")]
        rows.append((family.name, f"`{published_class(family)}`", *cells, vllm[family.name], reach.adapted))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    return _TEXT.format(section=SECTION, table=table, notes=notes)
