"""CPU attention of a few new tokens per row, against float64 attention and the stock model."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headstart.kernels import cpu_attention, prepacked
from headstart.kernels.cpu_attention import few_tokens_attention
from headstart.model.model import Target
from headstart.replay import attention
from headstart.support.compiled import compiler
from headstart.tree.tree import Tree, TreeBatch
from tests.tiny import tiny_model

needs_compiler = pytest.mark.skipif(not compiler(), reason="this machine has no C compiler")


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Allow bfloat16 rounding of the output, or float32 rounding of sums of 80 products and scores up to 100."""
    close = {"rtol": 2**-8, "atol": 1e-4} if found.dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 1e-5}
    torch.testing.assert_close(found.double(), wanted, **close)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "size", "out_size", "window"),
    [
        (torch.bfloat16, 3, 3, 64, 64, 0),
        (torch.float32, 3, 3, 64, 64, 0),
        (torch.float32, 2, 1, 80, 48, 0),
        (torch.bfloat16, 1, 7, 24, 24, 5),
        (torch.bfloat16, 1, 1, 128, 96, 0),
        (torch.float32, 2, 4, 20, 20, 5),
    ],
)
def test_rows_attend_within_their_own_length(
    dtype: torch.dtype, heads: int, groups: int, size: int, out_size: int, window: int, threads: int
) -> None:
    """Ragged rows in a cache with NaN after them, and scores that spread over a hundred nats."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    slots, stores = [1, 2, 5, 6, 33, 40], (size, out_size)
    keys, values = (torch.full((6, heads, 64, wide), float("nan"), dtype=dtype) for wide in stores)
    for row, seen in enumerate(slots):
        keys[row, :, :seen], values[row, :, :seen] = torch.randn(heads, seen, size), torch.randn(heads, seen, out_size)
    queries = (8 * torch.randn(6, heads * groups, 1, size)).to(dtype)
    given = queries, keys[:, :, :40], values[:, :, :40], torch.tensor(slots), size**-0.5
    found = few_tokens_attention(*given, window=window)
    assert found is not None and found.dtype == dtype and found.shape == (6, 1, heads * groups, out_size)
    for row, seen in enumerate(slots):
        first = max(0, seen - window) if window else 0
        parts = (part[row].double() for part in (keys[:, :, first:seen], values[:, :, first:seen]))
        wanted = F.scaled_dot_product_attention(queries[row].double().view(heads, groups, size), *parts)
        check(found[row, 0], wanted.view(heads * groups, out_size))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "tokens", "first"), [(3, 3, 8, 0), (1, 1, 2, 0), (2, 4, 13, 3), (1, 8, 64, 0)]
)
def test_tokens_attend_by_their_masks(dtype: torch.dtype, heads: int, groups: int, tokens: int, first: int) -> None:
    """Transposed queries as in a layer; the split over threads does not change a bit."""
    torch.manual_seed(0)
    seen, size = 100, 32
    keys, values = torch.randn(2, 2, heads, 128, size).to(dtype)[:, :, :, :seen]
    queries = torch.randn(2, tokens, heads * groups, size).to(dtype).transpose(1, 2)
    hidden_TC = torch.rand(1, 1, tokens, seen - first) < 0.4
    hidden_TC[..., -tokens:].diagonal(dim1=2, dim2=3).fill_(False)
    mask = torch.zeros(hidden_TC.shape).masked_fill_(hidden_TC, float("-inf")).to(dtype)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        slots = torch.full((2,), seen)
        found.append(few_tokens_attention(queries, keys, values, slots, 0.3, mask_B1TC=mask, first=first))
    assert found[0] is not None and found[1] is not None and torch.equal(*found)
    in_sight = (part[:, :, first:].double().repeat_interleave(groups, 1) for part in (keys, values))
    wanted = F.scaled_dot_product_attention(queries.double(), *in_sight, attn_mask=mask.double(), scale=0.3)
    check(found[0], wanted.transpose(1, 2))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(24, 80), (15, 21)])
def test_any_head_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """bfloat16 multiplies in pairs, so torch computes odd key sizes."""
    torch.manual_seed(0)
    size, out_size = sizes
    keys, values = torch.randn(1, 2, 40, size).to(dtype), torch.randn(1, 2, 40, out_size).to(dtype)
    queries, slots = torch.randn(1, 2, 3, size).to(dtype), torch.tensor([40])
    mask = torch.full((3, 3), float("-inf")).triu_(1)
    mask = torch.cat([torch.zeros(3, 37), mask], dim=1).to(dtype)[None, None]
    found = few_tokens_attention(queries, keys, values, slots, 0.5, mask_B1TC=mask)
    if size % 2 and dtype == torch.bfloat16:
        assert found is None
        return
    assert found is not None
    given = queries.double(), keys.double(), values.double()
    check(found, F.scaled_dot_product_attention(*given, attn_mask=mask.double(), scale=0.5).transpose(1, 2))


@needs_compiler
@pytest.mark.parametrize(
    ("without", "dtype"),
    [
        *(("amx-tile", torch.bfloat16), ("avx512bf16", torch.bfloat16)),
        *(("avx512f", torch.bfloat16), ("avx512f", torch.float32)),
    ],
)
def test_older_cpus(without: str, dtype: torch.dtype, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without some instructions; products still have the bits of single rows."""
    if platform.machine() != "x86_64":
        pytest.skip("x86 alone has these instructions")
    monkeypatch.setenv("CC", f"{compiler()[0]} -mno-{without}")
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(1, 4, 5, 32).to(dtype), torch.randn(2, 1, 2, 50, 32).to(dtype)
    found = few_tokens_attention(queries, keys, values, torch.tensor([50]), 0.2)
    assert found is not None
    in_sight = (part.double().repeat_interleave(2, 1) for part in (keys, values))
    check(found, F.scaled_dot_product_attention(queries.double(), *in_sight, scale=0.2).transpose(1, 2))
    weight_OI, rows_MI = torch.randn(70, 64).to(dtype), torch.randn(17, 64).to(dtype)
    if not prepacked.can_pack(weight_OI):
        pytest.skip("C for AVX2 and AVX-512")
    packed = prepacked.prepack(weight_OI)
    out = prepacked.product(rows_MI, packed, None)
    check(out, rows_MI.double() @ weight_OI.double().T)
    assert torch.equal(out, torch.cat([prepacked.product(row, packed, None) for row in rows_MI.split(1)]))


@needs_compiler
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"])
def test_trees_match_the_stock_model(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens, then a tree, beyond sliding windows, layer by layer."""
    monkeypatch.setattr("headstart.replay.recorded.group_steps", lambda graph: [])
    target, served = Target(tiny_model(kind)), list[bool]()
    texts = [[(7 * index + row) % 90 + 1 for index in range(9 + 2 * row)] for row in range(rows)]

    def logged(*given: Any, **more: Any) -> Any:
        found = few_tokens_attention(*given, **more)
        served.append(found is not None)
        return found

    monkeypatch.setattr(attention, "few_tokens_attention", logged)
    cache = target.new_cache(rows, 64)
    target.prefill(cache, texts)
    target.forward_tree(cache, TreeBatch.roots([10] * rows))
    cache.commit([[0]] * rows)
    served.clear()
    tree = target.forward_tree(cache, TreeBatch.of([Tree([11, 12, 13, 14], [-1, 0, 0, 2])] * rows)).logits_BTV
    assert served == [True] * target.num_layers
    for text, logits_TV in zip(texts, tree, strict=True):
        for node, path in enumerate(([11], [11, 12], [11, 13], [11, 13, 14])):
            with torch.inference_mode():
                wanted = target.model(torch.tensor([[*text, 10, *path]])).logits[0, -1]
            torch.testing.assert_close(logits_TV[node], wanted, rtol=1e-4, atol=1e-5)  # float32 rounding of two kernels


@needs_compiler
@pytest.mark.parametrize("why", ["softcap", "many tokens"])
def test_unsupported_forwards_use_torch(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("gemma2" if why == "softcap" else "llama"))
    cache = target.new_cache(2, 96)
    target.prefill(cache, [[1, 2, 3], [2, 2, 3, 4]])
    monkeypatch.setattr("headstart.replay.attention.few_tokens_attention", lambda *_, **__: pytest.fail("torch's"))
    tree = Tree.chain_of([5] * 65) if why == "many tokens" else Tree([5], [-1])
    assert target.forward_tree(cache, TreeBatch.of([tree] * 2)).logits_BTV.isfinite().all()


def test_torch_attends_without_a_compiler(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    target = Target(tiny_model("llama"))
    texts = [[1 + row, 2, 3] for row in range(4)]
    cache = target.new_cache(len(texts), 8)
    target.prefill(cache, texts)
    logits = target.forward_tree(cache, TreeBatch.roots([5] * len(texts))).logits_BTV
    with torch.inference_mode():
        wanted = target.model(torch.tensor([[*text, 5] for text in texts])).logits[:, -1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_failing_compiler_is_named_and_skipped(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false --loudly")
    given = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8), torch.tensor([4, 4])
    with pytest.warns(UserWarning, match="false --loudly cannot compile cpu_attention.c"):
        assert not cpu_attention.serves(1, torch.float32, torch.device("cpu"))
    cpu_attention._compiled.cache_clear()
    monkeypatch.delenv("CC")
    assert few_tokens_attention(*given, 1.0) is not None
    assert few_tokens_attention(*(part.half() for part in given[:3]), given[3], 1.0) is None, "no float16"


@needs_compiler
def test_loading_keeps_denormals(nothing_compiled: None) -> None:
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    assert cpu_attention._compiled(torch.float32) is not None
    assert float(torch.tensor(1e-40) * 1) > 0
