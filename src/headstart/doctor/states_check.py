"""Do the stored states belong to this target? At the aux layers that they are filed under, token by token.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from headstart.data.states.codes import AUTO
from headstart.data.states.identify import called, every_layer, identify
from headstart.doctor.findings import Finding, bad, good
from headstart.doctor.subject import Absent, Subject, spread
from headstart.errors import UserError

_READ = 128
"""Tokens of a conversation that are read again: a causal model's first states do not depend on the rest."""


def states(subject: Subject) -> Finding:
    """Whether the stored states are those of the target at the aux layers they are filed under, and finite."""
    target = subject.target
    problems: dict[int, str] = {}
    distances: list[float] = []
    for store in subject.stores.values():
        if store.target_fingerprint not in (None, target.identity().fingerprint):
            return bad(
                f"The states in {store.folder} are those of another model than {target.name}, or of other weights.",
                "Use the target that the data were written with, or build the data again in another --run-dir.",
            )
        for index in spread(len(store), 8 if subject.quick else 64):
            for aux_layer, state_TE in store.get(index).states.items():
                if not state_TE.isfinite().all():
                    where = f"{called(aux_layer)}, conversation {index} of {store.folder}"
                    problems.setdefault(aux_layer, f"Stored states are not finite ({where})")
        for index in spread(len(store), 1 if subject.quick else 3):
            sample, rounded = store.get(index), store.states_dtype != AUTO
            fresh = target.hidden_states([sample.tokens_T[:_READ].tolist()], every_layer(target))[0]
            for aux_layer in store.aux_layers:
                distance, problem = identify(aux_layer, sample.states[aux_layer][:_READ], fresh, target, rounded)
                distances.append(distance)
                if problem:
                    problems.setdefault(aux_layer, f"The store's {problem} (conversation {index} of {store.folder})")
    stored = set.intersection(*(set(store.aux_layers) for store in subject.stores.values()))
    try:
        missing = sorted(set(subject.heads.aux_layers) - stored)
    except (Absent, UserError):  # none yet, or `vocabulary` reports it
        missing = []
    for aux_layer in missing:
        problems[aux_layer] = f"The heads read {called(aux_layer)}, and the store does not hold it"
    figures = {"aux_layers": sorted(stored), "distance": max(distances, default=0.0), "wrong": problems}
    if problems:
        return bad(
            f"{'; '.join(problems.values())}.",
            "Remove the shards that its manifest names and build the states again (headstart data build), with "
            "target.dtype=float32 if numbers stay infinite; then train again.",
            **figures,
        )
    return good(f"The stored states are the target's own at layers {sorted(stored)}.", **figures)
