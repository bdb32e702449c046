"""Explain a step's metrics in plain words: one finding for each rule of `RULES` that is broken.

    metrics of this step and of the step before --find_findings--> "what was observed: what it means. What to do"

docs/metrics.md is made from the table of rules. Bounds come from papers and tools of the field, or lie well outside of
what healthy runs show: a finding is worth a look, and a healthy step has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from art.config.losses import MASKED_ALARM

BEFORE = "the step before"
"""Value of `Limit.over` that means: divide by the same metric's value in the step before."""

_IS_RL = "offpolicy/ratio_mean"
"""Only steps with reinforcement-learning samples report it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The allowed range of a metric, both ends included."""

    metric: str
    low: float = -math.inf
    high: float = math.inf
    over: str | None = None
    """The metric is divided by this before it is compared: another metric, or `BEFORE`."""

    def value(self, metrics: Mapping[str, float], before: Mapping[str, float]) -> float | None:
        """Return the value to compare, or `None` if it was not measured or cannot be divided."""
        value = metrics.get(self.metric)
        if value is None or self.over is None:
            return value
        divisor = before.get(self.metric) if self.over == BEFORE else metrics.get(self.over)
        return value / divisor if divisor else None

    def holds(self, value: float | None) -> bool:
        """Return whether the value was measured and is in the range."""
        return value is not None and self.low <= value <= self.high

    def describe(self, value: float) -> str:
        """Describe in words a value that is outside of the range."""
        seen = f"{self.metric} is {value:.3g}"
        if self.over is not None:
            seen += f" times that of {BEFORE}" if self.over == BEFORE else f" of {self.over}"
        return f"{seen}, below {self.low:g}" if value < self.low else f"{seen}, above {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    limits: tuple[Limit, ...]
    """The rule is broken if a measured value is outside of any of these ranges."""
    only_if: tuple[Limit, ...] = ()
    """The rule applies only to steps in which all of these metrics were measured and are in range."""
    meaning: str
    advice: str
    source: str
    """The reason for the bounds, e.g. a paper or the values of healthy runs."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    rule: Rule
    seen: str

    def __str__(self) -> str:
        """The text for users. The part after the first ": " is the same each time the rule is broken."""
        return f"{self.seen}: {self.rule.meaning}. {self.rule.advice}"


_NOT_FEW = Limit("data/step_num_rollouts_trained", low=32.0)
"""With fewer rollouts, steps differ by chance."""

_FEW_GROUPS = Limit("data/step_num_groups_trainable", low=0.25, over="data/step_num_groups_submitted")
_FEW_GROUPS_SOURCE = (
    "such groups have no gradient (DAPO, arXiv 2503.14476, section 3.2); if less than a quarter of the groups is left, "
    "a step costs more than four times what it needs to"
)
_HIGHEST = "data/reward_hist/9"
_OF_ROLLOUTS = "data/step_num_trajectories"
_NOT_SOLVED = Limit(_HIGHEST, high=0.75, over=_OF_ROLLOUTS)
"""Where most rollouts get the highest reward, answers become alike because the right ones are known."""

RULES: dict[str, Rule] = {
    "sampler_gap": Rule(
        limits=(Limit("offpolicy/first_update_kl", high=0.01), Limit("offpolicy/first_update_outside_share", high=0.1)),
        only_if=(Limit("offpolicy/mean_staleness", high=0.0),),
        meaning="engine and trainer give the same tokens different probabilities, even before anything was trained",
        advice="Check whether engine and trainer use different number types, or whether the server or the chat "
        "template was changed between sampling and training",
        source="training is stable with a KL below 0.01 (Tinker's documentation, RL hyperparameters); rounding to "
        "bfloat16 gives a KL of 0.001 and puts 3 % of the tokens outside",
    ),
    "mismatch_masked": Rule(
        limits=(Limit("offpolicy/mismatch_masked_share", high=MASKED_ALARM),),
        meaning="this share of the rollouts does not come from the policy that is trained, so they were left out",
        advice="The trainer's log names the bounds and what was observed. The usual causes are samples of another "
        "policy than their record says, another sampling temperature, top_p below 1, an adapter that the engine does "
        "not apply, or changed tokens; with a mixture of experts also experts that engine and trainer choose "
        "differently",
        source="5 %, as in the trainer's warning",
    ),
    "sampler_noise": Rule(
        limits=(Limit("offpolicy/mismatch_noise", high=1.0, over="offpolicy/mismatch_noise_allowed"),),
        meaning="tokens of this very policy have log-probs that differ between engine and trainer by more than "
        "rounding explains, even if few rollouts were left out",
        advice="Check that engine and trainer use the same base model, temperature and chat template, that sampling "
        "has top_p=1, and that the engine is not quantised. A mixture of experts needs router replay, which ART does "
        'not have; dtype "float32" on both sides makes the difference smaller',
        source="the largest noise of the number types: 4e-4 nats in float32 as a rule, 0.1 in bfloat16, 0.2 in a "
        "quantised engine, and twice as much in a mixture of experts (`docs/objectives.md`)",
    ),
    "constraint_refused": Rule(
        limits=(Limit("offpolicy/constraint_refused_tokens", high=0.0),),
        meaning="samples hold tokens that their recorded grammar or kept tokens do not allow, so they were left out",
        advice="Check that server and trainer have the same tokenizer; the log of the trainer names the first sample "
        "and token",
        source="an engine draws only allowed tokens, so one that is not allowed means a damaged record or another "
        "tokenizer",
    ),
    "moved_too_far": Rule(
        limits=(
            Limit("offpolicy/last_update_kl", high=1.0),
            Limit("offpolicy/ratio_p10", low=0.5),
            Limit("offpolicy/ratio_p90", high=2.0),
        ),
        only_if=(Limit("data/step_num_gradient_steps", low=2.0), Limit("offpolicy/first_update_kl", high=0.01)),
        meaning="the first updates of this step moved the policy so far that the later updates learn from samples of "
        "a different policy",
        advice="Use a lower `learning_rate` or fewer `num_minibatches`",
        source="SkyRL and verl mask tokens at ratios of 0.5 and 2; healthy runs of `art demo` reach a KL of 0.3",
    ),
    "entropy_gone": Rule(
        limits=(Limit("loss/entropy", low=0.01),),
        only_if=(Limit(_IS_RL), Limit("loss/entropy_varying", high=1.0), _NOT_SOLVED),
        meaning="the policy gives almost the same answers every time, so it cannot find better ones",
        advice="Continue from an earlier checkpoint with a lower `learning_rate`, a wider `clip_high`, or a KL term to "
        "the base model in the loss",
        source="without entropy there is no further gain (arXiv 2505.22617); at 0.01 nats about one token in a "
        "thousand differs. A low mean is fine if the tokens that vary are few among many, as in long tool calls, and "
        "if most rollouts get the highest reward",
    ),
    "entropy_fell": Rule(
        limits=(Limit("loss/entropy", low=0.5, over=BEFORE), Limit("loss/entropy_varying", low=0.5, over=BEFORE)),
        only_if=(
            Limit(_IS_RL),
            Limit("loss/entropy", low=0.01),
            _NOT_FEW,
            Limit(_HIGHEST, high=0.6, over=_OF_ROLLOUTS),
        ),
        meaning="the policy lost more than half of its entropy, the variety of its answers, in one step",
        advice="Use a lower `learning_rate`; at this pace all answers are the same after a few steps",
        source="in healthy runs of `art demo` each step keeps at least 56 %. A run that finds the right answers may "
        "lose more, so the rule is silent if most rollouts get the highest reward",
    ),
    "gradient_large": Rule(
        limits=(Limit("loss/grad_norm", high=10.0),),
        only_if=(Limit("loss/grad_clipped_share", low=1.0),),
        meaning="the gradient of every update was clipped, so the size of the rewards has no effect",
        advice="Check for rewards of very different sizes, use `scale_rewards`, or raise `optimizer.max_grad_norm`",
        source="ten times the default of `optimizer.max_grad_norm`; healthy runs of `art demo` stay below 1",
    ),
    "optimizer_restarted": Rule(
        limits=(Limit("loss/optimizer_updates", low=1.0, over=BEFORE),),
        meaning="the optimiser started without moments, because those of the step before were removed",
        advice="The first updates are larger than usual. Train from one of the newest steps, or set "
        "`TrainerConfig(keep_moments=None)` to keep the moments of all steps",
        source="the number of updates grows with every step",
    ),
    "nothing_changed": Rule(
        limits=(Limit("loss/adapter_change", low=1e-6), Limit("loss/grad_norm", low=1e-12)),
        meaning="the step did not change the policy",
        advice="Use a higher `learning_rate` (1e-5 to 5e-5 is usual for LoRA), and check whether advantages differ "
        "from 0",
        source="float32 has a relative precision of 1e-7; at a usual learning rate a step changes 1e-5 and more",
    ),
    "too_easy": Rule(
        limits=(_FEW_GROUPS,),
        only_if=(Limit(_HIGHEST, low=0.75, over=_OF_ROLLOUTS),),
        meaning="most rollouts get the highest reward, so the policy has learnt nearly all that these scenarios and "
        "rewards can teach",
        advice="Stop training, or use harder scenarios or a reward that still separates good from better rollouts",
        source=_FEW_GROUPS_SOURCE,
    ),
    "groups_alike": Rule(
        limits=(_FEW_GROUPS,),
        only_if=(_NOT_SOLVED,),
        meaning="most groups had nothing to learn from, because the rollouts of a group all get the same reward",
        advice="If that is the lowest one, use easier scenarios, rewards for partial success, or start with supervised "
        "fine-tuning. Otherwise use more rollouts per group, and check whether rollouts differ at all (temperature, "
        "random opponents), and whether the reward depends on the answer",
        source=_FEW_GROUPS_SOURCE,
    ),
    "malformed_rollouts": Rule(
        limits=(Limit("data/step_malformed_share", high=0.5),),
        meaning="rollouts fail because the task or its tools cannot read the policy's answers",
        advice="Read a few rollouts. If they failed from the beginning, show the format in the prompt, or teach it by "
        "supervised fine-tuning first. If the share grew, the policy forgets the format: continue from an earlier "
        "checkpoint with a lower `learning_rate`",
        source="a word game with too high a learning rate had 98 % in its third step; healthy runs of `art demo` have "
        "at most 29 %",
    ),
    "answers_cut_off": Rule(
        limits=(Limit("data/step_truncated_share", high=0.25),),
        meaning="the token limit cut off answers in this share of the rollouts, so their rewards say little",
        advice="Raise `max_completion_tokens`, or let the reward fall with the length of answers",
        source="rewards of cut-off answers destabilise training (DAPO, arXiv 2503.14476, section 3.4); a few are "
        "normal",
    ),
    "far_from_base": Rule(
        limits=(Limit("loss/kl_to_base_k1", high=3.0),),
        only_if=(Limit("loss/kl_to_base_targets", low=32.0),),
        meaning="the policy writes tokens that the base model would hardly ever write",
        advice="Read a few rollouts and check whether they exploit the reward. A KL term to the base model in the "
        "loss keeps the policy closer to it",
        source="at 3 nats, a token of the policy has on average a twentieth of its probability under the base model; "
        "healthy runs of `art demo` reach 1",
    ),
    "messages_left_out": Rule(
        limits=(Limit("ledger/dropped_messages/template_rewrites_history", high=0.0),),
        meaning="the chat template changes the text of these assistant messages, so the policy could never write "
        "them, and they were left out",
        advice="Put reasoning and tool calls into the fields that the template reads, or split the conversation",
        source="no message should be left out",
    ),
}
"""All rules by name, in the order of their findings."""


def find_findings(metrics: Mapping[str, float], before: Mapping[str, float]) -> list[Finding]:
    """Find the rules that a step breaks, in the order of `RULES`.

    Args:
        before: metrics of the step that this one continues, or empty. They are ignored if one of the two steps is
            supervised and the other is not.
    """
    comparable = before if (_IS_RL in before) == (_IS_RL in metrics) else {}
    findings = []
    for name, rule in RULES.items():
        if not all(limit.holds(limit.value(metrics, comparable)) for limit in rule.only_if):
            continue
        values = [(limit, limit.value(metrics, comparable)) for limit in rule.limits]
        seen = [limit.describe(value) for limit, value in values if value is not None and not limit.holds(value)]
        if seen:
            findings.append(Finding(name, rule, "; ".join(seen)))
    return findings
