"""Scripted policies beside which a trained agent is shown: what chance, one fixed answer and a simple rule reach.

    POLICIES["support_desk"].rule.make(task, scenario, rng)(messages, tools)     {"content": "billing"}

They see what an agent sees, the messages of its rollout, and nothing else of the scenario. They play the smaller form
that a tiny model learns, and say how good its figures are: a rule that solves a task shows that it needs no more.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.task import Player, Scenario
from art.tasks.tic_tac_toe import read_board
from art.tasks.yes_no_maybe import REWARDS
from art_tasks.chat_rubric import GIFTS, NAMES
from art_tasks.clue_solver import VICTIM
from art_tasks.codenames.match import message_player, read_key, role_of
from art_tasks.codenames.match import read_board as read_words
from art_tasks.desks.calendar_jobs import CLOSES, DAYS, OPENS
from art_tasks.desks.server_task import Call, field_of
from art_tasks.game_2048 import legal_moves, say_move
from art_tasks.game_2048 import read_board as read_tiles
from art_tasks.mail_search.mail_search_task import call_message
from art_tasks.mail_search.questions import NO_IDEA
from art_tasks.support_desk import DESKS, matters_of

Make = Callable[[Any, Scenario, random.Random], Player]
"""Makes the player of one rollout, from the task, the scenario and a random generator of its own."""
Say = Callable[[Any, str, random.Random], str]
"""What is answered to the last message: its first argument is the task, the second the message's text."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A scripted policy and what it does, in a few words."""

    about: str
    make: Make


@dataclass(frozen=True, slots=True)
class TaskPolicies:
    """The three scripted policies of a task."""

    random: Policy
    """Any answer that keeps to the rules."""
    constant: Policy
    """The best fixed answer, or fixed order of answers, that we know: it reads only which answers are legal."""
    rule: Policy
    """The best script that we know."""


def _say(about: str, say: Say) -> Policy:
    """Make a policy whose answer depends on the last message alone."""

    def make(task: Any, scenario: Scenario, rng: random.Random) -> Player:
        return lambda messages, tools: {"content": say(task, str(messages[-1]["content"]), rng)}

    return Policy(about, make)


def _own(about: str) -> Policy:
    """Take the task's own player, for tasks whose player knows no more than the agent."""
    return Policy(about, lambda task, scenario, rng: task.player(scenario))


# -- games --

_CELLS = "519372846"
_MOVES = ("left", "down", "right", "up")


def _free(board: str) -> list[str]:
    return [str(cell + 1) for cell in read_board(board).free_cells()]


def _legal(task: Any, board: str) -> list[str]:
    return legal_moves(read_tiles(board, task.options))


def _move(task: Any, move: str) -> str:
    return str(say_move(move, task.options.signs)["content"])


def _codenames_constant(task: Any, scenario: Scenario, rng: random.Random) -> Player:
    def answer(messages: Any, tools: Any) -> dict[str, Any]:
        shown = str(messages[-1]["content"])
        if role_of(str(messages[0]["content"])) == "guesser":
            return {"content": read_words(shown)[2][0]}
        board, used = (
            read_key(shown),
            {str(one["content"]).split()[0] for one in messages if one["role"] == "assistant"},
        )
        return {"content": f"{next(clue for clue in task.lexicon.clues if clue not in {*board, *used})} 2"}

    return answer


# -- look-ups and labels --


def _lists(prompt: str) -> list[list[str]]:
    """The possible answers to `where` and `who`."""
    listed = dict(line.split(": ") for line in prompt.partition("Clues:")[0].splitlines())
    return [listed["Rooms"].split(", "), listed["Suspects"].split(", ")]


def _case_answer(words: Sequence[str]) -> str:
    return "\n".join(f"{label}. {word}" for label, word in zip("AB", words, strict=True))


def _desk_of(task: Any, message: str, rng: random.Random) -> str:
    """The desk whose matters of the training split have most words of the last clause, rare words counting more."""
    words = {desk: Counter(" ".join(matters_of(desk, "train")).lower().split()) for desk in DESKS}
    told = re.findall(r"[a-z]+", message.lower().rpartition(" was fine, but ")[2])
    return max(
        DESKS, key=lambda desk: sum(words[desk][w] / sum(c[w] for c in words.values()) for w in told if words[desk][w])
    )


# -- tools --

Step = Callable[[Sequence[str], random.Random], Call]
"""The next call, from the user's message and the results of the calls so far."""


def _calls(about: str, step: Step) -> Policy:
    def make(task: Any, scenario: Scenario, rng: random.Random) -> Player:
        return lambda messages, tools: call_message(
            step([str(one["content"]) for one in messages if one["role"] in ("user", "tool")], rng)
        )

    return Policy(about, make)


def _fixed(about: str, *calls: Call) -> Policy:
    return _calls(about, lambda texts, rng: calls[len(texts) - 1])


def _done(answer: str) -> Call:
    return "complete_task", {"summary": answer}


def _any_value(result: str, rng: random.Random) -> Call:
    """End with any word or number of a result."""
    return _done(rng.choice(re.findall(r"[\w.-]+", result) or ["done"]))


_JOBS: Sequence[tuple[str, Callable[..., Call], str]] = (
    (r"What is the price of (.+)\?", lambda sku: ("get_product", {"sku": sku}), "price"),
    (r"How many of (.+) are in stock\?", lambda sku: ("get_product", {"sku": sku}), "stock"),
    (r"Which category is (.+) in\?", lambda sku: ("get_product", {"sku": sku}), "category"),
    (r"Set the price of (.+) to (\d+)\.", lambda sku, price: ("set_price", {"sku": sku, "price": int(price)}), "price"),
    (
        r"(\d+) of (.+) have arrived\.",
        lambda count, sku: ("change_stock", {"sku": sku, "change": int(count), "reason": "arrived"}), "stock",
    ),
    (
        r"We sold (\d+) of (.+)\.",
        lambda count, sku: ("change_stock", {"sku": sku, "change": -int(count), "reason": "sold"}), "stock",
    ),
    (r"When is the (.+)\?", lambda title: ("search_events", {"text": title}), "start"),
    (r"How many minutes is the (.+)\?", lambda title: ("search_events", {"text": title}), "minutes"),
    (r"First event of (.+) on (.+)\?", lambda who, day: ("list_events", {"day": day, "person": who}), "title"),
    (r"Cancel event (\d+)\.", lambda number: ("cancel_event", {"id": int(number)}), ""),
    (r"Move event (\d+) to (.+)\.", lambda number, start: ("move_event", {"id": int(number), "start": start}), "start"),
)  # fmt: skip
"""What a job of one call says, its call, and the field of the result that answers; `""`: what follows the colon."""


def _job(texts: Sequence[str], rng: random.Random) -> Call:
    match, call, field = next(
        (match, call, field) for pattern, call, field in _JOBS if (match := re.fullmatch(pattern, texts[0]))
    )
    if len(texts) == 1:
        return call(*match.groups())
    return _done(field_of(texts[1], field) if field else texts[1].partition(": ")[2])


def _any_stock_call(texts: Sequence[str], rng: random.Random) -> Call:
    if len(texts) > 1:
        return _any_value(texts[1], rng)
    sku, number = re.findall(r"P-\d+", texts[0])[0], rng.randrange(2, 30)
    change = {"sku": sku, "change": number, "reason": "arrived"}
    return rng.choice(
        [("get_product", {"sku": sku}), ("set_price", {"sku": sku, "price": number}), ("change_stock", change)]
    )


def _any_calendar_call(texts: Sequence[str], rng: random.Random) -> Call:
    if len(texts) > 1:
        return _any_value(texts[1], rng)
    number, day = rng.randrange(1, 7), rng.choice(DAYS)
    move = {"id": number, "start": f"{day} {rng.randrange(OPENS, CLOSES - 1):02}:00"}
    return rng.choice([("list_events", {"day": day}), ("cancel_event", {"id": number}), ("move_event", move)])


def _found(texts: Sequence[str], rng: random.Random) -> Call:
    """Search for topic and attribute, read what is found, and answer its last word."""
    asked = re.fullmatch(r'What is the (.+) of "(.+)"\?', texts[0])
    assert asked is not None, texts[0]
    if len(texts) == 1:
        return "search_emails", {"keywords": [asked[2], asked[1]]}
    hit = re.search(r"\((\d+), ", texts[1])
    if hit is None:
        return "return_final_answer", {"answer": NO_IDEA, "sources": []}
    if len(texts) == 2:
        return "read_email", {"message_id": hit[1]}
    return "return_final_answer", {"answer": texts[2].rstrip(".").split()[-1], "sources": [hit[1]]}


def _any_mail(texts: Sequence[str], rng: random.Random) -> Call:
    """Search for the topic, read any email that is found, and answer any number or that it is not known."""
    if len(texts) == 1:
        return "search_emails", {"keywords": [texts[0].split('"')[1]]}
    hits = re.findall(r"\((\d+), ", texts[1])
    if hits and len(texts) == 2:
        return "read_email", {"message_id": rng.choice(hits)}
    answer = rng.choice([NO_IDEA, str(rng.randrange(10, 100))])
    return "return_final_answer", {"answer": answer, "sources": []}


_LETTER = "{}{}, {} for the {}."

POLICIES: Mapping[str, TaskPolicies] = {
    "calendar": TaskPolicies(
        _calls("any call, any word of its result", _any_calendar_call),
        _fixed("all events, and the answer 60", ("search_events", {"text": ""}), _done("60")),
        _calls("five patterns, one for each kind of job", _job),
    ),
    "chat_rubric": TaskPolicies(
        _say("a letter with any name and gift", lambda task, text, rng: _LETTER.format(
            *rng.choice([("Dear ", rng.choice(NAMES), "many thanks"), ("", rng.choice(NAMES), "thanks")]),
            rng.choice(GIFTS),
        )),
        _say("one polite letter", lambda task, text, rng: _LETTER.format("Dear ", "Ada", "many thanks", "lamp")),
        _say("a polite letter with the second and the last word of the request", lambda task, text, rng:
            _LETTER.format("Dear ", text.split()[1], "many thanks", text.rstrip(".").split()[-1])),
    ),
    "codenames": TaskPolicies(
        Policy("any legal clue and word", lambda task, scenario, rng: message_player(task.lexicon, rng, 0.0)),
        Policy("the first legal clue, the first word of the board", _codenames_constant),
        _own("clues and words by the cosine of their vectors"),
    ),
    "game_2048": TaskPolicies(
        _say("any legal move", lambda task, board, rng: _move(task, rng.choice(_legal(task, board)))),
        _say(f"the first legal move of {', '.join(_MOVES)}", lambda task, board, rng: _move(
            task, next(move for move in _MOVES if move in _legal(task, board))
        )),
        _own("the move to the best board"),
    ),
    "inventory": TaskPolicies(
        _calls("any call with the product, any word of its result", _any_stock_call),
        _fixed("all products, and the answer furniture", ("list_products", {}), _done("furniture")),
        _calls("six patterns, one for each kind of job", _job),
    ),
    "mail_search": TaskPolicies(
        _calls("any email about the topic, any number", _any_mail),
        _fixed("a search, and I don't know", ("search_emails", {"keywords": ["a"]}),
               ("return_final_answer", {"answer": NO_IDEA, "sources": []})),
        _calls("search for the quoted words, read what is found, answer its last word", _found),
    ),
    "support_desk": TaskPolicies(
        _say("any desk", lambda task, text, rng: rng.choice(DESKS)),
        _say(f"always {DESKS[1]}", lambda task, text, rng: DESKS[1]),
        _say("words of the last clause, counted in the training split", _desk_of),
    ),
    "temporal_clue": TaskPolicies(
        _say("any words of the lists", lambda task, text, rng: _case_answer([*map(rng.choice, _lists(text))])),
        _say("the first room, the first suspect", lambda task, text, rng: _case_answer([w[0] for w in _lists(text)])),
        _say("two regular expressions", lambda task, text, rng: _case_answer([
            re.findall(rf"^- {VICTIM} (\w+)$", text, re.M)[0], re.findall(rf"^- {VICTIM} with (\w+)$", text, re.M)[0]
        ])),
    ),
    "tic_tac_toe": TaskPolicies(
        _say("any free cell", lambda task, board, rng: rng.choice(_free(board))),
        _say(f"the first free cell of {_CELLS}", lambda task, board, rng: next(c for c in _CELLS if c in _free(board))),
        _own("the best move against perfect, then random play"),
    ),
    "yes_no_maybe": TaskPolicies(
        _say("any of the three words", lambda task, text, rng: rng.choice([*REWARDS])),
        _say("always maybe", lambda task, text, rng: "maybe"),
        _say("always maybe", lambda task, text, rng: "maybe"),
    ),
}  # fmt: skip
"""The policies of each ready task."""
