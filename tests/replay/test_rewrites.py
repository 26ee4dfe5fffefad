"""Rewrites of recorded operators: the operators replaced, and equal results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from headstart.kernels.prepacked import can_pack
from headstart.model.model import Target
from headstart.replay import products, recorded, rewrites
from headstart.replay.recorder import call, compile_graph, record
from headstart.tree.tree import TreeBatch
from tests.replay.test_recorded import CLOSE, TEXTS, check_replay, replay_of, rounds, through_modules
from tests.spies import spy
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model

needs_compiler = pytest.mark.skipif(not can_pack(torch.zeros(32, 32)), reason="C for AVX2 and AVX-512")


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
    monkeypatch.setattr(rewrites, "_replace_matches", lambda *_: None)
    for name in ("inverse_rms", "rotate"):
        spy(monkeypatch, rewrites, name, lambda *_, name=name: called.append(name))
    target = Target(tiny_model(kind))
    check_replay(target, 1, 4)
    cache = target.new_cache(1, 20)
    target.prefill(cache, [TEXTS[0][:4]])
    called.clear()
    target.forward_tree(cache, TreeBatch.roots([5]))
    assert called.count("rotate") == 2 * target.num_layers
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
def test_operators_around_products_are_fused(kind: str, calls: tuple[int, ...], dtype: torch.dtype) -> None:
    """Counts calls of norms, gates and attention, and of norms, sums and gates fused into products; a batch and a tree
    match the same operators on torch."""
    model = tiny_model(kind).to(dtype)
    in_c = Target(model)
    called = called_by(in_c)
    functions = [getattr(function, "__name__", type(function).__name__) for function, _ in called]
    around = [args[1:] for function, args in called if isinstance(function, products.MergedLinear) and len(args) > 1]
    norms, _, gates, sums = zip(*around, strict=True)
    alone = tuple(functions.count(name) for name in ("rms_norm_cpu", "silu_gate", "QKVAttention"))
    assert (*alone, *(len(values) - values.count(None) for values in (norms, sums)), sum(gates)) == calls
    on_torch = Target(tiny_model(kind).to(dtype))
    with mock.patch.object(rewrites, "_replace_matches"):
        on_torch.record()
    for rows, width in ((1, 1), (1, 7), (3, 5)):
        torch.testing.assert_close(rounds(in_c, rows, width), rounds(on_torch, rows, width), **CLOSE[dtype])


def called_by(target: Target) -> list[tuple[Any, Any]]:
    """Record a target and return the functions and arguments of its replay, before its steps are grouped."""

    def calls(graph: fx.Graph) -> list[tuple[Any, Any]]:
        return [(node.target, node.args) for node in graph.nodes if node.op == "call_function"]

    with pytest.MonkeyPatch.context() as patch:
        called = spy(patch, recorded, "compile_graph", calls)
        target.record()
    return list(called[0])


@pytest.mark.parametrize(("kind", "norms"), [("llama", 2), ("qwen3", 4)])
def test_norm_is_one_operator_on_a_gpu(kind: str, norms: int) -> None:
    with StandIn():
        target = Target(tiny_model(kind).to(CUDA))
        called = [function for function, _ in called_by(target)]
        assert called.count(rewrites.rms_norm_cuda) == norms * target.num_layers + 1
        assert not [function for function in called if getattr(function, "func", None) is rewrites.inverse_rms]
        there = rounds(target, 2, 3)
    torch.testing.assert_close(
        [one.cpu() for one in there], rounds(Target(tiny_model(kind)), 2, 3), rtol=1e-5, atol=1e-5
    )


@needs_compiler
def test_values_with_other_readers_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten = rewrites.shorten_rotations

    def with_a_reader(graph: Any) -> None:
        query = next(node for node in graph.nodes if rewrites._part(node) is not None)
        with graph.inserting_after(query):
            call(graph, torch.neg, (query,)).meta["writes"] = True
        shorten(graph)

    monkeypatch.setattr(rewrites, "shorten_rotations", with_a_reader)
    target = Target(tiny_model("llama"))
    functions = [type(function) for function, _ in called_by(target)]
    counts = functions.count(rewrites.QKVAttention), functions.count(rewrites.AttentionCall)
    assert counts == (target.num_layers - 1, 1)


@needs_compiler
def test_norms_of_products_are_one_call_and_the_models_splits_stay() -> None:
    matrix_OI, weight_O = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()

    def code(recorder: Any, x_TI: Tensor) -> list[Tensor]:
        y_TO = F.linear(x_TI, matrix_OI)
        wide_TO = y_TO.float()
        normed_TO = weight_O * (wide_TO * torch.rsqrt(wide_TO.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x_TI.dtype)
        gate_TO, up_TO = normed_TO.split([32, 32], -1)
        other_TO, more_TO = F.linear(x_TI, matrix_OI).split([32, 32], -1)
        return [F.silu(gate_TO) * up_TO, F.silu(other_TO) * more_TO, normed_TO.to("cpu", torch.float32) * weight_O]

    graph = record(code, ("x",), lambda count: [torch.ones(count, 32, dtype=torch.bfloat16)], (11, 13))
    rewrites.rewrite(graph, torch.device("cpu"), packs=True, int8=False)
    functions = [node.target for node in graph.nodes if node.op == "call_function"]
    assert functions.count(rewrites.rms_norm_cpu) == 1 and rewrites.silu_gate not in functions
    x_TI = torch.randn(5, 32).bfloat16()
    # Sums of 32 products of size 1 in another order, rounded to bfloat16.
    torch.testing.assert_close(compile_graph(graph)(x_TI, 5), code(None, x_TI), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
def test_only_float32_norms_are_rewritten(wide: bool) -> None:
    def code(recorder: Any, x_TE: Tensor) -> list[Tensor]:
        y_TE = (x_TE + 1).float() if wide else x_TE + 1
        return [y_TE * torch.rsqrt(y_TE.pow(2).mean(-1, keepdim=True) + 1e-6)]

    graph = record(code, ("x",), lambda count: [torch.ones(count, 64, dtype=torch.bfloat16)], (11, 13))
    rewrites.shorten_norms(graph, torch.device("cpu"))
    assert any(getattr(node.target, "func", None) is rewrites.inverse_rms for node in graph.nodes) == wide
    x_TE = torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(compile_graph(graph)(x_TE, 5), code(None, x_TE))


def test_rotations_differ_by_their_tables() -> None:
    """Views of one table of sines, by index or by keyword: each rotation keeps its own."""
    angles_KD = torch.randn(2, 3, 8)

    def code(recorder: Any, x_TD: Tensor) -> list[Tensor]:
        turned_TD = torch.cat((-x_TD[..., 4:], x_TD[..., :4]), dim=-1)
        sums = angles_KD.sum(dim=1), angles_KD.sum(dim=0)[:2]
        tables = angles_KD[:, 0, :], angles_KD[:, 1, :], *sums
        return [x_TD * 2.0 + turned_TD * table_KD[:1] for table_KD in tables]

    graph = record(code, ("x",), lambda count: [torch.ones(count, 8)], (11, 13))
    rewrites.shorten_rotations(graph)
    x_TD = torch.randn(5, 8)
    assert all(map(torch.equal, compile_graph(graph)(x_TD, 5), code(None, x_TD)))


def test_layers_with_one_input_are_merged() -> None:
    target = Target(tiny_model("llama"))
    replay = replay_of(target)
    if not can_pack(torch.zeros(32, 32)):
        assert not replay.products
        return
    assert [product.sizes for product in replay.products[:4]] == [[64, 32, 32], [64], [96, 96], [64]]


def test_large_layers_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MAX_MERGED_BYTES", 1)
    weights = [torch.zeros(4, 4)] * 3
    assert products.MergedLinear.groups(weights, [None, None, torch.zeros(4)]) == [[0], [1], [2]]
