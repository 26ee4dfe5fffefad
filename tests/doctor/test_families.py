"""Every registered family: drafting equals training, and one conversation is learned by heart to its full depth."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headstart.data.conversations.records import Conversation
from headstart.data.states.shards import build_store
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.prefix_cache import common_prefix_length
from headstart.doctor.examination import examine
from headstart.doctor.findings import Finding
from headstart.doctor.subject import Subject
from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import DraftHead, family, make_config
from headstart.heads.io import load_heads
from headstart.model.model import Target
from headstart.recipes.recipe import parse_recipe
from headstart.replay.patch import FINAL
from headstart.train.trainer import train
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import measure_drafts
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def coarse(tiny_target: Target) -> Target:
    """The tiny target in bfloat16, as most targets are; larger logits keep its choices from being near-ties."""
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    model.lm_head.weight.data *= 12
    return Target(model.bfloat16(), tiny_target.tokenizer, "coarse")


def equality(subject: Subject, heads: DraftHead | None = None) -> Finding:
    if heads is not None:
        subject.heads = heads.to(subject.target.dtype).eval().requires_grad_(False)
    return next(finding for finding in examine(subject) if finding.check == "equality")


@pytest.mark.parametrize("name", CASES)
def test_drafting_equals_training(name: str, coarse: Target) -> None:
    finding = equality(Subject(coarse, quick=True), shake(build(name, coarse)))
    assert finding.ok is True, finding.sentence
    assert finding.figures["positions"] >= 6


@pytest.mark.parametrize("name", CASES)
def test_drafting_that_ignores_commits_is_reported(name: str, coarse: Target) -> None:
    def forget(self: DraftHead, *arguments: Any) -> None:
        return None

    heads = shake(build(name, coarse))
    heads.__class__ = type("Forgetful", (type(heads),), {"commit": forget})
    finding = equality(Subject(coarse, quick=True), heads)
    assert finding.ok is False
    assert "traceback" in finding.figures or finding.figures["observed_rounds"] >= 1


@pytest.mark.parametrize("name", CASES)
def test_drafting_equals_training_before_anything_is_trained(name: str, tiny_target: Target) -> None:
    recipe = parse_recipe({"name": "tiny", "heads": CASES[name]})
    finding = equality(Subject(tiny_target, recipe, quick=True))
    assert finding.ok is True, finding.sentence


# -- one text, learned by heart --------------------------------------------------------------------------------------


STEPS = (100, 300, 1200)
"""Numbers of optimiser steps before the heads are checked; training ends once they know the text."""
PERFECT = 0.98
TRAINING = {
    "lr": 8e-3,  # at a quarter of it, families need up to four times the steps
    "loss": "hard_ce",  # a soft label says little of the argmax where the target itself is undecided
    "step_weight": 1.0,
    "batch_tokens": 64,  # one text is one batch, however long
    "mixed_precision": "no",
}


def learn(name: str, target: Target, item: Conversation, folder: Path, steps: int) -> DraftHead:
    """Train heads to `steps` steps on one text, in float32; continue where the last call ended."""
    section = {**TRAINING, "steps": steps, "epochs": steps, "eval_every": steps, "save_every": steps}
    recipe = parse_recipe({"name": "tiny", "heads": {**CASES[name], "draft_vocab_size": 0}, "train": section})
    config = make_config(recipe.heads, target)
    aux_layers = sorted({*family(config.family)(config).aux_layers, FINAL})
    store = build_store(folder / "states", [item], target, aux_layers, budget_bytes=10**12)
    result = train(recipe, target, store, store, folder / "train")
    return load_heads(result.last_folder, target).to(target.dtype).eval()


@cache
def varied_text(target: Target) -> Conversation:
    """Return an answer of the target without repetitions, which would hide shifts.

    It ends where a single forward over it first disagrees with decoding: heads learn that forward's choices, and in
    bfloat16 near-ties may round differently.
    """
    texts = []
    for item in Subject(target).heldout:
        start = item.supervised.index(True)
        final_TE = target.hidden_states([item.tokens], [FINAL])[0][FINAL]
        choices = target.lm_head(final_TE[start - 1 : -1]).argmax(-1).tolist()
        end = start + max(1, common_prefix_length([choices, item.tokens[start:]]))
        texts.append(replace(item, tokens=item.tokens[:end], supervised=item.supervised[:end]))
    return max(texts, key=lambda item: len(set(zip(item.tokens, item.tokens[1:], item.supervised, strict=False))))


def accepted(target: Target, heads: DraftHead, item: Conversation) -> list[int]:
    """Return the accepted drafts of each round while decoding repeats the learned text and a full round is left."""
    start = item.supervised.index(True)
    answer = item.tokens[start:]
    loop = DecodeLoop(target, HeadDrafter(heads, TreeShape.chain(heads.draft_steps), "chain"))
    options = DecodeOptions(max_new_tokens=len(answer), draft="on")
    (output,) = loop.generate([item.tokens[:start]], options)
    learned = common_prefix_length([output.tokens, answer])
    counts, position = [], 1  # the first token comes from the prompt
    for done in output.rounds:
        if position + heads.draft_steps + 1 > learned:
            break
        counts.append(done.emitted - 1)
        position += done.emitted
    return counts


def learns_by_heart(name: str, target: Target, folder: Path) -> None:
    item = varied_text(target)
    for steps in STEPS:
        heads = learn(name, target, item, folder, steps)
        right_OK = measure_drafts(target, heads, [item], max_rank=1).ranks_OK == 0
        counts = accepted(target, heads, item)
        shares = [*right_OK.double().mean(0).tolist(), sum(counts) / (len(counts) * heads.draft_steps)]
        if min(shares) >= PERFECT:
            break
    assert min(shares) >= PERFECT, shares


FIRST = {case["family"]: name for name, case in reversed(CASES.items())}
"""The first case of each family. Its variants are covered above and by the contract's gradients; learning by heart is
by far the slowest test here."""


@pytest.mark.parametrize("name", [*FIRST.values(), "eagle3-transition"])
def test_one_conversation_is_learned_by_heart(name: str, tiny_target: Target, tmp_path: Path) -> None:
    learns_by_heart(name, tiny_target, tmp_path)


@pytest.mark.parametrize("name", ["medusa-root", "mtp"])
def test_one_conversation_is_learned_by_heart_in_bfloat16(name: str, coarse: Target, tmp_path: Path) -> None:
    learns_by_heart(name, coarse, tmp_path)
