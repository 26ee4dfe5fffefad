"""Checks of the stored hidden states: are they what the aux layers say, and does the LM head read the answers from
them?

Shape suffixes: T tokens, S supervised tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.data.states.codes import AUTO
from headstart.data.states.identify import called, every_layer, identify
from headstart.data.states.store import StateStore
from headstart.doctor.findings import Finding, bad, check, good, unknown
from headstart.doctor.subject import SPLITS, Absent, Subject, spread
from headstart.target.fitting import FINAL
from headstart.target.model import Target

_READ = 128
"""Tokens of a conversation that are read again: a causal model's first states do not depend on the rest."""

_ROWS = 512
_AGREE = 0.95
"""Greedy answers are the target's own choice, but for near-ties that another batch rounds the other way (1-2 % in
bfloat16)."""

_REBUILD = (
    "Remove the shards that its manifest names and build the states again (headstart data build), then train again."
)


@check("states")
def states(subject: Subject) -> Finding:
    """Whether the stored states are those of the target at the aux layers they are filed under."""
    target = subject.target
    found: dict[int, str] = {}
    worst = 0.0
    for store in subject.stores.values():
        if store.target_fingerprint not in (None, target.identity().fingerprint):
            return bad(
                f"The states in {store.folder} are those of another model than {target.name}, or of other weights.",
                "Use the target that the data were written with, or build the data again in another --run-dir.",
            )
        for index in spread(len(store), 1 if subject.quick else 3):
            sample = store.get(index)
            tokens = sample.tokens_T[:_READ].tolist()
            fresh = target.hidden_states([tokens], every_layer(target))[0]
            for aux_layer in store.aux_layers:
                states_TE, rounded = sample.states[aux_layer][:_READ], store.states_dtype != AUTO
                distance, said = identify(aux_layer, states_TE, fresh, target, rounded)
                worst = max(worst, distance)
                if said:
                    found.setdefault(aux_layer, f"The store's {said} (conversation {index} of {store.folder})")
    missing = [
        aux_layer
        for aux_layer in _aux_layers(subject)
        if any(aux_layer not in store.aux_layers for store in subject.stores.values())
    ]
    aux_layers = sorted({aux_layer for store in subject.stores.values() for aux_layer in store.aux_layers})
    figures = {
        "aux_layers": aux_layers,
        "distance": worst,
        "wrong": {str(aux_layer): said for aux_layer, said in found.items()},
    }
    if missing:
        found[missing[0]] = f"The heads read {called(missing[0])}, and the store does not hold it"
    if found:
        return bad(f"{'; '.join(found.values())}.", _REBUILD, **figures)
    return good(
        f"The stored states are the target's own at {len(aux_layers)} layer{'s' * (len(aux_layers) > 1)}.", **figures
    )


def _aux_layers(subject: Subject) -> tuple[int, ...]:
    try:
        return subject.heads.aux_layers
    except (Absent, ValueError):  # none yet, or reported by `files`
        return ()


# -- the teacher -----------------------------------------------------------------------------------------------------


@dataclass
class _Verdict:
    """Sums over supervised tokens: how many there are, how many the target itself would choose, its surprise at them
    (negative log-probability) and its entropy, in nats."""

    tokens: int = 0
    chosen: int = 0
    surprise: float = 0.0
    entropy: float = 0.0

    @property
    def agreement(self) -> float:
        """Share of the tokens that are the target's own choice."""
        return self.chosen / max(1, self.tokens)

    @property
    def excess(self) -> float:
        """Nats by which the tokens surprise the target more than its own draws would; about 0 for its own."""
        return (self.surprise - self.entropy) / max(1, self.tokens)


_EXCESS = 0.5
"""Nats a token. Own draws surprise by the entropy; a few thousand of them stay within a tenth of a nat of it."""


@check("states")
def teacher(subject: Subject) -> Finding:
    """Whether the LM head reads the answers out of the stored states: right norm, right layer, answers of the
    target."""
    items = _drawn(subject)
    kind = _kind(items[0][1])
    stored, fresh = _Verdict(), _Verdict()
    for store, item, index in items:
        final_TE = subject.target.hidden_states([item.tokens], [FINAL])[0][FINAL]
        _judge(subject.target, final_TE, item, fresh)
        if store is not None and index < len(store):
            _judge(subject.target, store.get(index).states[FINAL], item, stored)
    if not fresh.tokens:
        return unknown("No answer is longer than a token.")
    figures = {
        "answers": kind, "tokens": fresh.tokens, "agreement_stored": round(stored.agreement, 4),
        "agreement_recomputed": round(fresh.agreement, 4), "excess_nats": round(fresh.excess, 4),
    }  # fmt: skip
    of = f"of the answers' tokens ({fresh.tokens} looked at)"
    if stored.tokens and stored.agreement < min(_AGREE, fresh.agreement - 0.05):
        return bad(
            f"From the stored final states the target's LM head chooses {stored.agreement:.0%} {of}, from states "
            f"computed now {fresh.agreement:.0%}: the stored states are not what the LM head reads (a norm, a layer or "
            "other weights; see states).", _REBUILD, **figures
        )  # fmt: skip
    if kind == "greedy" and fresh.agreement < _AGREE:
        return bad(
            f"The answers are off-policy: they are said to be greedy, and the target itself chooses "
            f"{fresh.agreement:.0%} {of}.",
            "Let the target write the answers in the dtype it decodes in (data.regenerate=true), and train again.",
            **figures,
        )
    if kind == "given" and fresh.agreement < _AGREE:
        return bad(
            f"The answers are off-policy: they were given, and the target itself would choose {fresh.agreement:.0%} "
            f"{of}. Heads learn to draft texts that the target does not write.",
            "Set data.regenerate=true: the target then answers the same prompts itself.",
            **figures,
        )
    if kind == "sampled" and fresh.excess > _EXCESS:
        return bad(
            f"The answers are off-policy: they are said to be drawn from the target, and surprise it by "
            f"{fresh.excess:.2f} nats a token more than its own draws would ({fresh.tokens} tokens looked at).",
            "Let the target write the answers (data.regenerate=true), and train again.",
            **figures,
        )
    return good(f"The target itself chooses {fresh.agreement:.0%} {of}, which are {kind}.", **figures)


def _kind(item: Conversation) -> str:
    """How the answers came to be, as the conversation says."""
    if "temperature" not in item.sampling:
        return "given"
    return "sampled" if item.sampling["temperature"] else "greedy"


def _drawn(subject: Subject) -> list[tuple[StateStore | None, Conversation, int]]:
    """Some conversations of the kind that says most (greedy ones first), each with its index in its store."""
    maximum = 4 if subject.quick else 16
    found = list(_all(subject))
    for kind in ("greedy", "given", "sampled"):
        if some := [row for row in found if _kind(row[1]) == kind]:
            return [some[index] for index in spread(len(some), maximum)]
    raise Absent("there are no conversations")


def _all(subject: Subject) -> Iterator[tuple[StateStore | None, Conversation, int]]:
    for split in SPLITS:
        try:
            store: StateStore | None = subject.stores[split]
        except (Absent, ValueError):  # none yet, or reported by `files`
            store = None
        for index, item in enumerate(subject.conversations(split)):
            if any(item.supervised):
                yield store, item, index


@torch.no_grad()
def _judge(target: Target, final_TE: Tensor, item: Conversation, verdict: _Verdict) -> None:
    """Add one conversation: inside each run of supervised tokens, whatever the mask says of its edges."""
    for start, stop in _inner(item.supervised_spans):
        for first in range(start, stop, _ROWS):
            last = min(first + _ROWS, stop)
            logits_SV = target.lm_head(final_TE[first - 1 : last - 1].to(target.device, target.dtype)).float()
            tokens_S = torch.tensor(item.tokens[first:last], device=logits_SV.device)
            log_SV = logits_SV.log_softmax(-1)
            verdict.tokens += len(tokens_S)
            verdict.chosen += int((logits_SV.argmax(-1) == tokens_S).sum())
            verdict.surprise -= float(log_SV.gather(1, tokens_S[:, None]).sum())
            verdict.entropy -= float((log_SV.exp() * log_SV).sum())


def _inner(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The runs without their first token, which a shifted mask takes from the template."""
    return ((start + 1, stop) for start, stop in spans if stop - start > 1)
