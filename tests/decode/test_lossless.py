"""Greedy decoding with drafts gives token for token what plain greedy decoding and transformers give."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.decode.verify import GreedyVerifier
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.model.model import Target, TargetOutput
from headstart.support.detokenizer import AnswerMarkup
from headstart.tree.tree import Committed, TreeBatch, TreeShape, build_commit
from tests.decode.drafters import ReplayDrafter
from tests.decode.test_sampling import by_hand
from tests.tiny import KINDS, LONG, tiny_model

NEW = 48
OPTIONS = DecodeOptions(max_new_tokens=NEW, ignore_end=True)


def prompts(vocab: int, lengths: Sequence[int] = (3, 17, 9), seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab) for _ in range(length)] for length in lengths]


def plain(target: Target, texts: list[list[int]], options: DecodeOptions = OPTIONS) -> list[list[int]]:
    return [DecodeLoop(target).generate([text], options)[0].tokens for text in texts]


@pytest.mark.parametrize("kind", [*KINDS, *LONG])
def test_every_architecture_with_random_trees(kind: str) -> None:
    target = Target(tiny_model(kind, vocab_size=61))
    texts = prompts(61)
    stock = [
        target.model.generate(
            torch.tensor([text]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(text) :].tolist()
        for text in texts
    ]
    expected = plain(target, texts)
    assert expected == stock
    for seed, right in enumerate((0.0, 0.5, 0.9)):
        drafter = ReplayDrafter(expected, 61, right, seed=seed)
        together = DecodeLoop(target, drafter).generate(texts, OPTIONS)
        assert [row.tokens for row in together] == expected
        if right == 0.9:
            assert all(row.tokens_per_round > 1.3 for row in together), "the proof must exercise accepted drafts"
        for row, text in enumerate(texts):
            alone = DecodeLoop(target, ReplayDrafter([expected[row]], 61, right, seed=seed)).generate([text], OPTIONS)
            assert alone[0].tokens == expected[row]


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.6},
        {"frequency_penalty": -0.3, "repetition_penalty": 1.2},
        {"logit_bias": {7: 1.5, 30: -100.0}, "presence_penalty": -0.5},
        {"logit_bias": {"7": 1.5, "30": -100.0}},  # as OpenAI's clients write them
    ],
    ids=str,
)
def test_penalties_and_bias_with_drafts(settings: dict[str, Any], target: Target) -> None:
    """Equal to a loop that recomputes the whole text and counts by hand."""
    texts, options = prompts(61), DecodeOptions(24, ignore_end=True, **settings)
    expected = []
    for text in texts:
        answer: list[int] = []
        for _ in range(24):
            with torch.inference_mode():
                logits_V = target.model(torch.tensor([[*text, *answer]])).logits[0, -1]
            answer.append(int(by_hand(options, logits_V, text, answer).argmax()))
        expected.append(answer)
    assert expected != plain(target, texts, DecodeOptions(24, ignore_end=True)), "the settings matter here"
    assert plain(target, texts, options) == expected
    for right in (0.5, 0.9):
        rows = DecodeLoop(target, ReplayDrafter(expected, 61, right)).generate(texts, options)
        assert [row.tokens for row in rows] == expected
    assert all(row.tokens_per_round > 1.3 for row in rows)


@pytest.mark.parametrize("exact", ["bits", "tokens"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 9, "frequency_penalty": 0.5}], ids=str)
def test_logprobs_are_those_of_plain_decoding(exact: Any, sampling: dict[str, Any]) -> None:
    """Bit for bit on batch-invariant kernels. They are the target's own, before penalties, temperature and cuts."""
    target, texts = Target(tiny_model("llama", vocab_size=61), exact=exact), prompts(61)
    rule = "top_k" if sampling else "auto"
    options = DecodeOptions(24, ignore_end=True, seed=3, verifier=rule, logprobs=3, **sampling)
    plainly = DecodeLoop(target).generate(texts, options)
    known = [row.tokens for row in plainly]
    drafted = DecodeLoop(target, ReplayDrafter(known, 61, 0.8)).generate(texts, options)
    assert [row.tokens for row in drafted] == known
    assert all(row.tokens_per_round > 1.3 for row in drafted)
    for text, row, other in zip(texts, drafted, plainly, strict=True):
        with torch.inference_mode():
            logits_TV = target.model(torch.tensor([text + row.tokens])).logits[0, len(text) - 1 : -1]
        expected_TV = logits_TV.log_softmax(-1)
        assert len(row.logprobs) == len(row.tokens) == 24
        assert exact != "bits" or row.logprobs == other.logprobs
        for number, token in enumerate(row.tokens):
            found, expected_V = row.logprobs[number], expected_TV[number]
            in_order = list(dict.fromkeys([token, *expected_V.topk(3).indices.tolist()]))
            assert list(found) == list(other.logprobs[number]) == in_order
            # Logits of about 1 that float32 products sum in another order.
            assert list(found.values()) == pytest.approx(expected_V[list(found)].tolist(), abs=1e-5)
            assert found == pytest.approx(other.logprobs[number], abs=1e-5)
    only_own = DecodeLoop(target).generate(texts[:1], replace(options, logprobs=0, max_new_tokens=5))[0]
    assert [list(one) for one in only_own.logprobs] == [[token] for token in known[0][:5]]
    assert not DecodeLoop(target).generate(texts[:1], replace(options, logprobs=None))[0].logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [TreeShape.chain(0), TreeShape.chain(3), TreeShape.from_paths([(0, 1, 0), (2,)])])
def test_random_heads(shape: TreeShape, dtype: torch.dtype) -> None:
    target = Target(tiny_model("llama", vocab_size=61).to(dtype))
    config = make_config({"family": "medusa", "num_heads": 3}, target)
    torch.manual_seed(0)
    heads = family("medusa")(config)
    heads.warm_start(target)
    torch.nn.init.normal_(heads.block_weight_KLEE)  # type: ignore[arg-type]  # a parameter, which torch types as a module, too
    texts = prompts(61)
    together = DecodeLoop(target, HeadDrafter(heads.to(dtype), shape)).generate(texts, OPTIONS)
    assert [row.tokens for row in together] == plain(target, texts)


def test_rows_that_end_at_different_times_do_not_disturb_the_others() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    texts = prompts(61, (4, 8, 12, 16))
    whole = plain(target, texts)
    ends = frozenset({whole[0][5], whole[2][11]})
    target.end_tokens = ends
    options = DecodeOptions(max_new_tokens=NEW)
    expected = plain(target, texts, options)
    assert len({len(tokens) for tokens in expected}) > 1
    rows = DecodeLoop(target, ReplayDrafter(whole, 61, 0.8)).generate(texts, options)
    assert [row.tokens for row in rows] == expected
    for row in rows:
        assert row.finish_reason == ("end" if row.tokens[-1] in ends else "length")


def test_end_of_turn_inside_an_accepted_path_cuts_the_rest() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    text = prompts(61)[:1]
    whole = plain(target, text)[0]
    index = next(i for i in range(3, NEW) if whole[i] not in whole[:i])
    target.end_tokens = frozenset({whole[index]})
    out = DecodeLoop(target, ReplayDrafter([whole], 61, 1.0, nodes=12)).generate(text, DecodeOptions(NEW))
    assert out[0].tokens == whole[: index + 1]
    assert out[0].finish_reason == "end"


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_token_limit_is_exact(limit: int, target: Target) -> None:
    text = prompts(61)[:1]
    whole = plain(target, text)[0]
    options = DecodeOptions(max_new_tokens=limit, ignore_end=True)
    out = DecodeLoop(target, ReplayDrafter([whole], 61, 1.0)).generate(text, options)[0]
    assert out.tokens == whole[:limit]
    assert out.finish_reason == "length"


def test_context_can_be_filled_to_the_last_token() -> None:
    target = Target(tiny_model("llama", vocab_size=61, max_length=64))
    text = prompts(61, (16,))
    options = DecodeOptions(max_new_tokens=48, ignore_end=True)
    whole = plain(target, text, options)[0]
    assert DecodeLoop(target, ReplayDrafter([whole], 61, 0.9)).generate(text, options)[0].tokens == whole
    with pytest.raises(UserError, match="context of 64"):
        DecodeLoop(target).generate(text, DecodeOptions(max_new_tokens=49))


def test_stop_string_across_tokens(tiny_target: Target) -> None:
    text = [tiny_target.tokenizer("user: the")["input_ids"]]
    options = DecodeOptions(max_new_tokens=40, ignore_end=True)
    whole = DecodeLoop(tiny_target).generate(text, options)[0].tokens
    decoded = tiny_target.tokenizer.decode(whole[:12], skip_special_tokens=True)
    stop = decoded[len(decoded) // 2 :][:3]
    stopped = DecodeOptions(max_new_tokens=40, ignore_end=True, stop=(stop,))
    expected = DecodeLoop(tiny_target).generate(text, stopped)[0]
    assert expected.finish_reason == "stop"
    assert stop in tiny_target.tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert stop not in tiny_target.tokenizer.decode(expected.tokens[:-1], skip_special_tokens=True)
    drafter = ReplayDrafter([whole], tiny_target.vocab_size, 1.0)
    assert DecodeLoop(tiny_target, drafter).generate(text, stopped)[0].tokens == expected.tokens


def test_a_stop_string_with_a_space_before_punctuation_is_seen(tiny_target: Target) -> None:
    """Tokenizers that tidy what they decode would hide it."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokens = tokenizer("to a . b")["input_ids"]
    assert " ." not in tokenizer.decode(tokens), "this tokenizer tidies"
    target: Any = SimpleNamespace(tokenizer=tokenizer, end_tokens=frozenset(), markup=AnswerMarkup())
    text = Generation()
    text.extend(tokens, 0, DecodeOptions(max_new_tokens=40, stop=(" .",)), target)
    assert text.finish_reason == "stop"
    assert tokenizer.decode(text.tokens, clean_up_tokenization_spaces=False) == "to a ."


def test_streaming_gives_every_token_once_in_order(target: Target) -> None:
    texts = prompts(61)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    drafts = [0, 0, 0]

    def on_tokens(row: int, tokens: list[int], drafted: int) -> None:
        seen[row] += tokens
        drafts[row] += drafted

    known = plain(target, texts)
    rows = DecodeLoop(target, ReplayDrafter(known, 61, 0.7)).generate(texts, OPTIONS, on_tokens)
    assert [seen[row] for row in range(3)] == [row.tokens for row in rows] == known
    for row, drafted in zip(rows, drafts, strict=True):
        assert drafted > 0
        cut = 1 + sum(r.emitted for r in row.rounds) - len(row.tokens)
        assert drafted == sum(r.emitted - 1 for r in row.rounds) - max(0, cut - 1), "the target's own are not drafts"


def test_rounds_account_for_every_token(target: Target) -> None:
    texts = prompts(61)[:1]
    known = plain(target, texts)
    out = DecodeLoop(target, ReplayDrafter(known, 61, 0.7)).generate(texts, OPTIONS)[0]
    emitted = sum(step.emitted for step in out.rounds)
    assert NEW <= 1 + emitted < NEW + 9, "the first token comes from the prefill, the last round may overrun"
    assert len(out.token_ms) == NEW
    assert out.token_ms[0] <= out.token_ms[-1]


class _AcceptsEverything(GreedyVerifier):
    """A broken verifier: takes the first chain of drafts whatever the target says."""

    def accept(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        choice = out.logits_BTV.argmax(-1).tolist()
        return build_commit(batch, [[0, 1] for _ in choice], [row[1] for row in choice], {}, out.logits_BTV)


def test_the_proof_notices_a_broken_verifier(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    texts = prompts(61)[:1]
    known = plain(target, texts)
    monkeypatch.setattr("headstart.decode.verify.GreedyVerifier", _AcceptsEverything)
    drafter = ReplayDrafter(known, 61, 0.0, nodes=4)
    monkeypatch.setattr(drafter.rng, "randint", lambda *_: 4)
    assert DecodeLoop(target, drafter).generate(texts, OPTIONS)[0].tokens != known[0]


def test_bad_prompts_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="Prompt 1 is empty"):
        DecodeLoop(target).generate([[1], []], OPTIONS)
    with pytest.raises(UserError, match="no prompt"):
        DecodeLoop(target).generate([], OPTIONS)


def test_tree_deeper_than_the_heads_is_refused(target: Target) -> None:
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, target))
    with pytest.raises(UserError, match="3 deep and the heads draft 2"):
        HeadDrafter(heads, TreeShape.chain(3))
    with pytest.raises(UserError, match="the heads draft 61"):
        HeadDrafter(heads, TreeShape.from_paths([(61,)]))
