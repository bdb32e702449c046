"""Turn the assistant messages of conversations into samples for supervised fine-tuning.

No exchange was recorded for these texts, so here, and only here, text becomes training tokens. Each assistant message
is rendered in the context that the model would see when it writes the message: `prompt = render(messages before)` with
the generation prompt, and the completion is what rendering the message adds. Some templates rewrite history and do not
add the message after that prompt. Such a message cannot be learnt exactly; it is dropped and counted. Prefixes that
samples share merge in the prefix tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from art.errors import NothingTrainableError
from art.gateway.format.renderer import Renderer
from art.protocol.chat import normalize_messages
from art.protocol.samples import TrainingSample
from art.protocol.training import WireHistory, WireTrajectory


def sft_samples(
    trajectories: list[WireTrajectory], renderer: Renderer
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Make one sample per assistant message, and count messages for the metrics (`data/...`, `ledger/...`).

    Raises:
        NothingTrainableError: there is no assistant message that can be learnt.
    """
    made = [
        sample
        for t, trajectory in enumerate(trajectories)
        for h, history in enumerate(trajectory.histories)
        for sample in _history_samples(history, renderer, rollout_id=f"trajectories[{t}]", number=h)
    ]
    samples = [sample for sample in made if sample is not None]
    if not samples:
        raise NothingTrainableError(
            f"no assistant message to learn from in {len(trajectories)} trajectories; `messages_and_choices` must hold "
            "assistant messages after at least one other message"
        )
    metrics = {
        "data/step_num_trajectories": float(len(trajectories)),
        "ledger/retokenised_messages": float(len(samples)),
        "ledger/dropped_messages/template_rewrites_history": float(len(made) - len(samples)),
    }
    return samples, metrics


def _history_samples(
    history: WireHistory, renderer: Renderer, *, rollout_id: str, number: int
) -> Iterator[TrainingSample | None]:
    """A sample for each assistant message after the first message, `None` for one that cannot be learnt exactly."""
    messages = normalize_messages([item["choice"]["message"] if "choice" in item else item for item in history.items])
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        prompt = renderer.render(messages[:i], history.tools)
        completion = renderer.completion(messages[: i + 1], history.tools, prompt)
        if completion is None:
            yield None
            continue
        before, learnt = len(prompt), len(completion)
        yield TrainingSample(
            sample_id=f"{rollout_id}.histories[{number}].messages[{i}]",
            rollout_id=rollout_id,
            token_ids=prompt + completion,
            loss_mask=[False] * before + [True] * learnt,
            sampling_logprobs=[0.0] * (before + learnt),
            advantages=[0.0] * (before + learnt),
            component="sft",
        )
