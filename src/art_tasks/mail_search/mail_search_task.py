"""A task with tools: find the answer to a question in a mailbox, and name the emails that state it (ART-E).

    user       What is the hotel for the May trip to Riga?
    assistant  search_emails(keywords=["trip to Riga", "hotel"])
    tool       m62435 | 2026-02-11 08:36 | Omar Varga <...> | News about the May trip to Riga | the **hotel** ...
    assistant  read_email(message_id="m62435")
    tool       ... the hotel for the May trip to Riga is now Calm Otter House, not Red Heron Inn. ...
    assistant  return_final_answer(answer="Calm Otter House", sources=["m62435"])          reward 1.52

`world.py` has the generated mailboxes and the short ones that a tiny model learns with. The reward has parts:

| outcome | reward |
|---|---|
| `correct`: the right answer, or "I don't know" after a search if the mailbox does not tell | 1 |
| `no_idea`: "I don't know", although the mailbox tells, or without a search | 0 |
| `unjudged`: an answer to a user's own question, of which the right answer is not known | 0 |
| `no_answer`: none within the turns | -0.5 |
| `wrong`: any other answer | -1 |
| `protocol_error`: not a valid tool call. The rollout ends, and no other part counts | -1.5 |

| part | adds |
|---|---|
| `found`: the share of the right emails that a search has shown | up to 0.05 |
| `read`: the share of them that were read | up to 0.1 |
| `sources`, if correct: how well the named sources fit, |named and right| / |named or right| | up to 0.3 |
| `turns`, if correct: the share of turns left over | up to 0.1 |
| `made_up`: an id was read or named that no email has | -0.1 |
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from art.errors import ConfigError
from art.task import (
    Conversation,
    Player,
    Scenario,
    Split,
    Task,
    TaskDefaults,
    TaskOptions,
    derive_seed,
    describe_messages,
    take_turn,
)
from art.trajectory import Trajectory
from art_tasks.mail_search.mailbox import TOOLS, Desk, Hit, Search
from art_tasks.mail_search.questions import NO_IDEA, MailQuestion, is_right, numbers_in, plain, says_no_idea
from art_tasks.mail_search.world import World, generate, generate_short

if TYPE_CHECKING:
    from art.model import Model


def read_prompt(prompt: str, questions: Sequence[MailQuestion]) -> MailQuestion:
    """Find the question of a mailbox that a user's prompt asks. If it asks another, its kind is `open`."""
    words = f" {plain(prompt)} "
    same = [question for question in questions if plain(question.text) == plain(prompt)]
    near = [question for question in questions if all(f" {plain(word)} " in words for word in question.keywords)]
    return (same or (near if len(near) == 1 else None) or [MailQuestion(text=prompt, kind="open")])[0]


class MailSearchOptions(TaskOptions):
    """Options of the task `mail_search`."""

    mailbox: Literal["generated", "short"] = "generated"
    """`generated`: realistic mailboxes with threads and corrections. `short`: a dozen one-line emails,
    which a tiny model can learn."""
    max_turns: int = Field(10, ge=2, le=100)
    """Number of assistant messages of a rollout."""
    size: int = Field(1_000, ge=100, le=50_000)
    """Number of emails of a generated mailbox."""

    @model_validator(mode="after")
    def _fits_the_mailbox(self) -> MailSearchOptions:
        if self.mailbox == "short" and self.size != type(self).model_fields["size"].default:
            raise ValueError("size has no effect with mailbox=short; leave it out")
        return self


class ShortOptions(MailSearchOptions):
    """Options of the task `search_emails`, the short form under an older name."""

    mailbox: Literal["short"] = "short"
    """Only `short`. The task `mail_search` has the others."""


OUTCOMES = {
    "correct": 1.0, "no_idea": 0.0, "unjudged": 0.0, "no_answer": -0.5, "wrong": -1.0, "protocol_error": -1.5,
}  # fmt: skip
"""From best to worst; the other parts never change this order. `unjudged`: the right answer is not known."""
FOUND, READ, SOURCES, TURNS, MADE_UP = 0.05, 0.1, 0.3, 0.1, -0.1


@dataclass(frozen=True, slots=True)
class MailVerdict:
    """How good a rollout was."""

    outcome: str
    parts: dict[str, float]
    """What the outcome and each other part add to the reward."""
    why: str

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


def reach_outcome(question: MailQuestion, desk: Desk) -> str:
    """Tell how a rollout ended: a key of `OUTCOMES`."""
    if desk.error is not None:
        return "protocol_error"
    if desk.answer is None:
        return "no_answer"
    if question.kind == "open":
        return "unjudged"
    if says_no_idea(desk.answer):
        return "correct" if question.is_unanswerable and desk.num_searches else "no_idea"
    return "correct" if is_right(question, desk.answer) else "wrong"


def judge(question: MailQuestion, desk: Desk, *, outcome: str, turns_left: float) -> MailVerdict:
    """Give a rollout its reward.

    Args:
        turns_left: share of the turns that were not needed, 0 to 1.
    """
    if outcome == "protocol_error":
        return MailVerdict(outcome, {"outcome": OUTCOMES[outcome]}, f"The rules were broken: {desk.error}.")
    right, is_correct = {*question.sources}, outcome == "correct"
    named = {*desk.sources}
    cited = len(named & right) / len(named | right) if named | right else 1.0
    parts = {
        "outcome": OUTCOMES[outcome],
        "found": FOUND * _share(right, desk.seen),
        "read": READ * _share(right, desk.opened),
        "sources": SOURCES * cited * is_correct,
        "turns": TURNS * turns_left * is_correct,
        "made_up": MADE_UP if desk.num_made_up else 0.0,
    }
    return MailVerdict(outcome, parts, _explain(question, desk, outcome, cited))


def _share(right: set[str], reached: set[str]) -> float:
    return len(right & reached) / len(right) if right else 0.0


def _explain(question: MailQuestion, desk: Desk, outcome: str, cited: float) -> str:
    expected = "that the mailbox does not tell" if question.is_unanswerable else repr(question.answer)
    reasons = {
        "correct": f"The answer {desk.answer!r} is right",
        "no_idea": f"It gave up; right was {expected}" if desk.num_searches else "It gave up without a search",
        "no_answer": f"The turns ended without an answer; right was {expected}",
        "wrong": f"The answer {desk.answer!r} is wrong; right was {expected}",
    }
    if question.kind == "open":
        return "The right answer to this question is not known; let a judge score it."
    told = [reasons[outcome]]
    if outcome == "correct" and cited < 1:
        told.append(
            f"its sources {', '.join(desk.sources) or '(none)'} should be {', '.join(question.sources) or 'none'}"
        )
    if question.sources and outcome != "correct":
        reached = (
            "read" if {*question.sources} <= desk.opened else "found" if {*question.sources} <= desk.seen else "missed"
        )
        told.append(f"the emails that tell were {reached}")
    if desk.num_made_up:
        told.append(f"{desk.num_made_up} ids were made up")
    return "; ".join(told) + "."


_NUM_DRILLED = 4


def best_answer(question: MailQuestion, messages: list[Any]) -> dict[str, Any]:
    """The next assistant message of a player who knows the answer: search, read all sources, answer."""
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn == 0:
        words = question.keywords or question.text.split()
        return call_message(("search_emails", {"keywords": words, "max_results": 20}))
    if turn == 1 and question.sources:
        return call_message(*(("read_email", {"message_id": source}) for source in question.sources))
    answer = question.answer or NO_IDEA
    return call_message(("return_final_answer", {"answer": answer, "sources": question.sources}))


def play_rollout(
    world: World, opening: list[Any], question: MailQuestion, rng: random.Random, skill: float
) -> Conversation:
    """Make a rollout in the short form by a player who takes the right step with probability `skill`, else any."""
    desk = Desk(mailbox=world.mailbox, is_short=True, shows_state=False)
    messages = [*opening]

    def act(name: str, arguments: dict[str, Any]) -> str:
        messages.append(call_message((name, arguments)))
        result = desk.call(name, json.dumps(arguments))
        if not desk.is_over:
            messages.append(_result(result))
        return result

    topic, attribute = question.keywords
    if rng.random() >= skill:
        topic = rng.choice(world.questions).keywords[0]
    hits: list[Hit] = []
    for keywords in ([topic, attribute], [topic])[rng.randrange(2) :]:
        if not hits:
            hits = world.mailbox.search(Search(keywords=keywords))
            act("search_emails", {"keywords": keywords})
    if not hits:
        act("return_final_answer", {"answer": NO_IDEA, "sources": []})
        return Conversation(messages=messages, tools=TOOLS)
    right = [hit.email for hit in hits if hit.email.subject.endswith(attribute)]
    email = right[0] if right and rng.random() < skill else rng.choice(hits).email
    text = act("read_email", {"message_id": email.message_id})
    value = text.rstrip(".").split()[-1]
    act("return_final_answer", {"answer": value, "sources": [email.message_id]})
    return Conversation(messages=messages, tools=TOOLS)


def play_drill(world: World, rng: random.Random) -> Conversation:
    """Make short exchanges that need copying: repeat search results, or call a tool with a word just shown."""
    emails = rng.sample(world.mailbox.all(), _NUM_DRILLED)
    desk = Desk(mailbox=world.mailbox, is_short=True, shows_state=False)
    if rng.random() < 0.3:
        lines = "\n".join(
            desk.call("search_emails", json.dumps({"keywords": email.subject.split(": ")})) for email in emails
        )
        return Conversation(messages=[{"role": "user", "content": lines}, {"role": "assistant", "content": lines}])
    messages: list[Any] = []
    for email in emails:
        topic, attribute = email.subject.split(": ")
        line = desk.call("search_emails", json.dumps({"keywords": [topic, attribute]}))
        answer = {"answer": email.body.rstrip(".").split()[-1], "sources": [email.message_id]}
        asked = {"role": "user", "content": f'What is the {attribute} of "{topic}"?'}
        read = [_result(line), call_message(("read_email", {"message_id": email.message_id}))]
        steps: list[list[dict[str, Any]]] = [
            [asked, call_message(("search_emails", {"keywords": [topic]}))],
            read,
            [*read, _result(email.body), call_message(("return_final_answer", answer))],
        ]
        messages += rng.choice(steps)
    return Conversation(messages=messages)


def call_message(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant message with tool calls, each a name with arguments."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    tool_calls = [{"id": f"call_{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


SCORES = {"supported": 0.9, "no_idea": 0.45, "unsupported": 0.2, "no_answer": 0.3, "protocol_error": 0.05}
CITED = 0.1
"""Added to `supported` if the sources are exactly the emails that support the answer."""
_COMMON = {
    "what", "is", "the", "of", "for", "do", "we", "on", "in", "by", "to", "are", "how", "who", "which", "when", "where",
    "much", "many", "does", "it", "from", "my",
}  # fmt: skip


def score_transcript(messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Score a rollout from 0 to 1, with the reason."""
    question = next(plain(str(message["content"])) for message in messages if message["role"] == "user")
    last = messages[-1]
    if last["role"] != "assistant":  # the result of a tool
        return SCORES["no_answer"], "The rollout ends without an answer."
    try:
        call = last["tool_calls"][-1]["function"]
        final = json.loads(call["arguments"])
        answer, sources = str(final["answer"]), {str(source) for source in final.get("sources", ())}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return SCORES["protocol_error"], "The last message is not a valid call of `return_final_answer`."
    if call["name"] != "return_final_answer":
        return SCORES["protocol_error"], f"The last message calls {call['name']}, which was not answered."
    if says_no_idea(answer):
        return SCORES["no_idea"], "The agent says that it does not know."
    emails = _emails_read(messages)
    supporting = {message_id for message_id, text in emails.items() if _supports(text, question, answer)}
    if not supporting:
        return SCORES["unsupported"], f"No email that was read supports the answer {answer!r}."
    if sources and sources <= supporting:
        return SCORES["supported"] + CITED, f"The answer {answer!r} is in an email that was read and cited."
    return SCORES["supported"], f"The answer {answer!r} is in an email that was read, and not or wrongly cited."


def _emails_read(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Texts of the emails that were read, by id."""
    results = {message["tool_call_id"]: str(message["content"]) for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {
        str(json.loads(call["function"]["arguments"]).get("message_id")): results[call["id"]]
        for call in calls
        if call["function"]["name"] == "read_email" and call["id"] in results
    }


def _supports(text: str, question: str, answer: str) -> bool:
    """Whether an email has the answer and most of the question's words."""
    words = set(question.split()) - _COMMON
    shared = words & set(plain(text).split())
    values = numbers_in(answer) - numbers_in(question)
    stated = values <= numbers_in(text) if values else plain(answer) in plain(text)
    return stated and bool(answer.strip()) and 2 * len(shared) >= len(words) + (len(words) <= 2)


MAILBOXES, SHORT_MAILBOXES = 16, 256
"""Number of mailboxes in each split. A generated one has a question for about four emails, a short one has twelve."""
_SHORT_SYSTEM = f"Answer from the mailbox. If it is not there: {NO_IDEA}"
_SHORT_SYSTEM_OF_PROMPTS = (
    f"Today is {{today:%A}}, {{today}}. {_SHORT_SYSTEM}. Name emails by their subject or their id."
)
_SYSTEM = f"""\
You answer questions about the mailbox of {{owner}}. Today is {{today:%A}}, {{today}}.
Search it, read what you need, and end with return_final_answer within {{max_turns}} turns. Every turn is a tool call.
Facts change, and the newest email counts. Name the ids of the emails that state the answer as its sources.
If the mailbox does not tell, the answer is: {NO_IDEA}. That is better than a guess."""
_DRILLS = 0.5
"""Share of the play that is drills in copying, of which a whole rollout shows a tiny model too little."""


class MailSearch(Task):
    """A task: answer questions about a mailbox with tools that search it and read emails.

    A tiny model learns the short form. It has one token for each word that it knows and cannot read whole emails.
    """

    name: ClassVar[str] = "mail_search"
    description: ClassVar[str] = "answer questions about a mailbox with tools that search it and read emails"
    headline_metric: ClassVar[str] = "correct"
    options_class = MailSearchOptions
    options: MailSearchOptions
    tiny_options: ClassVar[Mapping[str, Any]] = {"mailbox": "short"}
    rubric: ClassVar[str | None] = (
        "The agent answers a question about a mailbox. Best is a right and short answer that one of the emails it read "
        "states, the newest if the fact has changed, with the ids of exactly these emails as sources, in few turns. An "
        'honest "I don\'t know" after a thorough search is worse than a right answer and better than a wrong one. A '
        "guess, an answer that no email supports, and ids that no result showed are bad. Worst are turns that are not "
        "valid tool calls."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=30, groups_per_step=8, num_minibatches=1, warmup_steps=4, play_skill=0.7, warm_start_steps=400,
        tiny_vocab_size=512,
    )  # fmt: skip

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw questions. Splits have different mailboxes."""
        rng = random.Random(derive_seed(self.name, split, seed))
        num_mailboxes = SHORT_MAILBOXES if self.options.mailbox == "short" else MAILBOXES
        inputs: list[dict[str, Any]] = []
        for _ in range(count):
            mailbox = derive_seed("mail_search", split, "mailbox", rng.randrange(num_mailboxes))
            question = rng.choice(self._world(mailbox).questions)
            inputs.append({"mailbox": mailbox, "question": question.model_dump()})
        return [self.scenario(split, seed, index, each) for index, each in enumerate(inputs)]

    def _world(self, mailbox: int) -> World:
        if self.options.mailbox == "short":
            return generate_short(mailbox)
        return generate(mailbox, self.options.size)

    def prompt_scenario(self, prompt: str) -> Scenario:
        """Ask a question of your own about the first test mailbox. The answer is known if it was generated with it."""
        inputs: dict[str, Any] = {"mailbox": derive_seed("mail_search", "test", "mailbox", 0)}
        world = self._world(inputs["mailbox"])
        inputs["question"] = read_prompt(prompt, world.questions).model_dump()
        return Scenario(id=f"{self.label}/prompt", seed=derive_seed(prompt), inputs=inputs)

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        world, question = self._world(scenario.inputs["mailbox"]), MailQuestion(**scenario.inputs["question"])
        is_short = self.options.mailbox == "short"
        desk = Desk(mailbox=world.mailbox, is_short=is_short, shows_state=not question.keywords)
        trajectory = Trajectory(
            messages_and_choices=self._opening(world, question), tools=TOOLS,
            metadata={"scenario_id": scenario.id, "question": question.text},
        )  # fmt: skip
        num_turns = 0
        while not desk.is_over and num_turns < self.options.max_turns:
            calls = await take_turn(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=80 if is_short else 2048,
                seed=derive_seed(scenario.seed, rollout_index, num_turns),
            )  # fmt: skip
            if calls == "context_full":
                break
            num_turns += 1
            if isinstance(calls, str) or not calls:
                desk.fail("the answer was cut off" if calls else "an answer without a tool call")
                break
            for call in calls:
                result = desk.call(call.function.name, call.function.arguments)
                if desk.is_over:
                    break
                message = {"role": "tool", "tool_call_id": call.id, "content": result}
                trajectory.messages_and_choices.append(message)  # type: ignore[arg-type]
        outcome = reach_outcome(question, desk)
        verdict = judge(question, desk, outcome=outcome, turns_left=1 - num_turns / self.options.max_turns)
        right = {*question.sources}
        trajectory.reward = verdict.reward
        trajectory.metrics |= {name: float(name == outcome) for name in OUTCOMES}
        trajectory.metrics |= {f"reward/{part}": value for part, value in verdict.parts.items()}
        trajectory.metrics |= {
            "found": float(bool(right) and right <= desk.seen), "read": float(bool(right) and right <= desk.opened),
            "cited": float({*desk.sources} == right and desk.answer is not None), "num_turns": num_turns,
            "num_searches": desk.num_searches, "num_reads": len(desk.opened),
        }  # fmt: skip
        trajectory.metadata["why"] = verdict.why
        trajectory.metadata["outcome"] = "policy_fault" if outcome == "protocol_error" else "ok"
        trajectory.log(verdict.why)
        return trajectory.finish()

    def _opening(self, world: World, question: MailQuestion) -> list[Any]:
        system = _SYSTEM.format(owner=world.owner, today=world.today, max_turns=self.options.max_turns)
        if self.options.mailbox == "short":
            system = _SHORT_SYSTEM if question.keywords else _SHORT_SYSTEM_OF_PROMPTS.format(today=world.today)
        return [{"role": "system", "content": system}, {"role": "user", "content": question.text}]

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A player who searches, reads the right emails and answers: the best reward in three turns."""
        question = MailQuestion(**scenario.inputs["question"])
        return lambda messages, tools: best_answer(question, list(messages))

    def play(self, rng: random.Random, skill: float) -> Conversation:
        if self.options.mailbox != "short":
            raise ConfigError(
                f"mailbox={self.options.mailbox} is too long for a tiny model; leave it out, or train a real model"
            )
        world = generate_short(derive_seed("mail_search", "train", "mailbox", rng.randrange(SHORT_MAILBOXES)))
        if rng.random() < _DRILLS:
            return play_drill(world, rng)
        question = rng.choice(world.questions)
        return play_rollout(world, self._opening(world, question), question, rng, skill)

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        return score_transcript(messages)

    def render_trajectory(self, trajectory: Trajectory) -> str:
        why = trajectory.metadata.get("why", "unfinished")
        return "\n".join([*describe_messages(trajectory.messages()[1:]), f"{why} Reward {trajectory.reward:.2f}"])


class SearchEmails(MailSearch):
    """The short form under the name that it has in older programs, whatever the base model is."""

    name: ClassVar[str] = "search_emails"
    options_class = ShortOptions
    tiny_options: ClassVar[Mapping[str, Any]] = {}
