"""Every setting and its default; nowhere else holds one.

Unknown keys are errors. A setting that a backend cannot honour is an error too, never ignored in silence.
Sources of the defaults: "LoRA without regret" (rank, all linear layers, learning rate about 10 times that of full
fine-tuning), Dr.GRPO (no division by the standard deviation), prime-rl's DPPO mask (see `losses/dppo.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
LearningRate = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Base of all settings: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraConfig(Config):
    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    """The product B @ A is scaled by `alpha / rank`."""
    target_modules: list[str] | None = None
    """Module name endings to adapt; `None` means every linear layer but the language-model head."""
    seed: int = Field(default=0, ge=0)
    """Of the initial A matrices; B starts at zero."""


class EngineConfig(Config):
    device: Device = "auto"
    dtype: Dtype = "auto"
    """`auto`: float32 on CPU, bfloat16 on CUDA, the checkpoint's on MPS."""
    max_context: int | None = Field(default=None, ge=16)
    """Tokens of prompt plus completion; `None` takes the model's own limit, at most 32,768."""
    max_running: int = Field(default=64, ge=1)
    """Requests decoded together, which is the number of KV slots in use at once."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests that may queue; one more is refused with 429."""
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """KV cache size; `None` fits `max_running` average requests and what memory allows."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Prompt tokens computed in one forward pass, so that long prompts do not stall decoding."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; `None` gives engine and trainer disjoint halves of the cores."""


class TrainerConfig(Config):
    device: Device = "auto"
    dtype: Dtype = "auto"
    """Of the frozen base weights; adapters and logits are always float32."""
    max_tokens: int = Field(default=16_384, ge=64)
    """Tree tokens in one forward and backward pass; larger trees are split."""
    gradient_checkpointing: bool = False
    num_threads: int | None = Field(default=None, ge=1)


class DppoConfig(Config):
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


class PpoConfig(Config):
    """PPO's clipped surrogate on the sampler's log-probs."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)


class CispoConfig(Config):
    """Clipped importance weights, gradient through the log-prob (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=4.0, gt=0)


LossConfig = Annotated[DppoConfig | PpoConfig | CispoConfig, Field(discriminator="type")]


class MismatchConfig(Config):
    """Gate on the gap between sampler and trainer, by the geometric mean of a sample's importance ratios."""

    low: float = Field(default=0.99, gt=0, le=1)
    high: float = Field(default=1.01, ge=1)
    token_low: float = Field(default=1e-4, gt=0)
    token_high: float = Field(default=1e2, gt=0)
    """A sample with any token ratio outside [token_low, token_high] is masked."""
    alarm: float = Field(default=0.05, ge=0, le=1)
    """Share of masked samples above which a warning is logged."""
    abort: float = Field(default=0.5, ge=0, le=1)
    """Share of masked samples above which the step fails and nothing is published."""


class OptimizerConfig(Config):
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class TrainConfig(Config):
    """One reinforcement-learning step."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    loss: LossConfig = DppoConfig()
    scale_rewards: Literal["none", "group"] = "none"
    """`group` divides advantages by the group's standard deviation (plus 1e-6)."""
    spread_tolerance: float = Field(default=1e-6, ge=0)
    """A group whose rewards all lie within this of their mean carries no signal; it is left out and counted."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates made from one batch of groups; more than 1 is slightly off-policy."""
    mismatch: MismatchConfig | None = MismatchConfig()
    """`None` switches the gate off. It looks at the first mini-batch only, where sampler and trainer should agree."""
    optimizer: OptimizerConfig = OptimizerConfig()


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

    lora: LoraConfig = LoraConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    render: RenderConfig = RenderConfig()


class ServerConfig(Config):
    """`art-server`."""

    host: str = "127.0.0.1"
    port: int = Field(default=5000, ge=0, le=65535)
    """0 takes a free port."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    child_start_timeout_s: float = Field(default=600.0, gt=0)
    """How long an engine or trainer may take to load its model, the first time with its download."""
    heartbeat_timeout_s: float = Field(default=120.0, gt=0)
    """A child whose heartbeat stops for so long is killed and restarted."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """So is one whose heartbeat goes on, but which works on one micro-batch or engine step for so long."""
    handshake_tolerance: float | None = None
    """Largest allowed probe difference in nats; `None`: 1e-3 in float32, 0.15 in bfloat16."""
