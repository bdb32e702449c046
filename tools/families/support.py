"""Take one small random model through the whole loop and compare each stage with an independent computation.

render    our tokens of conversations are those of transformers' own chat template
parse     an answer's tokens give the message back
bridge    the next turn extends the exact tokens of this one, or is a declared branch
tools     tool calls come back as they were written
sample    the engine's log-probs of what it samples are those of transformers' own forward pass
train     the gradient of a prefix tree is that of transformers and peft, sequence by sequence
publish   after a real step on the sampled tokens the engine reproduces the trainer's probe: the handshake
vLLM      sample and publish once more, with a vLLM server as the engine
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from art.config import LoraConfig, TrainConfig, TrainerConfig, VllmConfig
from art.engine import Engine, GenerateRequest
from art.engines.vllm.start import start_engine
from art.errors import ArtError
from art.gateway.fidelity import examine, plain_conversations
from art.gateway.renderer import Renderer, load_renderer
from art.protocol.calls import StartVllm, Train
from art.protocol.samples import Component, TrainingSample
from art.runtime.publish import publish
from art.runtime.submission import check_tools
from art.storage import checkpoints
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.trainer import Trainer
from art.trainer.tree import check_sample
from tools.families.engine import InProcessEngine

VLLM = "vLLM"
STAGES = ("render", "parse", "bridge", "tools", "sample", "train", "publish", VLLM)
Status = Literal["yes", "branch", "no", "not reached", "not run"]

LORA = LoraConfig(rank=4, alpha=8)
NUM_SAMPLES, NUM_TOKENS = 4, 12
LOGPROB_TOLERANCE = 1e-3
"""Nats, in float32; kernels agree to about 1e-5."""
GRADIENT_TOLERANCE = 1e-3
"""Largest difference, as a share of the largest component."""


_IN_WORDS = {
    "template_rewrites_history": "the chat template writes an answer differently once other messages follow it",
    "template_without_turn_end": "the chat template has no token that ends an answer",
}
"""Explanations of branch reasons for the page."""


@dataclass(frozen=True, slots=True)
class Outcome:
    status: Status
    reason: str = ""
    """Explains a "no" or a "branch"."""


class DisagreementError(Exception):
    """Two parts disagree; the message says how."""


async def check_model(path: Path, work: Path, vllm_python: str | None = None) -> dict[str, Outcome]:
    """Run each of `STAGES` for the model in folder `path`.

    Args:
        work: folder for checkpoints.
        vllm_python: interpreter of an environment with vLLM; without one that stage is not run.
    """
    outcomes = dict.fromkeys(STAGES, Outcome("not reached"))
    loaded: dict[str, Any] = {}

    async def stage(name: str, check: Callable[[], Awaitable[Outcome]], *, needs: tuple[str, ...] = ()) -> None:
        if all(outcomes[need].status in ("yes", "branch") for need in needs):
            try:
                outcomes[name] = await check()
            except (ArtError, DisagreementError) as error:
                outcomes[name] = Outcome("no", str(error))
            except Exception as error:  # an architecture that some library cannot run is a finding, not a crash
                outcomes[name] = Outcome("no", f"{type(error).__name__}: {error}")

    async def render() -> Outcome:
        loaded["renderer"] = renderer = load_renderer(path)
        return _check_rendering(renderer, path)

    async def sample() -> Outcome:
        loaded["engine"] = engine = InProcessEngine(str(path))
        loaded["samples"] = await sample_answers(engine, loaded["renderer"])
        return check_logprobs(path, loaded["samples"])

    async def parse() -> Outcome:
        return _check_parsing(loaded["renderer"])

    async def bridge() -> Outcome:
        return _check_bridge(loaded["renderer"])

    async def tools() -> Outcome:
        check = check_tools(loaded["renderer"])
        return Outcome("yes") if check.status == "ok" else Outcome("no", check.found)

    async def train() -> Outcome:
        return check_gradient(path, work, loaded["renderer"])

    async def hand_over() -> Outcome:
        return await check_publish(path, work / "embedded", loaded["engine"], loaded["samples"])

    async def vllm() -> Outcome:
        assert vllm_python is not None
        return await _check_vllm(path, work / "vllm", loaded["renderer"], vllm_python)

    await stage("render", render)
    await stage("parse", parse, needs=("render",))
    await stage("bridge", bridge, needs=("render",))
    await stage("tools", tools, needs=("render",))
    await stage("sample", sample, needs=("render",))
    await stage("train", train, needs=("render",))
    await stage("publish", hand_over, needs=("sample", "train"))
    if vllm_python is None:
        outcomes[VLLM] = Outcome("not run")
    else:
        await stage(VLLM, vllm, needs=("render", "train"))
    return outcomes


def check_model_now(path: Path, work: Path, vllm_python: str | None = None) -> dict[str, Outcome]:
    """Run `check_model` from synchronous code."""
    return asyncio.run(check_model(path, work, vllm_python))


def _check_rendering(renderer: Renderer, path: Path) -> Outcome:
    theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    refused = []
    for conversation in plain_conversations():
        messages = [*conversation.asked, conversation.answer, *conversation.then]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        if renderer.render(messages, None) != ids:
            raise DisagreementError(f"{conversation.name}: other tokens than transformers' chat template")
        refused += [conversation.name for item in [examine(renderer, conversation)] if item.refused]
    return Outcome("yes", f"refuses {', '.join(refused)}" if refused else "")


def _check_parsing(renderer: Renderer) -> Outcome:
    for conversation in plain_conversations():
        examined = examine(renderer, conversation)
        if examined.parse_problem or examined.detached:
            raise DisagreementError(f"{conversation.name}: {examined.parse_problem or 'the answer cannot be cut out'}")
    return Outcome("yes")


def _check_bridge(renderer: Renderer) -> Outcome:
    examined = [examine(renderer, conversation) for conversation in plain_conversations()]
    if problems := [item.extend_problem for item in examined if item.extend_problem]:
        raise DisagreementError(problems[0])
    branches = sorted({item.branch for item in examined if item.branch})
    return Outcome("branch", "; ".join(_IN_WORDS.get(b, b) for b in branches)) if branches else Outcome("yes")


async def sample_answers(engine: Engine, renderer: Renderer) -> list[TrainingSample]:
    """Sample completions of one prompt as training samples; every second one has a positive advantage."""
    prompt = renderer.render(plain_conversations()[0].asked, None)
    samples = []
    for number in range(NUM_SAMPLES):
        request = GenerateRequest(
            request_id="", adapter=None, prompt_token_ids=prompt, max_tokens=NUM_TOKENS,
            stop_token_ids=renderer.stop_token_ids, seed=number,
        )  # fmt: skip
        chunks = [chunk async for chunk in engine.generate(request, stream=False)]
        token_ids, logprobs = chunks[-1].token_ids, chunks[-1].logprobs
        advantage = 1.0 if number % 2 else -1.0
        sample = make_sample(str(number), prompt, token_ids, "rl")
        padding = [0.0] * len(prompt)
        advantages = padding + [advantage] * len(token_ids)
        samples.append(replace(sample, sampling_logprobs=padding + logprobs, advantages=advantages))
    return samples


def make_sample(name: str, prompt: list[int], answer: list[int], component: Component) -> TrainingSample:
    zeros = [0.0] * (len(prompt) + len(answer))
    return TrainingSample(
        sample_id=name,
        rollout_id=name,
        token_ids=prompt + answer,
        loss_mask=[False] * len(prompt) + [True] * len(answer),
        sampling_logprobs=zeros,
        advantages=zeros,
        component=component,
    )


def check_logprobs(path: Path, samples: list[TrainingSample]) -> Outcome:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    worst = 0.0
    for sample in samples:
        with torch.no_grad():
            theirs = own_logprobs(model, sample.token_ids)
        mask = torch.tensor(sample.loss_mask[1:])
        ours = torch.tensor(sample.sampling_logprobs[1:])
        worst = max(worst, float((ours - theirs).abs()[mask].max()))
    if not worst <= LOGPROB_TOLERANCE:
        raise DisagreementError(f"log-probs of sampled tokens differ from transformers' by {worst:.2g} nats")
    return Outcome("yes")


def own_logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute the log-probs of `token_ids[1:]` with the model's own forward pass."""
    ids = torch.tensor([list(token_ids)])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def check_gradient(path: Path, work: Path, renderer: Renderer) -> Outcome:
    """Compare the cross-entropy gradient of the trainer's tree with that of peft, from the same fresh adapter."""
    prompt = renderer.render(plain_conversations()[0].asked, None)
    answers = [renderer.tokenizer.encode(text, add_special_tokens=False) for text in ("It is 2.", "It was 3", "No")]
    taught = [make_sample(str(i), prompt, answer, "sft") for i, answer in enumerate(answers)]
    base = load_base_model(str(path), TrainerConfig(device="cpu"))
    policy = LoraPolicy(base, LORA)
    paths = [p for sample in taught if (p := check_sample(sample, vocab_size=base.vocab_size)) is not None]
    update = Update(paths=paths, learning_rate=1e-3)
    batches = split_micro_batches(paths, base, max_tokens=4096)
    compute_gradient(policy, update, batches, StepRecord())
    ours, start = {}, 0
    for name, tensor in policy.tensors.items():
        ours[name] = policy.grads[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    folder = work / "fresh"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in policy.files().items():
        checkpoints.write_content(folder / name, data)
    theirs = _peft_gradient(path, folder, taught)
    if ours.keys() != theirs.keys():
        raise DisagreementError(f"peft adapts other layers: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    if not scale > 0 or not worst <= GRADIENT_TOLERANCE * scale:
        raise DisagreementError(f"the gradient differs from peft's by {worst:.2g}, its largest number is {scale:.2g}")
    return Outcome("yes")


def _peft_gradient(path: Path, adapter: Path, samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    adapted = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    num_targets = sum(sum(sample.loss_mask) for sample in samples)
    for sample in samples:
        mask = torch.tensor(sample.loss_mask[1:])
        (-own_logprobs(adapted, sample.token_ids)[mask].sum() / num_targets).backward()
    return {
        name.replace(".default.", "."): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in adapted.named_parameters()
        if "lora_" in name
    }


async def _check_vllm(path: Path, work: Path, renderer: Renderer, python: str) -> Outcome:
    config = VllmConfig(device="cpu", dtype="float32", num_threads=1)
    os.environ["ART_VLLM_PYTHON"] = python
    engine, server = await start_engine(StartVllm(model=str(path), config=config, lora_rank=LORA.rank))
    try:
        samples = await sample_answers(engine, renderer)
        check_logprobs(path, samples)
        return await check_publish(path, work, engine, samples)
    finally:
        await engine.close()
        if server is not None:
            await server.close()


async def check_publish(path: Path, work: Path, engine: Engine, samples: list[TrainingSample]) -> Outcome:
    first, second = work / "0000", work / "0001"
    trainer = Trainer(str(path), TrainerConfig(device="cpu", num_threads=torch.get_num_threads()))
    trainer.init_checkpoint(first, LORA)
    config = TrainConfig(learning_rate=1e-2)
    trainer.train(
        Train(samples=samples, config=config, from_checkpoint=first, to_checkpoint=second, job_id="support-check")
    )
    await publish(engine, "trial@1", second)
    effect = checkpoints.read_probe(second)
    if effect.logprobs == effect.base_logprobs:
        raise DisagreementError("the step changed nothing that the probe shows")
    return Outcome("yes")
