"""The same bits: a node of a tree has the numbers that a single step after the same text gives, in every dtype."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.target import cpu_attention, prepacked
from headstart.target.attention import Scores, TreeMask, _reference, causal_attention
from headstart.target.fitting import FINAL
from headstart.target.model import Target
from headstart.target.prepacked import MAX_ROWS
from headstart.target.products import ALONE, SameBits, agreeing, same_bits
from headstart.tree.tree import Tree, TreeBatch
from tests.decode.drafters import ReplayDrafter
from tests.tiny import KINDS, PackedLinear, packed_model, tiny_model

TEXTS = [[5, 9, 2, 7, 7, 1, 30], [4, 4, 8], [*range(1, 13)], [3]]
AUX_LAYERS = (1, FINAL)
SHORT = (torch.bfloat16, torch.float16)


@dataclass
class Found:
    """What differs between single steps and trees with the same accepted path.

    Attributes:
        logits: rows of logits with a differing bit.
        states: rows of hidden states with one.
        kept: rows of a text whose keys or values in the cache have one.
        rows: rows of logits compared.
    """

    logits: int = 0
    states: int = 0
    kept: int = 0
    rows: int = 0


def compare(target: Target, texts: Sequence[Sequence[int]], rounds: int = 3, depth: int = 3, seed: int = 0) -> Found:
    """Decode texts one token at a time, and the same in trees with wrong siblings before, between and after."""
    draw, found = random.Random(seed), Found()
    rows = range(len(texts))
    room = max(map(len, texts)) + rounds * (depth + 1)
    plain, drafted = target.new_cache(len(texts), room + 1), target.new_cache(len(texts), room + 32)
    logits_BV = target.prefill(plain, texts).logits_BTV[:, 0]
    assert torch.equal(logits_BV, target.prefill(drafted, texts).logits_BTV[:, 0]), "the same prefill"
    for _ in range(rounds):
        paths: list[list[int]] = [[root] for root in logits_BV.max(-1).indices.tolist()]
        steps = []
        for _ in range(depth + 1):
            step = TreeBatch.roots([path[-1] for path in paths])
            steps.append(target.forward_tree(plain, step, AUX_LAYERS))
            plain.commit([[0]] * len(texts))
            for path, token in zip(paths, steps[-1].logits_BTV[:, 0].max(-1).indices.tolist(), strict=True):
                path.append(token)
        trees = [_tree(path[:-1], target.vocab_size, draw) for path in paths]
        batch = TreeBatch.of([Tree(tokens, parents) for tokens, parents, _ in trees])
        out = target.forward_tree(drafted, batch, AUX_LAYERS)
        drafted.commit([tree[2] for tree in trees])
        for row in rows:
            for step, node in zip(steps, trees[row][2], strict=True):
                found.rows += 1
                found.logits += not torch.equal(step.logits_BTV[row, 0], out.logits_BTV[row, node])
                found.states += any(
                    not torch.equal(step.aux_hidden_states[layer][row, 0], out.aux_hidden_states[layer][row, node])
                    for layer in AUX_LAYERS
                )
        logits_BV = steps[-1].logits_BTV[:, 0]
    assert plain.lengths == drafted.lengths
    for row, length in enumerate(plain.lengths):
        pairs = zip(plain._stores, drafted._stores, strict=True)
        found.kept += any(not torch.equal(one[:, row, :, :length], two[:, row, :, :length]) for one, two in pairs)
    return found


def _tree(path: Sequence[int], vocab: int, draw: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and accepted nodes of a random tree that holds this path; at most 20 nodes."""
    tokens, parents, nodes = [path[0]], [-1], [0]
    for token in path[1:]:
        for _ in range(draw.randint(0, 4)):
            parents.append(draw.randrange(len(tokens)))
            tokens.append(draw.randrange(vocab))
        parents.append(nodes[-1])
        nodes.append(len(tokens))
        tokens.append(token)
    for _ in range(draw.randint(0, 4)):
        parents.append(draw.randrange(len(tokens)))
        tokens.append(draw.randrange(vocab))
    return tokens, parents, nodes


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_the_bits_of_single_steps(kind: str, rows: int) -> None:
    """Logits, hidden states, and the keys and values that are kept of the accepted path."""
    found = compare(Target(tiny_model(kind).bfloat16(), exact="bits"), TEXTS[:rows])
    assert (found.logits, found.states, found.kept) == (0, 0, 0) and found.rows == 12 * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_of_more_tokens_than_are_replayed_otherwise_have_them_too(dtype: torch.dtype) -> None:
    texts, depth = TEXTS * 10, 6
    assert len(texts) * (depth + 1) > MAX_ROWS, "the trees of a round, without a single sibling"
    found = compare(Target(tiny_model("llama").to(dtype), exact="bits"), texts, rounds=1, depth=depth)
    assert (found.logits, found.states, found.kept) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_have_them_too(dtype: torch.dtype) -> None:
    found = compare(Target(tiny_model("llama").to(dtype), exact="bits"), TEXTS)
    assert (found.logits, found.states, found.kept) == (0, 0, 0)


def test_without_them_rounding_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: it is what `exact` does that makes it pass."""
    monkeypatch.setattr("headstart.target.cpu_attention.serves", lambda *_: False)
    found = compare(Target(tiny_model("llama").bfloat16(), exact="tokens"), TEXTS)
    assert found.logits > found.rows / 4 and found.kept > 0  # 23 of 48 without AVX-512, more with it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_compiled_adds_up_in_one_order(dtype: torch.dtype) -> None:
    """Rows have their own bits without being asked to, where products and attention are in C."""
    if prepacked._compiled(dtype) is None or not cpu_attention.serves(1, dtype, torch.device("cpu")):
        pytest.skip("nothing is compiled on this machine")
    found = compare(Target(tiny_model("llama").to(dtype), exact="tokens"), TEXTS)
    assert (found.logits, found.states, found.kept) == (0, 0, 0)


def test_the_order_of_slots_is_felt_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _reference
    monkeypatch.setattr("headstart.target.cpu_attention.serves", lambda *_: False)
    monkeypatch.setattr("headstart.target.attention._reference", lambda *args, how, exactly=None: own(*args, how))
    assert compare(Target(tiny_model("llama"), exact="bits"), TEXTS).logits > 0


@pytest.mark.parametrize("tried", [True, False])
def test_layers_that_sum_in_another_order_run_in_pieces(tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of these run backwards beyond 6 rows; whoever does not try it has other bits."""
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: _backwards(own, *args))
    monkeypatch.setattr("headstart.target.products._KNOWN", {})
    if not tried:
        monkeypatch.setattr("headstart.target.products.same_bits", lambda *_: SameBits(4, 128))
    monkeypatch.setattr("headstart.target.fitting.fits", lambda _: False)  # plain products, which are watched here
    found = compare(Target(tiny_model("llama"), exact="bits"), TEXTS, rounds=2)
    assert (found.logits == 0) == tried


def _backwards(own: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map whose sums run backwards beyond 6 rows."""
    if x.shape[:-1].numel() > 6:
        x, weight = x.flip(-1), weight.flip(-1)
    out: Tensor = own(x, weight, bias)
    return out


def test_layers_that_cannot_be_tried_run_row_by_row() -> None:
    target = Target(packed_model(tiny_model("llama").bfloat16(), 8), exact="bits")
    packed = [module for module in target._fitting.matrices if isinstance(module, PackedLinear)]
    assert len(packed) == 3 * 7 and all(same_bits(module) == ALONE for module in packed)
    found = compare(target, TEXTS, rounds=2)
    assert (found.logits, found.states, found.kept) == (0, 0, 0)


def test_more_rows_than_fit_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces give the same; no piece is larger than allowed, and none lacks a row."""
    seen: list[int] = []
    monkeypatch.setattr("headstart.target.products.same_bits", lambda *_: SameBits(2, 5))
    monkeypatch.setattr("headstart.target.fitting.fits", lambda _: False)  # plain products, which are watched here
    target = Target(tiny_model("gpt_neox"), exact="bits")
    own = nn.Linear.forward

    def counted(module: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x.shape[:-1].numel())
        return own(module, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    compare(target, TEXTS, rounds=1)
    steps = [count for count in seen if count > 1]
    assert max(steps) <= max(5, max(map(len, TEXTS)) * len(TEXTS)) and 5 in steps


@pytest.mark.parametrize(
    ("rows", "same", "pieces"),
    [
        (1, SameBits(1, 32), [(0, 1)]),
        (32, SameBits(2, 32), [(0, 32)]),
        (64, SameBits(2, 32), [(0, 32), (32, 64)]),
        (3, ALONE, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_pieces(rows: int, same: SameBits, pieces: list[tuple[int, int]]) -> None:
    assert same.pieces(rows) == pieces


def test_numbers_of_rows_that_agree() -> None:
    one = torch.arange(64.0).view(64, 1) % 4
    assert agreeing({n: one[:n] for n in (1, 2, 4, 16, 64)}) == SameBits(1, 64)
    assert agreeing({n: one[:n] + (n == 1) for n in (1, 2, 4, 16, 64)}) == SameBits(2, 64)
    assert agreeing({n: one[:n] + (n > 4) for n in (1, 2, 4, 16, 64)}) == SameBits(1, 4)
    assert agreeing({n: one[:n] + n for n in (1, 2, 4, 16, 64)}) == SameBits(4, 4)
    torn = one + (torch.arange(64)[:, None] > 31)  # rows of one product that differ by where they stand
    assert agreeing({1: one[:1], 2: one[:2], 4: one[:4], 64: torn}) == SameBits(1, 4)


def test_trying_notices_another_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer whose sums run backwards beyond 6 rows; ordinary numbers would seldom show it."""
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: _backwards(own, *args))
    monkeypatch.setattr("headstart.target.products._KNOWN", {})
    same = same_bits(nn.Linear(96, 40).bfloat16())
    assert same.fewest <= 4 and same.maximum == 6


def test_bits_are_kept_where_they_are_asked_for() -> None:
    assert Target(tiny_model("llama").bfloat16()).exact == "tokens", "they cost more than 3 % of a round"
    assert Target(tiny_model("llama").bfloat16(), exact="bits").exact == "bits"
    with pytest.raises(UserError, match="Did you mean 'bits'"):
        Target(tiny_model("llama"), exact="bit")  # type: ignore[arg-type]  # what a user may write


def test_a_released_model_computes_as_before() -> None:
    model = tiny_model("mixtral").bfloat16()
    before = [dict(vars(module)) for module in model.modules()]
    target = Target(model, exact="bits")
    first = compare(target, TEXTS[:2], rounds=1)
    target.release()
    assert [vars(module).get("forward") for module in model.modules()] == [own.get("forward") for own in before]
    assert compare(target, TEXTS[:2], rounds=1) == first, "and back again"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "qwen3"])
def test_drafted_texts_are_the_plain_loops(kind: str, batch: int) -> None:
    """Right and wrong drafts in random trees: every token, and the same rows when others have left the batch."""
    target = Target(tiny_model(kind).bfloat16(), exact="bits")
    options = DecodeOptions(max_new_tokens=24, draft="on", stop_test=lambda row, tokens: len(tokens) > 12 + 4 * row)
    prompts = TEXTS[:batch]
    plain = DecodeLoop(target).generate(prompts, options)
    drafter = ReplayDrafter([output.tokens for output in plain], target.vocab_size, right=0.6, nodes=12, seed=3)
    drafted = DecodeLoop(target, drafter).generate(prompts, options)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert max(output.tokens_per_round for output in drafted) > 1.2


def test_the_same_of_attention_in_any_order_of_slots() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, size, 16).bfloat16() for size in (6, 40, 40))
    order = torch.randperm(40)
    holes = torch.zeros(1, 1, 6, 40)
    holes[..., 30:] = float("-inf")
    one = _reference(query, key[:, :, :30], value[:, :, :30], None, Scores(), torch.float64)
    two = _reference(query, key[:, :, order], value[:, :, order], holes[..., order], Scores(), torch.float64)
    assert torch.equal(one, two) and one.dtype == torch.bfloat16
    last = _reference(query[:, :, 5:], key[:, :, :30], value[:, :, :30], None, Scores(), torch.float64)
    assert torch.equal(one[:, :, 5:], last)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("new", [21, 9, 1])
def test_causal_attention_equals_the_masked_one(
    new: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.target.attention.PIECE", 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, 21, 8), torch.randn(2, 2, 21, 8)
    distance = torch.arange(21 - new, 21)[:, None] - torch.arange(21)
    allowed = (distance >= 0) & (distance < (window or 99))
    mask = TreeMask(torch.zeros(1, 1, new, 21).masked_fill(~allowed, float("-inf")), None).folded(False, 2, query)
    folded = query.reshape(2, 2, 2 * new, 8)
    wanted = _reference(folded, key, value, mask, Scores(softcap=softcap)).reshape(2, 4, new, 8)
    torch.testing.assert_close(causal_attention(query, key, value, Scores(softcap=softcap), window), wanted)


@pytest.mark.parametrize("kind", [*KINDS, "phi3_long", "llama_long"])
def test_a_long_text_read_in_pieces_equals_one_read_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(kind, max_length=96))
    texts = [[*range(1, 60)], [*range(20, 45)], [7]]
    whole = target.prefill(cache := target.new_cache(3, 64), texts, AUX_LAYERS)
    step = TreeBatch.roots([4, 5, 6])
    after = target.forward_tree(cache, step).logits_BTV
    captured = target.hidden_states(texts, AUX_LAYERS)
    monkeypatch.setattr("headstart.target.model.PIECE", 16)
    monkeypatch.setattr("headstart.target.attention.PIECE", 16)
    monkeypatch.setattr("headstart.target.model._CAPTURED", 1)
    pieces = target.prefill(cache := target.new_cache(3, 64), texts, AUX_LAYERS)
    assert cache.lengths == [59, 25, 1]
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(pieces.logits_BTV, whole.logits_BTV, **close)
    torch.testing.assert_close(target.forward_tree(cache, step).logits_BTV, after, **close)
    for row, text in enumerate(texts):
        alone = target.hidden_states([text], AUX_LAYERS)[0]
        for layer in AUX_LAYERS:
            torch.testing.assert_close(
                pieces.aux_hidden_states[layer][row, : len(text)],
                whole.aux_hidden_states[layer][row, : len(text)],
                **close,
            )
            torch.testing.assert_close(captured[row][layer], alone[layer], **close)


def test_reading_keeps_memory_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of a text by itself, no logits but the last tokens', no keys and values where states are captured."""
    target = Target(tiny_model("llama", max_length=400))
    largest: list[int] = []
    cache = target.new_cache(2, 310)
    kept = {store.untyped_storage().data_ptr() for store in cache._stores}

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            # Views of the cache cost nothing.
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in kept:
                largest.append(out.numel())
            return out

    monkeypatch.setattr("headstart.target.model.PIECE", 32)
    monkeypatch.setattr("headstart.target.attention.PIECE", 32)
    texts = [[*range(1, 101)] * 3, [5] * 130]
    with Watch():
        out = target.prefill(cache, texts, AUX_LAYERS)
    assert out.logits_BTV.shape == (2, 1, 101)
    # A piece times all slots, twice for groups of heads; the states of all tokens; keys and values of both rows.
    assert max(largest) <= max(2 * 32 * 300, 2 * 300 * 64, 2 * 4 * 300 * 16)
    largest.clear()
    monkeypatch.setattr("headstart.target.model.TreeCache", None)
    with Watch():
        target.hidden_states(texts, AUX_LAYERS)
    assert max(largest) <= 2 * 300 * 96, "the MLP's width, and no text by text"
