"""Upper limits on waits, uploads and launches of a round: they may go down, not up. No upload makes the host wait.
Forwards are captured before, and each is one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest

from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import build
from tests.standin import CUDA, Round, StandIn, rounds_of
from tests.tiny import tiny_model

ONE_FORWARD, BY_LEVELS = "medusa", "eagle3"
"""Rows of `tests.heads.test_contract` that draft all depths from one state, and level by level; both 3 deep."""
ONE_AND_NGRAM, LEVELS_AND_NGRAM = f"{ONE_FORWARD}+ngram", f"{BY_LEVELS}+ngram"

WAITS = {"none": 1, "ngram": 1, ONE_FORWARD: 2, BY_LEVELS: 4, ONE_AND_NGRAM: 2, LEVELS_AND_NGRAM: 4}
"""Greedy, for any number of rows: reading the outcome, and reading drafts: at once, or level by level."""
SAMPLED = {"none": 1, "ngram": 1, ONE_FORWARD: 3, BY_LEVELS: 5, ONE_AND_NGRAM: 3, LEVELS_AND_NGRAM: 5}
"""Above temperature 0: also reading which children were drawn: in the last level, or in all of one forward."""
UPLOADS = {"none": 0, "ngram": 1, ONE_FORWARD: 1, ONE_AND_NGRAM: 1, BY_LEVELS: 4, LEVELS_AND_NGRAM: 4}
"""Greedy: the proposal, and the nodes of each level, which the host chooses when it has read the level before. Of
several rows, as long as none ends; n-grams end them soon."""
SAMPLED_UPLOADS = {name: uploads + 1 + (name not in ("none", "ngram")) for name, uploads in UPLOADS.items()}
"""Above temperature 0: also the numbers for accepting, on their way while the target reads the proposal, and those for
drawing the last level; for drawing other levels they go with the nodes of the next one."""
BESIDE_GRAPHS = {"none": 5, "ngram": 30, ONE_FORWARD: 38, BY_LEVELS: 43, ONE_AND_NGRAM: 38, LEVELS_AND_NGRAM: 50}
"""Greedy, one row: launches outside graphs, which fill and empty the graphs' buffers and decide."""

SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}},
    "logprobs": {"logprobs": 2},
}
WAYS = tuple(product((1, 4), (0.0, 1.0)))
"""Rows and temperatures."""


def make_drafters(name: str, target: Target, host: Target) -> list[Drafter]:
    drafters: list[Drafter] = []
    for part in name.split("+") if name != "none" else ():
        if part == "ngram":
            drafters.append(NgramDrafter())
            continue
        heads = build(part, host).to(CUDA)
        heads.bind(target)
        drafters.append(HeadDrafter(heads, TreeShape.chain(3), "dynamic", max_nodes=8))
    return drafters


@cache
def decoded(
    name: str, layers: int, ways: Sequence[tuple[int, float]] = WAYS, settings: str = ""
) -> dict[tuple[int, float], list[Round]]:
    """Return the rounds by rows and temperature, decoded a second time after their graphs were captured."""
    host = Target(tiny_model("llama", vocab_size=61, layers=layers))
    found = {}
    with StandIn() as device:
        target = Target(tiny_model("llama", vocab_size=61, layers=layers).to(CUDA))
        drafters = make_drafters(name, target, host)
        for rows, temperature in ways:
            options = DecodeOptions(10, ignore_end=True, temperature=temperature, seed=0, **SETTINGS[settings])
            prompts = [[5 + row, 9, 14, 5 + row, 9, 14, 5 + row, 9][: 8 - row] for row in range(rows)]
            loop = DecodeLoop(target, *drafters)
            loop.generate(prompts, options)
            found[rows, temperature] = rounds_of(device, target, partial(loop.generate, prompts, options))
            assert found[rows, temperature]
    return found


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_waits_and_uploads_of_a_round(name: str, rows: int, temperature: float) -> None:
    rounds = decoded(name, 3)[rows, temperature]
    most_waits, most_uploads = (SAMPLED, SAMPLED_UPLOADS) if temperature else (WAITS, UPLOADS)
    for one in rounds:
        waits = [event for event in one.events if event.kind == "wait"]
        assert len(waits) == one.counts.waits
        uploads = [event for event in one.events if event.kind == "upload"]
        if rows == 1 or ("ngram" not in name and one is rounds[1]):
            listed = "\n".join(f"{event.where} {event.operation}" for event in uploads)
            assert len(uploads) <= most_uploads[name], listed
        assert one.counts.slow_uploads == 0, "\n".join(f"{event.where} {event.operation}" for event in uploads)
        assert len(waits) <= most_waits[name], "\n".join(f"{event.where} {event.operation}" for event in waits)


@pytest.mark.parametrize("name", ["none", ONE_FORWARD])
@pytest.mark.parametrize(("settings", "more_waits", "more_uploads"), [("penalties", 0, 1), ("logprobs", 1, 0)])
def test_one_more_copy_at_most(name: str, settings: str, more_waits: int, more_uploads: int) -> None:
    """Log-probabilities are read once a round. Penalties count on the device; greedy, they upload unused numbers."""
    for (_, temperature), rounds in decoded(name, 3, ((1, 0.0), (1, 1.0)), settings).items():
        most_waits, most_uploads = (SAMPLED, SAMPLED_UPLOADS) if temperature else (WAITS, UPLOADS)
        for one in rounds:
            assert one.counts.waits <= most_waits[name] + more_waits
            uploads = [f"{event.where} {event.operation}" for event in one.events if event.kind == "upload"]
            assert len(uploads) <= most_uploads[name] + (0 if temperature else more_uploads), "\n".join(uploads)
            assert one.counts.slow_uploads == 0


@pytest.mark.parametrize("name", WAITS)
def test_launches_of_a_round(name: str) -> None:
    """One graph for the target's forward and one per level of the heads, whatever the number of layers, with one read
    each. Other launches fill and empty the graphs' buffers, and decide."""
    for one in decoded(name, 8, ((1, 0.0),))[1, 0.0]:
        assert one.counts.graphs == one.counts.waits <= WAITS[name]
        assert one.counts.launches - one.counts.graphs <= BESIDE_GRAPHS[name]
