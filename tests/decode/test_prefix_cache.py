"""A prompt that continues an earlier text: drafts and output as after a full prefill, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headstart.decode.drafting import Drafter
from headstart.decode.engine import Engine
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decoder import Decoder
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.heads.base import family, make_config
from headstart.model.model import Target
from headstart.tree.tree import Request, Tree, TreeBatch, TreeShape
from tests.decode.arrivals import decode
from tests.replay.test_chains import hybrid
from tests.tiny import tiny_model, tiny_tokenizer

OPTIONS = DecodeOptions(14, draft="on", ignore_end=True)
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"family": "medusa", "num_heads": 2},
    "eagle3": {"family": "eagle3", "aux_layers": [1, 2, 3]},
    "hydra": {"family": "hydra", "num_heads": 2},
}


class RecordingDrafter(HeadDrafter):
    """Heads that record their drafts."""

    drafts: Sequence[list[int]] = ()

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        trees = super().propose(session, roots, request)
        self.drafts = [*self.drafts, *(tree.tokens for tree in trees)]
        return trees


def target_of(kind: str) -> Target:
    return Target(tiny_model(kind), None, kind)


def drafters_of(target: Target, name: str) -> tuple[Drafter, ...]:
    config = make_config(HEADS[name], target)
    heads = family(config.family)(config)
    heads.warm_start(target)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in heads.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    heads.bind(target)
    return RecordingDrafter(
        heads.eval().requires_grad_(False), TreeShape.from_paths([(0,), (1,), (0, 0)])
    ), NgramDrafter()


def drafts(loop: DecodeLoop) -> list[list[int]]:
    """Return the heads' drafts since the last call."""
    (heads, _) = loop.drafters
    assert isinstance(heads, RecordingDrafter)
    drafted, heads.drafts = list(heads.drafts), ()
    return drafted


def assert_as_uncached(loop: DecodeLoop, prompt: list[int], engine: Engine) -> None:
    """Compare drafts and text with those of a full prefill."""
    drafts(loop)
    cached = decode(engine, loop, prompt, OPTIONS)
    drafted = drafts(loop)
    (uncached,) = loop.generate([prompt], OPTIONS)
    assert (cached.tokens, drafted) == (uncached.tokens, drafts(loop))


def turns(loop: DecodeLoop, prompt: list[int], engine: Engine | None) -> list[Any]:
    """Run three turns of a conversation, each after the previous answer without its last token; return each one's
    tokens, node counts and drafts."""
    answers = []
    for turn in range(3):
        prompt = [*prompt, 7 + turn, 8, 9, 8, 9]
        answer = loop.generate([prompt], OPTIONS)[0] if engine is None else decode(engine, loop, prompt, OPTIONS)
        answers.append((answer.tokens, [done.nodes for done in answer.rounds], drafts(loop)))
        prompt = [*prompt, *answer.tokens[:-1]]
    return answers


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_drafts_and_text_equal_a_full_prefill(kind: str, name: str, spy: Any) -> None:
    target = target_of(kind)
    loop = DecodeLoop(target, *drafters_of(target, name))
    uncached = turns(loop, [3, 4, 5], None)
    calls = spy(Target, "prefill")
    assert turns(loop, [3, 4, 5], Engine(target)) == uncached
    read = [len(rows[0]) for _, _, rows, *_ in calls]
    assert read[0] == 8 and max(read[1:]) <= 7, "later turns read only new tokens"


def test_streams_of_one_conversation_end_each_by_itself() -> None:
    """The target's cache is copied; the check that may end one stream is not copied along."""
    decoder, prompt = Decoder(Target(hybrid(), tiny_tokenizer())), [3, 4, 5]
    for turn in range(3):
        stream = decoder.stream(prompt, max_new_tokens=6, drafter="ngram")
        list(stream)
        assert stream.answer is not None
        assert stream.answer.tokens == decoder.generate(prompt, max_new_tokens=6, drafter="none").tokens
        prompt = [*prompt, *stream.answer.tokens[:-1], 7 + turn]


@pytest.fixture
def cached() -> tuple[DecodeLoop, Engine]:
    """A loop, and an engine that has decoded the text [3, 4, 5, 6, 7]."""
    target = target_of("llama")
    loop, engine = DecodeLoop(target, *drafters_of(target, "eagle3")), Engine(target)
    decode(engine, loop, [3, 4, 5, 6, 7], OPTIONS)
    return loop, engine


def test_a_text_that_differs_is_read_from_there(cached: tuple[DecodeLoop, Engine]) -> None:
    loop, engine = cached
    for prompt in ([3, 4, 5, 9, 9, 9], [9, 9], [9], [9, 9, 9]):
        assert_as_uncached(loop, prompt, engine)


def test_a_cancelled_answer_leaves_nothing_wrong(cached: tuple[DecodeLoop, Engine]) -> None:
    loop, engine = cached
    text = decode(engine, loop, [3, 4, 5, 6, 7, 8], OPTIONS, cancel_after=3)
    assert text is None
    assert_as_uncached(loop, [3, 4, 5, 6, 7, 9], engine)


@pytest.mark.parametrize("kind", ["phi3_long", "llama_long"])
def test_changing_rotary_frequencies_are_prefilled_again(kind: str) -> None:
    """They change at 24 tokens."""
    target = target_of(kind)
    plain, engine = DecodeLoop(target), Engine(target)
    prompt = list(range(3, 13))
    for _ in range(3):
        cached = decode(engine, plain, prompt, OPTIONS)
        (uncached,) = plain.generate([prompt], OPTIONS)
        assert cached.tokens == uncached.tokens
        prompt = [*prompt, *cached.tokens]


def test_a_plain_answer_can_be_continued_with_drafts() -> None:
    """States of text that was decoded without drafts are kept too."""
    target = target_of("llama")
    drafters = drafters_of(target, "eagle3")
    loop, engine = DecodeLoop(target, *drafters), Engine(target)
    off = DecodeOptions(14, draft="off", ignore_end=True)
    first = decode(engine, loop, [3, 4, 5], off)
    assert_as_uncached(loop, [3, 4, 5, *first.tokens, 8], engine)
