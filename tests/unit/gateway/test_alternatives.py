"""The most likely tokens beside each sampled one, recorded where a setting asks for them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from art.gateway.chat import Gateway
from art.record.recorded_answers import pack_alternatives, unpack_alternatives
from art_page.databases import ReadOnlyDatabase
from art_page.rollout_answers import TokensQuery
from art_page.token_paths import join_paths, read_alternatives, read_exchanges
from art_page.tokens import describe_tokens
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import open_bench, user


@pytest.mark.parametrize("fields", [{}, {"stop": ["q"]}, {"logprobs": True, "top_logprobs": 1}], ids=str)
async def test_they_are_recorded_and_shown_and_the_client_gets_what_it_asked_for(
    tmp_path: Path, tokenizer_dir: Path, fields: dict[str, object]
) -> None:
    async with open_bench(tmp_path, tokenizer_dir, engine=FakeEngine(vocab_size=400)) as bench:
        bench.resolver.policy = replace(bench.resolver.policy, adapter=None)
        plain = await bench.chat(user("hi"), seed=7, max_tokens=20, **fields)
        bench.gateway = Gateway(bench.resolver, bench.recorder, num_alternatives=3)
        answer = await bench.chat(user("hi"), seed=7, max_tokens=20, **fields)
        assert answer["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
        assert bench.exchange(plain).alternatives is None
        bench.forget()
        exchange = bench.exchange(answer)  # from the disk
        database = ReadOnlyDatabase(tmp_path / "art.db")
        recorded = read_exchanges(database, [exchange.id])
        best = read_alternatives(database, recorded.values())[exchange.id]
        assert [len(row) for row in best] == [3] * len(exchange.completion_token_ids)
        for token, logprob, row in zip(exchange.completion_token_ids, exchange.sampling_logprobs, best, strict=True):
            assert [x for _, x in row] == sorted((x for _, x in row), reverse=True)
            assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
        paths, length = join_paths([[exchange.id]], recorded), len(exchange.prompt_token_ids)
        shown = describe_tokens(
            paths, None, bench.renderer.tokenizer, TokensQuery(first=length, last=length + 2),
            model=("games", "agent"), alternatives={exchange.id: best},
        )  # fmt: skip
        table = bench.renderer.tokenizer.token_bytes
        expected = [[(token, table[token].decode("utf-8", "replace"), x) for token, x in row] for row in best[:2]]
        assert shown.alternatives == dict(zip((length, length + 1), expected, strict=True))


def test_places_with_fewer_tokens_than_others_keep_what_they_have() -> None:
    rows = [[(7, math.log(0.5)), (9, math.log(0.25))], [(3, 0.0)], []]
    packed = pack_alternatives(rows)
    assert packed is not None
    assert len(packed) == 3 * 2 * 8
    read = unpack_alternatives(packed, 3)
    assert [[token for token, _ in row] for row in read] == [[7, 9], [3], []]
    assert read[0][1][1] == pytest.approx(math.log(0.25), abs=1e-6)
    assert pack_alternatives([]) is None
