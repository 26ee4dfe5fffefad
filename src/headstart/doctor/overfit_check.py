"""Does drafting equal training, for these settings, without any data? Fresh heads learn one text by heart.

Fresh heads that fail here would fail anywhere, whatever the data and the training time.

Shape suffixes: T tokens, E hidden size, O origins, K steps.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from headstart.data.conversations.records import Conversation
from headstart.data.states.shards import build_store
from headstart.data.writing.in_process import common_beginning
from headstart.doctor.drafting_checks import decode_chain
from headstart.doctor.findings import Finding, bad, good, unknown
from headstart.doctor.subject import Absent, Subject, prompt_of
from headstart.heads.base import DraftHead, family, make_config
from headstart.heads.io import load_heads
from headstart.recipes.recipe import parse_recipe
from headstart.recipes.sections import TrainSection
from headstart.target.fitting import FINAL
from headstart.train.trainer import train
from headstart.tuning.acceptance import measure_drafts

STEPS = (150, 450, 1200)
"""Optimiser steps after which the heads are asked; training goes on only while they do not know the text."""

PERFECT = 0.98
_MAX_TOKENS, _MIN_TOKENS = 96, 24
"""Of the answer that is learned."""
_VOCABULARY = 2048
"""Draft tokens at most, more than a text has: the alignment does not depend on their number, the time does."""


def overfit(subject: Subject) -> Finding:
    """Whether fresh heads of these settings can learn one conversation by heart, and draft it in decoding."""
    if subject.quick:
        raise Absent("left out by --quick")
    item = _text(subject)
    if sum(item.supervised) < _MIN_TOKENS:
        return unknown(
            f"Of none of its answers the target writes {_MIN_TOKENS} tokens that it reads as its own choice."
        )
    with tempfile.TemporaryDirectory(prefix="headstart-doctor-") as folder:
        for steps in STEPS:
            heads = _learn(subject, item, Path(folder), steps)
            known_OK = measure_drafts(subject.target, heads, [item], max_rank=1).ranks_OK == 0
            shares: list[float] = known_OK.double().mean(0).tolist()
            accepted = _accepted(subject, heads, item)
            all_accepted = sum(accepted) >= PERFECT * heads.draft_steps * len(accepted)
            if min(shares) >= PERFECT and all_accepted:
                break
    figures = {"steps": steps, "accuracy": [round(share, 4) for share in shares], "origins": len(known_OK)}
    if min(shares) < PERFECT:
        draft = next(step for step, share in enumerate(shares) if share < PERFECT)
        return bad(
            f"{heads.family.capitalize()} heads with these settings cannot even learn one text: after {steps} steps on "
            f"a single conversation draft {draft + 1} of {heads.draft_steps} is right in {shares[draft]:.0%} of cases "
            f"(all: {', '.join(f'{share:.0%}' for share in shares)}).",
            "An alignment bug in the family's unroll, or heads too small: no data and no time will fix it. Look at "
            f"what draft {draft + 1} reads and which token it is compared with.",
            **figures,
        )
    if not accepted:
        return unknown("The text is too short to be drafted.", **figures)
    mean = sum(accepted) / len(accepted)
    figures["accepted_in_decoding"] = round(mean, 3)
    known = f"{min(shares):.0%} at every depth"
    if not all_accepted:
        return bad(
            f"The heads know one text by heart ({known}), and decoding the same prompt accepts {mean:.2f} of "
            f"{heads.draft_steps} drafts a round: drafting is not what was trained.",
            "Fix the family's prefill, draft_step (depth_logits) or commit; equality names the step that differs.",
            **figures,
        )
    return good(
        f"Fresh heads learn one text by heart in {steps} steps ({known}), and decoding accepts all {heads.draft_steps} "
        "drafts a round.",
        **figures,
    )


def _text(subject: Subject) -> Conversation:
    """The most varied of some answers that the target writes now: in a text that repeats itself shifts do not show."""
    answers = subject.answered([prompt_of(item) for item in subject.heldout], _MAX_TOKENS)
    undisputed = [_undisputed(subject, item) for item in answers]
    return max(undisputed, key=lambda item: len(set(zip(item.tokens, item.tokens[1:], item.supervised, strict=False))))


def _undisputed(subject: Subject, item: Conversation) -> Conversation:
    """A greedy answer up to where the target, reading it at once, would have gone on otherwise.

    Heads learn the choices of that reading; in bfloat16 it rounds one near-tie in fifty the other way than writing did.
    """
    start = item.supervised.index(True)
    final_TE = subject.target.hidden_states([item.tokens], [FINAL])[0][FINAL]
    choices = subject.target.lm_head(final_TE[start - 1 : -1]).argmax(-1).tolist()
    end = start + max(1, common_beginning([choices, item.tokens[start:]]))
    return replace(item, tokens=item.tokens[:end], supervised=item.supervised[:end])


def _learn(subject: Subject, item: Conversation, folder: Path, steps: int) -> DraftHead:
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
    size = 0 if subject.target.vocab_size <= _VOCABULARY else _VOCABULARY
    settings = {**subject.settings, "draft_vocab_size": size}
    recipe = parse_recipe({"name": "doctor", "heads": settings, "train": section.model_dump()})
    config = make_config(recipe.heads, subject.target)
    aux_layers = sorted({*family(config.family)(config).aux_layers, FINAL})
    store = build_store(folder / "states", [item], subject.target, aux_layers, budget_bytes=10**12)
    result = train(recipe, subject.target, store, store, folder / "train")
    return load_heads(result.last_folder, subject.target).to(subject.target.dtype).eval()


def _accepted(subject: Subject, heads: DraftHead, item: Conversation) -> list[int]:
    """Drafts accepted in each round, while decoding writes what was learned and a whole round of it remains."""
    prompt = prompt_of(item)
    answer = item.tokens[len(prompt) :]
    row = decode_chain(subject.target, heads, [prompt], len(answer))[0]
    same = common_beginning([row.tokens, answer])
    accepted, position = [], 1  # the first token comes from the prompt
    for done in row.rounds:
        if position + heads.draft_steps + 1 > same:  # a round near the end drafts what nobody has learned
            break
        accepted.append(done.emitted - 1)
        position += done.emitted
    return accepted
