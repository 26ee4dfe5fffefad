"""How often a round makes the host wait for the device, at most: a limit that may go down, and not up. No upload makes
it wait."""

from __future__ import annotations

import pytest

from headstart.decode.loop import DecodeLoop, Drafter
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.target.model import Target
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import build
from tests.standin import CUDA, StandIn, rounds_of
from tests.tiny import tiny_model

ONE_FORWARD, BY_LEVELS = "medusa", "eagle3"
"""Rows of `tests.heads.test_contract` that draft all depths from one state, and level by level; both 3 deep."""

WAITS = {"none": 1, "ngram": 1, ONE_FORWARD: 2, BY_LEVELS: 4, f"{ONE_FORWARD}+ngram": 2, f"{BY_LEVELS}+ngram": 4}
"""Greedy, for any number of rows: reading the outcome, and reading drafts: at once, or level by level."""
SAMPLED = {"none": 1, "ngram": 1, ONE_FORWARD: 3, BY_LEVELS: 7, f"{ONE_FORWARD}+ngram": 3, f"{BY_LEVELS}+ngram": 7}
"""Above temperature 0: also reading which children were drawn, at once or level by level."""
UPLOADS = {"none": 0, "ngram": 1, ONE_FORWARD: 1, f"{ONE_FORWARD}+ngram": 1, BY_LEVELS: 4, f"{BY_LEVELS}+ngram": 4}
"""Greedy: the proposal, and the nodes of each level. Of several rows, as long as none ends; n-grams end them soon."""


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


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("temperature", "limits"), [(0.0, WAITS), (1.0, SAMPLED)], ids=["greedy", "sampled"])
def test_waits_of_a_round(name: str, rows: int, temperature: float, limits: dict[str, int]) -> None:
    options = DecodeOptions(max_new_tokens=16, ignore_end=True, temperature=temperature, seed=0)
    prompts = [[5 + row, 9, 14, 5 + row, 9, 14, 5 + row, 9][: 8 - row] for row in range(rows)]
    host = Target(tiny_model("llama", vocab_size=61))
    with StandIn() as device:
        target = Target(tiny_model("llama", vocab_size=61).to(CUDA))
        loop = DecodeLoop(target, *make_drafters(name, target, host))
        rounds = rounds_of(device, target, lambda: loop.generate(prompts, options))
    assert rounds
    for one in rounds:
        waits = [event for event in one.events if event.kind == "wait"]
        assert len(waits) == one.counts.waits
        uploads = [event for event in one.events if event.kind == "upload"]
        if not temperature and (rows == 1 or ("ngram" not in name and one is rounds[1])):
            assert len(uploads) <= UPLOADS[name], "\n".join(f"{event.where} {event.operation}" for event in uploads)
        assert one.counts.slow_uploads == 0, "\n".join(f"{event.where} {event.operation}" for event in uploads)
        assert len(waits) <= limits[name], "\n".join(f"{event.where} {event.operation}" for event in waits)
