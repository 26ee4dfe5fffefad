"""Checks of the heads themselves: what they can draft, and whether their numbers are numbers.

Shape suffixes: D draft vocabulary, V vocabulary, S supervised tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from headstart.data.conversations.conversations import Conversation
from headstart.doctor.findings import Finding, bad, check, good
from headstart.doctor.subject import Absent, Subject, spread
from headstart.heads.base import DraftHead, family
from headstart.pipeline.layout import TRAIN
from headstart.support.files import read_json
from headstart.target.fitting import FINAL
from headstart.train.validation import coverage, pick_vocabulary

_COVERED = 0.85
"""Coverage of held-out answers below which the vocabulary, not the heads, bounds acceptance: a draft outside it is
always wrong. 8192 tokens of the packaged target's 49152 cover 93 %."""
_BELOW_BEST = 0.03
"""By how much coverage may fall short of what as many of the most frequent tokens would cover."""


@check("heads")
def vocabulary(subject: Subject) -> Finding:
    """Whether the heads can draft what the target says."""
    target = subject.target
    learned, heldout = _answers(subject)
    counts_V = _counts(subject, learned)
    try:
        ids_D = subject.heads.draft_to_target_D.cpu()
        whole = not subject.heads.config.draft_vocab_size
    except Absent:
        size = int(subject.settings.get("draft_vocab_size", 0))
        ids_D, whole = pick_vocabulary(counts_V, min(size or target.vocab_size, target.vocab_size), []), not size
    figures: dict[str, Any] = {"draft_tokens": len(ids_D), "target_tokens": target.vocab_size}
    again = "Train again: the draft vocabulary is then picked from the data."
    outside = ids_D[(ids_D < 0) | (ids_D >= target.vocab_size)]
    if len(outside):
        return bad(
            f"{len(outside)} of the {len(ids_D)} draft tokens do not exist in the target, such as {int(outside[0])} of "
            f"{target.vocab_size}.", again, **figures
        )  # fmt: skip
    if twice := len(ids_D) - len(set(ids_D.tolist())):
        return bad(f"{twice} draft tokens are there twice.", again, **figures)
    if (ids_D.diff() < 0).any():
        return bad("The draft vocabulary is not sorted, so LM heads cut to it do not fit.", again, **figures)
    covered, heldout_covered = coverage(counts_V, ids_D), coverage(_counts(subject, heldout), ids_D)
    chosen = _coverage_of_choices(subject, ids_D)
    figures |= {
        "coverage": round(covered, 4),
        "coverage_heldout": round(heldout_covered, 4),
        "coverage_of_the_targets_choices": round(chosen, 4),
    }
    ends = [end for end in target.end_tokens if end < target.vocab_size]
    gone = [end for end in ends if end not in set(ids_D.tolist()) and int(counts_V[end])]
    if gone:
        return bad(
            f"The draft vocabulary lacks the end of the turn (token {gone[0]}): the last draft of each answer is lost.",
            again, **figures
        )  # fmt: skip
    # Answers that the vocabulary was not picked from say nothing of how it was picked.
    best = covered if learned is heldout else coverage(counts_V, pick_vocabulary(counts_V, len(ids_D), []))
    if heldout_covered < _COVERED or covered < best - _BELOW_BEST:
        hint = f"; the {len(ids_D)} most frequent tokens would lose {1 - best:.1%}" if covered < best - 0.01 else ""
        remedy = again if covered < best - _BELOW_BEST else "Raise heads.draft_vocab_size, and train again."
        return bad(
            f"The draft vocabulary is truncated: {1 - covered:.1%} of the answers' tokens, {1 - heldout_covered:.1%} "
            f"of held-out ones, are not among its {len(ids_D)} tokens and can never be drafted{hint}.",
            remedy,
            **figures,
        )
    what = "whole vocabulary" if whole else f"draft vocabulary of {len(ids_D)} tokens"
    return good(
        f"The {what} covers {covered:.1%} of the answers' tokens, {heldout_covered:.1%} of held-out ones.", **figures
    )


def _answers(subject: Subject) -> tuple[list[Conversation], list[Conversation]]:
    """What the heads learn from, and what they do not; without a run, answers written now for both."""
    try:
        return subject.conversations("train"), subject.conversations("calibration") or subject.judged
    except Absent:
        return subject.judged, subject.judged


def _counts(subject: Subject, items: Sequence[Conversation]) -> Tensor:
    """How often each token is supervised, int64 [V]."""
    tokens = [token for item in items for token, flag in zip(item.tokens, item.supervised, strict=True) if flag]
    known = [token for token in tokens if token < subject.target.vocab_size]
    return torch.bincount(torch.tensor(known, dtype=torch.long), minlength=subject.target.vocab_size)


@torch.no_grad()
def _coverage_of_choices(subject: Subject, ids_D: Tensor) -> float:
    """Share of the target's own choices, inside some answers, that the heads can draft."""
    target, chosen = subject.target, []
    for item in subject.judged:
        final_TE = target.hidden_states([item.tokens], [FINAL])[0][FINAL]
        before = [index for index, flag in enumerate(item.supervised[1:]) if flag]
        chosen += [target.lm_head(part_SE).argmax(-1).cpu() for part_SE in torch.split(final_TE[before], 512)]
    return float(torch.isin(torch.cat(chosen), ids_D).float().mean())


# -- numbers ---------------------------------------------------------------------------------------------------------


@check("heads")
def dtype(subject: Subject) -> Finding:
    """Whether weights and states are finite numbers, and whether training moved the weights."""
    kinds = {"target": subject.target.dtype}
    problems: list[tuple[str, str]] = []
    broken: dict[str, int] = {}
    try:
        heads = subject.heads
        kinds["heads"] = next((p.dtype for p in heads.parameters()), subject.target.dtype)
        broken = {name: int((~tensor.isfinite()).sum()) for name, tensor in heads.state_dict().items()}
        broken = {name: count for name, count in broken.items() if count}
        if broken:
            name, count = next(iter(broken.items()))
            problems.append((
                f"The heads' weights are not finite: {count} numbers of {name!r} are NaN or infinite"
                + (f", and {len(broken) - 1} more tensors" if len(broken) > 1 else ""),
                "Take heads of an earlier checkpoint, or train again with a lower train.lr; export again if the files "
                "were damaged on the way.",
            ))  # fmt: skip
        else:
            problems += _untouched(subject, heads)
    except Absent:
        pass
    figures: dict[str, Any] = {"not_finite": broken}
    with suppress(Absent):
        problems += _stored_numbers(subject, kinds, figures)
    named = {what: str(kind).removeprefix("torch.") for what, kind in kinds.items()}
    figures["dtypes"] = named
    if problems:
        return bad(". ".join(problem for problem, _ in problems) + ".", " ".join(fix for _, fix in problems), **figures)
    return good(f"All numbers are finite ({', '.join(f'{what} {kind}' for what, kind in named.items())}).", **figures)


def _stored_numbers(subject: Subject, kinds: dict[str, torch.dtype], figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Problems of the stored states; notes their dtype and their largest number."""
    largest, broken = 0.0, list[str]()
    for split, store in subject.stores.items():
        for index in spread(len(store), 8 if subject.quick else 64):
            for aux_layer, state_TE in store.get(index).states.items():
                kinds["states"] = state_TE.dtype
                if not state_TE.isfinite().all():
                    broken.append(f"conversation {index} of {split} at layer {aux_layer}")
                largest = max(largest, float(state_TE.float().nan_to_num().abs().max()))
    figures["largest_state"] = largest
    if not broken:
        return []
    what = "float16 ends at 65504" if kinds["states"] == torch.float16 else "the target's forward gave NaN or infinity"
    problem = f"Stored states are not finite in {len(broken)} places, such as {broken[0]} ({what})"
    return [(problem, "Build the states again; if it stays, use target.dtype=float32.")]


def _untouched(subject: Subject, heads: DraftHead) -> list[tuple[str, str]]:
    """Whether the heads are still what they were before the first step."""
    learned = {name: weight for name, weight in heads.named_parameters() if weight.numel()}
    zero = [name for name, weight in learned.items() if not weight.any()]
    if learned and len(zero) == len(learned):
        return [("All weights of the heads are zero", "Train again; these heads were never written.")]
    with torch.random.fork_rng(devices=[]):
        start = family(heads.family)(heads.config).to(subject.target.device)
        start.set_draft_vocabulary(heads.draft_to_target_D)
        start.warm_start(subject.target)
    begun = dict(start.named_parameters())
    same = [name for name, weight in learned.items() if torch.equal(weight, begun[name].to(weight))]
    if len(same) == len(learned) or _best_step(subject) == 0:
        return [(
            "The heads are those of the warm start: training never made them better",
            "Look at train/metrics.jsonl: raise train.minutes or train.steps, lower train.lr if the loss rose.",
        )]  # fmt: skip
    if zero:
        return [(
            f"The weights {zero[0]!r} are all zero although others learned: no gradient reaches them",
            "Nothing in the family's unroll uses them, or the loss does not reach their step.",
        )]  # fmt: skip
    return []


def _best_step(subject: Subject) -> int | None:
    """The step whose heads were kept; None when it is not known."""
    file = subject.run / TRAIN / "result.json" if subject.run else None
    if file is None or not file.is_file():
        return None
    best = read_json(file).get("best")
    return int(best["step"]) if isinstance(best, dict) and "step" in best else None
