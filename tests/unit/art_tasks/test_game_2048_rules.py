"""The rules of 2048: boards made by hand, and laws that hold on every board."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.errors import ConfigError
from art_tasks.game_2048 import (
    INVALID_REWARD,
    MOVES,
    Game2048,
    Game2048Options,
    TileGame,
    add_tile,
    best_move,
    legal_moves,
    points_of,
    reward_parts,
    slide,
)


def board(*rows: str) -> tuple[int, ...]:
    """Exponents of a board of numbers: `board("2 .", ". 4")` is (1, 0, 0, 2)."""
    return tuple(0 if sign == "." else int(sign).bit_length() - 1 for row in rows for sign in row.split())


@pytest.mark.parametrize(
    ("row", "left", "points"),
    [
        (". . . 2", "2 . . .", 0),
        ("2 . . 2", "4 . . .", 4),
        ("2 2 2 2", "4 4 . .", 8),
        ("2 2 2 .", "4 2 . .", 4),
        ("4 2 2 .", "4 4 . .", 4),
        ("4 . 4 8", "8 8 . .", 8),
        ("2 4 2 4", "2 4 2 4", 0),
    ],
)
def test_a_row_slides_and_each_tile_merges_once(row: str, left: str, points: int) -> None:
    free = (". . . .",) * 3
    assert slide(board(row, *free), "left") == (board(left, *free), points)
    mirrored = slide(board(" ".join(row.split()[::-1]), *free), "right")
    assert mirrored == (board(" ".join(left.split()[::-1]), *free), points)


def test_columns_slide_up_and_down() -> None:
    cells = board("2 . .", "2 4 .", "4 . .")
    assert slide(cells, "up").cells == board("4 4 .", "4 . .", ". . .")
    assert slide(cells, "down").cells == board(". . .", "4 . .", "4 4 .")
    three = board("2 . .", "2 . .", "2 . .")
    assert slide(three, "down").cells == board(". . .", "2 . .", "4 . ."), "those that move first merge first"


def test_a_full_board_is_not_the_end_while_tiles_can_merge() -> None:
    assert legal_moves(board("2 4", "2 8")) == ["up", "down"]
    assert legal_moves(board("2 4", "4 2")) == []


cells = st.sampled_from([2, 3, 4, 5]).flatmap(lambda n: st.tuples(*[st.integers(0, 6)] * (n * n)))


@given(cells, st.sampled_from(MOVES))
@settings(max_examples=200, deadline=None)
def test_laws_of_a_move(cells: tuple[int, ...], move: str) -> None:
    slid, points = slide(cells, move)
    total = sum(2**e for e in cells if e)
    assert sum(2**e for e in slid if e) == total, "the sum of the tiles is kept"
    merges = sum(map(bool, cells)) - sum(map(bool, slid))
    assert merges >= 0
    assert (points > 0) == (merges > 0)
    assert max(slid) <= max(cells) + 1
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}[move]
    mirrored = slide(cells[::-1], opposite)
    assert mirrored == (slid[::-1], points), "a board turned by 180 degrees moves the other way"
    again = slide(slid, move)
    assert sum(map(bool, again.cells)) == sum(map(bool, slid)) or points, "what did not meet does not merge later"


@given(cells, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_new_tile_changes_one_free_cell(cells: tuple[int, ...], seed: int) -> None:
    if 0 not in cells:
        return
    added = add_tile(cells, random.Random(seed))
    changed = [i for i in range(len(cells)) if cells[i] != added[i]]
    assert len(changed) == 1
    assert cells[changed[0]] == 0
    assert added[changed[0]] in (1, 2)


def test_the_chance_of_a_4_is_kept() -> None:
    rng = random.Random(0)
    tiles = [max(add_tile((0,) * 4, rng)) for _ in range(4000)]
    assert 0.08 < sum(tile == 2 for tile in tiles) / 4000 < 0.12
    assert sum(map(bool, TileGame(options=Game2048Options(size=3, goal=64), seed=0).cells)) == 2


def test_points_of_a_tile() -> None:
    assert [points_of(tile) for tile in (2, 4, 8, 16)] == [0, 4, 16, 48]


def game(rows: tuple[str, ...]) -> TileGame:
    size = len(rows)
    made = TileGame(options=Game2048Options(size=size, goal=8 if size == 2 else 64), seed=1)
    made.cells = board(*rows)
    return made


def test_a_move_that_changes_nothing_costs_a_turn_and_brings_no_tile() -> None:
    idle = game(("2 .", "4 ."))
    assert not idle.play("left")
    assert (idle.cells, idle.num_moves, idle.num_idle, idle.ending) == (board("2 .", "4 ."), 0, 1, None)
    assert idle.play("right")
    assert idle.idle_in_a_row == 0
    idle.cells = board("2 .", "4 .")
    assert [idle.play("left") for _ in range(4)] == [False] * 4
    assert idle.ending is None
    assert (idle.play("left"), idle.ending) == (False, "idle")


def test_endings() -> None:
    won = game(("4 4", ". ."))
    won.play("left")
    assert (won.ending, won.highest_tile, won.points) == ("goal", 8, 8)
    stuck = game(("2 4 8", "16 32 2", "4 8 2"))
    stuck.play("down")  # merges the right column and leaves one free cell, then none
    assert stuck.ending in ("no_legal_move", None)
    late = game(("2 .", ". ."))
    late.num_moves = late.options.goal - 1
    late.play("right")
    assert late.ending == "out_of_turns"


def test_the_same_moves_meet_the_same_tiles() -> None:
    options = Game2048Options(size=3, goal=64)
    games = [TileGame(options=options, seed=7) for _ in range(2)]
    for move in ("left", "down", "left", "up"):
        assert games[0].play(move) == games[1].play(move)
    assert games[0].cells == games[1].cells != TileGame(options=options, seed=8).cells


def test_the_reward_grows_with_tile_and_points_and_bad_answers_are_below_all() -> None:
    assert reward_parts(2, 0, 64) == {"tile": 0.0, "points": 0.0, "goal": 0.0}
    assert reward_parts(32, 128, 64)["tile"] == pytest.approx(0.4)
    assert sum(reward_parts(64, points_of(64), 64).values()) == pytest.approx(1.0)
    by_tile = [sum(reward_parts(2**k, points_of(2**k), 2048).values()) for k in range(1, 12)]
    assert by_tile == sorted(set(by_tile))
    assert min(by_tile) > INVALID_REWARD


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"goal": 100}, "power of 2"),
        ({"size": 2, "goal": 64}, "does not fit on a board of 2 x 2: its highest possible tile is 32"),
        ({"size": 6}, "size"),
        ({"signs": "mime"}, "signs"),
        ({"sise": 3}, "did you mean 'size'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Game2048(**options)


def test_the_expert_takes_a_win_and_never_an_idle_move() -> None:
    assert best_move(board("4 .", "4 2")) in ("up", "down")
    assert best_move(board("2 .", "4 .")) in ("right", "up", "down")
    with pytest.raises(ValueError, match="empty"):
        best_move(board("2 4", "4 2"))
