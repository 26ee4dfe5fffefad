"""Drafters by name."""

from __future__ import annotations

import inspect

import pytest

from headstart.cli import heads as cli_heads
from headstart.drafters.catalog import DEFAULT, make_drafters
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.sections import EvalSection
from tests.decode.drafters import ReplayDrafter

HEADS = ReplayDrafter([], 61, 0.0)


def test_plain_decoding_is_no_drafter(tiny_target: Target) -> None:
    assert make_drafters("none", tiny_target) == ()


def test_names(tiny_target: Target) -> None:
    assert make_drafters("heads", tiny_target, HEADS) == (HEADS,)
    three = make_drafters("lookahead+ngram+early-exit", tiny_target)
    assert list(map(type, three)) == [LookaheadDrafter, NgramDrafter, EarlyExitDrafter]
    first, second = make_drafters("heads+ngram", tiny_target, HEADS)
    assert first is HEADS and isinstance(second, NgramDrafter)
    (early,) = make_drafters("early-exit:2", tiny_target)
    assert isinstance(early, EarlyExitDrafter) and early.first_layers.num_layers == 2
    (default,) = make_drafters("early-exit", tiny_target)
    assert isinstance(default, EarlyExitDrafter) and default.first_layers.num_layers == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngramm", "Unknown drafter 'ngramm'. Did you mean 'ngram'?"),
        ("heads+ngrma", "Unknown drafter 'ngrma' in 'heads+ngrma'. Did you mean 'ngram'?"),
        ("heads+n-gram", "Unknown drafter 'n-gram' in 'heads+n-gram'"),
        ("", "Unknown drafter ''. Known: early-exit, heads"),
        ("heads", "needs trained heads"),
        ("none+ngram", "Leave out 'none'"),
        ("ngram:4", "takes no argument"),
        ("memory", "none came with these heads. Name a file for the answers to come: memory:FILE"),
        ("memory:", "names no file"),
        ("memory:/nowhere/a+b", "Cannot keep answers in /nowhere/a+b (No such file or directory)"),
        ("early-exit:", "no number of layers"),
        ("early-exit:9", "Use 1 to 3"),
    ],
)
def test_bad_names_are_refused(tiny_target: Target, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_drafters(name, tiny_target)
    assert message in str(caught.value)


def test_the_default_drafter_is_the_same_everywhere() -> None:
    """Commands and recipes spell the name out, so that they start without loading the decoder."""
    for command in (cli_heads.generate, cli_heads.chat):
        assert inspect.signature(command).parameters["drafter"].default == DEFAULT
    assert EvalSection().compare == (DEFAULT,)
