"""Every registered family keeps the contract; a new family needs one row in CASES and gets the whole suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, families, family, make_config
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.model.teacher import load_teacher, save_teacher
from headstart.tree.tree import Committed, Request, TreeBatch, TreeShape

BLOCK: dict[str, Any] = {"aux_layers": (1, 2), "mask_token_id": 60}
CASES: dict[str, dict[str, Any]] = {
    "medusa": {"family": "medusa", "num_heads": 3},
    "medusa-draft-vocabulary": {"family": "medusa", "num_heads": 2, "draft_vocab_size": 30},
    "medusa-root": {"family": "medusa", "num_heads": 2, "see_root": True},
    "medusa-published": {"family": "medusa", "num_heads": 3, "num_layers": 2, "input_map": False},
    "medusa-shared-deep": {"family": "medusa", "num_heads": 3, "num_layers": 2, "shared_lm_head": True},
    "hydra": {"family": "hydra", "num_heads": 3},
    "hydra-draft-vocabulary": {"family": "hydra", "num_heads": 2, "draft_vocab_size": 30},
    "hydra-shared-deep": {"family": "hydra", "num_heads": 3, "num_layers": 2, "shared_lm_head": True},
    "eagle": {"family": "eagle", "draft_steps": 3},
    "eagle-draft-vocabulary": {"family": "eagle", "draft_steps": 2, "draft_vocab_size": 30},
    "eagle-published": {"family": "eagle", "draft_steps": 2, "embedding_norm": False},
    "eagle3": {"family": "eagle3", "draft_steps": 3, "aux_layers": (1, 2, 3)},
    "eagle3-draft-vocabulary": {"family": "eagle3", "draft_steps": 2, "aux_layers": (1, 3), "draft_vocab_size": 30},
    "eagle3-cold": {"family": "eagle3", "draft_steps": 2, "aux_layers": (1, 2, 3), "init": "random"},
    "eagle3-deep-normed": {
        "family": "eagle3", "draft_steps": 3, "num_layers": 2, "aux_layers": (1, 2), "aux_norms": True,
        "feedback": "post_norm",
    },
    "eagle3-normed-residual": {
        "family": "eagle3", "draft_steps": 2, "aux_layers": (1, 3), "norm_before_residual": True, "qk_norm": True,
    },
    "eagle3-transition": {
        "family": "eagle3", "draft_steps": 3, "aux_layers": (1, 3), "init": "transition", "norm_before_residual": True,
    },
    "peagle": {"family": "peagle", "draft_steps": 3, "aux_layers": (1, 3), "mask_token_id": 60},
    "peagle-deep-normed": {
        "family": "peagle", "draft_steps": 3, "num_layers": 2, **BLOCK, "aux_norms": True, "qk_norm": True,
        "draft_vocab_size": 30, "train_embeddings": True,
    },
    "dspark": {"family": "dspark", "block_size": 3, **BLOCK, "markov_rank": 4},
    "dspark-deep": {
        "family": "dspark", "block_size": 7, "num_layers": 2, **BLOCK, "markov_rank": 4, "confidence": True,
        "draft_vocab_size": 30, "sliding_window": 8,
    },
    "dflash": {"family": "dflash", "block_size": 4, **BLOCK},
    "dflash-deep": {"family": "dflash", "block_size": 8, "num_layers": 2, **BLOCK, "draft_vocab_size": 30},
    "dflash-sliding": {
        "family": "dflash", "block_size": 8, "num_layers": 2, **BLOCK, "sliding_window": 9, "full_layers": (0,),
        "causal": True,
    },
    "dflash-cold": {"family": "dflash", "block_size": 5, **BLOCK, "init": "random", "causal": True},
    "dflash2": {"family": "dflash2", "block_size": 4, **BLOCK, "selector_rank": 4, "selector_top_k": 8},
    "dflash2-deep": {
        "family": "dflash2", "block_size": 6, "num_layers": 2, **BLOCK, "conv_kernel_size": 3, "conv_group_size": 8,
        "selector_rank": 4, "draft_vocab_size": 30, "sliding_window": 7, "full_layers": (0,),
    },
    "mtp": {"family": "mtp", "draft_steps": 3},
    "mtp-draft-vocabulary": {"family": "mtp", "draft_steps": 2, "draft_vocab_size": 30},
}  # fmt: skip


def started(settings: dict[str, Any], target: FrozenModel, seed: int = 0) -> Any:
    """Return warm-started heads; a draft vocabulary is the tokens from 7 on."""
    torch.manual_seed(seed)
    config = make_config(settings, target)
    heads = family(config.family)(config)
    if config.draft_vocab_size:
        heads.set_draft_vocabulary(torch.arange(7, 7 + config.draft_vocab_size))
    heads.warm_start(target)
    return heads


def build(name: str, target: FrozenModel, seed: int = 0) -> DraftHead:
    heads: DraftHead = started(CASES[name], target, seed)
    return heads


def prefilled(heads: DraftHead, target: Target, texts: list[list[int]]) -> Any:
    """Return a session after these texts."""
    cache = target.new_cache(len(texts), max(map(len, texts)))
    return heads.prefill(texts, target.prefill(cache, texts, heads.aux_layers).aux_hidden_states)


def shake(heads: DraftHead) -> DraftHead:
    """Move the parameters off their warm start, so that an unused one shows."""
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return heads


def batch_of(target: Target, heads: DraftHead, texts: Sequence[Sequence[int]], prompt: int) -> HeadBatch:
    width = max(map(len, texts))
    states = target.hidden_states(texts, heads.aux_layers)
    return HeadBatch(
        torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]),
        torch.tensor([[prompt <= index < len(text) for index in range(width)] for text in texts]),
        {
            layer: torch.stack(
                [torch.nn.functional.pad(row[layer], (0, 0, 0, width - len(row[layer]))) for row in states]
            )
            for layer in heads.aux_layers
        },
    )


def draft(heads: DraftHead, session: Any, roots: list[int], shape: TreeShape) -> list[list[int]]:
    trees = HeadDrafter(heads, shape).propose(session, TreeBatch.roots(roots), Request(shape.size))
    return [tree.tokens for tree in trees]


def test_every_family_has_a_case() -> None:
    assert {case["family"] for case in CASES.values()} == set(families())


@pytest.mark.parametrize("name", CASES)
def test_unroll_shapes_and_gradients(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    batch = batch_of(target, heads, [list(range(1, 13)), list(range(20, 28))], prompt=3)
    total = torch.zeros(())
    for step, prediction in enumerate(heads.unroll(batch)):
        rows = len(prediction.teacher_M)
        assert prediction.logits_MD.shape == (rows, heads.config.draft_width)
        assert (prediction.teacher_M - prediction.origin_M == step + 1).all(), "step k of origin t predicts t + k + 2"
        flat = batch.supervised_BT.flatten()
        assert flat[prediction.teacher_M + 1].all(), "only supervised tokens are predicted"
        assert (prediction.origin_M // 12 == (prediction.teacher_M + 1) // 12).all(), "never across rows"
        logits_MD = prediction.logits_MD
        total = total + logits_MD[logits_MD.isfinite()].square().mean()
        if prediction.confidence_M is not None:
            assert prediction.confidence_M.shape == (rows,)
            total = total + prediction.confidence_M.square().mean()
    total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads.parameters() if p.requires_grad)
    assert all(not p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_a_teacher_replaces_the_target_in_training(name: str, target: Target, tmp_path: Path) -> None:
    """Heads that start from earlier layers name them in `HeadConfig.start_layers`."""
    folder = save_teacher(tmp_path, target, make_config(CASES[name], target).start_layers)
    assert folder is not None
    heads, taught = build(name, target), build(name, load_teacher(folder, target.device))
    batch = batch_of(target, heads, [list(range(1, 13)), list(range(20, 28))], prompt=3)
    for one, other in zip(heads.unroll(batch), taught.unroll(batch), strict=True):
        assert torch.equal(one.logits_MD, other.logits_MD)
    assert all(torch.equal(tensor, taught.state_dict()[key]) for key, tensor in heads.state_dict().items())


@pytest.mark.parametrize("name", CASES)
def test_texts_with_too_few_supervised_tokens_predict_nothing(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    for supervised in (0, 1, 2):
        steps = list(heads.unroll(batch_of(target, heads, [[3, 9, 14, 27, 33]], prompt=5 - supervised)))
        assert [len(step.teacher_M) for step in steps if len(step.teacher_M)] == [1] * max(0, supervised - 1)


@pytest.mark.parametrize("name", CASES)
def test_subsampling_leaves_the_other_predictions_unchanged(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    random = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, target.vocab_size, (length,), generator=random).tolist() for length in (30, 22, 9)]
    complete = batch_of(target, heads, texts, 3)
    subset = dataclasses.replace(
        complete, subsampled_steps_BT=torch.randint(1, 4, complete.tokens_BT.shape, generator=random)
    )
    lost = 0
    for step, (kept, full) in enumerate(zip(heads.unroll(subset), heads.unroll(complete), strict=True)):
        stays_M = subset.subsampled_steps_BT.flatten()[full.origin_M] > step
        lost += int((~stays_M).sum())
        assert torch.equal(kept.origin_M, full.origin_M[stays_M])
        assert torch.equal(kept.teacher_M, full.teacher_M[stays_M])
        # Products of other shapes add up in another order.
        torch.testing.assert_close(kept.hidden_MH, full.hidden_MH[stays_M], rtol=1e-4, atol=1e-4)
    assert lost > 5


@pytest.mark.parametrize("name", CASES)
def test_drafting_equals_the_unrolled_training_forward(name: str, target: Target) -> None:
    """A mismatch between training and drafting would lower acceptance."""
    heads = shake(build(name, target))
    text = [3, 9, 14, 27, 33, 8, 40, 12]
    for read in (2, 4, 6):
        session = prefilled(heads, target, [text[:read]])
        chain, level = [text[read]], torch.zeros(1, 1, dtype=torch.long)
        drafted = []
        for depth in range(heads.draft_steps):
            drafted.append(heads.draft_step(session, torch.tensor([chain[-1:]]), level, depth)[0, 0])
            chain.append(int(heads.draft_to_target_D[drafted[-1].argmax()]))
        batch = batch_of(target, heads, [text[:read] + chain], prompt=read)
        trained = {}
        for step, prediction in enumerate(heads.unroll(batch)):
            indices = (prediction.origin_M == read - 1).nonzero()[:, 0].tolist()
            if indices:
                trained[step] = prediction.logits_MD[indices[0]]
        assert set(trained) == set(range(heads.draft_steps))
        for step, logits_D in trained.items():
            scale = (
                logits_D[logits_D.isfinite()].abs().max().item()
            )  # float32 sums in other orders are off by a share of the largest
            torch.testing.assert_close(drafted[step], logits_D, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CASES)
def test_commits_in_rounds_equal_one_prefill(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    text = [3, 9, 14, 27, 33, 8, 40]
    shape = TreeShape.from_paths([(0, 0), (1,)])
    states = target.prefill(target.new_cache(1, 8), [text], heads.aux_layers).aux_hidden_states
    rounds = heads.prefill([text[:3]], {layer: state[:, :3] for layer, state in states.items()})
    for begin, end in ((3, 5), (5, 6), (6, 7)):
        draft(heads, rounds, [text[begin]], shape)
        part = {layer: state[:, begin:end] for layer, state in states.items()}
        heads.commit(rounds, Committed.of([text[begin:end]], part))
    root = [11]
    afresh = draft(heads, heads.prefill([text], states), root, shape)
    assert draft(heads, rounds, root, shape) == afresh


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drafting", [True, False])
def test_uneven_commits_equal_one_prefill(name: str, drafting: bool, target: Target) -> None:
    """Two rows accept different lengths, with a draft in each round or with drafting paused."""
    heads = shake(build(name, target))
    texts = [[3, 9, 14, 27, 33, 8, 40], [8, 40, 12, 5, 51, 22, 19, 2]]
    shape = TreeShape.from_paths([(0, 0), (1,)])
    states = target.prefill(target.new_cache(2, 8), texts, heads.aux_layers).aux_hidden_states
    starts = [2, 3]
    session = heads.prefill([text[:start] for text, start in zip(texts, starts, strict=True)], _part(states, [0, 0], 3))
    for counts in ([1, 3], [3, 1], [1, 1]):
        if drafting:
            draft(heads, session, [text[at] for text, at in zip(texts, starts, strict=True)], shape)
        width = max(counts)
        tokens = [text[at : at + count] for text, at, count in zip(texts, starts, counts, strict=True)]
        heads.commit(session, Committed.of(tokens, _part(states, starts, width)))
        starts = [at + count for at, count in zip(starts, counts, strict=True)]
    root = [11, 12]
    afresh = draft(heads, heads.prefill(texts, states), root, shape)
    assert draft(heads, session, root, shape) == afresh


def _part(states: dict[int, torch.Tensor], starts: Sequence[int], width: int) -> dict[int, torch.Tensor]:
    """Slice `width` states of each row from its own start; beyond the row's end they are arbitrary."""
    padded = {layer: torch.nn.functional.pad(state, (0, 0, 0, width), value=7.0) for layer, state in states.items()}
    return {
        layer: torch.stack([state[row, start : start + width] for row, start in enumerate(starts)])
        for layer, state in padded.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_batch_are_independent(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    texts = [[3, 9, 14, 27, 33], [8, 40, 12]]
    shape = TreeShape.from_paths([(0, 0), (1, 0)])
    roots = [6, 7]
    session = prefilled(heads, target, texts)
    together = draft(heads, session, roots, shape)
    for row, text in enumerate(texts):
        alone = prefilled(heads, target, [text])
        assert draft(heads, alone, roots[row : row + 1], shape)[0] == together[row]
    heads.reorder(session, [1])
    assert draft(heads, session, roots[1:], shape)[0] == together[1]
    session = prefilled(heads, target, texts[1:])
    heads.join(session, prefilled(heads, target, texts[:1]))
    assert draft(heads, session, roots[::-1], shape) == together[::-1]


@pytest.mark.parametrize("name", CASES)
def test_greedy_output_is_the_targets_own(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    options = DecodeOptions(max_new_tokens=32, ignore_end=True, draft="on")
    texts = [[3, 9, 14], [8, 40, 12, 5, 51, 22]]
    plain = [DecodeLoop(target).generate([text], options)[0].tokens for text in texts]
    drafter = HeadDrafter(heads, TreeShape.from_paths([(0, 0), (1, 0), (2,)]))
    rows = DecodeLoop(target, drafter).generate(texts, options)
    assert [row.tokens for row in rows] == plain
    assert [row.drafter_error for row in rows] == [None, None]
    assert all(one.nodes == drafter.max_nodes for row in rows for one in row.rounds), "every round was drafted"


@pytest.mark.parametrize("name", CASES)
def test_siblings_are_distinct_and_inside_the_draft_vocabulary(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    shape = TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1)])
    (tokens,) = draft(heads, prefilled(heads, target, [[3, 9]]), [5], shape)
    assert tokens[0] == 5
    assert len(set(tokens[1:4])) == 3
    assert len(set(tokens[4:6])) == 2
    assert set(tokens[1:]) <= set(heads.draft_to_target_D.tolist())


@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_draft_are_counted(name: str, target: Target) -> None:
    """Including products of the C kernels, which torch does not count."""
    heads = build(name, target)
    lm_head = 2 * heads.config.draft_width * heads.config.hidden_size
    slots = getattr(heads.config, "block_size", heads.draft_steps) / heads.draft_steps  # of a block, for each draft
    weights = 2 * sum(parameter.numel() for parameter in heads.parameters()) * slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.heads.int8_weights._MIN", 0)
        assert lm_head <= heads.flops_per_draft() <= weights + lm_head, "each weight is used once a slot at most"


def test_unknown_families_and_settings_are_refused(target: Target) -> None:
    for look_up in (family, lambda name: make_config({"family": name}, target)):
        with pytest.raises(UserError, match="Did you mean 'medusa'"):
            look_up("medsa")
    with pytest.raises(UserError, match=r"no setting 'num_head'\. Did you mean 'num_heads'"):
        make_config({"family": "medusa", "num_head": 3}, target)
    with pytest.raises(UserError, match="larger than the target's 61"):
        make_config({"family": "medusa", "draft_vocab_size": 62}, target)
    with pytest.raises(UserError, match=r"heads\.num_heads' is 0: input should be greater than or equal to 1"):
        make_config({"family": "medusa", "num_heads": 0}, target)
