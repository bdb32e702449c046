from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art.engine import GenerateRequest
from art.engines.torch.sampler import Cut, Sampled, cut_of, sample, token_logprobs, truncate, uniforms


def cuts(top_ps: list[float]) -> list[Cut | None]:
    return [Cut(top_p) if top_p < 1 else None for top_p in top_ps]


def draw(
    logits: torch.Tensor, u: list[float], temperature: float = 1.0, top_p: float = 1.0, num_top: int = 0
) -> Sampled:
    n = len(logits)
    return sample(logits, np.array(u), [temperature] * n, cuts([top_p] * n), [num_top] * n)


def test_uniforms_depend_on_seed_and_index_only() -> None:
    together = uniforms([1, 2, 2**64 - 1], [0, 5, 2**40])
    alone = [float(uniforms([s], [i])[0]) for s, i in ((1, 0), (2, 5), (2**64 - 1, 2**40))]
    assert together.tolist() == alone
    assert (together >= 0).all()
    assert (together < 1).all()


def test_uniforms_are_uniform_and_independent() -> None:
    grid = np.array([uniforms([seed] * 500, range(500)) for seed in range(200)])
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(grid.var() - 1 / 12) < 0.002
    for shifted in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1)):  # neighbouring seeds and indices
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 0.015
    assert len(np.unique(grid)) == grid.size


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.4)])
def test_frequencies_and_logprobs_are_those_of_the_distribution(temperature: float, top_p: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    probs = torch.softmax(logits / temperature, 0)
    order = probs.argsort(descending=True)
    nucleus = order[: int((probs[order].cumsum(0) < top_p).sum()) + 1]  # the smallest set of at least that mass
    want = torch.zeros(12)
    want[nucleus] = probs[nucleus] / probs[nucleus].sum()
    n = 20_000
    drawn = draw(logits.expand(n, -1), uniforms([3] * n, range(n)).tolist(), temperature, top_p)
    counts = torch.bincount(torch.tensor(drawn.token_ids), minlength=12) / n
    assert float((counts - want).abs().max()) < 0.015
    assert drawn.logprobs == pytest.approx([math.log(want[t]) for t in drawn.token_ids], abs=1e-5)


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20),
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0, 1, exclude_min=True),
)
@settings(max_examples=60, deadline=None)
def test_any_draw_is_a_possible_token(logits: list[float], u: float, temperature: float, top_p: float) -> None:
    drawn = draw(torch.tensor([logits]), [u], temperature, top_p)
    assert 0 <= drawn.token_ids[0] < len(logits)
    assert -200 < drawn.logprobs[0] <= 1e-6


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_masked_tokens_are_never_drawn(u: float) -> None:
    inf = math.inf
    drawn = draw(torch.tensor([[-inf, 1.0, -inf, 1.0, -inf]]), [u])
    assert drawn.token_ids[0] in (1, 3)
    assert drawn.logprobs[0] == pytest.approx(math.log(0.5))


def test_greedy_reports_the_unscaled_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    greedy = GenerateRequest(
        request_id="r", adapter=None, prompt_token_ids=[1], max_tokens=1, stop_token_ids=(), seed=0,
        temperature=0.0, top_p=0.1, top_k=1,
    )  # fmt: skip
    drawn = sample(logits, np.array([0.99, 0.99]), [0.0, 0.0], [cut_of(greedy), None], [0, 0])
    assert drawn.token_ids == [1, 0]
    assert drawn.logprobs == pytest.approx([float(logits[0].log_softmax(0)[1]), float(logits[1].log_softmax(0)[0])])


@pytest.mark.parametrize("top_p", [1e-9, 2e-49])
def test_a_tiny_top_p_leaves_the_best_token(top_p: float) -> None:
    drawn = draw(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), [0.9, 0.999], top_p=top_p)
    assert (drawn.token_ids, drawn.logprobs) == ([1, 0], [0.0, 0.0])


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    drawn = draw(torch.tensor([[40.0, -3.0, 41.0]]), [0.999], temperature)
    assert (drawn.token_ids, drawn.logprobs) == ([2], [0.0])


def test_rows_keep_their_own_settings() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    u, temperatures, top_ps, tops = (
        [0.1, 0.9, 0.5, 0.7, 0.3],
        [1.0, 0.0, 0.3, 2.0, 1.0],
        [1.0, 1.0, 0.95, 0.9, 1.0],
        [0, 1, 2, 0, 3],
    )
    together = sample(logits, np.array(u), temperatures, cuts(top_ps), tops)
    for i in range(5):
        alone = sample(logits[i : i + 1], np.array(u[i : i + 1]), [temperatures[i]], cuts([top_ps[i]]), [tops[i]])
        assert together.token_ids[i] == alone.token_ids[0]
        assert together.logprobs[i] == pytest.approx(alone.logprobs[0], abs=1e-6)
        assert len(together.top_logprobs[i]) == tops[i]


def test_top_logprobs_are_the_best_that_can_be_drawn() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    (top,) = draw(logits, [0.5], num_top=3).top_logprobs
    assert [t for t, _ in top] == [1, 2, 0]
    assert [lp for _, lp in top] == pytest.approx(logits[0].log_softmax(0)[[1, 2, 0]].tolist(), abs=1e-6)
    (top,) = draw(logits, [0.5], top_p=0.7, num_top=3).top_logprobs
    assert [t for t, _ in top] == [1, 2]
    assert sum(math.exp(lp) for _, lp in top) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_show_in_the_logprob_of_their_row_only(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = bad
    drawn = draw(logits, [0.3, 0.3], temperature, top_p=0.9)
    assert not math.isfinite(drawn.logprobs[0])
    assert drawn.logprobs[1] == pytest.approx(math.log(0.25))


def test_token_logprobs() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([0, 5, 29, 3, 3, 1])
    want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
    assert token_logprobs(logits, targets) == pytest.approx(want, abs=1e-6)


def reference_cut(probs: torch.Tensor, cut: Cut) -> list[int]:
    """The kept tokens of one row, step by step."""
    order = probs.argsort(descending=True, stable=True).tolist()
    if cut.top_k:
        order = order[: cut.top_k]
    total, before, nucleus = float(probs[order].double().sum()), 0.0, []
    for token in order:
        if not nucleus or before < cut.top_p * total:
            nucleus.append(token)
        before += float(probs[token])
    return sorted(t for t in nucleus if probs[t] >= cut.min_p * probs[order[0]])


@pytest.mark.parametrize("vocab_size", [40, 6000])
@pytest.mark.parametrize(
    "cut",
    [
        Cut(top_k=3),
        Cut(top_k=2000),
        Cut(min_p=0.1),
        Cut(min_p=1.0),
        Cut(min_p=1e-9),
        Cut(top_p=0.9),
        Cut(top_p=0.6, top_k=7),
        Cut(top_p=0.8, top_k=20, min_p=0.2),
        Cut(top_p=0.999, min_p=1e-4),
    ],
    ids=str,
)
def test_what_was_kept_is_reported_and_is_what_was_drawn_from(vocab_size: int, cut: Cut) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    logits[1, ::2] = -math.inf  # as a grammar does
    probs = logits.softmax(dim=-1)
    left, kept = truncate(probs, [cut, cut, None])
    assert (left[2] == probs[2]).all()
    for row in (0, 1):
        want = reference_cut(probs[row], cut)
        possible = (probs[row] > 0).nonzero()[:, 0].tolist()
        assert kept.get(row, possible) == want
        assert (row in kept) == (len(want) < len(possible))
        assert (left[row] > 0).nonzero()[:, 0].tolist() == want
        assert left[row][want].tolist() == pytest.approx((probs[row][want] / probs[row][want].sum()).tolist(), rel=1e-5)


def test_a_draw_reports_the_kept_tokens_of_its_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    drawn = sample(logits, np.array([0.5] * 3), [1.0] * 3, [None, Cut(top_k=2), Cut(top_k=4)], [0, 4, 0])
    assert drawn.kept == {1: [2, 3]}
    assert [t for t, _ in drawn.top_logprobs[1]] == [3, 2]
    assert drawn.logprobs[1] == pytest.approx(float(logits[0, 2:].log_softmax(0)[drawn.token_ids[1] - 2]), abs=1e-6)
