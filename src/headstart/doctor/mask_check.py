"""Is the mask right? The heads learn from the assistant's tokens, from all of them and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.writing.in_process import common_beginning
from headstart.doctor.data_checks import RENDERED, has_answer, rendered
from headstart.doctor.findings import Finding, bad, good, unknown
from headstart.doctor.subject import Absent, Subject
from headstart.errors import UserError

_SHIFTS = sorted((late for late in range(-8, 9) if late), key=abs)
"""Tokens by which a mask may be late (early when negative) and still be recognised as shifted."""


@dataclass
class _Masked:
    """A conversation's tokens and mask as one file stores them, and the mask they should have (None: not known)."""

    where: str
    id: str
    tokens: list[int]
    mask: list[bool]
    wanted: list[bool] | None


def mask(subject: Subject) -> Finding:
    """Whether exactly the assistant's tokens are supervised, in the conversations and in the stores."""
    items = list(_masks(subject))
    if not items:
        raise Absent("there are no conversations")
    share = sum(sum(item.mask) for item in items) / max(1, sum(len(item.mask) for item in items))
    figures: dict[str, Any] = {"conversations": len(items), "supervised_share": round(share, 4)}
    known = [(item, item.wanted) for item in items if item.wanted is not None]
    empty = [item for item in items if not any(item.mask)]
    different = [(item, wanted) for item, wanted in known if item.mask != wanted]
    trailing = [item for item in items if _after_end(item, subject.target.end_tokens)]
    shift = _shift(different)
    size = "one token" if abs(shift) == 1 else f"{abs(shift)} tokens"
    wrong = [item for item, _ in different]
    if empty:
        wrong, sentence = empty, "Nothing is supervised: the heads learn nothing from such texts."
    elif shift > 0:
        sentence = f"The mask is {size} late: the beginning of each answer is not learned."
    elif shift < 0:
        sentence = f"The mask is {size} early: the heads learn what the template writes before each answer."
    elif trailing:
        wrong = trailing
        sentence = "Tokens after the end of the turn are supervised: padding, or the template's own text."
    elif different:
        sentence = _first_difference(*different[0])
    elif not known:
        return unknown(
            "Where the answers begin is not known, because the template gives other tokens now (see template); "
            f"{share:.0%} of the tokens are supervised.",
            **figures,
        )
    else:
        return good(f"Exactly the assistant's tokens are supervised: {share:.0%} of all.", **figures)
    return bad(
        f"{sentence} This is so in {len(wrong)} of {len(items)} conversations, such as {wrong[0].id!r} in "
        f"{wrong[0].where}.",
        "Build the data again: headstart data build RECIPE, in another --run-dir or with data/ removed.",
        shift=shift,
        **figures,
    )


def _masks(subject: Subject) -> Iterator[_Masked]:
    """What the conversation files and the stores say of the same conversations."""
    try:
        stores = subject.stores
    except (Absent, UserError):  # none yet, or `states` reports it
        stores = {}
    for split, index, item in subject.sampled(RENDERED):
        wanted: list[bool] | None = None
        if has_answer(item):
            tokens, mask_now = rendered(item, subject)
            if item.tokens[: len(tokens)] == tokens and any(mask_now):
                wanted = mask_now + [False] * (len(item.tokens) - len(tokens))
        file = str(subject.conversation_file(split))
        yield _Masked(file, item.id, item.tokens, item.supervised, wanted)
        if split in stores and index < len(stores[split]):
            folder, sample = stores[split].folder, stores[split].get(index)
            tokens = sample.tokens_T.tolist()
            if tokens != item.tokens:
                raise UserError(
                    f"The store {folder} was built from other conversations than {file} holds: number {index} parts "
                    f"at token {common_beginning([tokens, item.tokens])}.",
                    "Remove the shards that its manifest names and build the states again (headstart data build).",
                )
            yield _Masked(str(folder), item.id, tokens, sample.supervised_T.tolist(), wanted)


def _shift(different: Sequence[tuple[_Masked, list[bool]]]) -> int:
    """By how many tokens most of these masks are late (early when negative); 0 where they are wrong in another way."""
    for late in _SHIFTS:
        padding = [False] * abs(late)
        fitting = sum(
            item.mask == (padding + wanted[:-late] if late > 0 else wanted[-late:] + padding)
            for item, wanted in different
        )
        if 2 * fitting > len(different):
            return late
    return 0


def _first_difference(item: _Masked, wanted: list[bool]) -> str:
    pairs = zip(item.mask, wanted, [*wanted[1:], False], strict=True)
    differing = [(index, flag, following) for index, (flag, right, following) in enumerate(pairs) if flag != right]
    if not any(flag or following for _, flag, following in differing):
        return "The mask ends early: the end of each turn is not learned."
    index, flag, _ = differing[0]
    what = "is supervised and not the assistant's" if flag else "is the assistant's and not supervised"
    return f"The mask is not that of the assistant's tokens: token {index} {what}."


def _after_end(item: _Masked, ends: frozenset[int]) -> bool:
    """Whether a supervised token follows an end of turn that is supervised too."""
    triples = zip(item.tokens, item.mask, item.mask[1:], strict=False)
    return any(token in ends and flag and following for token, flag, following in triples)
