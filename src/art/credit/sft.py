"""Turn the assistant messages of conversations into samples for supervised fine-tuning.

No exchange was recorded for these texts, so here, and only here, text becomes training tokens. Each assistant message
is rendered in the context that the model would see when it writes the message: `prompt = render(messages before)` with
the generation prompt, and the completion is what rendering the message adds. Some templates rewrite history and do not
add the message after that prompt. Such a message cannot be learnt exactly; it is dropped and counted.

Messages whose prompt continues the tokens of the message before share one sample, so that a conversation of n messages
takes space in proportion to n, not to n squared. Until the job runs, they wait as packed paths:

    prompt P1, completion C1, prompt P1 C1 P2, completion C2     path: P1 C1 P2 C2, learnt: C1 and C2
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from art.errors import NothingTrainableError, TrajectoryError
from art.gateway.renderer import Renderer
from art.protocol.chat import normalize_messages
from art.protocol.compact import SpanValues
from art.protocol.samples import TrainingSample
from art.protocol.training import WireTrajectory


@dataclass(frozen=True, slots=True)
class SftPath:
    """The tokens of a conversation up to its last learnt message, and which of them are learnt."""

    sample_id: str
    rollout_id: str
    token_ids: str
    """32-bit numbers in base64: a list of numbers takes ten times the memory."""
    learnt: list[tuple[int, int]]
    """Where each learnt message begins and ends."""


def sft_paths(
    trajectories: list[WireTrajectory], renderer: Renderer, *, name: str = "trajectories"
) -> tuple[list[SftPath], dict[str, float]]:
    """Make paths of all assistant messages, and count the messages for the metrics (`ledger/...`).

    Args:
        name: name of the trajectories in the request, for errors and the ids of samples.

    Raises:
        NothingTrainableError: there is no assistant message that can be learnt.
        TrajectoryError: a conversation was sent without its texts.
    """
    paths: list[SftPath] = []
    num_learnt = num_dropped = 0
    for t, trajectory in enumerate(trajectories):
        for h, history in enumerate(trajectory.histories):
            if history.answers is not None:
                raise TrajectoryError(
                    f"{name}[{t}].histories[{h}] names its answers instead of holding `items`; supervised "
                    "fine-tuning learns the texts themselves, so send them as `items`"
                )
            items = [item["choice"]["message"] if "choice" in item else item for item in history.items]
            made: list[tuple[int, list[int], list[tuple[int, int]]]] = []  # first learnt message, tokens, learnt spans
            for index, prompt, completion in renderer.completions(normalize_messages(items), history.tools):
                if completion is None:
                    num_dropped += 1
                    continue
                num_learnt += 1
                # A prompt that continues the last path extends it; another one begins a new path.
                is_continued = bool(made) and prompt[: len(made[-1][1])] == made[-1][1]
                first, _, learnt = made.pop() if is_continued else (index, [], [])
                whole = prompt + completion
                made.append((first, whole, [*learnt, (len(prompt), len(whole))]))
            paths += [
                SftPath(
                    sample_id=f"{name}[{t}].histories[{h}].messages[{first}]",
                    rollout_id=f"{name}[{t}]",
                    token_ids=base64.b64encode(array("I", tokens)).decode(),
                    learnt=learnt,
                )
                for first, tokens, learnt in made
            ]
    if not paths:
        raise NothingTrainableError(
            f"no assistant message to learn from in the {len(trajectories)} trajectories of `{name}`; "
            "`messages_and_choices` must hold assistant messages after at least one other message"
        )
    metrics = {
        "ledger/retokenised_messages": float(num_learnt),
        "ledger/dropped_messages/template_rewrites_history": float(num_dropped),
    }
    return paths, metrics


def sft_samples(paths: Iterable[SftPath], weight: float = 1.0) -> list[TrainingSample]:
    """Unpack paths to what the trainer takes. Their loss is `weight` times the mean over all learnt tokens."""
    samples = []
    for path in paths:
        tokens = np.frombuffer(base64.b64decode(path.token_ids), dtype=np.uint32)
        spans = np.asarray(path.learnt, dtype=np.int64).reshape(-1, 2)
        learnt = np.ones(int((spans[:, 1] - spans[:, 0]).sum()), dtype=np.bool_)
        zeros = SpanValues(len(tokens), spans, np.zeros(len(learnt)))
        samples.append(
            TrainingSample(
                sample_id=path.sample_id,
                rollout_id=path.rollout_id,
                token_ids=SpanValues.whole(tokens),
                loss_mask=SpanValues(len(tokens), spans, learnt),
                sampling_logprobs=zeros,
                advantages=zeros,
                weight=weight,
                share=float(len(learnt)),
                component="sft",
            )
        )
    return samples
