"""The table of sessions, one-time codes and failed logins: bounded, and everything in it ends."""

from __future__ import annotations

import pytest

from art.errors import AuthenticationError, OverloadedError
from art_page.sessions import (
    CODE_S,
    IDLE_S,
    LONGEST_S,
    MAX_ADDRESSES,
    MAX_CODES,
    MAX_PER_KEY,
    MAX_SESSIONS,
    TRIES,
    TRY_EVERY_S,
    FailedLogins,
    Sessions,
)


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_a_session_that_is_used_lasts_and_one_that_is_not_ends() -> None:
    clock = Clock()
    sessions = Sessions(now=clock)
    text, _ = sessions.open("k")
    for _ in range(3):
        clock.at += IDLE_S - 1
        assert sessions.find(text).key_id == "k"
    clock.at += IDLE_S
    with pytest.raises(AuthenticationError):
        sessions.find(text)


def test_no_session_lasts_for_ever() -> None:
    clock = Clock()
    sessions = Sessions(now=clock)
    text, _ = sessions.open("k")
    while clock.at + IDLE_S / 2 < 1000 + LONGEST_S:
        clock.at += IDLE_S / 2
        sessions.find(text)
    clock.at = 1000 + LONGEST_S
    with pytest.raises(AuthenticationError):
        sessions.find(text)


def test_the_tables_are_bounded_and_the_oldest_goes() -> None:
    sessions = Sessions()
    first, _ = sessions.open("one")
    others = [sessions.open("one")[0] for _ in range(MAX_PER_KEY)]
    with pytest.raises(AuthenticationError):
        sessions.find(first)
    assert sessions.find(others[0])
    for number in range(MAX_SESSIONS):
        sessions.open(f"key-{number}")
    assert len(sessions._sessions) == MAX_SESSIONS
    codes = [sessions.make_code("k")[0] for _ in range(MAX_CODES + 1)]
    assert len(sessions._codes) == MAX_CODES
    with pytest.raises(AuthenticationError):
        sessions.redeem(codes[0])
    assert sessions.redeem(codes[-1]) == "k"


def test_a_code_works_once_and_for_a_while() -> None:
    clock = Clock()
    sessions = Sessions(now=clock)
    code, until = sessions.make_code("k")
    assert until == clock.at + CODE_S
    assert sessions.redeem(code) == "k"
    with pytest.raises(AuthenticationError, match="was used"):
        sessions.redeem(code)
    code, _ = sessions.make_code("k")
    clock.at += CODE_S
    with pytest.raises(AuthenticationError, match="too old"):
        sessions.redeem(code)


def test_neither_ids_nor_codes_are_kept() -> None:
    sessions = Sessions()
    text, _ = sessions.open("k")
    code, _ = sessions.make_code("k")
    kept = repr(vars(sessions))
    assert text not in kept
    assert code not in kept


def test_failed_logins_of_an_address_are_limited_and_forgotten() -> None:
    clock = Clock()
    failed = FailedLogins(now=clock)
    for _ in range(TRIES):
        failed.check("10.0.0.1")
        failed.note("10.0.0.1")
    with pytest.raises(OverloadedError) as refusal:
        failed.check("10.0.0.1")
    assert 0 < refusal.value.retry_after_s <= TRY_EVERY_S
    failed.check("10.0.0.2")
    clock.at += TRY_EVERY_S
    failed.check("10.0.0.1")
    for number in range(MAX_ADDRESSES + 5):
        failed.note(str(number))
    assert len(failed._addresses) == MAX_ADDRESSES
