"""Early exit: output, its cache, probabilities, and a target that stays as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.sampling import warp
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.tree.tree import Committed, Tree
from tests.decode.drafters import lossless
from tests.drafters.helpers import OPTIONS, TEXTS, propose, random_texts, tiny
from tests.tiny import KINDS, tiny_model


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("spare", [0, 512], ids=["cache grows", "cache is large"])
def test_output_equals_plain_decoding(layers: int, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.drafters.early_exit._SPARE", spare)
    target = tiny()
    together = lossless(target, [EarlyExitDrafter(target, layers, draft_steps=5)], TEXTS, OPTIONS)
    if layers == 3:  # the whole target: only a cache that holds the right tokens accepts everything
        assert all(round.emitted == 6 for row in together for round in row.rounds)


def after(drafter: EarlyExitDrafter, rows: list[list[int]], roots: list[int], **request: Any) -> list[Tree]:
    return propose(drafter, drafter.prefill(rows, {}), roots, **request)


def counts(trees: list[Tree]) -> list[int]:
    return [tree.size for tree in trees]


def test_accepted_tokens_are_not_read_again() -> None:
    drafter = EarlyExitDrafter(tiny(), 3, draft_steps=4)
    rows = TEXTS
    session = drafter.prefill(rows, {})
    trees = propose(drafter, session, [1, 2, 3])
    assert session.cache.lengths == [3 + 4, 17 + 4, 9 + 4]  # the root and three of the four drafts
    first, second, third = (tree.tokens for tree in trees)
    other = (second[2] + 1) % 61
    committed = [first[:5], [second[0], second[1], other], third[:1]]
    drafter.commit(session, Committed.of(committed, {}))
    assert session.cache.lengths == [3 + 4, 17 + 2, 9 + 1]
    now = [[*row, *more] for row, more in zip(rows, committed, strict=True)]
    assert session.texts == now
    again = propose(drafter, session, [7, 8, 9])
    assert [tree.tokens for tree in again] == [tree.tokens for tree in after(drafter, now, [7, 8, 9])]
    # rounds without a draft, then fewer rows
    drafter.commit(session, Committed.of([[7], [8], [9]], {}))
    drafter.commit(session, Committed.of([[4, 4], [5], [6, 6]], {}))
    drafter.reorder(session, [0, 2])
    late = [[*now[0], 7, 4, 4], [*now[2], 9, 6, 6]]
    assert session.texts == late
    again = propose(drafter, session, [1, 2])
    assert [tree.tokens for tree in again] == [tree.tokens for tree in after(drafter, late, [1, 2])]


def test_probabilities_are_of_the_first_layers_and_end_the_chain() -> None:
    target = tiny()
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(12.0)
    drafter = EarlyExitDrafter(target, 2)
    draft = drafter.first_layers
    whole = after(drafter, TEXTS, [1, 2, 3])
    probs = [tree.accept_probs for tree in whole if tree.accept_probs is not None]
    assert len(probs) == 3 and counts(whole) == [7, 7, 7]
    for number, text in enumerate(TEXTS):
        accept_prob, tokens = 1.0, whole[number].tokens
        for step in range(6):
            cache = draft.new_cache(1, 40)
            logits_V = draft.prefill(cache, [[*text, *tokens[: step + 1]]]).logits_BTV[0, 0]
            assert int(logits_V.argmax()) == tokens[step + 1]
            accept_prob *= float(logits_V.softmax(-1).max())
            assert probs[number][step + 1] == pytest.approx(accept_prob, rel=1e-4)
    threshold = sorted(row[2] for row in probs)[1]
    cut = after(drafter, TEXTS, [1, 2, 3], threshold=threshold)
    assert counts(cut) == [sum(accept_prob >= threshold for accept_prob in row) for row in probs]
    assert len(set(counts(cut))) > 1, "rows end at different depths"
    assert [tree.tokens for tree in cut] == [tree.tokens[: end.size] for tree, end in zip(whole, cut, strict=True)]


def test_sampled_chains_follow_the_warped_distribution() -> None:
    drafter = EarlyExitDrafter(tiny(), 2, draft_steps=2)
    draft = drafter.first_layers
    warper = partial(warp, SamplingOptions(temperature=1.0, top_k=3))
    root, text = 5, TEXTS[0]
    cache = draft.new_cache(1, 8)
    q_draft_V = warper(draft.prefill(cache, [[*text, root]]).logits_BTV[0, 0])
    stream = torch.Generator().manual_seed(0)
    counts = torch.zeros(61)
    rows = 40
    for _ in range(10):
        sampling = {"sample_drafts": True, "warp": warper, "generators": [stream] * rows}
        for tree in after(drafter, [text] * rows, [root] * rows, **sampling):
            assert list(tree.sampled) == [1, 2]
            torch.testing.assert_close(tree.sampled[1].q_draft_V(61), q_draft_V)
            assert tree.sampled[2].q_draft_V(61)[tree.tokens[2]] > 0
            counts[tree.tokens[1]] += 1
    assert (counts / 400 - q_draft_V).abs().max() < 0.1


def test_sampling_runs_with_sampled_drafts() -> None:
    target = tiny()
    options = DecodeOptions(max_new_tokens=30, ignore_end=True, temperature=1.0, top_p=0.9, seed=0)
    rows = DecodeLoop(target, EarlyExitDrafter(target, 3)).generate(TEXTS, options)
    assert all(row.drafter_error is None for row in rows)
    assert all(row.tokens_per_round > 5 for row in rows), "drafts of all layers are accepted"


def test_chains_end_at_the_context_of_the_target() -> None:
    drafter = EarlyExitDrafter(tiny(max_length=32), 3)
    assert [counts(after(drafter, random_texts(length), [1])) for length in (25, 29, 31, 32)] == [[7], [4], [2], [1]]


@pytest.mark.parametrize("kind", KINDS)
def test_early_exit_is_the_first_layers_and_leaves_the_target_alone(kind: str) -> None:
    target = Target(tiny_model(kind, vocab_size=61))
    before = target.identity()
    settings = target.model.config.to_dict()
    modules = {name: id(module) for name, module in target.model.named_modules()}
    memory = {parameter.data_ptr() for parameter in target.model.parameters()}
    text = TEXTS[1]
    answer = DecodeLoop(target).generate([text], OPTIONS)[0].tokens
    states = target.hidden_states([text], (1, 2, FINAL))[0]

    drafter = EarlyExitDrafter(target, 2)
    short = drafter.first_layers
    assert len(short.layers) == short.num_layers == 2
    assert {parameter.data_ptr() for parameter in short.model.parameters()} < memory
    short_states = short.hidden_states([text], (1, 2, FINAL))[0]
    torch.testing.assert_close(short_states[1], states[1])
    torch.testing.assert_close(short_states[2], states[2])
    logits = short.prefill(short.new_cache(1, len(text)), [text]).logits_BTV[0, 0]
    torch.testing.assert_close(logits, target.lm_head(short_states[FINAL][-1]))

    assert len(target.layers) == target.num_layers == 3
    assert {name: id(module) for name, module in target.model.named_modules()} == modules
    assert target.identity() == before
    assert target.model.config.to_dict() == settings
    out = DecodeLoop(target, drafter).generate([text], OPTIONS)[0]
    assert (out.tokens, out.drafter_error) == (answer, None)
    after = target.hidden_states([text], (1, 2, FINAL))[0]
    assert all(torch.equal(after[layer], states[layer]) for layer in states)
    stock = target.model.generate(
        torch.tensor([text]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert stock[0, len(text) :].tolist() == answer
