"""The word game's rules, words and scripted players, by hand-made cases."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from art_tasks.codenames.codenames_task import split_of
from art_tasks.codenames.game import CodenamesGame, Kind, TeamClue, TeamTurn, WordBoard
from art_tasks.codenames.lexicon import load_lexicon, read_themes
from art_tasks.codenames.match import ScriptedPlayer, board_text, key_text, play_turn, read_board, read_key

CARDS: dict[str, Kind] = {
    "horse": "ours", "wave": "theirs", "cow": "ours", "ice cream": "neutral", "knife": "assassin", "coral": "theirs",
}  # fmt: skip


def game(max_turns: int = 3, **cards: Kind) -> CodenamesGame:
    return CodenamesGame(WordBoard(cards or CARDS, "us"), max_turns=max_turns)


def turn(of: CodenamesGame, number: int = 2, team: str = "us") -> TeamTurn:
    of.turns.append(TeamTurn(team, TeamClue("farm", number)))  # type: ignore[arg-type]
    return of.turns[-1]


@pytest.mark.parametrize("answer", ["farm 2", "Farm, 2", "farm: 2.", "I think of animals.\n farm 2 "])
def test_clues_are_read_with_and_without_punctuation(answer: str) -> None:
    assert game().read_clue(answer) == TeamClue("farm", 2)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "not one word and a number"),
        ("farm", "not one word and a number"),
        ("farm animals 2", "not one word and a number"),
        ("f4rm 2", "not one word of letters"),
        ("2 farm", "not one word and a number"),
        ("farm 0", "not from 1 to 2"),
        ("farm 3", "not from 1 to 2"),
        ("horse 1", "'horse' is on the board"),
        ("horses 1", "parts of one another"),
        ("hors 1", "parts of one another"),
        ("ice 1", "parts of one another"),
        ("creamy 1", "parts of one another"),
        ("x" * 500 + " 1 2 3", "not one word and a number"),
    ],
)
def test_clues_against_the_rules_are_refused_with_a_reason(answer: str, why: str) -> None:
    clue = game().read_clue(answer)
    assert isinstance(clue, str)
    assert why in clue
    assert len(clue) < 150


def test_a_clue_may_name_a_word_that_is_no_longer_hidden() -> None:
    played = game()
    played.guess(turn(played), "horse")
    assert played.read_clue("horse 1") == TeamClue("horse", 1)


def test_allowed_clues_are_the_only_ones() -> None:
    played = CodenamesGame(WordBoard(CARDS, "us"), max_turns=1, allowed_clues=frozenset({"farm", "sea"}))
    assert played.read_clue("sea 1") == TeamClue("sea", 1)
    assert played.read_clue("farms 1") == "the clue 'farms' is not one of the allowed clues"


def test_a_guess_is_a_hidden_word_or_a_pass_after_the_first() -> None:
    played = game()
    mine = turn(played)
    assert played.read_guess("pass", mine) is None
    assert [played.read_guess(text, mine) for text in ("cow", ' "Cow". ', "Ice  cream", "ice cream")] == [
        "cow", "cow", None, "ice cream",
    ]  # fmt: skip
    assert played.guess(mine, "cow")
    assert played.read_guess("pass", mine) == "pass"
    assert [played.read_guess(text, mine) for text in ("cow", "pig", "", "horse wave")] == [None] * 4


def test_a_turn_has_one_guess_more_than_its_number() -> None:
    played = game(max_turns=9, a="ours", b="ours", c="ours", d="theirs")
    mine = turn(played, number=1)
    assert played.guess(mine, "a")
    assert not played.guess(mine, "b")
    assert (played.outcome, played.own_found) == (None, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("team", "words", "outcome"),
    [
        ("us", ["horse", "cow"], "win"),
        ("us", ["knife"], "assassin"),
        ("us", ["ice cream"], None),
        ("us", ["wave"], None),
        ("them", ["wave", "coral"], "loss"),
        ("them", ["knife"], "win"),
        ("them", ["horse"], None),
    ],
)
def test_how_games_end(team: str, words: list[str], outcome: str | None) -> None:
    played = game()
    one = turn(played, team=team)
    more = [played.guess(one, word) for word in words]
    assert played.outcome == outcome
    assert more == [True] * (len(words) - 1) + [False]


def test_the_last_turn_ends_the_game() -> None:
    played = game(max_turns=1)
    played.guess(turn(played), "wave")
    assert played.outcome is None
    played.end_turn()
    assert played.outcome == "turn_limit"


def test_texts_can_be_read_back() -> None:
    played = game()
    mine = turn(played)
    played.guess(mine, "cow")
    hidden = [word for word in CARDS if word != "cow"]
    assert board_text(played, mine).startswith("cow: yours\nboard:\nhorse\n")
    assert read_board(board_text(played, mine)) == (TeamClue("farm", 2), 1, hidden)
    turn(played, number=1, team="them").guesses.append(("ice cream", "neutral"))
    asked = key_text(played)
    assert asked.startswith("your team: farm 2, cow (yours)\nthe other team: farm 1, ice cream (neutral)\nyours:\n")
    assert read_key(asked) == {word: CARDS[word] for word in hidden}


def test_the_split_depends_on_kinds_and_not_on_their_order() -> None:
    boards = [WordBoard(dict(zip("abcdefgh", kinds, strict=True)), "us") for kinds in _kinds(200)]
    splits = Counter(map(split_of, boards))
    assert splits["train"] > 100
    assert min(splits.values()) > 5
    for board in boards[:20]:
        assert split_of(WordBoard(dict(reversed(board.cards.items())), "us")) == split_of(board)


def _kinds(count: int) -> list[list[Kind]]:
    rng = random.Random(0)
    return [rng.choices(["ours", "theirs", "neutral", "assassin"], k=8) for _ in range(count)]


def test_the_words_of_a_theme_are_related_and_clues_are_no_board_words() -> None:
    lexicon = load_lexicon()
    assert len(lexicon.words) > 400
    assert not {clue for _, clues, _ in read_themes() for clue in clues} & {*lexicon.words}
    themes_of = {word: [name for name, words in lexicon.themes.items() if word in words] for word in lexicon.words}
    for name, words in lexicon.themes.items():
        strangers = [word for word in lexicon.words if not any(name == other for other in themes_of[word])]
        inside, outside = lexicon.relatedness(name, words), lexicon.relatedness(name, strangers)
        assert inside.min() > 0.45 > 0.2 > outside.max(), name
    bark = lexicon.relatedness("bark", ["pine", "dog", "coin"])
    assert bark[0] > 0.4 < bark[1]
    assert bark[2] < 0.1
    cosines = lexicon.relatedness("farm", ["horse", "shepherd", "dog", "wave"])
    assert list(cosines) == sorted(cosines, reverse=True)
    norms = [float(np.linalg.norm(vector)) for vector in lexicon.vectors.values()]
    assert norms == pytest.approx([1.0] * len(norms), abs=1e-5)


def test_a_scripted_team_of_full_skill_knows_what_connects_words() -> None:
    lexicon = load_lexicon()
    player = ScriptedPlayer(lexicon=lexicon, rng=random.Random(0), skill=1.0)
    cards: dict[str, Kind] = {
        "horse": "ours", "cow": "ours", "goat": "ours", "wave": "theirs", "coin": "neutral", "fence": "assassin",
    }  # fmt: skip
    clue = player.give_clue(cards)
    assert clue.number >= 2
    assert min(lexicon.relatedness(clue.word, ["horse", "cow"])) > lexicon.relatedness(clue.word, ["fence"])[0] + 0.14
    assert {player.name_word(clue, list(cards), 0) for _ in range(5)} <= {"horse", "cow", "goat"}
    assert player.name_word(clue, list(cards), clue.number) == "pass"
    assert player.name_word(TeamClue("farm", 3), ["wave", "coin"], 1) == "pass"
    assert player.give_clue(cards, used={clue.word}).word != clue.word


def test_skill_decides_how_many_moves_are_good() -> None:
    lexicon = load_lexicon()
    hits = {}
    for skill in (0.0, 0.5, 1.0):
        player = ScriptedPlayer(lexicon=lexicon, rng=random.Random(1), skill=skill)
        hits[skill] = sum(
            player.name_word(TeamClue("farm", 2), ["wave", "coin", "cow", "dice"], 0) == "cow" for _ in range(400)
        )
    assert 60 < hits[0.0] < 140 < 200 < hits[0.5] < 300 < hits[1.0] == 400


def test_the_other_team_never_names_the_assassin() -> None:
    player = ScriptedPlayer(lexicon=load_lexicon(), rng=random.Random(2), skill=0.0)
    for _ in range(50):
        played = game(max_turns=9, cow="ours", wave="theirs", knife="assassin")
        play_turn(played, "them", player)
        assert "knife" in played.hidden
