"""Drafting level by level: every node of a tree gets what a chain of its ancestors alone would get."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headstart.heads.base import DraftHead, family
from headstart.heads.parts import cache
from headstart.heads.parts.layer import DraftLayer, LayerConfig, Rotary
from headstart.model.model import Target
from headstart.tree.tree import Committed
from tests.heads.test_contract import CASES, build, prefilled, shake
from tests.tiny import tiny_model

TEXTS = [[3, 9, 14, 27, 33, 8, 40], [8, 40, 12, 5, 51, 22, 19]]

Level = tuple[list[list[int]], list[list[int]]]
"""Tokens and parents' places of a level's nodes, by row."""


@pytest.fixture(scope="module")
def exact() -> Target:
    return Target(tiny_model("llama", vocab_size=61).double())


def random_levels(roots: list[int], widths: tuple[int, ...], rng: random.Random) -> list[Level]:
    """Return the roots, then random levels of the given widths below them."""
    levels: list[Level] = [([[root] for root in roots], [[0] for _ in roots])]
    for width in widths:
        above = len(levels[-1][0][0])
        tokens = [[rng.randrange(61) for _ in range(width)] for _ in roots]
        levels.append((tokens, [[rng.randrange(above) for _ in range(width)] for _ in roots]))
    return levels


def path_to(levels: list[Level], row: int, node: int) -> list[int]:
    """Return the tokens from the root to a node of the last level."""
    path = []
    for tokens, parents in reversed(levels):
        path.append(tokens[row][node])
        node = parents[row][node]
    return path[::-1]


def drafted_alone(heads: DraftHead, text: list[int], states: dict[int, torch.Tensor], chain: list[int]) -> torch.Tensor:
    """Return the logits after a chain of single nodes, from a fresh session."""
    session = heads.prefill([text], states)
    here_11 = torch.zeros(1, 1, dtype=torch.long)
    for depth, token in enumerate(chain):
        logits_BWD = heads.draft_step(session, torch.full_like(here_11, token), here_11, depth)
    return logits_BWD[0, 0]


@pytest.mark.parametrize(("rows", "widths"), [(2, (3, 4)), (1, (2, 1))])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_node_of_a_tree_is_drafted_as_the_chain_that_leads_to_it(
    name: str, rows: int, widths: tuple[int, ...], exact: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different length, trees of their own, a round accepted before, and a cache that has to grow."""
    monkeypatch.setattr(cache, "_SPARE", 0)
    heads = shake(build(name, exact)).double()
    heads.bind(exact)
    rng = random.Random(0)
    texts, lengths = TEXTS[:rows], [2, 4][:rows]
    known = exact.prefill(exact.new_cache(rows, 7), texts, heads.aux_layers).aux_hidden_states
    padded = {aux_layer: F.pad(state, (0, 0, 0, 2), value=7.0) for aux_layer, state in known.items()}
    read = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    session = heads.prefill(read, {aux_layer: state[:, : max(lengths)] for aux_layer, state in known.items()})
    for counts in ([3, 1][:rows], [1, 2][:rows]):
        roots = [text[length] for text, length in zip(texts, lengths, strict=True)]
        levels = random_levels(roots, widths[: heads.draft_steps - 1], rng)
        for depth, (tokens, parents) in enumerate(levels):
            logits_BWD = heads.draft_step(session, torch.tensor(tokens), torch.tensor(parents), depth)
            for row, text in enumerate(texts):
                own = {aux_layer: state[row : row + 1, : lengths[row]] for aux_layer, state in known.items()}
                for node in range(len(tokens[row])):
                    chain = path_to(levels[: depth + 1], row, node)
                    wanted_D = drafted_alone(heads, text[: lengths[row]], own, chain)
                    got_D = logits_BWD[row, min(node, logits_BWD.shape[1] - 1)]
                    # float64 sums in other orders are off by a share of the largest
                    largest = wanted_D[wanted_D.isfinite()].abs().max().item()
                    torch.testing.assert_close(got_D, wanted_D, rtol=0, atol=1e-9 * largest)
        indices = [slice(length, length + max(counts)) for length in lengths]
        tokens = [text[length : length + count] for text, length, count in zip(texts, lengths, counts, strict=True)]
        states = {
            aux_layer: torch.stack([state[row, index] for row, index in enumerate(indices)])
            for aux_layer, state in padded.items()
        }
        heads.commit(session, Committed.of(tokens, states))
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]


@pytest.mark.parametrize("name", ["eagle", "eagle3-deep-normed"])
@torch.inference_mode()
def test_the_last_layer_computes_only_the_last_token(name: str, exact: Target, spy: Any) -> None:
    """In the first draft after a long prompt, each layer's MLP takes as few entries as possible."""
    heads = shake(build(name, exact)).double()
    heads.bind(exact)
    calls = spy(DraftLayer, "write")
    heads.draft_step(prefilled(heads, exact, TEXTS[:1]), torch.tensor([[5]]), torch.tensor([[0]]), 0)
    assert [residual_BTE.shape[1] for _, residual_BTE, _ in calls] == ([7, 1] if name == "eagle3-deep-normed" else [1])


@torch.inference_mode()
def test_long_texts_attend_in_parts(exact: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build("eagle3-deep-normed", exact)).double()
    heads.bind(exact)
    known = exact.prefill(exact.new_cache(2, 7), TEXTS, heads.aux_layers).aux_hidden_states

    def first_draft() -> torch.Tensor:
        return heads.draft_step(
            heads.prefill([TEXTS[0], TEXTS[1][:5]], known), torch.tensor([[5], [6]]), torch.zeros(2, 1), 0
        )

    complete, masks = first_draft(), []
    honest = F.scaled_dot_product_attention

    def attend(queries: torch.Tensor, *args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        masks.append(0 if attn_mask is None else attn_mask.shape[2])
        return honest(queries, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(cache, "_QUERIES", 3)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(first_draft(), complete, rtol=0, atol=1e-12)  # float64 sums in another order
    assert masks and max(masks) <= 3 * 2, "two query heads share a key head"


def test_a_table_of_angles_is_as_long_as_the_text_needs(exact: Target) -> None:
    heads = build("eagle", exact)
    config = heads.config.model_copy(update={"max_position_embeddings": 5000})
    assert isinstance(config, LayerConfig)
    grown, complete = Rotary(config), Rotary(config)
    complete.at(torch.tensor([[0]]), torch.float32, 5000)
    for index, size in ((3, 256), (700, 1024), (10, 1024), (4999, 5000), (9999, 5000)):
        got = grown.at(torch.tensor([[index]]), torch.float32, index + 1)
        wanted = complete.at(torch.tensor([[index]]), torch.float32, index + 1)
        assert torch.equal(torch.stack(got), torch.stack(wanted))
        ((cos, _),) = grown._tables.values()
        assert len(cos) == size


@pytest.mark.parametrize("name", ["hydra", "eagle3", "dspark", "dflash2"])
def test_drafts_along_the_best_path_are_noticed(name: str, exact: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every node of a level is drafted as the first one."""
    honest = family(CASES[name]["family"]).draft_step

    def first(self: Any, state: Any, tokens_BW: torch.Tensor, parents_BW: torch.Tensor, depth: int) -> torch.Tensor:
        return honest(self, state, tokens_BW[:, :1].expand_as(tokens_BW), parents_BW, depth)

    monkeypatch.setattr(family(CASES[name]["family"]), "draft_step", first)
    with pytest.raises(AssertionError, match="not close"):
        test_every_node_of_a_tree_is_drafted_as_the_chain_that_leads_to_it(name, 2, (3, 4), exact, monkeypatch)
