"""TRL's trainers for a tiny model, and whole steps of them from given tokens and rewards on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from art.config import TrainConfig
from tests.support.objective_bench import LORA, Bench
from tests.support.objective_reference import Adapter, Branch, Rollout
from tests.support.trainer_samples import VOCAB_SIZE

TEMPERATURE = 0.7
MAX_COMPLETION_LENGTH = 20


@dataclass(frozen=True)
class Trl:
    """Makes TRL's trainers for the base model of `bench`."""

    bench: Bench
    model_path: str
    root: Path

    def model(self, adapter: Adapter) -> Any:
        """A peft model with `adapter`."""
        import peft
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"
        )
        model = peft.get_peft_model(base, settings)
        put(model, adapter)
        return model

    def options(self) -> dict[str, Any]:
        return {
            "output_dir": str(self.root),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }

    def tokenizer(self) -> Any:
        """Words t0, t1 and so on; TRL wants one, though the batches hold token ids."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0")
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="t0", eos_token="t1")

    def grpo(self, adapter: Adapter, **settings: Any) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(
            model=self.model(adapter),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=self.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["t2"]}),
            args=GRPOConfig(
                **self.options(),
                **{"per_device_train_batch_size": 8, "num_generations": 8} | settings,
                temperature=TEMPERATURE,
                max_completion_length=MAX_COMPLETION_LENGTH,
            ),
        )
        trainer.current_gradient_accumulation_steps = 1  # which its training loop would set
        return trainer

    def dpo(self, adapter: Adapter, reference: Adapter, **settings: Any) -> Any:
        """TRL keeps a copy of the adapter that it is given as the reference, so the policy's is put in afterwards."""
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        trainer = DPOTrainer(
            model=self.model(reference),
            processing_class=self.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["t2"], "chosen": ["t3"], "rejected": ["t4"]}),
            args=DPOConfig(**self.options(), **settings),
        )
        put(trainer.model, adapter)
        return trainer

    def sft(self, adapter: Adapter) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            model=self.model(adapter),
            processing_class=self.tokenizer(),
            train_dataset=Dataset.from_dict({"input_ids": [[2, 3]], "labels": [[2, 3]]}),
            args=SFTConfig(**self.options()),
        )

    def rloo(self, adapter: Adapter, **settings: Any) -> Any:
        from datasets import Dataset
        from trl import RLOOConfig, RLOOTrainer

        return RLOOTrainer(
            model=self.model(adapter),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=self.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["t2"]}),
            args=RLOOConfig(
                **self.options(),
                **{"per_device_train_batch_size": 8, "num_generations": 8} | settings,
                temperature=TEMPERATURE,
            ),
        )

    def distillation(self, adapter: Adapter, teacher: Adapter) -> Any:
        from datasets import Dataset
        from trl import DistillationConfig, DistillationTrainer

        return DistillationTrainer(
            model=self.model(adapter),
            teacher_model=self.model(teacher).merge_and_unload(),
            processing_class=self.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["t2"]}),
            args=DistillationConfig(**self.options(), beta=1.0, temperature=1.0),
        )

    def rows(self, rollouts: Sequence[Rollout], values: Callable[[Branch], list[float]]) -> Tensor:
        """[B, C] of the learnt tokens, behind the prompts."""
        rows = []
        for rollout in rollouts:
            (branch,) = rollout.branches
            row = torch.zeros(len(branch.token_ids))
            row[branch.learnt] = torch.tensor(values(branch), dtype=torch.float32)
            rows.append(row[branch.spans[0][0] :])
        return pad_sequence(rows, batch_first=True)

    def logprobs(self, rollouts: Sequence[Rollout], adapter: Adapter) -> Tensor:
        doubles = {name: tensor.double() for name, tensor in adapter.items()}
        return self.rows(rollouts, lambda branch: [v.item() for v in self.bench.model.logprobs(branch, doubles)])

    def batch(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """What TRL's rollouts would hand to its loss."""
        branches = [rollout.branches[0] for rollout in rollouts]
        prompts = [torch.tensor(branch.token_ids[: branch.spans[0][0]]) for branch in branches]
        completions = [torch.tensor(branch.token_ids[branch.spans[0][0] :]) for branch in branches]
        advantages = []
        for rollout in rollouts:
            rewards = [other.reward for other in rollouts if other.group == rollout.group]
            advantages.append(rollout.reward - sum(rewards) / len(rewards))
        learnt = self.rows(rollouts, lambda branch: [1.0] * len(branch.learnt))
        return {
            "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
            "prompt_mask": mask_of(prompts, padding_side="left"),
            "completion_ids": pad_sequence(completions, batch_first=True),
            "completion_mask": mask_of(completions, padding_side="right"),
            "tool_mask": learnt.long(),
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": learnt.sum(),
        }


def mask_of(rows: list[Tensor], *, padding_side: str) -> Tensor:
    return pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=padding_side)


def put(model: Any, adapter: Adapter) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".default." in name:
                parameter.copy_(adapter[name.replace(".default.", ".")])


def gradient(model: Any, adapter: Adapter) -> Tensor:
    grads = {name.replace(".default.", "."): p.grad for name, p in model.named_parameters() if ".default." in name}
    return torch.cat([grads[name].flatten() for name in adapter])


def without_results(rollout: Rollout) -> Rollout:
    """The rollout up to the end of its first answer."""
    (branch,) = rollout.branches
    span = branch.spans[0]
    return replace(rollout, branches=[replace(branch, token_ids=branch.token_ids[: span[1]], spans=[span])])


# -- whole steps, from rewards on --

EOS = 1
"""Token of `Trl.tokenizer` that ends a completion."""
GROUP_SIZE = 4

STEPS: dict[str, tuple[dict[str, Any], TrainConfig]] = {
    "grpo": (
        {"loss_type": "grpo", "scale_rewards": "none"},
        TrainConfig(loss="grpo", scale_rewards="none", mismatch=None),
    ),
    "dapo": (
        {"loss_type": "dapo", "scale_rewards": "none"},
        TrainConfig(loss="dapo", scale_rewards="none", mismatch=None),
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        TrainConfig(loss="dr_grpo", normalize=MAX_COMPLETION_LENGTH, mismatch=None),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "none"},
        TrainConfig(loss="gspo", scale_rewards="none", mismatch=None),
    ),
    # TRL sums over the tokens of a completion.
    "rloo": ({"beta": 0.0}, TrainConfig(loss="rloo", normalize=1, mismatch=None)),
}
"""Settings of TRL, and the same of ART. The divisor of advantages is 1 in both: deviations differ by the factor
sqrt(n / (n - 1)) of sample and population."""


def finished_rollouts(bench: Bench, *, num_groups: int, num_alive: int, cut: bool = False) -> list[Rollout]:
    """Groups of single answers of different lengths, on policy. Rewards differ in the first `num_alive` groups only.

    With `cut`, every third answer was cut off by the token limit; the others end with `EOS`.
    """
    rollouts = bench.rollouts(0, temperatures=(TEMPERATURE,) * GROUP_SIZE, has_branches=False, num_groups=num_groups)
    finished = []
    for number, rollout in enumerate(rollouts):
        (branch,) = without_results(rollout).branches
        if not (cut and number % 3 == 0):
            branch = replace(branch, token_ids=[*branch.token_ids[:-1], EOS])
        else:
            branch = replace(branch, token_ids=[*branch.token_ids[:-1], EOS + 1], is_cut=True)
        on_policy = [value.item() for value in bench.model.logprobs(branch, bench.policy_adapter)]
        logprobs = [0.0] * branch.spans[0][0] + torch.tensor(on_policy, dtype=torch.float32).tolist()
        reward = rollout.reward if rollout.group < num_alive else 0.5
        finished.append(replace(rollout, reward=reward, branches=[replace(branch, sampling_logprobs=logprobs)]))
    return finished


def trl_step(trl: Trl, name: str, rollouts: Sequence[Rollout], adapter: Adapter, **more: Any) -> tuple[float, Tensor]:
    """Loss and gradient of TRL's trainer: it scores given completions by given rewards, and computes its loss."""
    sizes = {"per_device_train_batch_size": len(rollouts), "num_generations": GROUP_SIZE}
    make = trl.rloo if name == "rloo" else trl.grpo
    trainer = make(adapter, **STEPS[name][0], **sizes, **more)
    branches = [rollout.branches[0] for rollout in rollouts]
    prompts = [branch.token_ids[: branch.spans[0][0]] for branch in branches]
    completions = [branch.token_ids[branch.spans[0][0] :] for branch in branches]
    texts = [""] * len(rollouts)
    generated = (
        (prompts, completions, texts) if name == "rloo" else (prompts, completions, None, texts, None, {}, None, None)
    )
    trainer._generate = lambda prompts: generated
    trainer.reward_funcs = [lambda **_: [rollout.reward for rollout in rollouts]]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "t2"} for _ in rollouts])
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), gradient(trainer.model, adapter)
