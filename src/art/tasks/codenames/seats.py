"""Who answers for a role: the policy, another model, or a scripted player."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from art.errors import ContextLengthError
from art.model import Model
from art.task import Player, derive_seed, sample_answer
from art.tasks.codenames.codenames_options import CodenamesOptions, Role
from art.tasks.codenames.lexicon import Lexicon
from art.tasks.codenames.match import Answer, Seat
from art.tasks.codenames.scripted import ScriptedPlayer
from art.tasks.codenames.wording import read_board, read_key, role_of
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_KEY = "PARTNER_API_KEY"


def model_seat(model: Any, *, seed: int, step: int | None, max_tokens: int) -> Seat:
    """Let a model answer, the policy or another one. Each request of a game has a seed of its own, made from `seed`."""

    async def answer(conversation: Trajectory) -> Answer:
        num_messages = len(conversation.messages_and_choices)
        try:
            choice = await sample_answer(
                model, conversation, step=step, temperature=1.0, max_completion_tokens=max_tokens,
                seed=derive_seed(seed, num_messages),
            )  # fmt: skip
        except Exception as error:
            if getattr(error, "code", None) == ContextLengthError.code and num_messages > 2:
                return Answer("", "the conversation fills the context of the model")
            raise
        cut = f"the answer was cut off after {max_tokens} tokens" if choice.finish_reason == "length" else None
        return Answer(choice.message.content or "", cut)

    return answer


def scripted_seat(player: Player) -> Seat:
    """Let a scripted player answer, as plain messages that are never trained."""

    async def answer(conversation: Trajectory) -> Answer:
        message: Any = player(conversation.messages(), None)
        conversation.messages_and_choices.append(message)
        return Answer(message["content"])

    return answer


def message_player(lexicon: Lexicon, rng: random.Random, skill: float) -> Player:
    """Make a player for both roles that reads what it is told and knows nothing else."""
    player = ScriptedPlayer(lexicon=lexicon, rng=rng, skill=skill)

    def answer(messages: Any, tools: Any = None) -> dict[str, Any]:
        shown = str(messages[-1]["content"])
        if role_of(str(messages[0]["content"])) == "spymaster":
            used = {str(message["content"]).split()[0] for message in messages if message["role"] == "assistant"}
            return {"role": "assistant", "content": str(player.give_clue(read_key(shown), used))}
        clue, num_guesses, hidden = read_board(shown)
        return {"role": "assistant", "content": player.name_word(clue, hidden, num_guesses)}

    return answer


class PartnerModel:
    """Another model in the partner's seat: a name on the server of the trained model, or at an address of its own."""

    def __init__(self, options: CodenamesOptions) -> None:
        self.name = options.partner
        self.elsewhere: Model[Any, Any] | None = None
        if options.partner_url is not None:
            self.elsewhere = Model[Any, Any](
                name="partner", project="codenames", inference_base_url=options.partner_url,
                inference_model_name=options.partner, inference_api_key=os.environ.get(_KEY, "none"),
            )  # fmt: skip

    def seat(self, trained: Any, *, seed: int, max_tokens: int) -> Seat:
        """Let the partner answer in a game of the model `trained`."""
        partner = self.elsewhere or _Neighbour(trained, self.name)
        return model_seat(partner, seed=seed, step=None, max_tokens=max_tokens)


class _Neighbour:
    """A model on the server of another one."""

    def __init__(self, other: Any, name: str) -> None:
        self._other, self._name = other, name

    def openai_client(self) -> AsyncOpenAI:
        client: AsyncOpenAI = self._other.openai_client()
        return client

    def get_inference_name(self, step: int | None = None) -> str:
        return self._name


def partner_role(trained: Role) -> Role:
    return "guesser" if trained == "spymaster" else "spymaster"
