"""A task with tools: search a mailbox, read an email and answer a question about it. Each step is a tool call.

    user       What is the budget of "opal"?
    assistant  search_emails(keywords=["opal"])        tool  opal: room (31, Bob)
                                                               opal: budget (12, Ann)
    assistant  read_email(message_id=12)                 tool  opal: the budget is 47.
    assistant  return_final_answer(answer="47")          reward 1.2

Your own prompt may also ask for emails by state, sender and date ("Find all unread emails from last week"). The agent
is then told the date, and its search also takes `unread`, `sender`, `since` and `until`.

The reward is 1 for a correct answer, 0 for "I don't know", and -0.25 for a wrong answer or none. An answer that is not
a valid tool call ends the rollout with -0.5. Finding the email in a search adds 0.1, and reading it another 0.1.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed, describe_messages, take_turn
from art.tasks.search_emails_mailbox import TODAY, Email, Filter, Mailbox, open_mailbox
from art.tasks.search_emails_questions import NO_IDEA, Question, question_about, read_question
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

OUTCOMES = {"correct": 1.0, "no_idea": 0.0, "wrong": -0.25, "no_answer": -0.25, "protocol_error": -0.5}
FOUND_BONUS, READ_BONUS = 0.1, 0.1
MAX_TURNS = 6
_SYSTEM = f"Answer from the mailbox. If it is not there: {NO_IDEA}"
_SYSTEM_OF_LISTS = f"Today is {TODAY:%A}, {TODAY}. {_SYSTEM}. Name emails by their subject or their id."
_MAX_COMPLETION_TOKENS = 80
_WITH_TOOLS = 0.2
"""Share of the scripted play that shows the tools, which are most of a conversation's tokens."""
NUM_MAILBOXES = 256
"""Number of mailboxes in each split. Scenarios of one mailbox differ in the question."""
_SKILL = 0.7
"""Probability that a step of the scripted play is the right one."""


def _tool(name: str, required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [required]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_KEYWORDS = {"type": "array", "items": {"type": "string"}}
_DAY = {"type": "string", "format": "date"}
TOOLS: list[Any] = [
    _tool("search_emails", "keywords", keywords=_KEYWORDS),
    _tool("read_email", "message_id", message_id={"type": "integer"}),
    _tool("return_final_answer", "answer", answer={"type": "string"}),
]
LIST_TOOLS: list[Any] = [
    _tool(
        "search_emails", "keywords", keywords=_KEYWORDS, unread={"type": "boolean"}, sender={"type": "string"},
        since=_DAY, until=_DAY,
    ),
    *TOOLS[1:],
]  # fmt: skip
"""Tools for questions about many emails. `TOOLS`, for the training scenarios, takes fewer tokens."""


@dataclass(slots=True)
class Desk:
    """The mailbox tools of one rollout, with the question, the emails that were found and read, and the outcome."""

    mailbox: Mailbox
    question: Question
    outcome: str | None = None
    error: str | None = None
    """Description of an invalid call."""
    _seen: set[Email] = field(default_factory=set)
    """Results of all searches."""
    _read: set[Email] = field(default_factory=set)

    @property
    def lists(self) -> bool:
        """Whether the question is about several emails."""
        return self.question.kind != "value"

    @property
    def found(self) -> bool:
        """Whether the searches have found all emails of the answer."""
        return bool(self.question.emails) and self._seen.issuperset(self.question.emails)

    @property
    def read(self) -> bool:
        """Whether the email whose text contains the answer was read."""
        return bool(self.question.emails) and not self.lists and self._read.issuperset(self.question.emails)

    def call(self, name: str, arguments: str) -> str:
        """Call a tool and return its result. Sets `outcome` when the rollout is over."""
        try:
            values = json.loads(arguments)
        except ValueError:
            return self.fail(f"the arguments of {name} are not valid JSON")
        match name, values:
            case "search_emails", dict() if (results := self._search(values)) is not None:
                self._seen |= {*results}
                return "\n".join(_line(email, with_state=self.lists) for email in results) or "nothing found"
            case "read_email", {"message_id": int(email_id)}:
                email = self.mailbox.read(email_id)
                self._read |= {email} if email is not None else set()
                return "no such email" if email is None else email.body
            case "return_final_answer", {"answer": str(answer)}:
                self.outcome = self.question.judge(answer, self.mailbox)
                return self.outcome
        return self.fail(f"there is no tool {name} with arguments {arguments}")

    def _search(self, arguments: dict[str, Any]) -> list[Email] | None:
        """Search the mailbox; `None` if the arguments are invalid."""
        try:
            condition = Filter.model_validate(arguments)
        except ValueError:
            return None
        is_filtered = condition != Filter()
        keywords = arguments.get("keywords", [] if is_filtered else None)
        if not isinstance(keywords, list) or not all(isinstance(word, str) for word in keywords):
            return None
        return self.mailbox.search(keywords, condition if is_filtered else None)

    def fail(self, error: str) -> str:
        """End the rollout with a protocol error, and return its description."""
        self.outcome, self.error = "protocol_error", error
        return error


class SearchEmails(Task):
    """A task: answer questions about a generated mailbox by tool calls that search it and read emails."""

    name: ClassVar[str] = "search_emails"
    description: ClassVar[str] = "answer questions about a mailbox with tools that search and read it"
    headline_metric: ClassVar[str] = "correct"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=40, groups_per_step=8, num_minibatches=1, schedule="constant", warm_start_steps=400,
        tiny_vocab_size=512,
    )  # fmt: skip

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        rng = random.Random(derive_seed(self.name, split, seed))
        return [
            self.scenario(split, seed, index, {"mailbox": mailbox_seed(split, rng.randrange(NUM_MAILBOXES))})
            for index in range(count)
        ]

    def prompt_scenario(self, prompt: str) -> Scenario:
        """Ask a question of your own about the first test mailbox (see `read_question` for what it understands)."""
        inputs = {"mailbox": mailbox_seed("test", 0), "prompt": prompt}
        return Scenario(id=f"{self.name}/prompt", seed=derive_seed(prompt), inputs=inputs)

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        prompt = scenario.inputs.get("prompt")
        desk = open_desk(scenario.inputs["mailbox"], scenario.seed if prompt is None else prompt)
        trajectory = Trajectory(
            messages_and_choices=_opening(desk.question),
            tools=LIST_TOOLS if desk.lists else TOOLS,
            metadata={"scenario_id": scenario.id},
        )
        num_turns = 0
        while desk.outcome is None and num_turns < MAX_TURNS:
            calls = await take_turn(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=_MAX_COMPLETION_TOKENS,
                seed=derive_seed(scenario.seed, rollout_index, num_turns),
            )  # fmt: skip
            num_turns += 1
            if isinstance(calls, str) or not calls:
                desk.fail("an answer without a tool call")
                break
            for call in calls:
                result = desk.call(call.function.name, call.function.arguments)
                if desk.outcome is not None:
                    break
                message = {"role": "tool", "tool_call_id": call.id, "content": result}
                trajectory.messages_and_choices.append(message)  # type: ignore[arg-type]
        _score(trajectory, desk, num_turns)
        return trajectory

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        """Alternate scripted rollouts and drills in copying, of which a whole rollout shows a tiny model too little."""
        return [_play(rng) if i % 2 else _drill(rng) for i in range(count)]

    def render_trajectory(self, trajectory: Trajectory) -> str:
        lines = describe_messages(trajectory.messages()[1:])
        outcome = next((name for name in OUTCOMES if trajectory.metrics.get(name)), "unfinished")
        return "\n".join([*lines, f"{outcome.replace('_', ' ')}, reward {trajectory.reward:g}"])


def mailbox_seed(split: Split, index: int) -> int:
    return derive_seed("search_emails", split, "mailbox", index)


def open_desk(seed: int, question: int | str) -> Desk:
    """Open a mailbox with a question: the text of a prompt, or the seed by which an email is drawn to ask about."""
    mailbox = open_mailbox(seed)
    if isinstance(question, int):
        return Desk(mailbox, question_about(random.Random(question).choice(mailbox.emails)))
    return Desk(mailbox, read_question(question, mailbox))


def _opening(question: Question) -> list[Any]:
    system = _SYSTEM if question.kind == "value" else _SYSTEM_OF_LISTS
    return [{"role": "system", "content": system}, {"role": "user", "content": question.text}]


def _score(trajectory: Trajectory, desk: Desk, num_turns: int) -> None:
    outcome = desk.outcome or "no_answer"
    trajectory.reward = OUTCOMES[outcome] + FOUND_BONUS * desk.found + READ_BONUS * desk.read
    trajectory.metrics |= {name: float(name == outcome) for name in OUTCOMES}
    trajectory.metrics |= {"found": float(desk.found), "read": float(desk.read), "num_turns": num_turns}
    if desk.error is not None:
        trajectory.log(desk.error)


def _play(rng: random.Random) -> Conversation:
    """Make a rollout of a player who knows the tools but often takes a wrong step."""
    mailbox = open_mailbox(mailbox_seed("train", rng.randrange(NUM_MAILBOXES)))
    target = rng.choice(mailbox.emails)
    desk = Desk(mailbox, question_about(target))
    messages = _opening(desk.question)

    def act(name: str, arguments: dict[str, Any]) -> None:
        messages.append(_call(name, arguments))
        result = desk.call(name, json.dumps(arguments))
        if desk.outcome is None:
            messages.append(_result(result))

    topic = target.topic if rng.random() < _SKILL else rng.choice(mailbox.emails).topic
    keywords = [topic, target.attribute] if rng.random() < 0.5 else [topic]
    act("search_emails", {"keywords": keywords})
    results = mailbox.search(keywords)
    if not results:
        act("search_emails", {"keywords": [topic]})
        results = mailbox.search([topic])
    right = [email for email in results if email.attribute == target.attribute]
    email = right[0] if right and rng.random() < _SKILL else rng.choice(results)
    act("read_email", {"message_id": email.id})
    act("return_final_answer", {"answer": email.value})
    return Conversation(messages=messages, tools=TOOLS if rng.random() < _WITH_TOOLS else None)


def _drill(rng: random.Random) -> Conversation:
    """Make short exchanges that need copying: repeat the lines of a search, or call a tool with a word just shown."""
    mailbox = open_mailbox(mailbox_seed("train", rng.randrange(NUM_MAILBOXES)))
    chosen = rng.sample(mailbox.emails, 4)
    if rng.random() < 0.3:
        lines = "\n".join(map(_line, chosen))
        return Conversation(messages=[{"role": "user", "content": lines}, {"role": "assistant", "content": lines}])
    messages: list[Any] = []
    for email in chosen:
        question = {"role": "user", "content": question_about(email).text}
        steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (question, _call("search_emails", {"keywords": [email.topic]})),
            (_result(_line(email)), _call("read_email", {"message_id": email.id})),
            (_result(email.body), _call("return_final_answer", {"answer": email.value})),
        ]
        messages += rng.choice(steps)
    return Conversation(messages=messages)


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def _line(email: Email, *, with_state: bool = False) -> str:
    """An email as a line of search results."""
    state = f", {email.date}, {'read' if email.is_read else 'unread'}" if with_state else ""
    return f"{email.subject} ({email.id}, {email.sender}{state})"
