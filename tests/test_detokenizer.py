"""Incremental detokenization, with tokenizers that split characters across tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headstart.support.detokenizer import AnswerMarkup, IncrementalDetokenizer, StopStrings, answer_text
from tests.tiny import tiny_tokenizer

WORDS = ["▁", "a", "b", "▁a", "ab", "é", "▁é", "語", "?", "�"]
STOPS = ("漢", "a語", " a", "éé", "語語語")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama's: words, with bytes for missing characters; id 0 is special."""
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    space, bytes_, joined, first = (
        *(decoders.Replace("▁", " "), decoders.ByteFallback()),
        *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    )
    tokenizer.decoder = decoders.Sequence([space, bytes_, joined, first])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)


KINDS = {"byte fallback": byte_fallback(), "byte level": tiny_tokenizer()}


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return answer_text(tokens, tokenizer, frozenset(), AnswerMarkup())


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Encode each character as a word or as its bytes."""
    if tokenizer.convert_tokens_to_ids("<0x00>") is None:
        return list(tokenizer.encode(text))
    names = [name for char in text for name in ([char] if char in "ab?" else [f"<0x{b:02X}>" for b in char.encode()])]
    return list(tokenizer.convert_tokens_to_ids(names))


def random_tokens(tokenizer: Any, rng: random.Random) -> list[int]:
    """Return complete characters, cut characters and random tokens."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        char = tokens_of(tokenizer, rng.choice("a b?é語漢🙂"))
        tokens += rng.choice([char, char, char, char[:-1], [rng.randrange(len(tokenizer))]])
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text(kind: str) -> None:
    tokenizer, rng = KINDS[kind], random.Random(0)
    for _ in range(300):
        tokens, pieces = random_tokens(tokenizer, rng), []
        detokenizer, start = IncrementalDetokenizer(tokenizer), 0
        while start < len(tokens):
            stop = start + rng.randrange(1, 4)
            pieces.append(detokenizer.push(tokens[start:stop]))
            start = stop
        pieces.append(detokenizer.flush())
        assert "".join(pieces) == text_of(tokenizer, tokens)
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        if kind == "byte level" or "\ufffd" not in whole:  # byte fallback drops whole characters beside a cut one
            assert text_of(tokenizer, tokens) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_character_takes_none_before_it(kind: str) -> None:
    tokenizer = KINDS[kind]
    tokens = tokens_of(tokenizer, "aé漢")[:-1]
    assert text_of(tokenizer, tokens) == ("aé\ufffd\ufffd" if kind == "byte fallback" else "aé\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_seen_at_its_first_token(kind: str) -> None:
    tokenizer, rng = KINDS[kind], random.Random(0)
    texts = [tokens_of(tokenizer, "語語語語漢a"), *(random_tokens(tokenizer, rng) for _ in range(150))]
    found = 0
    for tokens in texts:
        for stop in STOPS:
            stops = StopStrings(tokenizer, [stop, "@@@"])
            seen = next((count for count, token in enumerate(tokens, 1) if stops.seen_after(token)), None)
            prefixes = range(1, len(tokens) + 1)
            assert seen == next((n for n in prefixes if stop in text_of(tokenizer, tokens[:n])), None)
            found += seen is not None
    assert found > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_may_hold_special_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]
    end = tokenizer.eos_token
    stops = StopStrings(tokenizer, [f"b{end}"])
    tokens = [*tokens_of(tokenizer, "a"), tokenizer.eos_token_id, *tokens_of(tokenizer, "b"), tokenizer.eos_token_id]
    assert [stops.seen_after(token) for token in tokens] == [False, False, False, True]
