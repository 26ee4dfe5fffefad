"""Is the mask right? The heads learn from the assistant's tokens, from all of them and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.data.writing.in_process import common_beginning
from headstart.doctor.data_checks import has_answer, rendered
from headstart.doctor.findings import Finding, bad, good, unknown
from headstart.doctor.subject import Absent, Subject
from headstart.errors import UserError


@dataclass
class _Masked:
    """A conversation's tokens and mask as one file stores them, and the mask they should have (None: not known)."""

    file: str
    id: str
    tokens: list[int]
    mask: list[bool]
    expected: list[bool] | None


def mask(subject: Subject) -> Finding:
    """Whether exactly the assistant's tokens are supervised, in the conversations and in the stores."""
    items = list(_masks(subject))
    if not items:
        raise Absent("there are no conversations")
    share = sum(sum(item.mask) for item in items) / max(1, sum(len(item.mask) for item in items))
    figures = {"conversations": len(items), "supervised_share": round(share, 4)}
    wrong = [item for item in items if not any(item.mask)]
    sentence, shift = "Nothing is supervised: the heads learn nothing from such texts.", 0
    if not wrong and (wrong := [item for item in items if item.expected not in (None, item.mask)]):
        sentence, shift = _difference(wrong[0], subject.target.end_tokens)
    if wrong:
        return bad(
            f"{sentence} This is so in {wrong[0].id!r} of {wrong[0].file}; {len(wrong)} of {len(items)} masks are not "
            "what they should be.",
            "Build the data again: headstart data build RECIPE, in another --run-dir or with data/ removed.",
            shift=shift,
            **figures,
        )
    if all(item.expected is None for item in items):
        return unknown(
            "Where the answers begin is not known, because the template gives other tokens now (see template); "
            f"{share:.0%} of the tokens are supervised.",
            **figures,
        )
    return good(f"Exactly the assistant's tokens are supervised: {share:.0%} of all.", **figures)


def _masks(subject: Subject) -> Iterator[_Masked]:
    """What the conversation files and the stores say of the same conversations."""
    try:
        stores = subject.stores
    except (Absent, UserError):  # none yet, or `states` reports it
        stores = {}
    for split, index, item in subject.sampled():
        expected: list[bool] | None = None
        if has_answer(item):
            tokens, mask_now = rendered(item, subject)
            if item.tokens[: len(tokens)] == tokens and any(mask_now):
                expected = mask_now + [False] * (len(item.tokens) - len(tokens))
        file = f"{split}.jsonl"
        yield _Masked(file, item.id, item.tokens, item.supervised, expected)
        if split in stores and index < len(stores[split]):
            folder, sample = stores[split].folder, stores[split].get(index)
            tokens = sample.tokens_T.tolist()
            if tokens != item.tokens:
                raise UserError(
                    f"The store {folder} was built from other conversations than {file} holds: number {index} parts "
                    f"at token {common_beginning([tokens, item.tokens])}.",
                    "Remove the shards that its manifest names and build the states again (headstart data build).",
                )
            yield _Masked(str(folder), item.id, tokens, sample.supervised_T.tolist(), expected)


def _difference(item: _Masked, ends: frozenset[int]) -> tuple[str, int]:
    """How a mask is wrong, and by how many tokens it is late (early when negative; 0 where it is wrong otherwise)."""
    expected = item.expected or []
    late = item.mask.index(True) - expected.index(True)
    padding, size = [False] * abs(late), "one token" if abs(late) == 1 else f"{abs(late)} tokens"
    if late > 0 and item.mask == padding + expected[:-late]:
        return f"The mask is {size} late: the beginning of each answer is not learned.", late
    if late < 0 and item.mask == expected[-late:] + padding:
        return f"The mask is {size} early: the heads learn what the template writes before each answer.", late
    index = common_beginning([[int(flag) for flag in flags] for flags in (item.mask, expected)])
    if not item.mask[index]:
        if not any(expected[index + 1 : index + 2]):
            return "The mask ends early: the end of each turn is not learned.", 0
        return f"Token {index} is the assistant's and not supervised.", 0
    if item.tokens[index - 1] in ends:
        return "Tokens after the end of the turn are supervised: padding, or the template's own text.", 0
    return f"Token {index} is supervised and not the assistant's.", 0
