"""Where a text may end: at stop tokens, and never before `min_new_tokens`, as in transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, meaning
from headstart.decode.verify import SAMPLES_DRAFTS
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.hub.helpers import TUNING, make_heads

PROMPTS = [[5, 9, 5, 9, 5], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
OPTIONS = DecodeOptions(24, draft="on")


@pytest.fixture(scope="module")
def plain(tiny_target: Target) -> DecodeLoop:
    return DecodeLoop(tiny_target)


@pytest.fixture(scope="module")
def drafted(tiny_target: Target) -> DecodeLoop:
    heads = HeadDrafter(make_heads(tiny_target), TreeShape.from_paths(TUNING["paths"]), "static")
    return DecodeLoop(tiny_target, heads, NgramDrafter())


def ends_early(loop: DecodeLoop) -> tuple[int, int]:
    """Return a token of the first prompt's greedy text, and its first place in it."""
    (text,) = loop.generate(PROMPTS[:1], OPTIONS)
    place = next(place for place in range(2, 20) if text.tokens[place] not in text.tokens[:place])
    return text.tokens[place], place


def test_a_stop_token_ends_the_text_and_is_kept(plain: DecodeLoop, drafted: DecodeLoop) -> None:
    token, place = ends_early(plain)
    for loop in (plain, drafted):
        (text,) = loop.generate(PROMPTS[:1], replace(OPTIONS, stop_token_ids=[token, 3]))
        assert (text.tokens[-1], len(text.tokens), text.finish_reason) == (token, place + 1, "stop")


def test_a_stop_text_may_end_before_the_minimum(plain: DecodeLoop, drafted: DecodeLoop, tiny_target: Target) -> None:
    """As in transformers."""
    token, place = ends_early(plain)
    options = replace(OPTIONS, stop=tiny_target.tokenizer.decode([token]), min_new_tokens=place + 4)
    for loop in (plain, drafted):
        (text,) = loop.generate(PROMPTS[:1], options)
        assert (len(text.tokens), text.finish_reason) == (place + 1, "stop")
    assert "stop texts still apply" in meaning(DecodeOptions, "min_new_tokens").text


def test_numbers_of_numpy_are_numbers(drafted: DecodeLoop) -> None:
    given = {"max_new_tokens": 12, "min_new_tokens": 9, "seed": 1, "top_k": 5}
    loud = {name: np.int64(value) for name, value in given.items()}
    ours, theirs = (
        drafted.generate(PROMPTS, DecodeOptions(**numbers, temperature=temperature, top_p=top_p))
        for numbers, temperature, top_p in ((given, 0.5, 0.75), (loud, np.float32(0.5), np.float32(0.75)))
    )
    assert [text.tokens for text in ours] == [text.tokens for text in theirs]
    assert type(theirs[1].seed) is int, "records of answers are JSON"


def test_no_end_comes_before_the_shortest_text(plain: DecodeLoop, drafted: DecodeLoop, tiny_target: Target) -> None:
    """Greedy, rows of different lengths: the text of transformers, with the same tokens as ends."""
    token, place = ends_early(plain)
    options = replace(OPTIONS, stop_token_ids=[token], min_new_tokens=place + 4)
    for prompt, *texts in zip(PROMPTS, *(loop.generate(PROMPTS, options) for loop in (plain, drafted)), strict=True):
        theirs = tiny_target.model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            eos_token_id=[*tiny_target.end_tokens, token],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert [text.tokens for text in texts] == [theirs, theirs]
        assert len(theirs) >= place + 4 and token not in theirs[: place + 4]


@pytest.mark.parametrize("verifier", SAMPLES_DRAFTS)
def test_sampling_keeps_the_minimum(plain: DecodeLoop, drafted: DecodeLoop, tiny_target: Target, verifier: str) -> None:
    """Every second token would end the text."""
    ends = list(range(0, tiny_target.vocab_size, 2))
    options = replace(
        OPTIONS, temperature=1.0, seed=1, stop_token_ids=ends, min_new_tokens=9, max_new_tokens=12, verifier=verifier
    )
    for loop in (plain, drafted):
        for text in loop.generate(PROMPTS, options):
            assert len(text.tokens) >= 10 and not set(text.tokens[:9]) & set(ends)
    if verifier == "top_k":
        texts = [[text.tokens for text in loop.generate(PROMPTS, options)] for loop in (plain, drafted)]
        assert texts[0] == texts[1], "the very text that plain sampling draws"
    (short,) = plain.generate(PROMPTS[:1], replace(options, min_new_tokens=0))
    assert len(short.tokens) < 9, "else nothing was tested"
