"""Every setting and its default; nowhere else holds one.

Unknown keys are errors. A setting that a backend cannot honour is an error too, never ignored in silence.
Sources of the defaults: "LoRA without regret" (rank, all linear layers, learning rate about 10 times that of full
fine-tuning), Dr.GRPO (no division by the standard deviation), prime-rl's DPPO mask (see `losses/dppo.py`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "nf4"]
LearningRate = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Base of all settings: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_indices(device: Device, indices: tuple[int, ...]) -> None:
    if indices and device not in ("auto", "cuda"):
        raise ValueError(f'`device_indices` names GPUs, but `device` is "{device}"; leave one of the two out')
    if len(set(indices)) < len(indices) or any(index < 0 for index in indices):
        raise ValueError(f"`device_indices` must be different numbers from 0; got {indices}")


class LoraConfig(Config):
    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    """The product B @ A is scaled by `alpha / rank`."""
    target_modules: list[str] | None = None
    """Module name endings to adapt; `None` means every linear layer but the language-model head."""
    seed: int = Field(default=0, ge=0)
    """Of the initial A matrices; B starts at zero."""


class EngineSettings(Config):
    """What every kind of engine understands."""

    device: Device = "auto"
    device_indices: tuple[int, ...] = ()
    """GPU by its index, of those that the server sees; empty: one that the trainer does not use, if there is one."""
    dtype: Dtype = "auto"
    """`auto`: float32 on CPU, bfloat16 on CUDA, the checkpoint's on MPS."""
    max_context: int | None = Field(default=None, ge=16)
    """Tokens of prompt plus completion; `None` takes the model's own limit, at most 32,768."""
    max_running: int = Field(default=64, ge=1)
    """Requests decoded together, which is the number of KV slots in use at once. Each loaded full checkpoint has as
    many of its own, and its own KV cache."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests that may queue; one more is refused with 429."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; `None` gives engine and trainer disjoint halves of the cores."""


class EngineConfig(EngineSettings):
    """The embedded engine."""

    kind: Literal["torch"] = "torch"
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """KV cache size; `None` fits `max_running` average requests and what memory allows."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Prompt tokens computed in one forward pass, so that long prompts do not stall decoding."""
    quantization: Quantization = "none"
    """As the trainer's: the engine computes with the values that NF4 leaves of the base weights, kept in `dtype`, so it
    becomes neither smaller nor faster."""

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        _check_indices(self.device, self.device_indices)
        if len(self.device_indices) > 1:
            raise ValueError(f"the embedded engine runs on one device: `device_indices` has {self.device_indices}")
        return self


_VLLM_OWNED = {
    **dict.fromkeys(("model", "served_model_name", "tokenizer", "skip_tokenizer_init"), "follows from `base_model`"),
    **dict.fromkeys(("host", "port", "uds", "api_key"), "is chosen anew at each start; only loopback is listened on"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_cpu_loras"), "follows from the LoRA settings"),
    **dict.fromkeys(("logprobs_mode", "max_logprobs", "generation_config"), "decides what log-probs mean"),
    **dict.fromkeys(("api_server_count",), "must be 1, because adapters are loaded through one API server"),
    **dict.fromkeys(("trust_remote_code",), "would run code that comes with a model"),
    **dict.fromkeys(("enable_sleep_mode",), "does nothing yet: the engine does not sleep while the trainer works"),
    "dtype": "is the field `dtype`",
    "max_model_len": "is the field `max_context`",
    "max_num_seqs": "is the field `max_running`",
    "max_loras": "is the field `max_loras`",
}
"""Flags of `vllm serve` that a user cannot set, and why."""


class VllmConfig(EngineSettings):
    """vLLM: a server of its own, which ART starts and watches, or servers that run already."""

    kind: Literal["vllm"] = "vllm"
    urls: tuple[str, ...] = ()
    """Replicas that run already, e.g. `("http://gpu1:8000",)`; nothing is started then. Their key is read from
    VLLM_API_KEY, and checkpoints must be reachable for them under the same path."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters, which are steps of models, in one batch; requests for more of them wait."""
    flags: dict[str, bool | int | float | str | list[str]] = {}
    """Any further flag of `vllm serve`, with underscores: `{"tensor_parallel_size": 2}`. True becomes `--flag`,
    False `--no-flag`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_indices(self.device, self.device_indices)
        if self.device == "mps":
            raise ValueError('vLLM has no device "mps"; expected "auto", "cpu" or "cuda"')
        for name in self.flags:
            if reason := _VLLM_OWNED.get(name.replace("-", "_").lstrip("_")):
                raise ValueError(f"flag {name!r} of vLLM {reason}; leave it out of `flags`")
        if self.urls and (self.flags or self.device_indices):
            raise ValueError(
                "`flags` and `device_indices` are for a server that ART starts; with `urls`, set them where those start"
            )
        return self

    @property
    def num_devices(self) -> int:
        """GPUs that the flags ask for: replicas times stages times shards."""
        kinds = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
        sizes = [value for name, value in self.flags.items() if name.replace("-", "_").lstrip("_") in kinds]
        return math.prod(size for size in sizes if isinstance(size, int))


def _engine_kind(value: Any) -> str:
    """`torch` where nothing is said, as in settings that were stored before there was a choice."""
    return str(value.get("kind", "torch") if isinstance(value, dict) else getattr(value, "kind", "torch"))


AnyEngineConfig = Annotated[
    Annotated[EngineConfig, Tag("torch")] | Annotated[VllmConfig, Tag("vllm")], Discriminator(_engine_kind)
]


class TrainerConfig(Config):
    device: Device = "auto"
    device_indices: tuple[int, ...] = ()
    """GPUs by their index, one per process; empty: the first that the engine is not told to use."""
    dtype: Dtype = "auto"
    """Of the base weights, and of the rounded copy that full fine-tuning computes with; adapters, trained weights and
    logits are always float32."""
    max_tokens: int = Field(default=16_384, ge=64)
    """Tree tokens in one forward and backward pass; larger trees are split."""
    gradient_checkpointing: bool = False
    compile_layers: bool = False
    """Run the decoder layers through torch.compile. The first step waits minutes for it; on CPU later ones gain between
    nothing and a tenth."""
    quantization: Quantization = "none"
    """`nf4` keeps the frozen linear layers in 4 bits (QLoRA), an eighth of float32; the extra `qlora` installs what it
    needs. The rounded model is the base model then, for the engine too: set `engine.quantization` to the same."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads, of all processes together; `None` gives engine and trainer disjoint halves of the cores."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes of this machine that train together, each with a share of the micro-batches. On CUDA each has its own
    device; on CPU they share the threads."""
    shard_base: bool = False
    """Split the frozen base weights over the processes instead of giving each all of them: slower, for models that do
    not fit one device."""

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.shard_base and self.num_processes == 1:
            raise ValueError("`shard_base` splits the weights over several processes: set `num_processes` too")
        if self.shard_base and self.quantization != "none":
            raise ValueError("`shard_base` splits whole weights, not quantised ones: use one of the two")
        if self.compile_layers and (self.shard_base or self.quantization != "none"):
            raise ValueError("`compile_layers` is for whole weights: not with `shard_base` or `quantization`")
        if self.device == "mps" and self.num_processes > 1:
            raise ValueError('device "mps" is a single device: `num_processes` must be 1')
        _check_indices(self.device, self.device_indices)
        if self.device_indices and len(self.device_indices) != self.num_processes:
            raise ValueError(
                f"`device_indices` has {len(self.device_indices)} GPUs for `num_processes` = {self.num_processes}; "
                "give one per process"
            )
        return self


class LossTerm(Config):
    """Base of what `TrainConfig.loss` may name. Terms are summed, each times its weight."""

    weight: float = Field(default=1.0, ge=0)


class DppoConfig(LossTerm):
    """Importance-weighted policy gradient with the binary total-variation mask; the default."""

    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(default=0.2, gt=0)
    """A token with negative advantage is dropped once its probability fell by more than this."""
    mask_high: float = Field(default=0.2, gt=0)
    """A token with positive advantage is dropped once its probability rose by more than this."""
    max_ratio: float = Field(default=5.0, gt=1)
    """Upper clamp of the importance ratio."""
    log_ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, which holds the trained policy near the sampler."""


class PpoConfig(LossTerm):
    """PPO's clipped surrogate: the loss of GRPO, Dr.GRPO and DAPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token with negative advantage, as a multiple of it; 3 is usual."""


class GspoConfig(LossTerm):
    """PPO's surrogate on the geometric mean of a sample's importance ratios: a clip is of a whole sample."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)


class CispoConfig(LossTerm):
    """Clipped importance weights, gradient through the log-prob (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=4.0, gt=0)


class ReinforceConfig(LossTerm):
    """REINFORCE with importance weights, unbiased off-policy unless `max_ratio` truncates them."""

    type: Literal["reinforce"] = "reinforce"
    max_ratio: float | None = Field(default=None, gt=1)


class SftConfig(LossTerm):
    """Cross-entropy on the sampled tokens of the rollouts with positive advantage: rejection fine-tuning."""

    type: Literal["sft"] = "sft"


class DpoConfig(LossTerm):
    """Direct preference optimisation on pairs of rollouts of a group that differ in reward."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    pairs: Literal["best_worst", "all"] = "best_worst"
    reference: int | Literal["base", "sampler"] = "base"
    """The frozen policy: the base model, the sampler's recorded log-probs, or a checkpoint by its step."""


class DistillConfig(LossTerm):
    """On-policy distillation: the reverse KL from the policy to a teacher, on the policy's own samples."""

    type: Literal["distill"] = "distill"
    teacher: str
    """Inference name of a model on this server with the same vocabulary: `project/name` or `project/name@step`."""
    max_advantage: float | None = Field(default=None, gt=0)
    """Clamps a token's |log teacher - log policy|."""


class KlConfig(LossTerm):
    """Keeps the policy near a frozen reference. `weight` is what other code calls beta."""

    type: Literal["kl"] = "kl"
    weight: float = Field(default=1e-3, ge=0)
    reference: int | Literal["base"] = "base"
    """The base model (adapter off), or a checkpoint by its step."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    """`reward` takes it off the advantages, centred, so that it moves credit between tokens and adds none."""


Objective = DppoConfig | PpoConfig | GspoConfig | CispoConfig | ReinforceConfig | DpoConfig
"""What learns from rewards; a step has at most one."""
LossConfig = Annotated[Objective | SftConfig | DistillConfig | KlConfig, Field(discriminator="type")]


class MismatchConfig(Config):
    """What is done about the gap between sampler and trainer, by r = policy / sampler at the step's start."""

    low: float = Field(default=0.99, gt=0, le=1)
    high: float = Field(default=1.01, ge=1)
    """A sample whose geometric mean of r is outside [low, high] is masked."""
    token_low: float = Field(default=1e-4, gt=0, le=1)
    token_high: float = Field(default=1e2, ge=1)
    """A sample with any r outside [token_low, token_high] is masked."""
    mask_token_low: float | None = Field(default=None, gt=0, lt=1)
    mask_token_high: float | None = Field(default=None, gt=1)
    """A single token with r outside is masked; the rest of its sample stays. 0.5 and 2 are usual."""
    truncate: float | None = Field(default=None, ge=1)
    """Truncated importance sampling: each token's loss is multiplied by min(r, truncate); 2 is usual. Needs
    `anchor="step_start"`: with the sampler as the anchor the ratio is in the loss already."""
    alarm: float = Field(default=0.05, ge=0, le=1)
    """Share of masked samples above which a warning is logged."""
    abort: float = Field(default=0.5, ge=0, le=1)
    """Share of masked samples above which the step fails and nothing is published."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Refuse bounds that another one forestalls."""
        if self.mask_token_low is not None and self.mask_token_low <= self.token_low:
            raise ValueError("`mask_token_low` must be above `token_low`, below which the whole sample is masked")
        if self.mask_token_high is not None and self.mask_token_high >= self.token_high:
            raise ValueError("`mask_token_high` must be below `token_high`, above which the whole sample is masked")
        if self.truncate is not None and self.truncate >= (self.mask_token_high or self.token_high):
            raise ValueError("`truncate` must be below `mask_token_high` and `token_high`, or it never truncates")
        return self


class OptimizerConfig(Config):
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class OverlongConfig(Config):
    """DAPO's soft punishment: the reward falls linearly by 1 over the last `buffer` of `max_tokens` sampled tokens."""

    max_tokens: int = Field(ge=1)
    buffer: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.buffer > self.max_tokens:
            raise ValueError(f"`buffer` is a part of `max_tokens`; got {self.buffer} of {self.max_tokens}")
        return self


class LengthPenaltyConfig(Config):
    """Takes mean(R) * (sum of weight * share of the group's largest) off each reward; nothing where nothing passes."""

    sampled_tokens: float = Field(default=0.0, ge=0)
    prompt_tokens: float = Field(default=0.0, ge=0)
    turns: float = Field(default=0.0, ge=0)


class TrainConfig(Config):
    """One reinforcement-learning step."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    loss: LossConfig | tuple[LossConfig, ...] = DppoConfig()
    """One term or several, which are summed."""
    anchor: Literal["sampler", "step_start"] = "sampler"
    """What importance ratios compare the policy with: the recorded log-probs, or the trainer's own before the first
    update of the step (one more forward pass if there are several updates)."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divide advantages by the standard deviation of the group or of the batch (plus 1e-6), or by the mean reward of
    the group: maximum-likelihood weighting, for rewards of 0 and 1 only."""
    spread_tolerance: float = Field(default=1e-6, ge=0)
    """A group whose rewards all lie within this of their mean carries no signal; it is left out and counted."""
    overlong: OverlongConfig | None = None
    length_penalty: LengthPenaltyConfig | None = None
    normalize: Literal["token", "rollout", "group", "constant"] = "token"
    """Every token counts the same; or every rollout, branches together; or every group; or `constant`: sums over
    tokens divided by `constant_tokens` per rollout, so that length has no influence at all (Dr.GRPO)."""
    constant_tokens: int | None = Field(default=None, ge=1)
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates made from one batch of groups; more than 1 is slightly off-policy."""
    mismatch: MismatchConfig | None = MismatchConfig()
    """`None` switches the gate off. It compares the sampler with the policy at the step's start: with anchor="sampler",
    whose policy is known in the first mini-batch only, later ones pass."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def terms(self) -> tuple[LossConfig, ...]:
        """`loss` as a tuple."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards play a part; distillation alone does not look at them."""
        return any(isinstance(term, (Objective, SftConfig)) for term in self.terms)

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Refuse settings that would do nothing together."""
        objectives = [term.type for term in self.terms if isinstance(term, Objective)]
        if all(isinstance(term, KlConfig) or term.weight == 0 for term in self.terms):
            raise ValueError("`loss` has no term that learns anything; expected e.g. DppoConfig()")
        if len(objectives) > 1:
            raise ValueError(
                f"`loss` has several objectives that learn from rewards: {', '.join(objectives)}; keep one"
            )
        if len({term.type for term in self.terms}) < len(self.terms):
            raise ValueError("`loss` has two terms of the same type; keep one of them")
        if self.normalize == "constant" and self.constant_tokens is None:
            raise ValueError("normalize='constant' needs `constant_tokens`, e.g. the largest completion length")
        if self.constant_tokens is not None and self.normalize != "constant":
            raise ValueError(f"`constant_tokens` does nothing with normalize={self.normalize!r}; use 'constant'")
        if self.mismatch is not None and self.mismatch.truncate is not None and self.anchor == "sampler":
            raise ValueError("`mismatch.truncate` needs anchor='step_start': with 'sampler' the ratio is in the loss")
        self._check_dpo()
        self._check_rewards(weighs_advantages=any(name != "dpo" for name in objectives))
        if self.anchor != "sampler" and all(isinstance(term, SftConfig) for term in self.terms):
            raise ValueError("sft has no importance ratio: `anchor` does not apply")
        return self

    def _check_rewards(self, *, weighs_advantages: bool) -> None:
        """sft asks for the sign of an advantage, dpo for the order of rewards, distillation for neither."""
        shapes_rewards = self.overlong is not None or self.length_penalty is not None
        for name, is_set in (
            ("scale_rewards", self.scale_rewards != "none"),
            ("baseline", self.baseline != "mean"),
            ("KL in the reward", any(isinstance(term, KlConfig) and term.where == "reward" for term in self.terms)),
        ):
            if is_set and not weighs_advantages:
                raise ValueError(f"{name} needs an objective that weighs advantages, e.g. DppoConfig()")
        if shapes_rewards and not self.learns_from_rewards:
            raise ValueError("`overlong` and `length_penalty` need a loss that learns from rewards, e.g. DppoConfig()")
        if self.scale_rewards == "mean" and (self.baseline != "mean" or shapes_rewards):
            raise ValueError(
                "scale_rewards='mean' (maximum likelihood) weighs rewards of 0 and 1 against their mean: other "
                "baselines, `overlong` and `length_penalty` do not apply"
            )

    def _check_dpo(self) -> None:
        if not any(isinstance(term, DpoConfig) for term in self.terms):
            return
        if self.normalize != "token":
            raise ValueError("dpo is a mean over pairs: `normalize` does not apply")
        if len(self.terms) > 1 or self.num_minibatches > 1:
            raise ValueError("dpo stands alone, in one update: other terms and `num_minibatches` above 1 do not apply")
        if self.anchor != "sampler":
            raise ValueError("dpo has no importance ratio: `anchor` does not apply")
        gate = self.mismatch
        if gate is not None and (gate.mask_token_low is not None or gate.mask_token_high is not None):
            raise ValueError("dpo compares whole rollouts: `mask_token_low` and `mask_token_high` do not apply")

    @classmethod
    def grpo(cls, **settings: Any) -> Self:
        """DeepSeekMath (arXiv 2402.03300): rewards over the group's deviation, PPO clipping, a mean per rollout."""
        return cls(**{"loss": PpoConfig(clip_high=0.2), "scale_rewards": "group", "normalize": "rollout"} | settings)

    @classmethod
    def dr_grpo(cls, *, constant_tokens: int, **settings: Any) -> Self:
        """ "Understanding R1-Zero-like training" (arXiv 2503.20783): no scaling, no mean over length."""
        defaults = {"loss": PpoConfig(clip_high=0.2), "normalize": "constant", "constant_tokens": constant_tokens}
        return cls(**defaults | settings)

    @classmethod
    def dapo(cls, *, overlong: OverlongConfig | None = None, **settings: Any) -> Self:
        """DAPO (arXiv 2503.14476): a wider upper clip, a mean over all tokens, soft punishment of overlong answers."""
        return cls(**{"loss": PpoConfig(), "scale_rewards": "group", "overlong": overlong} | settings)

    @classmethod
    def gspo(cls, **settings: Any) -> Self:
        """Group sequence policy optimization (arXiv 2507.18071): GRPO with one ratio, and one clip, per sample."""
        return cls(**{"loss": GspoConfig(), "scale_rewards": "group", "normalize": "rollout"} | settings)

    @classmethod
    def rloo(cls, **settings: Any) -> Self:
        """ "Back to basics" (arXiv 2402.14740): REINFORCE against the mean reward of the group's other rollouts."""
        return cls(**{"loss": ReinforceConfig(), "baseline": "leave_one_out"} | settings)

    @classmethod
    def maxrl(cls, **settings: Any) -> Self:
        """Maximum likelihood reinforcement learning (arXiv 2602.02710): of rewards 0 and 1, a rare 1 counts more."""
        return cls(**{"loss": ReinforceConfig(), "scale_rewards": "mean"} | settings)


class TrainSFTConfig(Config):
    """Supervised fine-tuning on the assistant messages of trajectories."""

    learning_rate: LearningRate | list[LearningRate] = 5e-5
    """A list gives one rate per batch."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trajectories per optimiser update; `auto` is 2."""
    optimizer: OptimizerConfig = OptimizerConfig()


class RenderConfig(Config):
    """How messages become tokens."""

    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Passed to the chat template, e.g. `{"enable_thinking": False}`."""
    keep_reasoning: bool | None = None
    """Keep the reasoning of earlier turns in the context; `None` does as the model's template does."""


class ModelSettings(Config):
    """What a trainable model is made of, beside its name. Sent at registration and kept by the server."""

    lora: LoraConfig | None = LoraConfig()
    """`None` is full fine-tuning: instead of an adapter, all weights of the decoder layers and the final norm are
    trained; embedding and language-model head stay frozen."""
    engine: AnyEngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    render: RenderConfig = RenderConfig()

    @model_validator(mode="after")
    def _check_full(self) -> Self:
        """Full fine-tuning needs whole weights, which trainer and engine have to round alike."""
        engine, trainer = self.engine, self.trainer
        if self.lora is not None:
            return self
        if isinstance(engine, VllmConfig):
            raise ValueError(
                "the vLLM engine serves LoRA adapters; for full fine-tuning (lora=None) use the embedded engine"
            )
        if trainer.shard_base or trainer.quantization != "none":
            raise ValueError(
                "full fine-tuning (lora=None) needs whole weights: `shard_base` and `quantization` do not apply"
            )
        if engine.dtype != trainer.dtype or (engine.dtype == "auto" and engine.device != trainer.device):
            raise ValueError(
                f"`trainer` has dtype {trainer.dtype!r} on {trainer.device!r} and `engine` {engine.dtype!r} on "
                f"{engine.device!r}; with full fine-tuning (lora=None) each rounds the trained weights to its dtype, "
                "and the sampled policy would not be the trained one: set the same dtype for both"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        """Engine and trainer have to start from the same base weights."""
        rounded = self.engine.quantization if isinstance(self.engine, EngineConfig) else "none"
        if isinstance(self.engine, VllmConfig) and self.trainer.quantization != "none":
            raise ValueError(
                f"`trainer.quantization` is {self.trainer.quantization!r}, which the vLLM engine cannot round alike; "
                'set it to "none", or use the embedded engine'
            )
        if rounded != self.trainer.quantization:
            raise ValueError(
                f"`trainer.quantization` is {self.trainer.quantization!r} and `engine.quantization` is "
                f"{rounded!r}; the sampled policy would not be the trained one: set both alike"
            )
        return self


class MemoryConfig(Config):
    """When a process that holds too much memory is started anew, at a moment when that costs nothing: a trainer between
    two steps, an engine without requests or, if it never is, in the middle of them (they go on at their next token)."""

    limit_bytes: int | None = Field(default=None, gt=0)
    """Resident memory of an engine or trainer process above which it is; `None`: no limit."""
    leak_growth_bytes: int | None = Field(default=2**30, gt=0)
    """Growth that counts as a leak, if every one of the last `leak_windows` windows added to it; `None`: never."""
    leak_window_s: float = Field(default=300.0, gt=0)
    leak_windows: int = Field(default=12, ge=4)


class ServerConfig(Config):
    """`art-server`."""

    host: str = "127.0.0.1"
    port: int = Field(default=5000, ge=0, le=65535)
    """0 takes a free port."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    child_start_timeout_s: float = Field(default=600.0, gt=0)
    """How long an engine or trainer may take to load its model, the first time with its download."""
    heartbeat_timeout_s: float = Field(default=120.0, gt=0)
    """A child whose heartbeat stops for so long is killed and restarted; `LocalBackend` does the same with a server
    that gives no answer."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """So is one whose heartbeat goes on, but which works on one micro-batch or engine step for so long."""
    report_after_s: float = Field(default=60.0, gt=0)
    """Without progress for so long, the server's log tells who waits for whom, with stacks."""
    job_timeout_s: float = Field(default=24 * 3600.0, gt=0)
    """How long one training step may take in all."""
    memory: MemoryConfig = MemoryConfig()
    vllm_python: str | None = None
    """Interpreter of the environment that has vLLM; `None` takes the variable ART_VLLM_PYTHON, else ART's own."""
    preflight: bool = True
    """Before a model's first step, look at versions, devices, disk space and chat format, and refuse to train where one
    of them is sure to fail; `art doctor` looks closer."""
    handshake_tolerance: float | None = None
    """Largest allowed probe difference in nats; `None`: 1e-3 in float32, 0.15 in bfloat16."""
