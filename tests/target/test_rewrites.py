"""Rewrites of recorded operators: the operators replaced, and equal results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.kernels.cpu_attention import few_tokens_attention, joined_attention
from headstart.kernels.prepacked import can_pack
from headstart.model.model import Target
from headstart.replay import products, rewrites, tape
from headstart.replay.tape import record
from headstart.support.compiled import compiler
from headstart.tree.tree import TreeBatch
from tests.spies import spy
from tests.standin import CUDA, StandIn
from tests.target.test_captured import TEXTS, captured_by, check_replay, rounds, through_modules
from tests.tiny import tiny_model

needs_compiler = pytest.mark.skipif(not compiler(), reason="this machine has no C compiler")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox"])
def test_other_operators_keep_their_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.replay.rewrites.merge_products", lambda graph, int8: [])
    monkeypatch.setattr("headstart.replay.rewrites.shorten_norms", lambda graph, device: None)
    monkeypatch.setattr("headstart.replay.patch.fits", lambda modules: False)
    monkeypatch.setattr(Target, "_replays_texts", lambda *_: False)  # torch's attention on both sides
    target = Target(tiny_model(kind))
    replayed = rounds(target, 4, 8)
    with through_modules(target):
        expected = rounds(target, 4, 8)
    assert all(map(torch.equal, replayed, expected))


@pytest.mark.parametrize(("kind", "norms"), [("llama", 2), ("qwen3", 4), ("gemma3", 6)])
def test_norms_and_rotations_become_short_calls(kind: str, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(rewrites, "call_c", lambda graph: None)
    for name in ("inverse_rms", "rotated"):
        spy(monkeypatch, rewrites, name, lambda *_, name=name: called.append(name))
    target = Target(tiny_model(kind))
    check_replay(target, 1, 4)
    cache = target.new_cache(1, 20)
    target.prefill(cache, [TEXTS[0][:4]])
    called.clear()
    target.forward_tree(cache, TreeBatch.roots([5]))
    assert called.count("rotated") == 2 * target.num_layers
    assert called.count("inverse_rms") == norms * target.num_layers + 1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("llama", (1, 0, 3, 6, 6, 3)),
        ("qwen3", (1, 0, 3, 6, 6, 3)),
        ("mistral", (1, 0, 3, 6, 6, 3)),
        ("mixtral", (4, 0, 3, 3, 3, 0)),
        ("phi3", (1, 0, 0, 6, 6, 0)),
    ],
)
def test_operators_between_products_run_in_c(kind: str, calls: tuple[int, ...], dtype: torch.dtype) -> None:
    """Counts calls of norms, gates and attention, and of norms, sums and gates fused into products; a batch and a tree
    match the same operators on torch."""
    if rewrites._compiled(dtype) is None:
        pytest.skip("C for AVX2 and AVX-512")
    model = tiny_model(kind).to(dtype)
    in_c = Target(model)
    called = called_by(in_c)
    functions = [getattr(function, "__name__", type(function).__name__) for function, _ in called]
    around = [args[1:] for function, args in called if isinstance(function, products.Merged) and len(args) > 1]
    norms, _, gates, sums = zip(*around, strict=True)
    alone = tuple(functions.count(name) for name in ("normed", "gated", "JoinedSite"))
    assert (*alone, *(len(values) - values.count(None) for values in (norms, sums)), sum(gates)) == calls
    on_torch = Target(tiny_model(kind).to(dtype))
    with mock.patch.object(rewrites, "call_c"):
        on_torch.record()
    # In bfloat16 a sum in another order may round to a neighbouring number, in each of 3 layers.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for rows, width in ((1, 1), (1, 7), (3, 5)):
        for one, other in zip(rounds(in_c, rows, width), rounds(on_torch, rows, width), strict=True):
            torch.testing.assert_close(one, other, **close)


def called_by(target: Target) -> list[tuple[Any, Any]]:
    """Record a target and return the functions and arguments of its tape, before its steps are joined."""

    def calls(made: tape.Tape) -> list[tuple[Any, Any]]:
        return [(node.target, node.args) for node in made.graph.nodes if node.op == "call_function"]

    with pytest.MonkeyPatch.context() as patch:
        called = spy(patch, tape.Tape, "compile", calls)
        target.record()
    return list(called[0])


@needs_compiler
@pytest.mark.parametrize(("normed", "masked"), [(False, False), (True, False), (False, True), (True, True)])
def test_joined_attention(normed: bool, masked: bool) -> None:
    """Results and cache writes match the separate steps: bit-exact without norms, which torch sums in another order."""
    if rewrites._compiled(torch.bfloat16) is None:
        pytest.skip("C for AVX2 and AVX-512")
    torch.manual_seed(0)
    rows, tokens, heads, key_heads, size, first = 2, 3, 4, 2, 32, 2
    joined = torch.randn(rows, tokens, heads + 2 * key_heads, size, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 1, 1, rows * tokens, size, dtype=torch.bfloat16)
    norms = (*torch.randn(2, size, dtype=torch.bfloat16), 1e-5)
    kept = torch.randn(2, rows, key_heads, 20, size, dtype=torch.bfloat16)
    slots = torch.tensor([9, 17])
    mask = {"mask_B1TC": torch.randn(rows, 1, tokens, 17 - first, dtype=torch.bfloat16), "first": first}
    sight: dict[str, Any] = mask if masked else {}
    wanted, parts = kept.clone(), list(joined.split((heads, key_heads, key_heads), dim=2))
    for number in range(2):
        if normed:
            parts[number] = rewrites.normed(parts[number], norms[number], norms[2])
        flat = parts[number].reshape(1, rows * tokens, -1, size).transpose(1, 2)
        turned = rewrites.rotated(flat, cos, sin, size // 2)
        parts[number] = turned.transpose(1, 2).reshape(rows, tokens, -1, size)
    for row, last in enumerate(slots.tolist()):
        for store, part in zip(wanted, parts[1:], strict=True):
            store[row, :, last - tokens : last] = part[row].transpose(0, 1)
    found = few_tokens_attention(parts[0].transpose(1, 2), *wanted, slots, 0.1, **sight)
    got = joined_attention(joined, (cos, sin), heads, *kept, slots, 0.1, norms if normed else None, **sight)
    assert torch.equal(kept, wanted) and found is not None and got is not None and torch.equal(got, found)


@pytest.mark.parametrize(("kind", "norms"), [("llama", 2), ("qwen3", 4)])
def test_norm_is_one_operator_on_a_gpu(kind: str, norms: int) -> None:
    with StandIn():
        target = Target(tiny_model(kind).to(CUDA))
        called = [function for function, _ in called_by(target)]
        assert called.count(rewrites.rms_norm) == norms * target.num_layers + 1
        assert not [function for function in called if getattr(function, "func", None) is rewrites.inverse_rms]
        there = rounds(target, 2, 3)
    for one, other in zip(there, rounds(Target(tiny_model(kind)), 2, 3), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_values_with_other_readers_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    if rewrites._compiled(torch.float32) is None:
        pytest.skip("C for AVX2 and AVX-512")
    call_c = rewrites.call_c

    def with_a_reader(graph: Any) -> None:
        query = next(node for node in graph.nodes if rewrites._part(node) is not None)
        with graph.inserting_after(query):
            tape.call(graph, torch.neg, (query,)).meta["writes"] = True
        call_c(graph)

    monkeypatch.setattr(rewrites, "call_c", with_a_reader)
    target = Target(tiny_model("llama"))
    functions = [type(function) for function, _ in called_by(target)]
    assert (functions.count(rewrites.JoinedSite), functions.count(rewrites.Site)) == (target.num_layers - 1, 1)


@needs_compiler
def test_norms_of_products_run_in_c_and_the_models_splits_stay() -> None:
    if rewrites._compiled(torch.bfloat16) is None:
        pytest.skip("C for AVX2 and AVX-512")
    matrix_OI, weight_O = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()

    def code(recorder: Any, x_TI: Tensor) -> list[Tensor]:
        y_TO = F.linear(x_TI, matrix_OI)
        wide_TO = y_TO.float()
        normed_TO = weight_O * (wide_TO * torch.rsqrt(wide_TO.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x_TI.dtype)
        gate_TO, up_TO = normed_TO.split([32, 32], -1)
        other_TO, more_TO = F.linear(x_TI, matrix_OI).split([32, 32], -1)
        return [F.silu(gate_TO) * up_TO, F.silu(other_TO) * more_TO, normed_TO.to("cpu", torch.float32) * weight_O]

    recorded = record(code, ("x",), lambda count: [torch.ones(count, 32, dtype=torch.bfloat16)], (11, 13))
    rewrites.rewrite(recorded.graph, torch.device("cpu"), packs=True, int8=False)
    functions = [node.target for node in recorded.graph.nodes if node.op == "call_function"]
    assert functions.count(rewrites.normed) == 1 and rewrites.gated not in functions
    x_TI = torch.randn(5, 32).bfloat16()
    # Sums of 32 products of size 1 in another order, rounded to bfloat16.
    torch.testing.assert_close(recorded.compile()(x_TI, 5), code(None, x_TI), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
def test_only_float32_norms_are_rewritten(wide: bool) -> None:
    def code(recorder: Any, x_TE: Tensor) -> list[Tensor]:
        y_TE = (x_TE + 1).float() if wide else x_TE + 1
        return [y_TE * torch.rsqrt(y_TE.pow(2).mean(-1, keepdim=True) + 1e-6)]

    recorded = record(code, ("x",), lambda count: [torch.ones(count, 64, dtype=torch.bfloat16)], (11, 13))
    rewrites.shorten_norms(recorded.graph, torch.device("cpu"))
    assert any(getattr(node.target, "func", None) is rewrites.inverse_rms for node in recorded.graph.nodes) == wide
    x_TE = torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(recorded.compile()(x_TE, 5), code(None, x_TE))


def test_rotations_differ_by_their_tables() -> None:
    """Views of one table of sines, by index or by keyword: each rotation keeps its own."""
    angles_KD = torch.randn(2, 3, 8)

    def code(recorder: Any, x_TD: Tensor) -> list[Tensor]:
        turned_TD = torch.cat((-x_TD[..., 4:], x_TD[..., :4]), dim=-1)
        sums = angles_KD.sum(dim=1), angles_KD.sum(dim=0)[:2]
        tables = angles_KD[:, 0, :], angles_KD[:, 1, :], *sums
        return [x_TD * 2.0 + turned_TD * table_KD[:1] for table_KD in tables]

    recorded = record(code, ("x",), lambda count: [torch.ones(count, 8)], (11, 13))
    rewrites.shorten_rotations(recorded.graph)
    x_TD = torch.randn(5, 8)
    assert all(map(torch.equal, recorded.compile()(x_TD, 5), code(None, x_TD)))


def test_layers_with_one_input_are_merged() -> None:
    target = Target(tiny_model("llama"))
    captured = captured_by(target)
    if not can_pack(torch.zeros(32, 32)):
        assert not captured.products
        return
    assert [product.sizes for product in captured.products[:4]] == [[64, 32, 32], [64], [96, 96], [64]]


def test_large_layers_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MERGED", 1)
    weights = [torch.zeros(4, 4)] * 3
    assert products.Merged.groups(weights, [None, None, torch.zeros(4)]) == [[0], [1], [2]]
