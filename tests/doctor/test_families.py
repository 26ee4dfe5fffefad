"""Every registered family: drafting equals training, and one conversation is learned by heart to its full depth."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.doctor.examination import examine
from headstart.doctor.findings import Finding
from headstart.doctor.overfit_check import overfit
from headstart.doctor.subject import Subject
from headstart.heads.base import DraftHead
from headstart.recipes.recipe import parse_recipe
from headstart.target.model import Target
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def coarse(tiny_target: Target) -> Target:
    """The tiny target in bfloat16, as most targets are; larger logits keep its choices from being near-ties."""
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    model.lm_head.weight.data *= 12
    return Target(model.bfloat16(), tiny_target.tokenizer, "coarse")


def equality(heads: DraftHead, target: Target) -> Finding:
    subject = Subject(target, quick=True)
    subject.heads = heads.to(target.dtype).eval().requires_grad_(False)
    return next(finding for finding in examine(subject) if finding.check == "equality")


@pytest.mark.parametrize("name", CASES)
def test_drafting_equals_training(name: str, coarse: Target) -> None:
    finding = equality(shake(build(name, coarse)), coarse)
    assert finding.ok is True, finding.sentence
    assert finding.figures["positions"] >= 6


@pytest.mark.parametrize("name", CASES)
def test_drafting_that_forgets_what_was_accepted_is_named(name: str, coarse: Target) -> None:
    def forget(self: DraftHead, *arguments: Any) -> None:
        return None

    heads = shake(build(name, coarse))
    heads.__class__ = type("Forgetful", (type(heads),), {"commit": forget})
    finding = equality(heads, coarse)
    assert finding.ok is False
    assert "traceback" in finding.figures or finding.figures["observed_rounds"] >= 1


@pytest.mark.parametrize("name", CASES)
def test_one_conversation_is_learned_by_heart(name: str, tiny_target: Target) -> None:
    finding = overfit(Subject(tiny_target, parse_recipe({"name": "tiny", "heads": CASES[name]})))
    assert finding.ok is True, finding.sentence
    assert min(finding.figures["accuracy"]) >= 0.98
    assert finding.figures["accepted_in_decoding"] >= 0.98 * len(finding.figures["accuracy"])


@pytest.mark.parametrize("name", ["medusa-root", next(reversed(CASES))])
def test_one_conversation_is_learned_by_heart_on_a_target_in_bfloat16(name: str, coarse: Target) -> None:
    finding = overfit(Subject(coarse, parse_recipe({"name": "tiny", "heads": CASES[name]})))
    assert finding.ok is True, finding.sentence
