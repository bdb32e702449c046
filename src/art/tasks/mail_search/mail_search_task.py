"""A task with tools: find the answer to a question in a mailbox, and name the emails that state it (ART-E).

    user       What is the hotel for the May trip to Riga?
    assistant  search_emails(keywords=["trip to Riga", "hotel"])
    tool       m62435 | 2026-02-11 08:36 | Omar Varga <...> | News about the May trip to Riga | the **hotel** ...
    assistant  read_email(message_id="m62435")
    tool       ... the hotel for the May trip to Riga is now Calm Otter House, not Red Heron Inn. ...
    assistant  return_final_answer(answer="Calm Otter House", sources=["m62435"])          reward 1.52

`reward.py` has the reward, `generated.py` the mailboxes, `enron.py` the loader of the Enron emails, and `short.py` the
form that a tiny model learns.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError
from art.task import (
    Conversation,
    Player,
    Scenario,
    Split,
    Task,
    TaskDefaults,
    derive_seed,
    describe_messages,
    take_turn,
)
from art.tasks.mail_search.enron import open_emails, questions_about
from art.tasks.mail_search.generator.world import World, generate
from art.tasks.mail_search.mailbox import Mailbox
from art.tasks.mail_search.options import MailSearchOptions, ShortOptions, load_checker
from art.tasks.mail_search.play import best_answer, play_drill, play_rollout, score_transcript
from art.tasks.mail_search.prompts import read_prompt
from art.tasks.mail_search.questions import NO_IDEA, Question
from art.tasks.mail_search.reward import OUTCOMES, judge, reach_outcome
from art.tasks.mail_search.short import generate_short
from art.tasks.mail_search.tools import TOOLS, Desk
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

SHORT_MAILBOXES = 256
"""Number of short mailboxes in each split. Each has twelve questions."""
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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options.checker is not None:  # an error in it is reported before anything is loaded
            load_checker(self.options.checker)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw questions. Splits have different mailboxes, or for Enron different questions."""
        rng = random.Random(derive_seed(self.name, split, seed))
        if self.options.mailbox == "enron":
            return self._enron_scenarios(split, rng, seed, count)
        num_mailboxes = SHORT_MAILBOXES if self.options.mailbox == "short" else self.options.mailboxes
        inputs: list[dict[str, Any]] = []
        empty: set[int] = set()
        while len(inputs) < count:
            mailbox = derive_seed("mail_search", split, "mailbox", rng.randrange(num_mailboxes))
            if questions := self._asked(self._world(mailbox)):
                inputs.append({"mailbox": mailbox, "question": rng.choice(questions).model_dump()})
            else:
                empty.add(mailbox)
            if len(empty) == num_mailboxes:
                raise ConfigError(f"no mailbox has a question of level={self.options.level}; use a larger size")
        return [self.scenario(split, seed, index, each) for index, each in enumerate(inputs)]

    def _enron_scenarios(self, split: Split, rng: random.Random, seed: int, count: int) -> list[Scenario]:
        """In training, no question comes twice before all were drawn. A held-out split has each question once."""
        rows = questions_about(self.options.emails, self.options.questions)[split]
        if not rows:
            source = self.options.questions
            raise ConfigError(f"questions={source}: no question in split {split!r} is about these emails")
        inputs: list[dict[str, Any]] = []
        while len(inputs) < (count if split == "train" else min(count, len(rows))):
            inputs += rng.sample(rows, min(len(rows), count - len(inputs)))
        return [self.scenario(split, seed, index, each) for index, each in enumerate(inputs)]

    def _world(self, mailbox: int) -> World:
        if self.options.mailbox == "short":
            return generate_short(mailbox)
        return generate(mailbox, self.options.size, self.options.people)

    def _asked(self, world: World) -> list[Question]:
        return [question for question in world.questions if self.options.level in ("all", question.level)]

    def _open(self, inputs: Mapping[str, Any]) -> World:
        """The mailbox of a scenario."""
        if "inbox" not in inputs:
            return self._world(inputs["mailbox"])
        mailbox = Mailbox(open_emails(self.options.emails).database, inputs["inbox"])
        return World(mailbox, (), inputs["inbox"], datetime.date.fromisoformat(inputs["today"]))

    def prompt_scenario(self, prompt: str) -> Scenario:
        """Ask a question of your own about the first test mailbox. See `prompts.py` for those whose answer is known."""
        if self.options.mailbox == "enron":
            rows = questions_about(self.options.emails, self.options.questions)
            inputs = {**next(row for split in ("test", "val", "train") for row in rows[split])}
        else:
            inputs = {"mailbox": derive_seed("mail_search", "test", "mailbox", 0)}
        world = self._open(inputs)
        inputs["question"] = read_prompt(prompt, world.mailbox, world.questions, world.today).model_dump()
        return Scenario(id=f"{self.label}/prompt", seed=derive_seed(prompt), inputs=inputs)

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        world, question = self._open(scenario.inputs), Question(**scenario.inputs["question"])
        is_short = self.options.mailbox == "short"
        desk = Desk(mailbox=world.mailbox, is_short=is_short, shows_state=not question.keywords)
        trajectory = Trajectory(
            messages_and_choices=self._opening(world, question), tools=TOOLS,
            metadata={"scenario_id": scenario.id, "question": question.text, "level": question.level},
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
        await self._score(trajectory, question, desk, num_turns)
        return trajectory.finish()

    def _opening(self, world: World, question: Question) -> list[Any]:
        system = _SYSTEM.format(owner=world.owner, today=world.today, max_turns=self.options.max_turns)
        if self.options.mailbox == "short":
            system = _SHORT_SYSTEM if question.keywords else _SHORT_SYSTEM_OF_PROMPTS.format(today=world.today)
        return [{"role": "system", "content": system}, {"role": "user", "content": question.text}]

    async def _score(self, trajectory: Trajectory, question: Question, desk: Desk, num_turns: int) -> None:
        outcome = await reach_outcome(question, desk, self.options.checker)
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

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A player who searches, reads the right emails and answers: the best reward in three turns."""
        question = Question(**scenario.inputs["question"])
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
