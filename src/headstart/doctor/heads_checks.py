"""Can what was trained draft at all? The heads' vocabulary holds what the target says, and their weights are learned.

Shape suffixes: D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.doctor.findings import Finding, bad, good
from headstart.doctor.subject import Absent, Subject
from headstart.heads.base import DraftHead, family
from headstart.pipeline.run import TRAIN
from headstart.support.files import read_json
from headstart.train.validation import coverage, pick_vocabulary

_COVERED = 0.85
"""Coverage of held-out answers below which the vocabulary, not the heads, bounds acceptance: a draft outside it is
always wrong. 8192 tokens of the packaged target's 49152 cover 93 %."""
_BELOW_BEST = 0.03
"""By how much coverage may fall short of what as many of the most frequent tokens would cover."""


def vocabulary(subject: Subject) -> Finding:
    """Whether the heads can draft what the target says."""
    target, ids_D = subject.target, subject.heads.draft_to_target_D.cpu()
    size = len(ids_D)
    figures: dict[str, float] = {"draft_tokens": size, "target_tokens": target.vocab_size}
    again = "Train again: the draft vocabulary is then picked from the data."
    strange = ids_D[(ids_D < 0) | (ids_D >= target.vocab_size)].tolist()
    problem = ""
    if strange:
        problem = f"{len(strange)} of the {size} draft tokens do not exist in the target, such as {strange[0]}."
    elif duplicates := size - len(set(ids_D.tolist())):
        problem = f"{duplicates} draft tokens are there twice."
    elif (ids_D.diff() < 0).any():
        problem = "The draft vocabulary is not sorted, so LM heads cut to it do not fit."
    if problem:
        return bad(problem, again, **figures)
    learned, heldout = _answers(subject)
    counts_V = _counts(subject, learned)
    covered, covered_heldout = coverage(counts_V, ids_D), coverage(_counts(subject, heldout), ids_D)
    figures |= {"coverage": round(covered, 4), "coverage_heldout": round(covered_heldout, 4)}
    # Answers that the vocabulary was not picked from say nothing of how it was picked.
    best = covered if learned is heldout else coverage(counts_V, pick_vocabulary(counts_V, size, []))
    badly_picked = covered < best - _BELOW_BEST
    if badly_picked or covered_heldout < _COVERED:
        hint = f"; the {size} most frequent tokens would lose {1 - best:.1%}" if badly_picked else ""
        return bad(
            f"The draft vocabulary is truncated: {1 - covered:.1%} of the answers' tokens, {1 - covered_heldout:.1%} "
            f"of held-out ones, are not among its {size} tokens and can never be drafted{hint}.",
            again if badly_picked else "Raise heads.draft_vocab_size, and train again.",
            **figures,
        )
    return good(
        f"The draft vocabulary of {size} tokens covers {covered:.1%} of the answers' tokens, {covered_heldout:.1%} of "
        "held-out ones.",
        **figures,
    )


def _answers(subject: Subject) -> tuple[list[Conversation], list[Conversation]]:
    """What the heads learn from, and what they do not; without a run, answers written now for both."""
    try:
        return subject.conversations["train"], subject.conversations["calibration"] or subject.heldout
    except Absent:
        return subject.heldout, subject.heldout


def _counts(subject: Subject, items: Sequence[Conversation]) -> Tensor:
    """How often each token is supervised, int64 [V]."""
    tokens = [token for item in items for token, flag in zip(item.tokens, item.supervised, strict=True) if flag]
    known = [token for token in tokens if token < subject.target.vocab_size]
    return torch.bincount(torch.tensor(known, dtype=torch.long), minlength=subject.target.vocab_size)


# -- weights ---------------------------------------------------------------------------------------------------------


def weights(subject: Subject) -> Finding:
    """Whether the heads' weights are finite, and whether training moved them."""
    heads = subject.heads
    broken = {name: int((~tensor.isfinite()).sum()) for name, tensor in heads.state_dict().items()}
    broken = {name: count for name, count in broken.items() if count}
    if broken:
        name, count = next(iter(broken.items()))
        more = f", and {len(broken) - 1} more tensors" if len(broken) > 1 else ""
        return bad(
            f"The heads' weights are not finite: {count} numbers of {name!r} are NaN or infinite{more}.",
            "Take heads of an earlier checkpoint, or train again with a lower train.lr; export again if the files were "
            "damaged on the way.",
            not_finite=broken,
        )
    learned = {name: weight for name, weight in heads.named_parameters() if weight.numel()}
    if learned and not any(weight.any() for weight in learned.values()):
        return bad("All weights of the heads are zero.", "Train again; these heads were never written.")
    start = _warm_started(subject, heads)
    if all(torch.equal(weight, start[name].to(weight)) for name, weight in learned.items()) or _best_step(subject) == 0:
        return bad(
            "The heads are those of the warm start: training never made them better.",
            "Look at train/metrics.jsonl: raise train.minutes or train.steps, lower train.lr if the loss rose.",
        )
    dtype = str(next(iter(learned.values())).dtype).removeprefix("torch.")
    return good(f"All weights are finite ({dtype}), and training has moved them.", dtype=dtype)


def _warm_started(subject: Subject, heads: DraftHead) -> dict[str, Tensor]:
    """The weights that training these heads begins with."""
    with torch.random.fork_rng(devices=[]):
        start = family(heads.family)(heads.config).to(subject.target.device)
        start.set_draft_vocabulary(heads.draft_to_target_D)
        start.warm_start(subject.target)
    return dict(start.named_parameters())


def _best_step(subject: Subject) -> int | None:
    """The step whose heads were kept; None when it is not known."""
    file = subject.run / TRAIN / "result.json" if subject.run else None
    if file is None or not file.is_file():
        return None
    best = read_json(file).get("best")
    return int(best["step"]) if isinstance(best, dict) and "step" in best else None
