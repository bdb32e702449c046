"""What a step's metrics say, in plain words: one finding for each rule of `RULES` that is broken.

    metrics of the step and of the one before --find_findings--> "what was seen: what it means. What to do"

The rules are a table, docs/metrics.md shows the same. A bound is where the field's papers and tools put it, or else far
enough from what healthy runs show: a finding is worth a look, and a healthy step has none. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from art.config import MismatchConfig
from art.metrics.trends import WINDOW

BEFORE = "the step before"
"""Instead of a metric's name: its own value in the step before this one."""

_IS_RL = "offpolicy/ratio_mean"
"""Only steps with reinforcement-learning samples report it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A range of a metric, both ends included."""

    metric: str
    low: float = -math.inf
    high: float = math.inf
    over: str | None = None
    """What the metric is divided by before it is compared: another metric, or `BEFORE`."""

    def value(self, metrics: Mapping[str, float], before: Mapping[str, float]) -> float | None:
        """What is compared; `None` where it was not measured, or cannot be divided."""
        value = metrics.get(self.metric)
        if value is None or self.over is None:
            return value
        divisor = before.get(self.metric) if self.over == BEFORE else metrics.get(self.over)
        return value / divisor if divisor else None

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def describe(self, value: float) -> str:
        """What was seen, where it does not hold."""
        number = f"{value:.3g}"
        seen = {
            None: f"{self.metric} is {number}",
            BEFORE: f"{self.metric} is {number} times that of {BEFORE}",
        }.get(self.over, f"{self.metric} is {number} of {self.over}")
        return f"{seen}, below {self.low:g}" if value < self.low else f"{seen}, above {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    name: str
    limits: tuple[Limit, ...]
    """One that does not hold breaks the rule."""
    only_if: tuple[Limit, ...] = ()
    """The rule is for steps where all of these hold; one that was not measured does not."""
    meaning: str
    advice: str
    source: str
    """Why the bounds are where they are."""


@dataclass(frozen=True, slots=True)
class Finding:
    rule: Rule
    seen: str

    def __str__(self) -> str:
        """What follows the first ": " is the same every time the rule is broken."""
        return f"{self.seen}: {self.rule.meaning}. {self.rule.advice}"


_NOT_FEW = Limit("data/step_num_rollouts_trained", low=32.0)
"""Below that steps differ by chance."""

_FEW_GROUPS = Limit("data/step_num_groups_trainable", low=0.25, over="data/step_num_groups_submitted")
_FEW_GROUPS_SOURCE = (
    "such groups have no gradient (DAPO, arXiv 2503.14476, section 3.2); with fewer than a quarter left a step costs "
    "four times what it needs to"
)
_LOWEST, _HIGHEST = (f"data/reward_hist/{number}" for number in (0, 9))

RULES: tuple[Rule, ...] = (
    Rule(
        name="sampler_gap",
        limits=(
            Limit("offpolicy/first_update_kl", high=0.01),
            Limit("offpolicy/first_update_outside_share", high=0.1),
        ),
        only_if=(Limit("offpolicy/mean_staleness", high=0.0),),
        meaning="before anything was trained, engine and trainer already give the same tokens different probabilities",
        advice="Look for different number types, other settings of the chat template, or a server that was changed "
        "between sampling and training",
        source="training is stable with a KL below 0.01 (Tinker's documentation, RL hyperparameters); errors with a KL "
        "of 0.001, as bfloat16 makes them, put 3 % of the tokens outside",
    ),
    Rule(
        name="mismatch_masked",
        limits=(Limit("offpolicy/mismatch_masked_share", high=MismatchConfig().alarm),),
        meaning="these samples do not come from the policy that is trained, so nothing was learnt from them",
        advice="The usual causes are samples of an older policy, another sampling temperature, or changed tokens; "
        "`mismatch` has the bounds",
        source="`mismatch.alarm`, 5 % by default",
    ),
    Rule(
        name="tokens_masked",
        limits=(
            Limit("offpolicy/mismatch_masked_tokens", high=MismatchConfig().alarm, over="data/step_trainable_tokens"),
        ),
        only_if=(Limit("offpolicy/mismatch_masked_share", high=MismatchConfig().alarm),),
        meaning="few samples were left out, but many tokens: the policy would hardly have said them, or much sooner",
        advice="Look for what changes tokens or their probabilities between engine and trainer, or widen "
        "`mismatch.mask_token_low` and `mismatch.mask_token_high`",
        source="as for whole samples",
    ),
    Rule(
        name="weights_truncated",
        limits=(Limit("offpolicy/truncated_share", high=0.1),),
        meaning="many tokens are much more likely in the trainer than they were when they were sampled",
        advice="Correction by importance weights is for rare tokens: mend the gap between engine and trainer, or train "
        "on fresher rollouts",
        source="where weights agree to within bfloat16, ratios above 2 are single tokens",
    ),
    Rule(
        name="stale_rollouts",
        limits=(Limit("offpolicy/max_staleness", high=8.0),),
        meaning="some tokens were sampled by a policy of long ago, whose successes may not be those of today",
        advice="Train on rollouts sooner, or leave old ones out",
        source="prime-rl's bound; AReaL (arXiv 2505.24298) finds about the same for an objective that corrects for age",
    ),
    Rule(
        name="moved_too_far",
        limits=(
            Limit("offpolicy/last_update_kl", high=1.0),
            Limit("offpolicy/ratio_p10", low=0.5),
            Limit("offpolicy/ratio_p90", high=2.0),
        ),
        only_if=(
            Limit("data/step_num_gradient_steps", low=2.0),
            Limit("offpolicy/first_update_kl", high=0.01),
        ),
        meaning="the updates of this step moved the policy so far that the later ones learn from another policy's "
        "samples",
        advice="Use a lower `learning_rate` or fewer `num_minibatches`",
        source="0.5 and 2 are where SkyRL and verl mask tokens; healthy runs of the demo reach a KL of 0.3",
    ),
    Rule(
        name="many_clipped",
        limits=(Limit("loss/masked_share", high=0.5),),
        meaning="the loss clipped or dropped these tokens, which learn nothing",
        advice="Use a lower `learning_rate` or fewer `num_minibatches`, or wider clips if they are tighter than the "
        "defaults",
        source="losses by token usually clip less than 5 %; GSPO clips far more by design (arXiv 2507.18071), but not "
        "most",
    ),
    Rule(
        name="entropy_gone",
        limits=(Limit("loss/entropy", low=0.01),),
        only_if=(Limit(_IS_RL), Limit("loss/entropy_varying", high=1.0)),
        meaning="the policy hardly varies its answers any more, so it cannot find better ones",
        advice="If rewards are as high as they can be, the task is solved. Else go on from an earlier checkpoint with "
        "a lower `learning_rate`, a wider `clip_high`, or KL to the base in the loss",
        source="gains end where entropy does (arXiv 2505.22617); at 0.01 nats about one token in a thousand differs. "
        "Where few tokens vary, but among many others, as in long tool calls, nothing is lost",
    ),
    Rule(
        name="entropy_fell",
        limits=(
            Limit("loss/entropy", low=0.5, over=BEFORE),
            Limit("loss/entropy_varying", low=0.5, over=BEFORE),
        ),
        only_if=(Limit(_IS_RL), Limit("loss/entropy", low=0.01), _NOT_FEW),
        meaning="the policy lost more than half of its variety in one step",
        advice="Use a lower `learning_rate`; at this pace nothing is left to choose from in a few steps",
        source="steps of healthy runs of the demos keep 56 % and more",
    ),
    Rule(
        name="entropy_rose",
        limits=(Limit("loss/entropy", high=2.0, over=BEFORE),),
        only_if=(Limit(_IS_RL), Limit("loss/entropy", low=1.0), _NOT_FEW),
        meaning="the policy's answers became random in one step",
        advice="Read a few rollouts. If they make no sense, go on from an earlier checkpoint with a lower "
        "`learning_rate`",
        source="steps of healthy runs of the demo add at most a third",
    ),
    Rule(
        name="gradient_jumped",
        limits=(Limit("loss/grad_norm", high=10.0, over=BEFORE),),
        only_if=(Limit("loss/grad_clipped_share", low=0.5), _NOT_FEW),
        meaning="the gradient is out of line with that of the step before, and was clipped",
        advice="Look at this step's rewards and advantages (`data/advantage_max`) for outliers",
        source="steps of healthy runs of the demo differ by at most a factor of 3",
    ),
    Rule(
        name="gradient_large",
        limits=(Limit("loss/grad_norm", high=10.0),),
        only_if=(Limit("loss/grad_clipped_share", low=1.0),),
        meaning="every update was clipped, so the size of the rewards has no influence",
        advice="Look for rewards of very different sizes, use `scale_rewards`, or raise `optimizer.max_grad_norm`",
        source="ten times the default of `optimizer.max_grad_norm`; healthy runs of the demo stay below 1",
    ),
    Rule(
        name="nothing_changed",
        limits=(Limit("loss/adapter_change", low=1e-6), Limit("loss/grad_norm", low=1e-12)),
        meaning="the step left the policy as it was",
        advice="Use a higher `learning_rate` (1e-5 to 5e-5 is usual for LoRA), and look whether advantages differ "
        "from 0",
        source="float32 tells numbers apart to 1e-7 of their size; at a usual rate a step adds 1e-3 and more",
    ),
    Rule(
        name="too_easy",
        limits=(_FEW_GROUPS,),
        only_if=(Limit(_HIGHEST, low=0.75, over="data/step_num_trajectories"),),
        meaning="most groups had nothing to learn from, because most rollouts earn the highest reward",
        advice="Use harder scenarios, a reward that still tells good from better, or stop here",
        source=_FEW_GROUPS_SOURCE,
    ),
    Rule(
        name="too_hard",
        limits=(_FEW_GROUPS,),
        only_if=(Limit(_LOWEST, low=0.75, over="data/step_num_trajectories"),),
        meaning="most groups had nothing to learn from, because most rollouts earn the lowest reward",
        advice="Use easier scenarios, more rollouts per group, rewards for partial success, or supervised fine-tuning "
        "first",
        source=_FEW_GROUPS_SOURCE,
    ),
    Rule(
        name="groups_alike",
        limits=(_FEW_GROUPS,),
        only_if=(
            Limit(_HIGHEST, high=0.75, over="data/step_num_trajectories"),
            Limit(_LOWEST, high=0.75, over="data/step_num_trajectories"),
        ),
        meaning="most groups had nothing to learn from: the rollouts of a group earn the same, whatever they do",
        advice="Use more rollouts per group, look whether they differ at all (temperature, random opponents), and "
        "whether the reward depends on the answer",
        source=_FEW_GROUPS_SOURCE,
    ),
    Rule(
        name="reward_flat",
        limits=(Limit("trend/reward_rise", low=2.0, over="trend/reward_rise_error"),),
        only_if=(
            Limit("trend/groups_trainable_share", low=0.5),
            Limit("trend/top_reward_share", high=0.6),
            _NOT_FEW,
        ),
        meaning=f"the reward has not risen for {WINDOW} steps although the rollouts of most groups differ in it, so "
        "that luck may decide more than skill",
        advice="Look whether the answers depend on what the model is shown: `art doctor MODEL --task TASK` measures "
        "it. If they do, a higher `learning_rate` or more rollouts per group may help; if not, teach the model more "
        "by supervised fine-tuning first. Rewards that only rank the rollouts of a group cannot rise",
        source=f"a rise within 2 standard errors is what chance makes: a word game that did not learn rose by 0.6 "
        f"errors in its first {WINDOW} steps, the demo by 3.8. Where most rollouts earn the most there is, little is "
        "left to gain",
    ),
    Rule(
        name="malformed_rollouts",
        limits=(
            Limit("data/step_malformed_share", high=0.5),
            Limit("trend/malformed_rise", high=0.2),
        ),
        meaning="the policy spoils rollouts by answers that the task or its tools cannot read",
        advice="Read a few rollouts. If it was so from the beginning, show the format in the prompt, or teach it by "
        "supervised fine-tuning first. If it grows, the policy forgets the format: go on from an earlier checkpoint "
        "with a lower `learning_rate`",
        source="a word game at too high a rate had 98 % in its third step; healthy runs of the demo have at most 29 %, "
        "and add 8 % within ten steps",
    ),
    Rule(
        name="length_swings",
        limits=(
            Limit("trend/answers_swing", high=0.25),
            Limit("trend/tokens_swing", high=0.25),
        ),
        only_if=(_NOT_FEW, Limit("data/step_num_groups_submitted", low=8.0)),
        meaning="rollouts are long in one step and short in the next, over and over: each update overshoots what the "
        "one before it did",
        advice="Use a lower `learning_rate`, fewer `num_minibatches` or more groups per step",
        source="healthy runs of the demo stay below 3 %; a word game at a rate that broke its format had 28 %",
    ),
    Rule(
        name="answers_cut_off",
        limits=(Limit("data/step_truncated_share", high=0.25),),
        meaning="the token limit cut off answers of these rollouts, and their rewards say little about the rest",
        advice="Raise `max_completion_tokens`, or teach shorter answers with `overlong`",
        source="DAPO (arXiv 2503.14476, section 3.4) shows that rewards of cut-off answers destabilise training; a few "
        "are normal",
    ),
    Rule(
        name="far_from_base",
        limits=(Limit("loss/kl_to_base_k1", high=3.0),),
        only_if=(Limit("loss/kl_to_base_targets", low=32.0),),
        meaning="the policy says what its base would hardly ever say",
        advice="Read a few rollouts for tricks on the reward; KL to the base in the loss holds the policy back",
        source="a token that the policy chooses has a twentieth of its probability under the base, on average; healthy "
        "runs of the demo reach 1",
    ),
    Rule(
        name="preferences_reversed",
        limits=(Limit("loss/preference_margin", low=-1.0),),
        meaning="the policy clearly prefers the rollouts that earned less",
        advice="Look for rewards with the wrong sign, or use a lower `learning_rate`",
        source="margins start at 0 and grow (DPO, arXiv 2305.18290); at -1 the policy gives the better rollout a "
        "chance of 27 %",
    ),
    Rule(
        name="messages_left_out",
        limits=(Limit("ledger/dropped_messages/template_rewrites_history", high=0.0),),
        meaning="the chat template rewrites these assistant messages, so the policy could never write them as given, "
        "and they were not learnt",
        advice="Give reasoning and tool calls in the fields that the template reads, or split the conversation",
        source="nothing should be left out",
    ),
)


def find_findings(
    metrics: Mapping[str, float], before: Mapping[str, float], *, highs: Mapping[str, float] | None = None
) -> list[Finding]:
    """Findings of a step, in the order of `RULES`.

    Args:
        before: metrics of the step that this one continues; empty for none. Those of a step of another kind
            (supervised or not) are not compared with.
        highs: upper bounds by metric that are set for this step, in place of those of the rules.
    """
    comparable = before if (_IS_RL in before) == (_IS_RL in metrics) else {}
    findings = []
    for rule in RULES:
        if not all(_holds(limit, metrics, comparable) for limit in rule.only_if):
            continue
        limits = [replace(limit, high=(highs or {}).get(limit.metric, limit.high)) for limit in rule.limits]
        values = [(limit, limit.value(metrics, comparable)) for limit in limits]
        seen = [limit.describe(value) for limit, value in values if value is not None and not limit.holds(value)]
        if seen:
            findings.append(Finding(rule, "; ".join(seen)))
    return findings


def _holds(limit: Limit, metrics: Mapping[str, float], before: Mapping[str, float]) -> bool:
    value = limit.value(metrics, before)
    return value is not None and limit.holds(value)
