"""Compiled FlexAttention has few graphs, the gradients of the reference, and never runs uncompiled unnoticed.

FlexAttention refuses a backward pass on the CPU, where only its own fused kernels lack one: without the refusal, and
traced by torch.compile without code being generated, it runs there too. The slow test generates code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from art.errors import TrainingError
from art.trainer.attention import flex
from art.trainer.attention.flex import FlexKind, compiled_function
from art.trainer.attention.kernel_choice import example_layout
from art.trainer.attention.tree_attention import Formula, TreeLayout, attend_dense, attend_flex

WINDOWS = (None, 100)
LENGTHS = (512, 640, 1024, 512, 768)
CPU = torch.device("cpu")


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """Number of graphs that were compiled since the test began."""
    compiled_function.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    compiled_function.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, and allow a backward pass on the CPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def random_inputs(num_tokens: int, needs_grad: str, num_heads: int = 4) -> list[Tensor]:
    """Query, key and value as models make them. `needs_grad` names those that need a gradient: "qkv", "qv", ""."""
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = []
    for name, heads in zip("qkv", (num_heads, 2, 2), strict=True):
        rows = torch.randn(1, num_tokens, heads * 16, generator=generator).requires_grad_(name in needs_grad)
        heads_first = rows.view(1, num_tokens, heads, 16).transpose(1, 2)
        inputs.append(heads_first if name == "v" else heads_first * 1.5)  # values are views, the others are rotated
    return inputs


def compiled(inputs: list[Tensor], layout: TreeLayout, formula: Formula) -> Tensor:
    query, key, value = inputs
    return attend_flex(query, key, value, layout, formula, compiles=True)


def same_gradients(inputs: list[Tensor], layout: TreeLayout, formula: Formula) -> None:
    """Compare output and gradients with the dense reference."""
    query, key, value = inputs
    found, expected = compiled(inputs, layout, formula), attend_dense(query, key, value, layout, formula)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if leaves := [x for x in inputs if x.requires_grad]:
        weights = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
        pairs = (torch.autograd.grad(out, leaves, weights) for out in (found, expected))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("window", "needs_grad"), [(100, ("qkv", "qv")), (None, ("",))])
def test_a_kind_has_two_graphs(window: int | None, needs_grad: tuple[str, ...], graphs: Callable[[], int]) -> None:
    """Whatever the layouts' lengths, and whichever of the inputs need a gradient."""
    sinks = torch.linspace(-2, 2, 4)
    for num_tokens in LENGTHS:
        layout = example_layout(num_tokens, CPU)
        for names in needs_grad:
            same_gradients(random_inputs(num_tokens, names), layout, Formula(0.3, window, sinks))
    assert graphs() == 2


@pytest.mark.usefixtures("traced")
def test_kinds_do_not_share_the_limit(monkeypatch: pytest.MonkeyPatch, graphs: Callable[[], int]) -> None:
    """Many windows, with and without gradient: 6 functions, each with one graph of the one that it may have."""
    monkeypatch.setattr(flex, "MAX_GRAPHS", 1)
    layout = example_layout(512, CPU)
    for window in (None, 10, 20):
        for names in ("qkv", ""):
            compiled(random_inputs(512, names), layout, Formula(0.3, window))
    assert graphs() == 6


@pytest.mark.usefixtures("traced")
def test_too_many_graphs_are_an_error(monkeypatch: pytest.MonkeyPatch, graphs: Callable[[], int]) -> None:
    monkeypatch.setattr(flex, "MAX_GRAPHS", 3)
    layout = example_layout(512, CPU)
    first, *others = (random_inputs(512, "", num_heads) for num_heads in (2, 4, 6, 8))
    for inputs in (first, *others[:2]):
        compiled(inputs, layout, Formula(0.3, 20))
    with pytest.raises(TrainingError, match=r"compiled FlexAttention 3 times for layers with window 20"):
        compiled(others[2], layout, Formula(0.3, 20))
    assert graphs() == 3


@pytest.mark.usefixtures("traced", "graphs")
def test_running_uncompiled_is_an_error() -> None:
    layout, inputs = example_layout(512, CPU), random_inputs(512, "")
    with torch.compiler.set_stance("force_eager"), pytest.raises(TrainingError, match="without being compiled"):
        compiled(inputs, layout, Formula(0.3))
    with torch._dynamo.config.patch(disable=True), pytest.raises(TrainingError, match="without being compiled"):
        compiled(inputs, layout, Formula(0.3))


@pytest.mark.usefixtures("traced")
def test_it_is_compiled_within_layers_that_are(graphs: Callable[[], int]) -> None:
    """`compile_layers` compiles each decoder layer except for its attention."""
    layout, inputs = example_layout(512, CPU), random_inputs(512, "")

    @torch.compiler.disable
    def attend() -> Tensor:
        return compiled(inputs, layout, Formula(0.3))

    layer: Any = torch.compile(lambda x: torch.sin(attend() + x).cos())
    expected = torch.sin(attend_dense(*inputs, layout, Formula(0.3)) + 1.0).cos()  # type: ignore[call-arg]
    torch.testing.assert_close(layer(torch.ones(())), expected, rtol=1e-4, atol=1e-5)
    assert graphs() >= 1


def test_a_kind_is_compiled_once() -> None:
    first, second = (FlexKind(8, 0.5, needs_grad, False) for needs_grad in (True, False))
    assert compiled_function(first) is compiled_function(FlexKind(8, 0.5, True, False))
    assert compiled_function(first) is not compiled_function(second)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_code_of_a_sliding_window_model_has_the_same_outputs(graphs: Callable[[], int]) -> None:
    for num_tokens in LENGTHS:
        layout = example_layout(num_tokens, CPU)
        for window in WINDOWS:
            same_gradients(random_inputs(num_tokens, ""), layout, Formula(0.3, window))
    assert graphs() == 2 * len(WINDOWS)
