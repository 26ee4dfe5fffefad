"""Batch-invariant kernels: a node of a tree has the bits of a single step after the same text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.kernels import prepacked
from headstart.kernels.prepacked import MAX_ROWS
from headstart.model.model import Target
from headstart.replay.attention import ScoreOptions, TreeMask, _eager_attention, causal_attention
from headstart.replay.patch import FINAL
from headstart.tree.tree import Tree, TreeBatch
from tests.decode.drafters import ReplayDrafter
from tests.tiny import KINDS, packed_model, tiny_model

TEXTS = [[5, 9, 2, 7, 7, 1, 30], [4, 4, 8], [*range(1, 13)], [3]]
AUX_LAYERS = (1, FINAL)
COMPILED = ("llama", "qwen3", "gemma3", "gpt_neox", "mistral", "phi3")
"""Architectures that run on the compiled kernels throughout."""
needs_kernels = pytest.mark.skipif(not prepacked.can_pack(torch.zeros(32, 32)), reason="C for AVX2 and AVX-512")


@dataclass
class Found:
    """Differences between single steps and trees with the same accepted path.

    Attributes:
        logits: rows of logits with a differing bit.
        states: rows of hidden states with a differing bit.
        kept: rows of the cache with a differing bit in keys or values.
        rows: rows of logits compared.
    """

    logits: int = 0
    states: int = 0
    kept: int = 0
    rows: int = 0


def compare(target: Target, texts: Sequence[Sequence[int]], rounds: int = 3, depth: int = 3, seed: int = 0) -> Found:
    """Decode texts token by token, and again in trees with wrong siblings before, between and after."""
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
        pairs = zip(plain.stores, drafted.stores, strict=True)
        found.kept += any(not torch.equal(one[:, row, :, :length], two[:, row, :, :length]) for one, two in pairs)
    return found


def _tree(path: Sequence[int], vocab: int, draw: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Draw a random tree around a path, up to 20 nodes; return its tokens, parents and the path's nodes."""
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


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "dtype", "exact", "rows", "depth"),
    [
        *((kind, torch.bfloat16, "bits", rows, 3) for kind in COMPILED for rows in (1, 4)),
        *(("llama", dtype, "tokens", 4, 3) for dtype in (torch.bfloat16, torch.float32)),  # the default
        *(("llama", dtype, "bits", 40, 6) for dtype in (torch.bfloat16, torch.float32)),  # beyond the replayed rows
    ],
)
def test_tree_has_the_bits_of_single_steps(kind: str, dtype: torch.dtype, exact: Any, rows: int, depth: int) -> None:
    """Logits, hidden states, and the keys and values of the accepted path."""
    rounds = 1 if rows == 40 else 3
    assert (rows * (depth + 1) > MAX_ROWS) == (rows == 40), "even without siblings"
    found = compare(Target(tiny_model(kind).to(dtype), exact=exact), (TEXTS * 10)[:rows], rounds, depth)
    assert (found.logits, found.states, found.kept) == (0, 0, 0) and found.rows == rounds * (depth + 1) * rows


@needs_kernels
def test_tree_wider_than_the_replayed_rows_has_the_same_bits() -> None:
    target = Target(tiny_model("llama", max_length=400).bfloat16(), exact="bits")
    single, drafted = target.new_cache(1, 340), target.new_cache(1, 340)
    for cache in (single, drafted):
        target.prefill(cache, [TEXTS[0]])
    chain = Tree.chain_of([(7 * i) % 101 for i in range(MAX_ROWS + 40)])
    logits_NV = target.forward_tree(drafted, TreeBatch.of([chain])).logits_BTV[0]
    for node, token in enumerate(chain.tokens[:8]):
        alone_V = target.forward_tree(single, TreeBatch.roots([token])).logits_BTV[0, 0]
        single.commit([[0]])
        assert torch.equal(alone_V, logits_NV[node])


def test_rounding_differs_without_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests above can fail."""
    monkeypatch.setattr("headstart.kernels.cpu_attention.serves", lambda *_: False)
    found = compare(Target(tiny_model("llama").bfloat16(), exact="tokens"), TEXTS)
    assert found.logits > found.rows / 4 and found.kept > 0  # 23 of 48 without AVX-512, more with it


@pytest.mark.filterwarnings("ignore:No C compiler")
def test_exact_bits_without_a_compiler_are_refused(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    target = Target(tiny_model("llama").bfloat16())
    with pytest.raises(UserError) as refused:
        target.exact = "bits"
    no_avx2 = torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    why = "this processor has no AVX2" if no_avx2 else "this machine has no C compiler"
    assert why in refused.value.problem and target.name in refused.value.problem
    assert no_avx2 or refused.value.remedy.startswith("Install gcc, or leave out --exact bits; in float32")
    assert target.exact == "tokens"


@needs_kernels
def test_models_partly_computed_by_torch_are_refused_by_name() -> None:
    refusals = {
        "gemma2": "torch computes its attention, which has soft caps",
        "mixtral": "some of its weights are quantised, or do not belong to a linear layer",
        "gpt2": "do not belong to a linear layer",
        "phi3_long": "its rotary frequencies depend on the length of the text",
    }
    for kind, why in refusals.items():
        with pytest.raises(UserError, match=why):
            Target(tiny_model(kind).bfloat16(), exact="bits")
    with pytest.raises(UserError, match="some of its weights are quantised"):
        Target(packed_model(tiny_model("llama").bfloat16(), 8), exact="bits")
    with pytest.raises(UserError, match=r"support float16\. Use --dtype bfloat16, or leave out"):
        Target(tiny_model("llama").half(), exact="bits")


@needs_kernels
def test_model_changed_later_is_refused_at_the_next_text() -> None:
    target = Target(tiny_model("llama"), exact="bits")
    target.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(UserError, match="has hooks or a forward from other code"):
        target.new_cache(1, 8)
    target.exact = "tokens"
    assert target.new_cache(1, 8).rows == 1


@needs_kernels
def test_released_model_computes_as_before() -> None:
    model = tiny_model("llama").bfloat16()
    before = [dict(vars(module)) for module in model.modules()]
    target = Target(model, exact="bits")
    assert target.exact == "bits"
    first = compare(target, TEXTS[:2], rounds=1)
    target.release()
    assert [vars(module).get("forward") for module in model.modules()] == [own.get("forward") for own in before]
    assert compare(target, TEXTS[:2], rounds=1) == first, "and back again"


@needs_kernels
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "qwen3"])
def test_drafted_tokens_match_the_plain_loop(kind: str, batch: int) -> None:
    """Right and wrong drafts in random trees, also after other rows have left the batch."""
    target = Target(tiny_model(kind).bfloat16(), exact="bits")
    options = DecodeOptions(max_new_tokens=24, draft="on", stop_test=lambda row, tokens: len(tokens) > 12 + 4 * row)
    prompts = TEXTS[:batch]
    plain = DecodeLoop(target).generate(prompts, options)
    drafter = ReplayDrafter([output.tokens for output in plain], target.vocab_size, right=0.6, nodes=12, seed=3)
    drafted = DecodeLoop(target, drafter).generate(prompts, options)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert max(output.tokens_per_round for output in drafted) > 1.2


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("new", [21, 9, 1])
def test_causal_attention_matches_masking(
    new: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.replay.attention.CHUNK", 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, 21, 8), torch.randn(2, 2, 21, 8)
    distance = torch.arange(21 - new, 21)[:, None] - torch.arange(21)
    allowed = (distance >= 0) & (distance < (window or 99))
    mask = TreeMask(torch.zeros(1, 1, new, 21).masked_fill(~allowed, float("-inf")), None).folded(False, 2, query)
    folded = query.reshape(2, 2, 2 * new, 8)
    wanted = _eager_attention(folded, key, value, mask, ScoreOptions(softcap=softcap)).reshape(2, 4, new, 8)
    torch.testing.assert_close(causal_attention(query, key, value, ScoreOptions(softcap=softcap), window), wanted)


@pytest.mark.parametrize("kind", [*KINDS, "phi3_long", "llama_long"])
def test_prefill_in_pieces_matches_one_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(kind, max_length=96))
    texts = [[*range(1, 60)], [*range(20, 45)], [7]]
    whole = target.prefill(cache := target.new_cache(3, 64), texts, AUX_LAYERS)
    step = TreeBatch.roots([4, 5, 6])
    after = target.forward_tree(cache, step).logits_BTV
    captured = target.hidden_states(texts, AUX_LAYERS)
    monkeypatch.setattr("headstart.model.model.CHUNK", 16)
    monkeypatch.setattr("headstart.replay.attention.CHUNK", 16)
    monkeypatch.setattr("headstart.model.model._STATE_TOKENS", 1)
    pieces = target.prefill(cache := target.new_cache(3, 64), texts, AUX_LAYERS)
    assert cache.lengths == [59, 25, 1]
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(pieces.logits_BTV, whole.logits_BTV, **close)
    torch.testing.assert_close(target.forward_tree(cache, step).logits_BTV, after, **close)
    for row, text in enumerate(texts):
        alone = target.hidden_states([text], AUX_LAYERS)[0]
        for layer in AUX_LAYERS:
            ours, theirs = (out.aux_hidden_states[layer][row, : len(text)] for out in (pieces, whole))
            torch.testing.assert_close(ours, theirs, **close)
            torch.testing.assert_close(captured[row][layer], alone[layer], **close)


def test_prefill_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of a text by itself, logits of the last tokens alone, and no KV cache while capturing states."""
    target = Target(tiny_model("llama", max_length=400))
    largest: list[int] = []
    cache = target.new_cache(2, 310)
    kept = {store.untyped_storage().data_ptr() for store in cache.stores}

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            # Views of the cache cost nothing.
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in kept:
                largest.append(out.numel())
            return out

    monkeypatch.setattr("headstart.model.model.CHUNK", 32)
    monkeypatch.setattr("headstart.replay.attention.CHUNK", 32)
    texts = [[*range(1, 101)] * 3, [5] * 130]
    with Watch():
        out = target.prefill(cache, texts, AUX_LAYERS)
    assert out.logits_BTV.shape == (2, 1, 101)
    # A piece times all slots, twice for grouped heads; states of all tokens; keys and values of both rows.
    assert max(largest) <= max(2 * 32 * 300, 2 * 300 * 64, 2 * 4 * 300 * 16)
    largest.clear()
    monkeypatch.setattr("headstart.model.model.TreeCache", None)
    with Watch():
        target.hidden_states(texts, AUX_LAYERS)
    assert max(largest) <= 2 * 300 * 96, "the MLP's width, no attention matrix"
