"""The n-gram index against brute force, and the drafter's proposals."""

from __future__ import annotations

import random

import pytest
import torch

from headstart.drafters.ngram import PRIORS, NgramDrafter, TextIndex
from headstart.model.model import Target
from headstart.tree.tree import Committed
from tests.decode.drafters import lossless
from tests.drafters.helpers import OPTIONS, propose, random_texts

LONGEST = PRIORS[-1][0]


def brute_force(text: list[int], looks: int) -> tuple[int, int]:
    """Return the place and length of the longest match, comparing the end of the text with every earlier place."""
    lengths = {}
    for end in range(len(text) - 1):
        length = 0
        while length <= end and text[end - length] == text[-1 - length] and length < LONGEST:
            length += 1
        if length:
            lengths[end + 1] = length
    latest = {index: length for index, length in sorted(lengths.items(), reverse=True) if length >= 2}
    found = dict(list(latest.items())[:looks]) or lengths
    if not found:
        return -1, 0
    return max(found.items(), key=lambda item: (item[1], item[0]))


@pytest.mark.parametrize("alphabet", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("looks", [1, 3, 10_000])
def test_longest_match_by_brute_force(alphabet: int, looks: int) -> None:
    rng = random.Random(alphabet)
    text: list[int] = []
    index = TextIndex(looks)
    for _ in range(160):
        repeats = text and rng.random() < 0.1
        more = text[rng.randrange(len(text)) :][:12] if repeats else [rng.randrange(alphabet)]
        for token in more:
            text.append(token)
            index.append(token)
            assert index.longest() == brute_force(text, looks)


def test_each_row_continues_its_own_match() -> None:
    drafter = NgramDrafter()
    session = drafter.prefill([[1, 2, 3, 4, 5, 9, 1], [7, 7, 8]], {})
    first, second = propose(drafter, session, [2, 3], max_nodes=5)
    assert (first.tokens, first.parents) == ([2, 3, 4, 5, 9], [-1, 0, 1, 2, 3])
    by_length = dict(PRIORS)
    expected = [1.0, by_length[2], by_length[3], by_length[4], by_length[5]]
    assert first.accept_probs == pytest.approx(torch.tensor(expected).cumprod(0).tolist())
    assert (second.tokens, second.accept_probs) == ([3], [1.0])


def test_a_text_that_repeats_its_end_is_continued_beyond_it() -> None:
    drafter = NgramDrafter()
    session = drafter.prefill([[5, 1, 2, 1, 2, 1]], {})
    assert propose(drafter, session, [2], max_nodes=8)[0].tokens == [2, 1, 2, 1, 2, 1, 2, 1]


def test_nodes_that_are_not_worth_it_are_left_out() -> None:
    drafter = NgramDrafter()
    session = drafter.prefill([[1, 2, 3, 4, 5, 9, 1]], {})
    assert propose(drafter, session, [2], threshold=0.3)[0].size == 3  # .53, .53 * .62, .53 * .62 * .7 < .3
    session = drafter.prefill([[1, 2, 3]], {})
    assert propose(drafter, session, [1], threshold=0.3)[0].size == 1  # a single token in common: .2


def test_rates_follow_the_text() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter()
    session = drafter.prefill([[0], [0]], {})
    for step in range(300):
        tokens = [rng.randrange(20), step % 7]
        propose(drafter, session, tokens)
        drafter.commit(session, Committed.of([[token] for token in tokens], {}))
    alone, circle = propose(drafter, session, [1, 300 % 7], threshold=0.15)
    assert alone.size == 1, "random text: matches go on rightly in one of 20 cases, so none is worth it"
    assert circle.size == 32, "text in a circle: every draft is as good as certain"


def test_paused_rounds_are_read_too() -> None:
    texts = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1], [2, 7, 1, 8, 2, 8, 2, 7]]
    drafter = NgramDrafter()
    one = drafter.prefill([text[:2] for text in texts], {})
    drafter.commit(one, Committed.of([texts[0][2:5], texts[1][2:3]], {}))
    drafter.commit(one, Committed.of([texts[0][5:], texts[1][3:]], {}))
    two = drafter.prefill(texts, {})
    assert [row.index.text for row in one] == [row.index.text for row in two] == texts
    assert propose(drafter, one, [4, 1]) == propose(drafter, two, [4, 1])
    drafter.reorder(one, [1])
    assert [row.index.text for row in one] == [[*texts[1], 1]]


def test_output_equals_plain_decoding(target: Target) -> None:
    together = lossless(target, [NgramDrafter()], random_texts(30, 5, 17, vocab=6), OPTIONS)
    assert max(row.tokens_per_round for row in together) > 1.2, "the proof must exercise accepted drafts"
    assert any(round.emitted == 1 < round.nodes for row in together for round in row.rounds), "and rejected ones"


def test_quoted_text_is_accepted_in_long_runs() -> None:
    rng = random.Random(2)
    answer = [rng.randrange(50) for _ in range(120)]
    drafter = NgramDrafter()
    session = drafter.prefill([[60, *answer, 61, 60]], {})  # the prompt holds the answer
    rounds = done = 0
    while done < len(answer):
        drafts = propose(drafter, session, [answer[done]])[0].tokens
        right = next(
            (index for index, pair in enumerate(zip(drafts, answer[done:], strict=False)) if pair[0] != pair[1]),
            min(len(drafts), len(answer) - done),
        )
        drafter.commit(session, Committed.of([answer[done : done + right]], {}))
        done, rounds = done + right, rounds + 1
    assert rounds <= 10
