"""The proofs of `test_on_device.py` on a real CUDA device."""

from __future__ import annotations

from typing import get_args
from unittest.mock import patch

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, TreeKind
from headstart.drafters.heads import HeadDrafter
from headstart.model.model import Target
from headstart.recipes.sections import LossName, TrainSection
from headstart.tree.tree import Request, Tree, TreeBatch
from tests.decode.test_on_device import SHAPE, TEXTS, loss_of, on_both, training_batch
from tests.drafters.test_draft_graphs import probabilities
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def host() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61).to("cuda"))


def test_forwards_are_graphs(target: Target) -> None:
    DecodeLoop(target).generate(TEXTS, DecodeOptions(max_new_tokens=6, ignore_end=True))
    assert target.forwards == "CUDA graphs"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tree", ["dynamic", "static"])
@pytest.mark.parametrize("name", CASES)
def test_heads_change_no_text(name: str, tree: TreeKind, rows: int, target: Target) -> None:
    """Greedy, in float32."""
    heads = shake(build(name, target)).to("cuda")
    heads.bind(target)
    options = DecodeOptions(max_new_tokens=32, ignore_end=True, draft="on")
    texts = (TEXTS * rows)[:rows]
    outputs = DecodeLoop(target, HeadDrafter(heads, SHAPE, tree, max_nodes=8)).generate(texts, options)
    assert [output.drafter_error for output in outputs] == [None] * rows
    plain = [DecodeLoop(target).generate([text], options)[0].tokens for text in texts]
    assert [output.tokens for output in outputs] == plain


def proposed(target: Target, drafter: HeadDrafter, rows: int, request: Request) -> list[Tree]:
    """Return the first trees after some texts."""
    states, width = target.hidden_states(TEXTS[:rows], drafter.aux_layers), max(map(len, TEXTS))
    padded = {
        layer: torch.stack([torch.nn.functional.pad(of[layer], (0, 0, 0, width - len(of[layer]))) for of in states])
        for layer in drafter.aux_layers
    }
    roots = TreeBatch.roots([5 + row for row in range(rows)], target.device)
    return drafter.propose(drafter.prefill(TEXTS[:rows], padded), roots, request)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_eager_drafts(name: str, rows: int, target: Target) -> None:
    heads = shake(build(name, target)).to("cuda")
    heads.bind(target)
    drafter = HeadDrafter(heads, SHAPE, "dynamic", max_nodes=8)
    with patch.object(drafter.heads, "draft_step", side_effect=AssertionError("no level is drafted without a graph")):
        captured = proposed(target, drafter, rows, Request(8))
    assert drafter.forwards == "CUDA graphs"
    drafter._graphs = None
    for tree, eager in zip(captured, proposed(target, drafter, rows, Request(8)), strict=True):
        assert probabilities(tree) == pytest.approx(probabilities(eager), rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_heads_draft_the_same_on_both_devices(name: str, host: Target, target: Target) -> None:
    """Logits of every draft step equal the CPU's."""
    heads, moved = on_both(name, host, target)
    for ours, theirs in zip(
        heads.unroll(training_batch(host, heads, "cpu")), moved.unroll(training_batch(host, heads, "cuda")), strict=True
    ):
        scale = ours.logits_MD.abs().max().item()  # float32 sums in other orders are off by a share of the largest
        torch.testing.assert_close(theirs.logits_MD.cpu(), ours.logits_MD, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_training_step(loss: LossName, name: str, host: Target, target: Target) -> None:
    heads, moved = on_both(name, host, target)
    section = TrainSection(loss=loss)
    expected = loss_of(heads, host, training_batch(host, heads, "cpu"), section)
    assert loss_of(moved, target, training_batch(host, heads, "cuda"), section) == pytest.approx(expected, rel=1e-4)
