"""DSpark: the previous token's part in a draft, level by level, and the training of the confidence head."""

from __future__ import annotations

from typing import Any, cast

import torch

from headstart.heads.dspark import DSparkHead
from headstart.heads.int8_weights import linear
from headstart.model.model import Target
from tests.heads.test_contract import batch_of, build, prefilled, shake

TEXT = [3, 9, 14, 27, 33]


def drafting(name: str, target: Target) -> tuple[DSparkHead, Any]:
    heads = cast(DSparkHead, shake(build(name, target)))
    return heads, prefilled(heads, target, [TEXT])


def test_drafts_after_a_node_depend_on_its_token_alone(target: Target) -> None:
    """The block runs once; siblings differ only by the contribution of their own tokens."""
    heads, session = drafting("dspark-deep", target)
    zero = torch.zeros(1, 2, dtype=torch.long)
    heads.draft_step(session, torch.tensor([[8]]), zero[:, :1], 0)
    for depth, tokens in ((1, [7, 30]), (2, [12, 7])):
        logits_WD = heads.draft_step(session, torch.tensor([tokens]), zero, depth)[0]
        added_WD = heads.markov_embedding_VR[tokens] @ heads.markov_lm_head_DR.T
        alone_D = linear(session.hidden_BSE[0, depth], heads.lm_head_DE)
        torch.testing.assert_close(logits_WD, alone_D + added_WD, rtol=1e-4, atol=1e-4)


def test_confidence_does_not_change_the_drafts(target: Target) -> None:
    heads = cast(DSparkHead, shake(build("dspark-deep", target)))
    for prediction in heads.unroll(batch_of(target, heads, [list(range(1, 20))], prompt=3)):
        assert prediction.confidence_M is not None
        prediction.confidence_M.sum().backward(retain_graph=True)
    learning = {name for name, weight in heads.named_parameters() if weight.grad is not None}
    assert learning == {"confidence_head.weight", "confidence_head.bias"}
