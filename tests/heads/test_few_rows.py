"""The C kernels for a few rows, against float64 and against the same heads on torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.draft_graphs import best_drafts
from headstart.drafters.heads import HeadDrafter, grow
from headstart.heads import int8_weights
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.int8_weights import Linear, drop_int8, to_int8
from headstart.heads.parts import cache
from headstart.heads.parts.cache import Entries
from headstart.heads.parts.layer import rms_norm
from headstart.kernels import draft_kernels
from headstart.model.model import Target
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Committed, Request, TreeBatch, TreeShape
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(draft_kernels.compiled(torch.float32) is None, reason="needs a C compiler and AVX2")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=64))


@pytest.fixture(scope="module")
def with_direction() -> Target:
    """A target with a direction that its embeddings share, as in trained models."""
    model = tiny_model("llama", vocab_size=64)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.add_(0.2 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0)))
    return Target(model)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the called C functions."""
    names: list[str] = []

    def record(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any) -> Any:
            names.append(name)
            return real(*given)

        monkeypatch.setattr(owner, name, call)

    for name in ("run_from_hidden", "run_from_tokens"):
        record(draft_kernels.Recurrent, name)
    for name in ("product", "norms", "attend", "best_drafts"):
        record(draft_kernels, name)
    return names


def assert_levels_close(found: list[Tensor], wanted: list[Tensor], share: float) -> None:
    """Compare logits level by level, with a tolerance relative to the largest."""
    for mine, torchs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=share * float(torchs.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_use_the_rounded_weights(
    dtype: torch.dtype, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch, kernel_calls: list[str]
) -> None:
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for inputs, outputs in ((32, 32), (96, 70), (512, 161)):  # outputs that fill no block of 32
        layer = Linear(inputs, outputs).to(dtype)
        to_int8(layer)
        held = layer.weight.int8
        weight = held.rows()[:outputs].double() * held.scale_N[:outputs, None].double()
        x = torch.randn(1, rows, inputs).to(dtype)
        with torch.inference_mode():
            found = layer(x)
        wanted = x.double() @ weight.T + layer.bias.double()
        # Rows are multiplied in 16 bits, so each number is off by half a step at most; bfloat16 rounds the product, and
        # the sum with the bias.
        off = x.double().abs().amax(-1, keepdim=True) / 32767 / 2 * weight.abs().sum(1)
        off = off + (2**-7 * wanted.abs() + 2**-8 if dtype == torch.bfloat16 else 1e-5)
        assert ((found.double() - wanted).abs() <= off).all()
    assert kernel_calls == ["product"] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_torchs(dtype: torch.dtype, kernel_calls: list[str]) -> None:
    torch.manual_seed(0)
    norm, x = torch.nn.RMSNorm(72, eps=1e-3), (0.1 * torch.randn(2, 3, 72)).to(dtype)
    norm.weight.data.normal_()
    wanted = F.rms_norm(x.double(), (72,), norm.weight.to(dtype).double(), 1e-3)
    with torch.inference_mode():
        found = rms_norm(norm, x)
        rms_norm(norm, torch.randn(13, 72))  # too many rows
    assert kernel_calls == ["norms"]
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_best_drafts_are_torchs(dtype: torch.dtype, ranks: int, kernel_calls: list[str]) -> None:
    torch.manual_seed(0)
    logits = torch.stack([8 * torch.randn(200), torch.linspace(-90, 90, 200), torch.linspace(90, -90, 200)])[None]
    logits, tokens = logits.to(dtype), 3 * torch.arange(200)
    with torch.inference_mode():
        found = best_drafts(logits, ranks, tokens)
    assert kernel_calls == ["best_drafts"] and found.dtype == torch.int32
    log_probs = logits.double().log_softmax(-1)
    torch.testing.assert_close(  # of equal logits either may come first
        found[0].view(torch.float32).double(), log_probs.topk(ranks).values, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(found[2], 3 * found[1])
    assert torch.equal(logits[0, 1:].gather(-1, found[1, 0, 1:].long()), logits[0, 1:].topk(ranks).values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_equals_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 5000).to(dtype)
    logits[0, 0], logits[0, 1] = -logits[0, 0].abs(), float("-inf")
    logits[0, 2, 4000:] = 7.0  # of equal ones the first
    logits[0, 3], logits[0, 3, 3], logits[0, 3, 4000] = -1.0, -0.0, 0.0
    logits[0, 4, -1] = logits[0, 5, 0] = float("inf")
    logits[0, 6, 1023] = logits[0, 7, 1024] = 50.0
    logits[1, 0, 7], logits[1, 1, 8], logits[1, 1, 9] = float("nan"), -torch.tensor(float("nan")), 99.0
    wanted = logits.double().argmax(-1)
    assert torch.equal(draft_kernels.argmax(logits), wanted)
    for on_torch in (logits.double(), logits[..., ::1], logits.transpose(0, 1)):
        assert torch.equal(draft_kernels.argmax(on_torch).flatten().sort().values, wanted.flatten().sort().values)


def test_an_outlier_does_not_spoil_distant_groups() -> None:
    """Residual streams have outliers; rows are quantized to 16 bits per group."""
    torch.manual_seed(0)
    layer, x = Linear(2048, 256, bias=False).bfloat16(), torch.randn(1, 2048).bfloat16()
    with torch.no_grad():
        layer.weight[:, 300] = 0
    x[0, 300] = 20_000
    to_int8(layer)
    held = layer.weight.int8
    wanted = x.double() @ (held.rows().double() * held.scale_N[:, None].double()).T
    with torch.inference_mode():
        off = layer(x).double() - wanted
    # One of sixteen groups is lost among 65,536 steps of 0.6; the other groups are off by half a bfloat16 step.
    assert off.square().mean() < (0.06 * wanted.square().mean().sqrt()) ** 2


@pytest.mark.parametrize("wrong", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_make_their_row_nan(wrong: float) -> None:
    layer, x = Linear(256, 256), torch.randn(3, 256)
    to_int8(layer)
    x[1, 200] = wrong
    with torch.inference_mode():
        found = layer(x)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def rounds(heads: Any, target: Target, prompts: list[list[int]], packed: bool = False) -> list[Tensor]:
    """Return the logits of all levels of three rounds. Rows advance by one, two and three tokens, and the second of
    three rows ends after the first round."""
    (to_int8 if packed else drop_int8)(heads)
    texts = [[*prompt, 9, 8, 7, 6, 5, 4, 3] for prompt in prompts]
    states = target.hidden_states(texts, heads.aux_layers)
    dtype = next(heads.parameters()).dtype

    def of(start: list[int], count: int) -> dict[int, Tensor]:
        return {
            layer: torch.stack(
                [F.pad(row[layer], (0, 0, 0, 99))[at : at + count] for row, at in zip(states, start, strict=True)]
            ).to(dtype)
            for layer in heads.aux_layers
        }

    lengths, logits = [len(prompt) for prompt in prompts], []
    session = heads.prefill(prompts, of([0] * len(prompts), max(lengths)))
    for counts in ([1, 2, 3], [3, 1, 2], []):
        rows = len(texts)
        roots = TreeBatch.roots([text[length] for text, length in zip(texts, lengths, strict=True)])
        logits.append(heads.draft_step(session, roots.tokens_BN, torch.zeros_like(roots.tokens_BN), 0))
        for depth, parents in ((1, [0, 0]), (2, [1, 0, 1]), (3, [2]))[: heads.draft_steps - 1]:
            tokens = torch.tensor([[11 + row + node for node in range(len(parents))] for row in range(rows)])
            logits.append(heads.draft_step(session, tokens, torch.tensor([parents] * rows), depth))
        if counts := counts[:rows]:
            new = [text[length : length + count] for text, length, count in zip(texts, lengths, counts, strict=True)]
            heads.commit(session, Committed.of(new, of(lengths, max(counts))))
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        if rows == 3 and counts == [1, 2, 3]:
            heads.reorder(session, [0, 2])
            texts, lengths, states = ([some[0], some[2]] for some in (texts, lengths, states))
    return logits


@pytest.fixture
def heads_of(target: Target, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build heads with caches that have to grow, and with fewer rotary positions than the texts have tokens."""
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    monkeypatch.setattr(cache, "_SPARE", 1)

    def make(name: str, seed: int = 0) -> Any:
        heads = build(name, target).eval()
        torch.manual_seed(seed)
        shake(heads)
        heads._rotary._config = heads.config.model_copy(update={"max_position_embeddings": 7})
        return heads

    return make


PROMPTS = [[5, 6], [7], [8, 9, 10]]
RECURRENT = [name for name in CASES if name.startswith(("eagle", "mtp"))]


@pytest.mark.parametrize("packed", [False, True], ids=["full", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", RECURRENT)
def test_drafts_equal_torchs(
    name: str, rows: int, packed: bool, target: Target, heads_of: Callable[..., Any], kernel_calls: list[str]
) -> None:
    heads = heads_of(name)
    with torch.no_grad():
        torchs = rounds(heads, target, PROMPTS[-rows:], packed)
    assert not kernel_calls
    with torch.inference_mode():
        found = rounds(heads, target, PROMPTS[-rows:], packed)
    levels = {"run_from_tokens"} if name.startswith("eagle3") else {"run_from_hidden", "product"}
    assert set(kernel_calls) >= (levels if packed else {"norms", "attend"})
    # float32 sums in another order, and int8 products with 16-bit rows, amplified by up to twelve random layers.
    assert_levels_close(found, torchs, 2e-2 if packed else 5e-4)


CURVES = Calibration(
    ((-6.0, -2.0, -0.5), (-5.0, -1.0), ()),
    ((0.05, 0.3, 0.9), (0.1, 0.8), ()),
    (0.9, 0.7),
    off_best=Calibration(((-4.0, 0.0),), ((0.02, 0.6),), (0.8, 0.5, 0.4)),
)
REQUESTS = {
    "all": Request(32),
    "few": Request(4),
    "one": Request(2),
    "worth it": Request(12, threshold=0.1),
    "a level must pay": Request(12, threshold=0.05, level_threshold=0.6),
    "a chain": Request(9, chain=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curves", [None, CURVES, replace(CURVES, off_best=None)], ids=["none", "off best", "one"])
@pytest.mark.parametrize("asks", REQUESTS)
@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3-draft-vocabulary", "eagle3-deep-normed", "eagle3-transition", "deep"]
)
def test_trees_grown_in_one_call_equal_levels(
    name: str,
    asks: str,
    curves: Calibration | None,
    dtype: torch.dtype,
    target: Target,
    heads_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CASES, "deep", {**CASES["eagle3-deep-normed"], "aux_norms": False, "draft_steps": 5})
    monkeypatch.setattr(draft_kernels, "ROWS", 40)  # wide levels as well
    heads = heads_of(name).to(dtype)
    heads._embedding_VE = heads.target_embeddings.to(dtype)
    to_int8(heads)
    text = [5, 6, 9, 8, 7, 6, 5, 4, 3, 2]
    (states,) = target.hidden_states([text], heads.aux_layers)
    request = replace(REQUESTS[asks], calibration=curves)

    def of(start: int, stop: int) -> dict[int, Tensor]:
        return {layer: states[layer][None, start:stop].to(dtype) for layer in heads.aux_layers}

    with torch.inference_mode():
        grown, levels = (heads.prefill([text[:2]], of(0, 2)) for _ in range(2))
        length = 2
        for count in (1, 3, 2):  # of tokens that the text gets on by
            roots = TreeBatch.roots(text[length : length + 1])
            whole = heads.draft_tree(grown, text[length], request, 8)
            (wanted,) = grow(heads, levels, roots, request, 8)
            assert (whole is None) == heads.config.aux_norms
            if whole is not None:
                assert (whole.tokens, whole.parents, whole.levels) == (wanted.tokens, wanted.parents, wanted.levels)
                # C rounds once where numpy rounds a product and a sum.
                assert whole.accept_probs == pytest.approx(wanted.accept_probs, rel=1e-12)
            for session in (grown, levels):
                new = Committed.of([text[length : length + count]], of(length, length + count))
                heads.commit(session, new)
            length += count


@pytest.mark.parametrize("packed", [False, True], ids=["full", "int8"])
@pytest.mark.parametrize("name", ["eagle3", "eagle3-deep-normed", "mtp"])
def test_bfloat16_rounds_no_worse_than_torchs(
    name: str, packed: bool, target: Target, heads_of: Callable[..., Any], kernel_calls: list[str]
) -> None:
    found, torchs, wanted = list[Tensor](), list[Tensor](), list[Tensor]()
    for seed in range(4):
        heads = heads_of(name, seed).bfloat16()
        (to_int8 if packed else drop_int8)(heads)
        exact = copy.deepcopy(heads)
        for mine, weight in zip(exact.parameters(), heads.parameters(), strict=True):
            if held := getattr(weight, "int8", None):
                mine.data = held.rows()[: held.outputs].float() * held.scale_N[: held.outputs, None].float()
        exact.float()
        with torch.no_grad():
            wanted += rounds(exact, target, PROMPTS)
            torchs += rounds(heads, target, PROMPTS, packed)
        with torch.inference_mode():
            found += rounds(heads, target, PROMPTS, packed)
    assert set(kernel_calls) & ({"run_from_hidden", "run_from_tokens"} if packed else {"attend"})
    # A single draft may be closer either way; over all drafts the rounding errors are alike.
    ours, theirs, all_of_it = (
        float(torch.cat([level.float().flatten() for level in some]).square().mean().sqrt())
        for some in (
            [a - b for a, b in zip(found, wanted, strict=True)],
            [a - b for a, b in zip(torchs, wanted, strict=True)],
            wanted,
        )
    )
    assert ours < 1.3 * theirs < 0.2 * all_of_it, (ours, theirs, all_of_it)


def test_own_heads_skip_queries(
    with_direction: Target, monkeypatch: pytest.MonkeyPatch, kernel_calls: list[str]
) -> None:
    """The kernels do not compute queries and keys of untrained own-position heads."""
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    heads = cast(Eagle3Head, build("eagle3-transition", with_direction)).eval()
    layer, own = heads.layers[0], heads.config.own_heads

    def own_heads() -> int:
        to_int8(heads)
        return heads.own_heads(layer, torch.ones(1, 1))

    with torch.no_grad():
        rows_3HdI = layer.qkv.weight.view(3, -1, heads.config.head_dim, layer.qkv.in_features)
        for weight in (rows_3HdI[:2, own:], rows_3HdI[2], layer.o.weight, layer.down.weight, heads.fc.weight):
            weight.add_(0.3 * torch.randn_like(weight))
        torchs = rounds(heads, with_direction, PROMPTS, packed=True)
    with torch.inference_mode():
        found = rounds(heads, with_direction, PROMPTS, packed=True)
    assert kernel_calls == ["run_from_tokens"] * 9 and own_heads() == own == 4
    # Own heads give up to 1e-3 of their attention to other positions, and it is fed back.
    assert_levels_close(found, torchs, 5e-3)
    with torch.no_grad():
        rows_3HdI[:2, 3, 2, -1].add_(1)  # query equals key, but also reads the state
        assert own_heads() == 3
        layer.qkv.weight[2 * heads.config.head_dim + 3, 5].add_(1)  # query differs from key
        assert own_heads() == 2
        rows_3HdI[:2, 1].mul_(1e-3)  # uniform attention
        assert own_heads() == 1


def test_torch_levels_continue_from_c_levels(with_direction: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """C writes no keys for heads that attend to their own position."""
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    heads = cast(Eagle3Head, build("eagle3-transition", with_direction)).eval()
    with torch.no_grad():
        for weight in (heads.layers[0].o.weight, heads.layers[0].down.weight, heads.fc.weight):
            weight.add_(0.3 * torch.randn_like(weight))
    to_int8(heads)
    (states,) = with_direction.hidden_states([[5, 6, 7, 8]], heads.aux_layers)

    def drafted() -> list[Tensor]:
        session = heads.prefill([[5, 6, 7, 8]], {layer: state[None] for layer, state in states.items()})
        levels = [torch.tensor([[9]]), torch.arange(20, 23)[None], torch.arange(30, 44)[None]]
        parents = [torch.zeros(1, 1).long(), torch.zeros(1, 3).long(), torch.arange(14)[None] % 3]
        nodes = enumerate(zip(levels, parents, strict=True))
        return [heads.draft_step(session, *of_level, depth) for depth, of_level in nodes]

    with torch.no_grad():
        torchs = drafted()
    with torch.inference_mode():
        found = drafted()
    assert heads.own_heads(heads.layers[0], torch.ones(1, 1)) == 4
    # Own heads give up to 1e-3 of their attention to other positions, and it is fed back.
    assert_levels_close(found, torchs, 5e-3)


def test_autocast_runs_on_torch(target: Target, heads_of: Callable[..., Any], kernel_calls: list[str]) -> None:
    """Its dtype differs from the weights' and the caches'."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        rounds(heads_of("eagle3"), target, PROMPTS[:1], packed=True)
    assert not kernel_calls


def test_attention_with_more_queries_than_one_pass_takes(kernel_calls: list[str]) -> None:
    """Twenty query heads of one key head, in bfloat16, with slots that one entry sees and another does not."""
    torch.manual_seed(0)
    heads, size, slots = 20, 24, 9
    keys, values = (torch.randn(2, 1, slots, size).bfloat16() for _ in range(2))
    qkv = (2 * torch.randn(2, 2, heads + 2, size)).bfloat16()
    angles = torch.ones(16, size).bfloat16(), torch.zeros(16, size).bfloat16()
    entries = Entries.of([[(row, slot, 3, 4, slot) for slot in (5 + 2 * row, 6 + 2 * row)] for row in range(2)])
    view = draft_kernels.KVView((entries.fields, entries.shape), None, (keys, values), angles, heads)
    found = draft_kernels.attend(draft_kernels.compiled(torch.bfloat16), qkv, view)
    assert torch.equal(keys[0, 0, 5], qkv[0, 0, heads]) and torch.equal(values[1, 0, 8], qkv[1, 1, heads + 1])
    for row in range(2):
        for node in range(2):
            seen = [0, 1, 2, 3, 5 + 2 * row + node]
            queries = qkv[row, node, :heads].double()
            wanted = F.scaled_dot_product_attention(queries, keys[row, 0, seen].double(), values[row, 0, seen].double())
            torch.testing.assert_close(found[row, node].double(), wanted.flatten(), rtol=2**-8, atol=1e-4)


def test_drafts_fall_back_to_torch_without_a_compiler(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build("eagle3", target)).eval()
    assert HeadDrafter(heads, TreeShape.chain(2)).forwards == "compiled"
    monkeypatch.setattr(draft_kernels, "compiled", lambda _: None)
    drafter = HeadDrafter(heads, TreeShape.chain(2))
    assert drafter.forwards == "eager"
    wanted = DecodeLoop(target).generate([[3, 4, 5]], DecodeOptions(8))[0].tokens
    assert DecodeLoop(target, drafter).generate([[3, 4, 5]], DecodeOptions(8, draft="on"))[0].tokens == wanted
