"""Explain a step's metrics in plain words: one finding for each rule of `RULES` that is broken.

    metrics of this step and of those before it --measure_trends--> `trend/...` metrics
    metrics of this step and of the step before --find_findings--> "what was observed: what it means. What to do"

docs/metrics.md is made from the table of rules. Bounds come from papers and tools of the field, or lie well outside of
what healthy runs show: a finding is worth a look, and a healthy step has none. Only steps of reinforcement learning
have trends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from art.config.losses import MASKED_ALARM

WINDOW = 20
"""Number of steps for the trend of the reward, including the current one. In ten steps of 128 rollouts, the rise of a
run that learns often hides in the scatter."""
RUN_STEPS = 1000
"""Most steps that count as the whole run."""


def measure_trends(metrics: Mapping[str, float], earlier: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the trends at a step. Trends for which there are too few steps are left out.

    Args:
        metrics: metrics of the step.
        earlier: metrics of the steps that it continues without a gap, oldest first; up to `RUN_STEPS` - 1 count.
    """
    run = [row for row in [*earlier, metrics][-RUN_STEPS:] if "data/reward_mean" in row]
    rows = [*earlier, metrics][-WINDOW:]
    if any("data/reward_mean" not in row for row in rows):
        return {}
    if len(rows) < WINDOW:
        return {}
    rise, error = _fit_rise([row["data/reward_mean"] for row in rows])
    run_rise, run_error = _fit_rise([row["data/reward_mean"] for row in run])
    rates = [row.get("loss/learning_rate", 0.0) for row in run]

    def mean_share(part: str, whole: str) -> float:
        return statistics.fmean(row.get(part, 0.0) / row[whole] if row.get(whole) else 0.0 for row in rows)

    return {
        "trend/reward_rise": rise,
        "trend/reward_rise_error": error,
        "trend/run_rise": run_rise,
        "trend/run_rise_error": run_error,
        "trend/learning_rate_share": rates[-1] / max(rates) if max(rates) > 0 else 1.0,
        "trend/groups_trainable_share": mean_share("data/step_num_groups_trainable", "data/step_num_groups_submitted"),
        "trend/top_reward_share": mean_share("data/reward_hist/9", "data/step_num_trajectories"),
    }


def _fit_rise(values: Sequence[float]) -> tuple[float, float]:
    """The rise of a line fitted to `values` by least squares, from the first to the last value, and its standard error.

    Example: 0, 1, 2, 3 rise by 3, with an error of 0.
    """
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    mean = statistics.fmean(values)
    spread = math.fsum(place**2 for place in places)
    slope = math.fsum(place * (value - mean) for place, value in zip(places, values, strict=True)) / spread
    residuals = [value - mean - slope * place for place, value in zip(places, values, strict=True)]
    variance = math.fsum(residual**2 for residual in residuals) / (count - 2)
    return slope * (count - 1), math.sqrt(variance / spread) * (count - 1)


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
_LOWEST, _HIGHEST = (f"data/reward_hist/{number}" for number in (0, 9))
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
    "stale_rollouts": Rule(
        limits=(Limit("offpolicy/max_staleness", high=8.0),),
        meaning="some tokens were sampled many steps ago, and the policy has changed since",
        advice="Train on rollouts sooner, or leave out old ones",
        source="the bound of prime-rl; AReaL (arXiv 2505.24298) finds a similar one for a loss that corrects for "
        "staleness",
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
    "many_clipped": Rule(
        limits=(Limit("loss/masked_share", high=0.5),),
        meaning="the loss clipped or dropped this share of the tokens, and nothing is learnt from them",
        advice="Use a lower `learning_rate` or fewer `num_minibatches`, or the default clip bounds if yours are "
        "tighter",
        source="losses that clip single tokens usually clip less than 5 %; GSPO clips far more by design (arXiv "
        "2507.18071), but not most",
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
    "entropy_rose": Rule(
        limits=(Limit("loss/entropy", high=2.0, over=BEFORE),),
        only_if=(Limit(_IS_RL), Limit("loss/entropy", low=1.0), _NOT_FEW),
        meaning="the policy's answers became random in one step",
        advice="Read a few rollouts. If they make no sense, continue from an earlier checkpoint with a lower "
        "`learning_rate`",
        source="in healthy runs of `art demo` a step adds at most a third",
    ),
    "gradient_jumped": Rule(
        limits=(Limit("loss/grad_norm", high=10.0, over=BEFORE),),
        only_if=(Limit("loss/grad_clipped_share", low=0.5), _NOT_FEW),
        meaning="the gradient is much larger than in the step before, and was clipped",
        advice="Look at this step's rewards and advantages (`data/advantage_max`) for outliers",
        source="in healthy runs of `art demo` neighbouring steps differ by at most a factor of 3",
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
    "too_hard": Rule(
        limits=(_FEW_GROUPS,),
        only_if=(Limit(_LOWEST, low=0.75, over=_OF_ROLLOUTS),),
        meaning="most groups had nothing to learn from, because most rollouts get the lowest reward",
        advice="Use easier scenarios, more rollouts per group, rewards for partial success, or start with supervised "
        "fine-tuning",
        source=_FEW_GROUPS_SOURCE,
    ),
    "groups_alike": Rule(
        limits=(_FEW_GROUPS,),
        only_if=(_NOT_SOLVED, Limit(_LOWEST, high=0.75, over=_OF_ROLLOUTS)),
        meaning="most groups had nothing to learn from, because the rollouts of a group all get the same reward",
        advice="Use more rollouts per group. Check whether rollouts differ at all (temperature, random opponents), "
        "and whether the reward depends on the answer",
        source=_FEW_GROUPS_SOURCE,
    ),
    "reward_flat": Rule(
        limits=(Limit("trend/reward_rise", low=1.0, over="trend/reward_rise_error"),),
        only_if=(
            Limit("trend/groups_trainable_share", low=0.5),
            Limit("trend/top_reward_share", high=0.6),
            _NOT_FEW,
            Limit("trend/run_rise", high=2.0, over="trend/run_rise_error"),
            Limit("trend/learning_rate_share", low=0.25),
        ),
        meaning=f"the reward has not risen for {WINDOW} steps, although rewards differ within most groups. Luck may "
        "decide them more than skill",
        advice="Read a few rollouts. If the answers depend on what the model is shown, a higher `learning_rate` or "
        "more rollouts per group may help. If not, teach the model by supervised fine-tuning first. Ignore this if "
        "your rewards only rank the rollouts of a group: such rewards cannot rise",
        source="without learning, the rise exceeds its standard error by chance in one of six cases. The rule is "
        "silent if most rollouts get the highest reward already, if the reward has risen over the whole run by twice "
        "the standard error, and once the learning rate has fallen to a quarter",
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
    "preferences_reversed": Rule(
        limits=(Limit("loss/preference_margin", low=-1.0),),
        meaning="the policy clearly prefers the rollouts with the lower rewards",
        advice="Check whether rewards have the wrong sign, or use a lower `learning_rate`",
        source="margins start at 0 and grow (DPO, arXiv 2305.18290); at -1 the policy gives the better rollout a "
        "chance of 27 %",
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


def find_findings(
    metrics: Mapping[str, float], before: Mapping[str, float], *, highs: Mapping[str, float] | None = None
) -> list[Finding]:
    """Find the rules that a step breaks, in the order of `RULES`.

    Args:
        before: metrics of the step that this one continues, or empty. They are ignored if one of the two steps is
            supervised and the other is not.
        highs: upper bounds for this step that replace those of the rules, by metric.
    """
    comparable = before if (_IS_RL in before) == (_IS_RL in metrics) else {}
    findings = []
    for name, rule in RULES.items():
        if not all(limit.holds(limit.value(metrics, comparable)) for limit in rule.only_if):
            continue
        limits = [replace(limit, high=(highs or {}).get(limit.metric, limit.high)) for limit in rule.limits]
        values = [(limit, limit.value(metrics, comparable)) for limit in limits]
        seen = [limit.describe(value) for limit, value in values if value is not None and not limit.holds(value)]
        if seen:
            findings.append(Finding(name, rule, "; ".join(seen)))
    return findings
