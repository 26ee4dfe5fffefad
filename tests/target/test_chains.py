"""Targets with running states (linear attention) verify chains: rejected drafts leave no trace."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from headstart.data.generation.generator import Continuation
from headstart.data.generation.in_process import InProcess
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.draft_model import DraftModelDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.model import model
from headstart.model.model import Target
from headstart.recipes.sections import TuneSection
from headstart.replay import patch
from headstart.replay.chains import ChainCache
from headstart.replay.patch import FINAL
from headstart.tree.tree import Tree, TreeBatch, TreeShape
from headstart.tuning.tune import tune
from tests.shipped import QWEN3_NEXT
from tests.tiny import tiny_model

LINEAR, FULL = "linear_attention", "full_attention"
TEXTS = [[3, 9, 14, 27, 33, 8, 40, 12, 55, 6, 21, 44, 17, 30, 2], [8, 40, 12, 5, 51, 22, 19, 4, 7, 33, 10, 1, 60, 5, 9]]


def hybrid(*kinds: str) -> Any:
    layers = list(kinds or (LINEAR, FULL, LINEAR))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3NextConfig(num_hidden_layers=len(layers), layer_types=layers, **QWEN3_NEXT)
        return Qwen3NextForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(hybrid())


@torch.inference_mode()
def stock(target: Target, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's own logits [T, V] and final states [T, E]."""
    out = target.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def assert_own(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare float32 sums over other pieces of a text. One token too many or too few moves logits by over 1 %."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("seed", range(3))
def test_rejected_chains_leave_no_trace(seed: int, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different length; in each round each row accepts none, some or all of its chain."""
    monkeypatch.setattr(model, "PIECE", 3)
    rng = random.Random(seed)
    read = [rng.randint(1, 5) for _ in TEXTS]
    cache = target.new_cache(2, 40)
    out = target.prefill(cache, [text[:length] for text, length in zip(TEXTS, read, strict=True)], (2, FINAL))
    for row, (text, length) in enumerate(zip(TEXTS, read, strict=True)):
        logits_TV, states_TE = stock(target, text[:length])
        assert_own(out.logits_BTV[row, 0], logits_TV[-1])
        assert_own(out.aux_hidden_states[FINAL][row, :length], states_TE)
    for _ in range(4):
        right = [rng.randint(0, min(3, len(text) - length)) for text, length in zip(TEXTS, read, strict=True)]
        wrong = [rng.randint(1 if count == 0 else 0, 2) for count in right]
        chains = [
            [*text[length : length + count], *[59] * more]
            for text, length, count, more in zip(TEXTS, read, right, wrong, strict=True)
        ]
        batch = TreeBatch.of([Tree.chain_of(chain) for chain in chains])
        out = target.forward_tree(cache, batch, (2, FINAL))
        assert out.aux_hidden_states[2].shape == (2, batch.size, 64)
        for row, (text, length, chain) in enumerate(zip(TEXTS, read, chains, strict=True)):
            logits_TV, states_TE = stock(target, [*text[:length], *chain])
            assert_own(out.logits_BTV[row, : len(chain)], logits_TV[length:])
            assert_own(out.aux_hidden_states[FINAL][row, : len(chain)], states_TE[length:])
        cache.commit([range(count) for count in right])
        read = [length + count for length, count in zip(read, right, strict=True)]
        assert cache.lengths == read


def test_kept_rows_continue(target: Target) -> None:
    cache = target.new_cache(2, 40)
    assert isinstance(cache, ChainCache)
    target.prefill(cache, [TEXTS[0][:3], TEXTS[1][:5]])
    target.forward_tree(cache, TreeBatch.of([Tree.chain_of([1, 2, 3]), Tree.chain_of(TEXTS[1][5:8])]))
    cache.commit([[], [0, 1]])
    cache.reorder([1])
    kept = cache.kept(0, 7)
    assert cache.kept(0, 6).lengths == [0], "a running state cannot be cut back"
    two = target.new_cache(2, 40)
    two.go_on_with(1, kept)
    both = target.new_cache(2, 40)
    for row in range(2):
        both.go_on_with(row, kept)
    target.prefill(cache, [[59, 59]])  # must not affect the kept copy
    out = target.prefill(both, [TEXTS[1][7:9], TEXTS[1][7:12]])
    part = two.part(1, 2)
    alone = target.prefill(part, [TEXTS[1][7:9]])
    assert_own(out.logits_BTV[0, 0], stock(target, TEXTS[1][:9])[0][-1])
    assert_own(out.logits_BTV[1, 0], stock(target, TEXTS[1][:12])[0][-1])
    assert_own(alone.logits_BTV[0, 0], stock(target, TEXTS[1][:9])[0][-1])
    assert part.lengths == [9]


def test_decoded_texts_match_the_model(target: Target) -> None:
    prompts = [[3], [8, 40, 12, 8, 40, 12], [9, 14, 27]]
    greedy: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    texts = [target.model.generate(torch.tensor([prompt]), **greedy)[0].tolist() for prompt in prompts]
    plain = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    options = DecodeOptions(max_new_tokens=16, ignore_end=True)
    for drafters in ([], [NgramDrafter()], [LookaheadDrafter()]):
        rows = DecodeLoop(target, *drafters).generate(prompts, options)
        assert [row.tokens for row in rows] == plain
        assert [row.drafter_error for row in rows] == [None] * 3
    assert InProcess(target).continue_rows(prompts, Continuation(16, [0.0] * 3, frozenset(), 0)) == plain


def test_unsupported_uses_are_refused(target: Target) -> None:
    cache = target.new_cache(1, 10)
    target.prefill(cache, [[3]])
    fork = TreeBatch.of([Tree([5, 6, 7], [-1, 0, 0])])
    with pytest.raises(UserError, match="keep a running state, so it verifies chains alone"):
        target.forward_tree(cache, fork)
    with pytest.raises(UserError, match="compiled CPU kernels"):
        target.exact = "bits"
    with pytest.raises(UserError, match="its layers keep running states"):
        Target(hybrid(), exact="bits")
    with pytest.raises(UserError, match="cannot forget what was rejected"):
        DraftModelDrafter(target, Target(tiny_model("llama", vocab_size=61)))


def test_models_with_other_running_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="layers of type linear_attention keep a running state"):
        Target(hybrid(LINEAR, LINEAR))
    monkeypatch.setattr(patch, "is_linear", lambda module: False)  # an unknown kind of linear attention
    with pytest.raises(UserError, match="cannot verify a token tree"):
        Target(hybrid())


def test_uncommitted_tokens_leave_no_trace(target: Target) -> None:
    cache = target.new_cache(1, 40)
    target.prefill(cache, [TEXTS[0][:3]])
    for _ in range(2):
        out = target.forward_tree(cache, TreeBatch.of([Tree.chain_of(TEXTS[0][3:6])]))
        assert_own(out.logits_BTV[0], stock(target, TEXTS[0][:6])[0][3:])


def test_heads_are_tuned_to_chains(target: Target) -> None:
    heads = family("mtp")(make_config({"family": "mtp", "draft_steps": 2}, target))
    heads.warm_start(target)
    texts = [SimpleNamespace(tokens=text, supervised=[index > 2 for index in range(len(text))]) for text in TEXTS]
    found = tune(target, heads, texts, TuneSection(widths=(1, 2), context=8, max_nodes=4, max_rank=3))
    assert found.tree == "static" and not any(any(path) for path in found.paths)
    options = DecodeOptions(max_new_tokens=12, ignore_end=True)
    plain = DecodeLoop(target).generate([TEXTS[0][:4]], options)[0].tokens
    for tree in ("dynamic", "static"):  # the tree is cut to a chain
        drafter = HeadDrafter(heads, TreeShape.from_paths([(0, 0), (1,)]), tree)
        (row,) = DecodeLoop(target, drafter).generate([TEXTS[0][:4]], options)
        assert row.tokens == plain and row.drafter_error is None
        assert all(one.nodes <= 3 for one in row.rounds) and any(one.nodes == 3 for one in row.rounds)
