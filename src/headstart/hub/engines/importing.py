"""Import of published draft heads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from headstart.errors import UserError
from headstart.heads.base import DraftHead, family_of
from headstart.heads.exchange.published import DFLASH2_LOGITS, Layout, Published
from headstart.hub.engines.base import non_finite
from headstart.hub.engines.export import formats_of
from headstart.hub.engines.facts import facts_of_target
from headstart.hub.format import export_heads, refuse_other_files
from headstart.hub.pull import HUB_ID, fetch
from headstart.hub.target_facts import kind_of
from headstart.model.model import Target
from headstart.support.files import no_folder

GUESSED = "guessed"
"""Label of an acceptance that was not measured."""


def import_heads(source: str | Path, target: Target, out: Path, revision: str | None = None) -> DraftHead:
    """Write a published checkpoint as a folder of headstart heads, see `headstart.import_heads`."""
    refuse_other_files(out)
    folder = Path(source).expanduser()
    if not folder.exists():
        if not isinstance(source, str) or not HUB_ID.fullmatch(source):
            raise no_folder(source, "Give a folder of draft heads, or a Hub id (user/name).")
        folder = fetch(source, revision, files=["*.json", "*.safetensors"])
    published = read_checked(folder, target)
    try:
        heads = family_of(published).from_published(published, target)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"headstart does not support {'.'.join(map(str, first['loc']))} of this checkpoint: "
            f"{first['msg'].lower()}.",
            "Take another checkpoint, or upgrade headstart.",
        ) from None
    name = source if isinstance(source, str) and HUB_ID.fullmatch(source) else folder.name
    facts = {"training": {"imported from": str(name), "arrangement": kind_of(published)}}
    export_heads(out, heads, target, tuning=untuned(heads), facts=facts)
    return heads


def read_checked(folder: Path, target: Target) -> Published:
    """Read heads and extend them to the target's context. Raises UserError if they do not fit the target."""
    facts = facts_of_target(target)
    published = formats_of(folder)[0].read(folder, facts)
    if (published.hidden_size, published.vocab_size) != (facts.hidden_size, facts.vocab_size):
        raise UserError(
            f"The heads in {folder} are for a target of size {published.hidden_size} with {published.vocab_size} "
            f"tokens; {facts.name} has size {facts.hidden_size} and {facts.vocab_size} tokens.",
            "Name the heads' target with --target.",
        )
    ours, theirs = [facts.logits.scale, facts.logits.cap or 0.0], [getattr(published, name) for name in DFLASH2_LOGITS]
    if published.layout is Layout.DFLASH2 and not torch.allclose(torch.tensor(ours), torch.tensor(theirs)):
        problem = f"The heads add scores to logits with scale and cap {theirs}, and {facts.name} has {ours}."
        raise UserError(problem, "Name the heads' target with --target.")
    for fault in non_finite(published):
        raise UserError(*fault)
    if published.layer is not None and (trained := published.layer.max_position_embeddings) < facts.context:
        warnings.warn(
            f"The heads' context of {trained} tokens is raised to the {facts.context} of {facts.name}. They were not "
            f"trained beyond {trained} tokens, where fewer drafts may be accepted.",
            stacklevel=3,
        )
    return published.with_context(facts.context).in_order()


def untuned(heads: DraftHead, right: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the tuning of a chain as deep as the heads, with placeholder costs until decoding measures them.

    `right` is the fraction of drafts correct up to each step, from validation; without it acceptance is guessed.
    """
    steps = heads.draft_steps
    shares = [1.0, *(right or accumulate([0.5] * steps, mul))]
    return {
        "paths": [[0] * depth for depth in range(1, steps + 1)],
        "node_counts": [1, steps + 1],
        "verify_ms": [1.0, 1.0],
        "draft_ms": 0.1,
        "acceptance": [[after / before if before else 0.0] for before, after in pairwise(shares)],
        "predicted": {"tokens_per_round": sum(shares), "speedup": 1.0, "tokens_per_second": 0.0},
        "chain": steps,
        "settings": {"acceptance": GUESSED if right is None else "of the training's validation"},
    }
