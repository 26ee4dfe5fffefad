"""The lookahead window by hand, its hook, and its output."""

from __future__ import annotations

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.model.model import Target
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, upload_paths
from tests.decode.drafters import lossless
from tests.drafters.helpers import OPTIONS, random_texts, tiny
from tests.tiny import tiny_model


def verified(trees: list[Tree], paths: list[list[int]], choices: list[list[int]]) -> Committed:
    """Return the outcome of a round with these trees and these choices of the target."""
    batch = TreeBatch.of(trees)
    padded = [[*row, *[0] * (batch.size - len(row))] for row in choices]
    paths_BP, counts_B, _ = upload_paths(paths, [0] * len(paths), "cpu")
    logits_BNV = torch.nn.functional.one_hot(torch.tensor(padded), 64)
    return Committed(batch, paths, paths_BP, counts_B, {}, logits_BNV)


def test_one_jacobi_step_by_hand() -> None:
    drafter = LookaheadDrafter(window=3, ngram=3, guesses=2)
    session = drafter.prefill([[9]], {})
    session[0].columns = [[10, 11], [20, 21], [30, 31]]
    (tree,) = drafter.propose(session, TreeBatch.roots([5]), Request(max_nodes=32))
    # root - 10 - 20 - 30 - 31, with 11 after 10 and 21 after 20
    assert tree.tokens == [5, 10, 11, 20, 21, 30, 31]
    assert tree.parents == [-1, 0, 1, 1, 3, 3, 5]
    assert tree.accept_probs is None
    drafter.commit(session, verified([tree], [[0]], [[1, 2, 12, 3, 22, 4, 32]]))
    assert session[0].columns == [[11, 12], [21, 22], [31, 32]]
    assert session[0].pool == {10: {(11, 12): None}, 20: {(21, 22): None}, 30: {(31, 32): None}}
    # the next root is one of the guesses: its n-gram is drafted before the window
    (tree,) = drafter.propose(session, TreeBatch.roots([10]), Request(max_nodes=4))
    assert tree.tokens == [10, 11, 12, 21]
    assert tree.parents == [-1, 0, 1, 1]
    # of the window only the first column fitted, so only it moves on
    drafter.commit(session, verified([tree], [[0]], [[0, 0, 13, 0]]))
    assert session[0].columns == [[12, 13], [21, 22], [31, 32]]


def test_pool_keeps_the_latest_n_grams_of_the_text() -> None:
    drafter = LookaheadDrafter(window=1, ngram=3, guesses=2)
    session = drafter.prefill([[1, 2, 3, 1, 4]], {})
    for text in ([5, 1], [6, 7]):
        drafter.commit(session, verified([Tree.chain_of(text)], [[0, 1]], [[0, 0]]))
    assert list(session[0].pool[1]) == [(4, 5), (6, 7)], "(2, 3) is the oldest of three"
    assert session[0].recent == [6, 7]
    (tree,) = drafter.propose(session, TreeBatch.roots([1]), Request(max_nodes=9, chain=True))
    assert tree.tokens == [1, 6, 7], "a chain has room for the latest n-gram only"


def test_rounds_without_a_window_teach_nothing() -> None:
    drafter = LookaheadDrafter()
    session = drafter.prefill([[1, 2, 3]], {})
    before = [list(column) for column in session[0].columns]
    (tree,) = drafter.propose(session, TreeBatch.roots([5]), Request(max_nodes=1))
    assert tree.size == 1
    drafter.commit(session, verified([tree], [[0]], [[7]]))
    assert session[0].columns == before


@pytest.mark.parametrize("settings", [{}, {"window": 1, "ngram": 2, "guesses": 1}, {"window": 6, "ngram": 5}])
def test_output_equals_plain_decoding(settings: dict[str, int]) -> None:
    target = Target(tiny_model("qwen3", vocab_size=31))
    lossless(target, [LookaheadDrafter(**settings)], random_texts(4, 23, 11, vocab=31), OPTIONS)


def test_the_window_drafts_text_that_has_not_occurred(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that goes once around its vocabulary never repeats itself; the window runs ahead of the text."""
    target = tiny()
    for layer in target.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding_VE = target.embedding_weight
    after = (torch.arange(61) + 7) % 61  # the token that follows each token
    target.lm_head_weight[after] = embedding_VE / embedding_VE.norm(dim=-1, keepdim=True)
    options = DecodeOptions(max_new_tokens=55, ignore_end=True)
    texts = [[19, 3, 44, 25, 8]]
    expected = [(8 + 7 * step) % 61 for step in range(1, 56)]
    ours = DecodeLoop(target, LookaheadDrafter(window=8)).generate(texts, options)[0]
    monkeypatch.setattr(LookaheadDrafter, "_step", lambda self, row, tree, choices: None)
    deaf = DecodeLoop(target, LookaheadDrafter(window=8)).generate(texts, options)[0]
    assert ours.tokens == deaf.tokens == expected
    assert deaf.tokens_per_round < 1.2 < 1.4 < ours.tokens_per_round


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_learns_the_targets_greedy_choices(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every verified node, whatever is decoded."""
    seen: list[list[int]] = []
    monkeypatch.setattr(LookaheadDrafter, "_step", lambda self, row, tree, choices: seen.append(choices))
    target = Target(tiny_model("llama", vocab_size=31))
    options = DecodeOptions(max_new_tokens=6, temperature=temperature, seed=0, ignore_end=True)
    [output] = DecodeLoop(target, LookaheadDrafter()).generate([[4, 9, 3]], options)
    assert output.drafter_error is None
    assert list(map(len, seen)) == [one.nodes for one in output.rounds]
    text = [4, 9, 3, *output.tokens]
    for choices, length in zip(
        seen, [3 + sum(one.emitted for one in output.rounds[:n]) for n in range(9)], strict=False
    ):
        assert choices[0] == int(target.model(torch.tensor([text[: length + 1]])).logits[0, -1].argmax())
