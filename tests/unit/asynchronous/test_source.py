"""The stream of scenarios: passes in a seeded order, functions, and what names a scenario."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from art.asynchronous.source import Passes, id_of, make_source
from art.config import PipelineConfig
from art.errors import ConfigError


def test_each_pass_has_every_scenario_once_in_an_order_of_its_own() -> None:
    source = make_source(list("abcdefgh"), PipelineConfig(seed=3))
    passes = [[source.at(8 * number + place) for place in range(8)] for number in range(3)]
    assert [{one.pass_number for one in each} for each in passes] == [{0}, {1}, {2}]
    orders = [[one.scenario for one in each] for each in passes]
    assert all(sorted(order) == list("abcdefgh") for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again = make_source(list("abcdefgh"), PipelineConfig(seed=3))
    assert [again.at(position).scenario for position in (20, 3)] == [orders[2][4], orders[0][3]]
    other = make_source(list("abcdefgh"), PipelineConfig(seed=4))
    assert [other.at(position).scenario for position in range(8)] != orders[0]


def test_the_order_of_the_list() -> None:
    source = make_source(["a", "b"], PipelineConfig(shuffle=False))
    assert [(source.at(position).scenario, source.at(position).scenario_id) for position in range(3)] == [
        ("a", "0"), ("b", "1"), ("a", "0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "name"), [({"id": 7}, "7"), (SimpleNamespace(id="x"), "x"), ("text", "3"), ({}, "3")]
)
def test_names(scenario: Any, name: str) -> None:
    assert id_of(scenario, 3) == name


def test_an_identity_tells_lists_apart() -> None:
    def identity(*names: str) -> Any:
        return Passes([{"id": name} for name in names], seed=0, shuffle=True).identity

    assert identity("a", "b") == identity("a", "b")
    assert identity("a", "b") != identity("b", "a")


def test_what_a_function_cannot_have() -> None:
    async def scenario_at(position: int) -> int:
        return position

    with pytest.raises(ConfigError, match="returned a coroutine"):
        make_source(scenario_at, PipelineConfig()).at(0)
    with pytest.raises(ConfigError, match="`shuffle` needs a list"):
        make_source(lambda position: position, PipelineConfig(shuffle=True))
