"""The packaged requests: distinct, readable, and without any question used for measurements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from headstart.data.prompts.loading import load_prompts
from headstart.data.prompts.overlap import Excluded, normalise
from headstart.data.prompts.self_prompts import SEED_PROMPTS, SHARES, acceptable
from headstart.data.prompts.sources import READY_MADE
from headstart.recipes.recipe import load_recipe
from headstart.recipes.sections import DataSection

QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "leaderboard_questions.jsonl"


def test_ready_made_requests_are_distinct_and_reveal_no_question() -> None:
    prompts = load_prompts(DataSection(prompts=READY_MADE)).prompts
    asked = [prompt.turns[0] for prompt in prompts]
    assert len({normalise(text) for text in asked}) == len(asked) >= 4000
    assert all(acceptable(text, ["<|im_end|>", "<|endoftext|>"]) for text in asked)
    kinds = Counter(prompt.category for prompt in prompts)
    assert set(kinds) == set(SEED_PROMPTS)
    others = mean(count for kind, count in kinds.items() if kind not in SHARES)
    for kind, share in SHARES.items():
        assert kinds[kind] / others == pytest.approx(share, rel=0.05), "the mix of self-written prompts"
    excluded = Excluded([str(QUESTIONS)])
    assert not any(excluded.reason([text]) for text in asked)


def test_laptop_recipes_use_them_before_the_target_writes_more() -> None:
    data = load_recipe("quickstart").data
    assert [source.source for source in data.sources] == [READY_MADE]
    assert 0 < data.self_share < 0.002, "all but a few"
    some = load_prompts(data, limit=300, seed=data.seed).prompts
    assert len({prompt.category for prompt in some}) == len(SEED_PROMPTS)
