"""Can what was trained draft at all? The heads' vocabulary holds what the target says, and their weights are learned.

Shape suffixes: D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.doctor.findings import Finding, bad, good
from headstart.doctor.subject import SPLITS, Absent, Subject
from headstart.heads.base import DraftHead, HeadConfig, family
from headstart.target.model import Target

_COVERED = 0.85
"""Coverage of the answers below which the vocabulary, not the heads, bounds acceptance: a draft outside it is always
wrong. 8192 tokens of the packaged target's 49152 cover 93 %."""


def vocabulary(subject: Subject) -> Finding:
    """Whether the heads can draft what the target says."""
    target, ids_D = subject.target, subject.heads.draft_to_target_D.cpu()
    size = len(ids_D)
    again = "Train again: the draft vocabulary is then picked from the data."
    if (ids_D.diff() <= 0).any() or ids_D[0] < 0 or ids_D[-1] >= target.vocab_size:
        return bad(
            "The draft vocabulary is none: tokens are not sorted, there twice, or do not exist in the target.",
            again,
        )
    try:
        answers = [item for split in SPLITS for item in subject.conversations[split]]
    except Absent:
        answers = subject.heldout
    drafted = set(ids_D.tolist())
    pairs = [pair for item in answers for pair in zip(item.tokens, item.supervised, strict=True)]
    tokens = [token for token, supervised in pairs if supervised]
    covered = sum(token in drafted for token in tokens) / max(1, len(tokens))
    figures = {"draft_tokens": size, "coverage": round(covered, 4)}
    if covered < _COVERED:
        return bad(
            f"The draft vocabulary is truncated: {1 - covered:.1%} of the answers' tokens are not among its {size} "
            "tokens and can never be drafted.",
            f"{again} If it was, raise heads.draft_vocab_size.",
            **figures,
        )
    return good(f"The draft vocabulary of {size} tokens covers {covered:.1%} of the answers' tokens.", **figures)


# -- weights ---------------------------------------------------------------------------------------------------------


def weights(subject: Subject) -> Finding:
    """Whether the heads' weights are finite, and whether training moved them."""
    heads = subject.heads
    counts = {name: int((~tensor.isfinite()).sum()) for name, tensor in heads.state_dict().items()}
    broken = {name: count for name, count in counts.items() if count}
    if broken:
        where = ", ".join(f"{count} numbers of {name!r}" for name, count in broken.items())
        return bad(
            f"The heads' weights are not finite: {where} are NaN or infinite.",
            "Take heads of an earlier checkpoint, or train again with a lower train.lr; export again if the files were "
            "damaged on the way.",
            not_finite=broken,
        )
    learned = {name: weight for name, weight in heads.named_parameters() if weight.numel()}
    if learned and not any(weight.any() for weight in learned.values()):
        return bad("All weights of the heads are zero.", "Train again; these heads were never written.")
    fresh = untrained(heads.config, heads.draft_to_target_D, subject.target)
    start = dict(fresh.named_parameters())
    if all(torch.equal(weight, start[name].to(weight)) for name, weight in learned.items()):
        return bad(
            "The heads are those of the warm start: training never made them better.",
            "Look at train/metrics.jsonl: raise train.minutes or train.steps, lower train.lr if the loss rose.",
        )
    return good("All weights are finite, and training has moved them.")


def untrained(config: HeadConfig, vocabulary_D: Tensor, target: Target) -> DraftHead:
    """Heads as training begins with them."""
    with torch.random.fork_rng(devices=[]):
        heads = family(config.family)(config).to(target.device)
        heads.set_draft_vocabulary(vocabulary_D)
        heads.warm_start(target)
    return heads
