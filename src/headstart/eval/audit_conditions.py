"""Replays of heads on an engine's texts, as trained and with the usual errors of engines and files.

Shape suffixes: T tokens, M predictions of one step, E hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, family_of
from headstart.heads.exchange.published import Published
from headstart.model.model import Target
from headstart.replay.patch import FINAL

Counts = Counter[str | int]
"""Counters as engines name them: "drafts" (rounds), "accepted_tokens", and accepted drafts by position from 0."""

_USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""Common rotary bases; the first is the default of engines."""


@dataclass(frozen=True)
class Text:
    """An engine's answer, with the target's continuation, since the last drafts may reach past the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    continuation: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.continuation]


@dataclass(frozen=True)
class Condition:
    """One way an engine may run the heads.

    Attributes:
        name: the difference from training, after "An engine that".
        remedy: its correction.
        layers: for a trained layer, the layer that is read instead.
        shift: positions by which states move; with 1 each token reads the state of the token before.
    """

    name: str
    remedy: str
    heads: DraftHead
    layers: Mapping[int, int] = field(default_factory=dict)
    shift: int = 0

    def states(self, read: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Select the heads' inputs [1, T, E] from the target's states [T, E] of each layer."""
        chosen = {layer: read[self.layers.get(layer, layer)] for layer in self.heads.aux_layers}
        return {layer: state_TE.roll(self.shift, 0)[None] for layer, state_TE in chosen.items()}


def conditions(heads: DraftHead, target: Target) -> list[Condition]:
    """Return the usual errors that apply to these heads: in layers, norms, positions and alignment."""
    return [*_read_states(heads, target), *_edited(heads, target)]


def _read_states(heads: DraftHead, target: Target) -> Iterator[Condition]:
    layers, last = heads.aux_layers, target.num_layers
    ids = [layer for layer in layers if layer != FINAL]
    ours = f"The layer ids of transformers' hidden_states are {', '.join(map(str, ids))}"
    remedy = f"{ours}; SGLang and block drafters number them one lower."
    if ids:
        if min(ids) > 0:
            yield Condition("reads each layer before the trained one", remedy, heads, {id: id - 1 for id in ids})
        if max(ids) < last:
            yield Condition("reads each layer after the trained one", remedy, heads, {id: id + 1 for id in ids})
        usual = dict(zip(ids, (2, last // 2, last - 3), strict=False))
        if len(ids) == 3 and all(0 < id <= last for id in usual.values()) and list(usual.values()) != ids:
            name = f"reads the default layers {', '.join(map(str, usual.values()))}"
            yield Condition(name, f"{ours}; the config must name them.", heads, usual)
    if last in ids:
        normed = "These heads read the last layer before the final norm."
        yield Condition("reads the last layer after the final norm", normed, heads, {last: FINAL})
    if FINAL in layers:
        raw = "These heads read the state after the final norm."
        yield Condition("reads the state before the final norm", raw, heads, {FINAL: last})
    aligned = "The state after a token goes with the embedding of the next one: update or report the engine."
    yield Condition("reads the state of the token before", aligned, heads, shift=1)
    yield Condition("reads the state of the token after", aligned, heads, shift=-1)


def _edited(heads: DraftHead, target: Target) -> Iterator[Condition]:
    """Yield heads with one setting of their file lost or changed."""
    published = heads.publish()
    for name, remedy, changed in _edits(published, target):
        if heads.settings_of(changed) == heads.settings_of(published):
            continue  # this family has no such setting
        with suppress(UserError):  # no family supports the combination
            built = family_of(changed).from_published(changed, target).to(heads.draft_to_target_D.device)
            dtype = next(heads.parameters()).dtype
            yield Condition(name, remedy, built.to(dtype).eval().requires_grad_(False))


def _edits(published: Published, target: Target) -> Iterator[tuple[str, str, Published]]:
    if (layer := published.layer) is not None:
        rope = layer.rope_parameters
        own, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")

        def rotary(values: dict[str, Any]) -> Published:
            return replace(published, layer=replace(layer, rope_parameters=values))

        theirs = (getattr(target.config, "rope_parameters", None) or {}).get("rope_theta")
        for base in sorted({*_USUAL_BASES, *([float(theirs)] if isinstance(theirs, int | float) else [])} - {own}):
            remedy = f"rope_theta must be {own:g}, in the spelling that the engine reads."
            yield f"uses the rotary base {base:g}", remedy, rotary({**rope, "rope_theta": base})
        if kind != "default":
            remedy = f"The rope parameters must be {rope}."
            yield f"ignores the {kind} rotary scaling", remedy, rotary({"rope_type": "default", "rope_theta": own})
    words = {True: "sets", False: "ignores"}
    for name in ("norm_output", "norm_before_residual", "aux_norms", "qk_norm", "causal"):
        value = getattr(published, name)
        if value or name in ("norm_output", "norm_before_residual"):
            remedy = f"{name} must be {str(value).lower()}: serve with an engine that reads it."
            changed: dict[str, Any] = {name: not value}
            yield f"{words[not value]} {name}", remedy, replace(published, **changed)
    if published.fed_back is not None:
        remedy = "Set parallel_drafting in vLLM's --speculative-config."
        yield "feeds drafts back instead of drafting in parallel", remedy, published.fed_back
    if published.sliding_window:
        remedy = f"The sliding window must be {published.sliding_window}."
        yield "ignores the sliding window", remedy, replace(published, sliding_window=0, full_layers=())


@torch.inference_mode()
def accepted_drafts(condition: Condition, read: Mapping[int, Tensor], text: Text) -> list[int]:
    """Return the number of accepted drafts after each token of a text, given the target's hidden states of it."""
    tokens_1T = torch.tensor([text.tokens], device=read[FINAL].device)
    supervised_1T = torch.arange(tokens_1T.shape[1])[None] >= len(text.prompt)
    batch = HeadBatch(tokens_1T, supervised_1T, condition.states(read))
    accepted_T = torch.zeros_like(tokens_1T[0])
    for step, predicted in enumerate(condition.heads.unroll(batch)):
        draft_M = condition.heads.draft_to_target_D[predicted.logits_MD.argmax(-1)]
        origin_M = predicted.origin_M
        accepted_T[origin_M] += (draft_M == tokens_1T[0, predicted.teacher_M + 1]) & (accepted_T[origin_M] == step)
    return accepted_T.tolist()


def count_rounds(accepted: Sequence[int], text: Text, drafts: int, longest: int | None) -> Counts:
    """Count rounds and accepted drafts of an answer in chains of `drafts`, given `accepted_drafts`.

    `longest` is the maximum answer length of engines that do not draft past it; None for others.

    >>> text = Text((5,), (6, 7, 8, 9))
    >>> count_rounds([2, 0, 1, 0], text, drafts=2, longest=None)
    Counter({'accepted_tokens': 2, 'drafts': 1, 0: 1, 1: 1})
    >>> count_rounds([1, 0, 1, 0], text, drafts=2, longest=4)
    Counter({'drafts': 2, 0: 1, 'accepted_tokens': 1})
    """
    counts, written = Counts(), 1
    while written < len(text.answer):
        most = drafts if longest is None else min(drafts, longest - written - 1)
        kept = min(most, accepted[len(text.prompt) + written - 2])
        counts.update(["drafts", *range(kept)])
        counts["accepted_tokens"] += kept
        written += 1 + kept
    return counts
