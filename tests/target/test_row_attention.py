"""One new token each of many rows, on one core, against attention in float64 and against the batch's own rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from headstart.target import row_attention
from headstart.target.model import Target
from headstart.tree.tree import Tree, TreeBatch
from tests.tiny import tiny_model

needs_compiler = pytest.mark.skipif(not row_attention.compiler(), reason="this machine has no C compiler")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    row_attention._compiled.cache_clear()
    yield
    row_attention._compiled.cache_clear()


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "size", "out_size", "window"),
    [
        (torch.bfloat16, 3, 3, 64, 64, 0),
        (torch.float32, 3, 3, 64, 64, 0),
        (torch.float32, 2, 1, 80, 48, 0),
        (torch.bfloat16, 1, 7, 24, 24, 5),
        (torch.float32, 2, 4, 20, 20, 5),
    ],
)
def test_rows_find_what_each_of_them_has_in_sight(
    dtype: torch.dtype, heads: int, groups: int, size: int, out_size: int, window: int
) -> None:
    """Ragged rows in a cache with garbage behind them, which no row may see; scores that spread over a hundred nats."""
    torch.manual_seed(0)
    slots, stores = [1, 2, 5, 6, 33, 40], (size, out_size)
    keys, values = (torch.full((6, heads, 64, wide), float("nan"), dtype=dtype) for wide in stores)
    for row, seen in enumerate(slots):
        keys[row, :, :seen], values[row, :, :seen] = torch.randn(heads, seen, size), torch.randn(heads, seen, out_size)
    queries = (8 * torch.randn(6, heads, groups, size)).to(dtype)
    given = queries, keys[:, :, :40], values[:, :, :40], torch.tensor(slots), size**-0.5, window
    found = row_attention.row_attention(*given)
    assert found is not None and found.dtype == dtype and found.shape == (6, heads, groups, out_size)
    for row, seen in enumerate(slots):
        first = max(0, seen - window) if window else 0
        parts = (part[row].double() for part in (queries, keys[:, :, first:seen], values[:, :, first:seen]))
        wanted = F.scaled_dot_product_attention(*parts)
        # The output is rounded to 8 bits, sums of 80 products and scores of up to a hundred are to 24.
        close = {"rtol": 2**-8, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 4e-6}
        torch.testing.assert_close(found[row].double(), wanted, **close)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"])
def test_a_batch_of_many_rows_says_what_its_rows_say_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = Target(tiny_model(kind)), 0
    texts = [[(7 * index + row) % 90 + 1 for index in range(3 + 2 * row)] for row in range(row_attention.ROWS)]
    original = row_attention.row_attention

    def counted(*given: object) -> torch.Tensor | None:
        nonlocal asked
        found = original(*given)  # type: ignore[arg-type]
        asked += found is not None
        return found

    monkeypatch.setattr("headstart.target.attention.row_attention", counted)
    cache = target.new_cache(len(texts), 64)
    target.prefill(cache, texts)
    for token in (10, 11):
        together = target.forward_tree(cache, TreeBatch.roots([token] * len(texts))).logits_BTV
        cache.commit([[0]] * len(texts))
    assert asked == 2 * target.num_layers
    for text, logits_1V in zip(texts, together, strict=True):
        with target.stock() as model, torch.inference_mode():
            wanted = model(torch.tensor([[*text, 10, 11]])).logits[0, -1:]
        torch.testing.assert_close(logits_1V, wanted, rtol=1e-4, atol=1e-5)  # float32 rounding of two kernels


@needs_compiler
@pytest.mark.parametrize("why", ["bits", "threads", "softcap", "few rows", "several tokens"])
def test_other_forwards_go_another_way(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.target.attention.row_attention", lambda *_: pytest.fail("these are torch's"))
    target = Target(tiny_model("gemma2" if why == "softcap" else "llama"), exact="bits" if why == "bits" else "auto")
    if why == "threads":
        torch.set_num_threads(2)
    rows = row_attention.ROWS - (why == "few rows")
    cache = target.new_cache(rows, 16)
    target.prefill(cache, [[1 + row, 2, 3] for row in range(rows)])
    tree = Tree.chain_of([5, 6]) if why == "several tokens" else Tree([5], [-1])
    assert target.forward_tree(cache, TreeBatch.of([tree] * rows)).logits_BTV.isfinite().all()


def test_without_a_compiler_torch_attends(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    target = Target(tiny_model("llama"))
    texts = [[1 + row, 2, 3] for row in range(row_attention.ROWS)]
    cache = target.new_cache(len(texts), 8)
    target.prefill(cache, texts)
    logits = target.forward_tree(cache, TreeBatch.roots([5] * len(texts))).logits_BTV
    with target.stock() as model, torch.inference_mode():
        wanted = model(torch.tensor([[*text, 5] for text in texts])).logits[:, -1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_a_compiler_that_fails_is_named_and_is_no_compiler(
    nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false --loudly")
    given = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8), torch.tensor([4, 4])
    with pytest.warns(UserWarning, match="false --loudly cannot compile row_attention.c"):
        assert row_attention.row_attention(*given, 1.0, 0) is None
    row_attention._compiled.cache_clear()
    monkeypatch.delenv("CC")
    assert row_attention.row_attention(*given, 1.0, 0) is not None
    assert row_attention.row_attention(*(part.half() for part in given[:3]), given[3], 1.0, 0) is None, "no float16"


def test_who_would_be_helped_by_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert row_attention.would_help(torch.bfloat16, cpu)
    assert not row_attention.would_help(torch.float16, cpu)
    assert not row_attention.would_help(torch.bfloat16, torch.device("meta"))
    torch.set_num_threads(4)
    assert not row_attention.would_help(torch.bfloat16, cpu), "two workers of two threads"


@needs_compiler
def test_loading_it_leaves_denormals_as_they_are(nothing_compiled: None) -> None:
    """A library linked with -ffast-math makes a process take them for zero."""
    assert row_attention._compiled(8, 8, 1, torch.float32) is not None
    assert float(torch.tensor(1e-40) * 1) > 0
