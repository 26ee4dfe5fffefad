"""The tests' own models and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.model.loading import load_target
from headstart.model.model import Target
from tests.tiny import KINDS, SPECIAL, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_target(kind: str) -> None:
    """Target refuses a model that cannot take token trees, so building one is the test."""
    target = Target(tiny_model(kind))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (3, 64, 101)


def test_the_same_seed_gives_the_same_weights() -> None:
    prints = [Target(tiny_model("llama", seed)).identity().fingerprint for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("text", ["the user is in the system", "naïve ☃ 日本語\n\ttabs  spaces", "".join(SPECIAL)])
def test_any_text_round_trips(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_saved_target_loads_as_the_same_model(tiny_target: Target, tiny_target_folder: Path) -> None:
    loaded = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    assert loaded.identity().fingerprint == tiny_target.identity().fingerprint
    messages = [{"role": "user", "content": "hello there"}]
    for tokenizer in (loaded.tokenizer, tiny_target.tokenizer):
        assert tokenizer.eos_token_id == 2
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer.encode(rendered, add_special_tokens=False)
        assert tokens[0] == 1
        assert tokenizer.decode(tokens) == rendered
