"""The check that needs no data: can heads with these settings learn one text by heart?

Fresh heads that fail here would fail anywhere, whatever the data and the training time.

Shape suffixes: O origins, K steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headstart.data.conversations.conversations import Conversation
from headstart.data.states.shards import build_store
from headstart.doctor.decoding import decode_chain
from headstart.doctor.findings import Finding, bad, check, good, unknown
from headstart.doctor.subject import Absent, Subject
from headstart.heads.base import DraftHead, family, make_config
from headstart.heads.io import load_heads
from headstart.recipes.recipe import parse_recipe
from headstart.recipes.sections import TrainSection
from headstart.target.fitting import FINAL
from headstart.train.loop import train
from headstart.tuning.acceptance import measure_ranks

STEPS = (150, 450, 1200)
"""Optimiser steps after which the heads are asked; training goes on only while they do not know the text."""

PERFECT = 0.98
_LONGEST = 96
_SHORTEST = 24
_VOCABULARY = 2048
"""Draft tokens at most: the alignment does not depend on their number, the time does."""


@check("training")
def overfit(subject: Subject) -> Finding:
    """Whether fresh heads of these settings can learn one conversation by heart, and draft it in decoding."""
    if subject.quick:
        raise Absent("left out by --quick")
    item = _text(subject)
    if sum(item.supervised) < _SHORTEST:
        return unknown(f"Of none of its answers the target writes {_SHORTEST} tokens that it reads as its own choice.")
    settings = {**subject.settings, "draft_vocab_size": _draft_tokens(subject, item)}
    with tempfile.TemporaryDirectory(prefix="headstart-doctor-") as folder:
        for steps in STEPS:
            heads = _learn(subject, settings, item, Path(folder), steps)
            known_OK = measure_ranks(subject.target, heads, [item], max_rank=1) == 0
            shares: list[float] = known_OK.double().mean(0).tolist()
            depths = _accepted(subject, heads, item)
            if min(shares) >= PERFECT and sum(depths) >= PERFECT * heads.draft_steps * len(depths):
                break
    figures = {"steps": steps, "accuracy": [round(share, 4) for share in shares], "origins": len(known_OK)}
    depth = next((step for step, share in enumerate(shares) if share < PERFECT), None)
    if depth is not None:
        return bad(
            f"{heads.family.capitalize()} heads with these settings cannot even learn one text: after {steps} steps on "
            f"a single conversation draft {depth + 1} of {heads.draft_steps} is right in {shares[depth]:.0%} of cases "
            f"(all: {', '.join(f'{share:.0%}' for share in shares)}).",
            "An alignment bug in the family's unroll, or heads too small: no data and no time will fix it. Look at "
            f"what draft {depth + 1} reads and which token it is compared with.",
            **figures,
        )
    if not depths:
        return unknown("The text is too short to be drafted.", **figures)
    figures["accepted_in_decoding"] = round(sum(depths) / len(depths), 3)
    known = f"{min(shares):.0%} at every depth"
    if sum(depths) < PERFECT * heads.draft_steps * len(depths):
        return bad(
            f"The heads know one text by heart ({known}), and decoding the same prompt accepts "
            f"{sum(depths) / len(depths):.2f} of {heads.draft_steps} drafts a round: drafting is not what was trained.",
            "Fix the family's prefill, draft_step (depth_logits) or commit; equality names the step that differs.",
            **figures,
        )
    return good(
        f"Fresh heads learn one text by heart in {steps} steps ({known}), and decoding accepts all {heads.draft_steps} "
        "drafts a round.",
        **figures,
    )


def _draft_tokens(subject: Subject, item: Conversation) -> int:
    """Size of the draft vocabulary: enough for the text (coverage is another check's), few enough to be quick."""
    size = int(subject.settings.get("draft_vocab_size", 0))
    needed = len({*item.tokens, *subject.target.end_tokens})
    if not size and subject.target.vocab_size <= _VOCABULARY:
        return 0
    return min(max(size or _VOCABULARY, needed), max(_VOCABULARY, needed), subject.target.vocab_size)


def _text(subject: Subject) -> Conversation:
    """The most varied of some answers that the target writes now: in a text that repeats itself shifts do not show."""
    prompts: Sequence[Sequence[int]] = [item.tokens[: item.supervised.index(True)] for item in subject.judged]
    answers = [_undisputed(subject, item) for item in subject.answered(prompts, _LONGEST)]
    return max(answers, key=lambda item: len(set(zip(item.tokens, item.tokens[1:], item.supervised, strict=False))))


def _undisputed(subject: Subject, item: Conversation) -> Conversation:
    """A greedy answer up to where the target, reading it at once, would have gone on otherwise.

    Heads learn the choices of that reading; in bfloat16 it rounds one near-tie in fifty the other way than writing did.
    """
    start = item.supervised.index(True)
    final_TE = subject.target.hidden_states([item.tokens], [FINAL])[0][FINAL]
    choices = subject.target.lm_head(final_TE[start - 1 : -1]).argmax(-1).tolist()
    pairs = zip(choices, item.tokens[start:], strict=True)
    stop = next((position for position, (own, written) in enumerate(pairs) if own != written), len(choices))
    end = start + max(stop, 1)
    return replace(item, tokens=item.tokens[:end], supervised=item.supervised[:end])


def _learn(subject: Subject, settings: dict[str, object], item: Conversation, folder: Path, steps: int) -> DraftHead:
    """Heads of these settings after so many steps on one text, in float32; goes on where the last call ended."""
    # The argmax is what is asked for; a soft label says little of it where the target itself is undecided.
    section = TrainSection(
        steps=steps,
        epochs=steps,
        lr=2e-3,
        loss="hard_ce",
        step_weight=1.0,
        batch_tokens=64,  # one text is one batch, however long
        eval_every=steps,
        save_every=steps,
        mixed_precision="no",
    )
    recipe = parse_recipe({"name": "doctor", "heads": settings, "train": section.model_dump()})
    config = make_config(recipe.heads, subject.target)
    aux_layers = sorted({*family(config.family)(config).aux_layers, FINAL})
    store = build_store(folder / "states", [item], subject.target, aux_layers, budget_bytes=10**12)
    result = train(recipe, subject.target, store, store, folder / "train")
    return load_heads(result.last_folder, subject.target).to(subject.target.dtype).eval()


def _accepted(subject: Subject, heads: DraftHead, item: Conversation) -> list[int]:
    """Drafts accepted in each round, as long as decoding writes the text that was learned and a whole round of it is
    left."""
    start = item.supervised.index(True)
    answer = item.tokens[start:]
    row = decode_chain(subject.target, heads, [item.tokens[:start]], len(answer))[0]
    same = next(
        (position for position, (a, b) in enumerate(zip(row.tokens, answer, strict=False)) if a != b), len(answer)
    )
    depths, position = [], 1  # the first token comes from the prompt
    for one in row.rounds:
        # A round near the end drafts what nobody has learned.
        if position + heads.draft_steps + 1 > min(same, len(answer)):
            break
        depths.append(one.emitted - 1)
        position += one.emitted
    return depths
