"""Made-up play of the programs in `old_programs/`, so that one tiny model knows the format of each."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

from art.task import Conversation

Load = Callable[[str], ModuleType]
ASKED = ["Is it raining?", "Is it cold?", "Is it late?", "Is it true?"]
"""Inputs of the programs that let a model write them."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def play(load: Load, rng: random.Random) -> list[Conversation]:
    """Conversations of each program; few of those that a judge scores, which need no play to learn from."""
    counts = {
        _2048: 40, _tic_tac_toe: 40, _words: 30, _dilemma: 30, _clue: 30, _rock: 80, _mail: 15, _mcp: 15, _langgraph: 15
    }  # fmt: skip
    found = [conversation for game, count in counts.items() for conversation in islice(game(load, rng), count)]
    rng.shuffle(found)
    return found


def _2048(load: Load, rng: random.Random) -> Iterator[Conversation]:
    game = load("game_2048")
    while True:
        messages, board = [{"role": "system", "content": game.SYSTEM}], game.new_board()
        for _ in range(rng.randint(1, 6)):
            move = rng.choice(["left", "right", "up", "down"])
            messages += [user(game.render(board)), says(f"<move>{move}</move>")]
            game.apply_move(board, move)
        yield Conversation(messages=messages)  # type: ignore[arg-type]


def _tic_tac_toe(load: Load, rng: random.Random) -> Iterator[Conversation]:
    game = load("tic_tac_toe")
    while True:
        mark, cells, board = rng.choice("xo"), rng.sample(game.CELLS, 9), {}
        messages = [{"role": "system", "content": game.SYSTEM.replace("as x", f"as {mark}")}]
        if mark == "o":
            board[cells.pop()] = "x"
        for _ in range(rng.randint(1, 4)):
            cell = cells.pop()
            messages += [user(game.render(board)), says(f"<move>{cell}</move>")]
            board |= {cell: mark, cells.pop(): "xo"[mark == "x"]}
        yield Conversation(messages=messages)  # type: ignore[arg-type]


def _words(load: Load, rng: random.Random) -> Iterator[Conversation]:
    prompts = [*load("yes_no_maybe_2025").PROMPTS, *load("yes_no_maybe_2026").PROMPTS]
    task = {"role": "system", "content": load("auto_rl").TASK}
    while True:
        answer = says(rng.choice(["yes", "no", "maybe"]))
        yield Conversation(messages=[user(rng.choice(prompts)), answer])  # type: ignore[list-item]
        yield Conversation(messages=[task, user(rng.choice(ASKED)), answer])  # type: ignore[list-item]


def _dilemma(load: Load, rng: random.Random) -> Iterator[Conversation]:
    while True:
        messages = [user(load("prisoners_dilemma").RULES)]
        for _ in range(rng.randint(0, 2)):
            said, other = rng.choices(["cooperate", "defect"], k=2)
            messages += [says(said), user(f"The other says: {other}")]
        yield Conversation(messages=[*messages, says(rng.choice(["cooperate", "defect"]))])  # type: ignore[list-item]


def _clue(load: Load, rng: random.Random) -> Iterator[Conversation]:
    puzzles = load("temporal_clue").PUZZLES
    while True:
        answer = f"A. {rng.choice(['red', 'green'])} B. {rng.choice(['hall', 'attic'])}"
        yield Conversation(messages=[user(rng.choice(puzzles)["prompt"]), says(answer)])  # type: ignore[list-item]


def _rock(load: Load, rng: random.Random) -> Iterator[Conversation]:
    program = load("rock_paper_scissors")
    while True:
        messages = [user("Play rock, paper, scissors.")]
        for _ in range(rng.randint(1, 3)):
            mine, theirs = rng.choices(list(program.BEATS), k=2)
            messages += [calls("play_move", move=mine), result(f"they: {theirs}")]
        yield Conversation(messages=messages[:-1], tools=program.TOOLS)  # type: ignore[arg-type]


def _mail(load: Load, rng: random.Random) -> Iterator[Conversation]:
    program = load("mail_search")
    while True:
        messages = [user(rng.choice(program.SCENARIOS)["question"])]
        if rng.random() < 0.5:
            word = rng.choice(["lunch", "budget", "noon"])
            found = [mail for mail in program.MAILS.values() if word in mail]
            messages += [calls("search", word=word), result(json.dumps(found))]
        answer = calls("final_answer", answer=rng.choice(["noon", "ten", "lunch"]))
        yield Conversation(messages=[*messages, answer], tools=program.TOOLS)  # type: ignore[list-item]


def _mcp(load: Load, rng: random.Random) -> Iterator[Conversation]:
    program = load("mcp_rl")
    tools: Any = [tool.to_tool_schema() for tool in program.TOOLS] + [copy.deepcopy(program.complete_task_tool)]
    while True:
        messages = [user(f"Task: {rng.choice(ASKED)}")]
        if rng.random() < 0.5:
            city = rng.choice(["Rome", "Oslo"])
            messages += [calls("weather", city=city), result(f"sunny in {city}")]
        yield Conversation(messages=[*messages, calls("complete_task", summary="done")], tools=tools)  # type: ignore[list-item]


def _langgraph(load: Load, rng: random.Random) -> Iterator[Conversation]:
    from langchain_core.utils.function_calling import convert_to_openai_tool

    program = load("langgraph_mail")
    tools: Any = [convert_to_openai_tool(program.search)]
    while True:
        messages = [user(rng.choice(program.QUESTIONS))]
        if rng.random() < 0.5:
            messages += [calls("search", word=rng.choice(["lunch", "budget"])), result("lunch is at noon")]
        yield Conversation(messages=[*messages, says(rng.choice(["noon", "ten"]))], tools=tools)  # type: ignore[list-item]
