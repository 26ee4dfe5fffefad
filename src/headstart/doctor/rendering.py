"""Checks of what is there, of the chat template, and of the mask that says what the heads learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import added_tokens, has_template, prompt_tokens, render
from headstart.data.writing.in_process import common_beginning
from headstart.doctor.findings import Finding, bad, check, good, unknown
from headstart.doctor.subject import SPLITS, Absent, Subject, spread
from headstart.errors import UserError

_LOOKED_AT = 64
"""Conversations of a split that are rendered again."""
_SHIFTS = 8
"""Tokens by which a mask may be shifted and still be recognised as shifted."""


@check("run")
def files(subject: Subject) -> Finding:
    """Whether what is there can be read."""
    found, broken = [], []
    for what, read in (
        ("conversations", lambda: [subject.conversations(split) for split in SPLITS]),
        ("hidden states", lambda: subject.stores),
        ("heads", lambda: subject.heads),
    ):
        try:
            read()
            found.append(what)
        except Absent:
            continue
        except UserError as error:
            broken.append(error)
    if broken:
        return bad(" ".join(error.problem for error in broken), " ".join(error.remedy for error in broken))
    if not found:
        return unknown("There is no run yet: the target and a fresh training are all there is to look at.")
    return good(f"{', '.join(found).capitalize()} can be read.", found=found)


# -- the template ----------------------------------------------------------------------------------------------------


@check("data")
def template(subject: Subject) -> Finding:
    """Whether the target's chat template and tokenizer still give the tokens that are stored."""
    tokenizer, looked, parted = subject.target.tokenizer, 0, list[tuple[str, Conversation, int, list[int]]]()
    for split, item in _sample(subject):
        looked += 1
        tokens, _ = rendered(item, subject)
        # What stands after the last turn is the mask's concern.
        if (index := _parting(item.tokens[: len(tokens)], tokens)) is not None:
            parted.append((split, item, index, tokens))
    if not looked:
        raise Absent("the conversations keep no messages to render")
    if not parted:
        return good(f"{looked} conversations rendered again give the tokens that are stored.", conversations=looked)
    split, item, index, tokens = parted[0]
    where = (
        f"{len(parted)} of {looked} conversations are rendered otherwise now than they are stored; conversation "
        f"{item.id!r} ({split}) parts at token {index}: stored {_word(item.tokens, index, tokenizer)}, now "
        f"{_word(tokens, index, tokenizer)}."
    )
    figures = {"conversations": looked, "parted": len(parted), "id": item.id, "token": index}
    if "strftime_now" in str(tokenizer.chat_template):
        return unknown(f"The chat template writes the date. {where}", **figures)
    cause = _cause(subject, item, index)
    return bad(
        f"{cause} {where} In decoding the heads read other prompts than those they learned from.",
        "Decode with the tokenizer and template that wrote the data (those in target/tokenizer of the run), or write "
        "the data again in another --run-dir.",
        **figures,
    )


def _cause(subject: Subject, item: Conversation, index: int) -> str:
    """One sentence: what changed since the data were written."""
    now, kept = subject.target.tokenizer, subject.kept_tokenizer
    if kept is not None:
        if kept.chat_template != now.chat_template:
            return "The chat template is another one than when the data were written."
        if kept.get_vocab() != now.get_vocab():
            return "The tokenizer is another one than when the data were written."
        if kept.special_tokens_map != now.special_tokens_map:
            return "The special tokens are others than when the data were written."
    first = _first_answer(item)
    text = render(item.messages[:first], now, answer=True) if has_template(now) else item.messages[0]["content"]
    if max(item.tokens) < subject.target.vocab_size and text.startswith(now.decode(item.tokens[: index + 1])):
        return "The tokenizer cuts the same text into other tokens than when the data were written."
    return "Another chat template or tokenizer wrote the data."


def rendered(item: Conversation, subject: Subject) -> tuple[list[int], list[bool]]:
    """Tokens and mask of a conversation as the target's template gives them now, around the answers as they are stored.

    Tokens that the target wrote are not what its tokenizer makes of the same text, so they are taken over; given
    answers are rendered with everything else.
    """
    tokenizer, ends = subject.target.tokenizer, subject.target.end_tokens
    if "temperature" not in item.sampling:
        return encode(item.messages, tokenizer, strict=False, max_tokens=len(item.tokens))
    tokens: list[int] = []
    mask: list[bool] = []
    answered = 0
    for turn, message in enumerate(item.messages):
        if message["role"] != "assistant" or len(tokens) > len(item.tokens):
            continue
        fresh = _added(item.messages, answered, turn, tokens, tokenizer)
        rest = item.tokens[len(tokens) + len(fresh) :]
        stop = next((index + 1 for index, token in enumerate(rest) if token in ends), len(rest))
        tokens += [*fresh, *rest[:stop]]
        mask += [False] * len(fresh) + [True] * stop
        answered = turn + 1
    return tokens, mask


def _added(messages: Any, answered: int, turn: int, tokens: Sequence[int], tokenizer: Any) -> list[int]:
    """Tokens that the template adds before the answer in message `turn`; the answer before that ends `tokens`."""
    if not answered:
        return prompt_tokens(messages[:turn], tokenizer)
    before = render(messages[:answered], tokenizer, answer=False)
    after = render(messages[:turn], tokenizer, answer=True)
    return added_tokens(before, after, tokens[-1], tokenizer)


def _parting(stored: Sequence[int], now: Sequence[int]) -> int | None:
    """The first token at which they differ; None when they are equal."""
    return None if list(stored) == list(now) else common_beginning([stored, now])


def _word(tokens: Sequence[int], index: int, tokenizer: Any) -> str:
    """A token for people: its text and its number."""
    if index >= len(tokens):
        return "the end"
    try:
        return f"{tokenizer.decode([tokens[index]])!r} ({tokens[index]})"
    except (OverflowError, IndexError, TypeError):  # a number that this tokenizer does not know
        return f"token {tokens[index]}"


def _sample(subject: Subject) -> Iterator[tuple[str, Conversation]]:
    for split in SPLITS:
        items = subject.conversations(split)
        for index in spread(len(items), 8 if subject.quick else _LOOKED_AT):
            if _first_answer(items[index]) is not None:
                yield split, items[index]


def _first_answer(item: Conversation) -> int | None:
    return next((turn for turn, message in enumerate(item.messages) if message["role"] == "assistant"), None)


# -- the mask --------------------------------------------------------------------------------------------------------


@dataclass
class _Masked:
    """A conversation's tokens and mask as one file stores them, and the mask they should have (None: not known)."""

    where: str
    id: str
    tokens: list[int]
    mask: list[bool]
    wanted: list[bool] | None


@check("data")
def mask(subject: Subject) -> Finding:
    """Whether the heads learn from the assistant's tokens, from all of them and from nothing else."""
    found = list(_masks(subject))
    if not found:
        raise Absent("there are no conversations")
    share = sum(sum(item.mask) for item in found) / max(1, sum(len(item.mask) for item in found))
    figures: dict[str, Any] = {"conversations": len(found), "supervised_share": round(share, 4)}
    remedy = "Build the data again: headstart data build RECIPE, in another --run-dir or with data/ removed."
    empty = [item for item in found if not any(item.mask)]
    if empty:
        return bad(
            f"Nothing is supervised in {len(empty)} of {len(found)} conversations, such as {empty[0].id!r} in "
            f"{empty[0].where}: the heads learn nothing from them.", remedy, **figures
        )  # fmt: skip
    known = [item for item in found if item.wanted is not None]
    wrong = [item for item in known if item.mask != item.wanted]
    trailing = [item for item in found if _after_end(item, subject.target.end_tokens)]
    sentence, shift = _describe(wrong) if wrong else ("", 0)
    if trailing and not shift:
        wrong = trailing
        sentence = "Tokens after the end of the turn are supervised: padding, or the template's own text."
    if wrong:
        where = f"{len(wrong)} of {len(found)} conversations, such as {wrong[0].id!r} in {wrong[0].where}"
        return bad(f"{sentence} This is so in {where}.", remedy, shift=shift, **figures)
    if not known:
        return unknown(
            "Where the answers begin is not known, because the template gives other tokens now (see template); "
            f"{share:.0%} of the tokens are supervised.", **figures
        )  # fmt: skip
    return good(f"Exactly the assistant's tokens are supervised: {share:.0%} of all.", **figures)


def _masks(subject: Subject) -> Iterator[_Masked]:
    """What the conversation files and the stores say of the same conversations."""
    for split in SPLITS:
        items = subject.conversations(split)
        try:
            store = subject.stores[split]
        except (Absent, UserError):  # none yet, or `files` has reported it
            store = None
        for index in spread(len(items), 8 if subject.quick else _LOOKED_AT):
            item = items[index]
            wanted: list[bool] | None = None
            if _first_answer(item) is not None:
                tokens, mask_now = rendered(item, subject)
                if item.tokens[: len(tokens)] == tokens and any(mask_now):
                    wanted = mask_now + [False] * (len(item.tokens) - len(tokens))
            file = str(subject.conversation_file(split))
            yield _Masked(file, item.id, item.tokens, item.supervised, wanted)
            if store is not None and index < len(store):
                sample = store.get(index)
                kept, supervised = sample.tokens_T.tolist(), sample.supervised_T.tolist()
                if kept != item.tokens:
                    raise UserError(
                        f"The store {store.folder} was built from other conversations than {file} holds: number "
                        f"{index} parts at token {_parting(kept, item.tokens)}.",
                        "Remove the shards that its manifest names and build the states again (headstart data build).",
                    )
                yield _Masked(str(store.folder), item.id, kept, supervised, wanted)


def _describe(wrong: Sequence[_Masked]) -> tuple[str, int]:
    """What is wrong with the masks, in words; and by how many tokens they are late (early when negative)."""
    misses = {late: sum(_misses(item, late) for item in wrong) for late in range(-_SHIFTS, _SHIFTS + 1)}
    late = min(misses, key=lambda late: (misses[late], abs(late)))
    size = "one token" if abs(late) == 1 else f"{abs(late)} tokens"
    if late and misses[late] < misses[0] / 2:
        if late > 0:
            return f"The mask is {size} late: the beginning of each answer is not learned.", late
        return f"The mask is {size} early: the heads learn what the template writes before each answer.", late
    item = wrong[0]
    assert item.wanted is not None, "only masks that are known to be wrong are described"
    pairs = zip(item.mask, item.wanted, [*item.wanted[1:], False], strict=True)
    differing = [(index, flag, following) for index, (flag, wanted, following) in enumerate(pairs) if flag != wanted]
    if not any(flag or following for _, flag, following in differing):
        return "The mask ends early: the end of each turn is not learned.", 0
    index, flag, _ = differing[0]
    what = "is supervised and not the assistant's" if flag else "is the assistant's and not supervised"
    return f"The mask is not that of the assistant's tokens: token {index} {what}.", 0


def _misses(item: _Masked, late: int) -> int:
    """Tokens whose mask is not that of the token `late` tokens before them."""
    assert item.wanted is not None, "only masks that are known to be wrong are compared"
    return sum(a != b for a, b in zip(item.mask[max(late, 0) :], item.wanted[max(-late, 0) :], strict=False))


def _after_end(item: _Masked, ends: frozenset[int]) -> bool:
    triples = zip(item.tokens, item.mask, item.mask[1:], strict=False)
    return any(token in ends and here and following for token, here, following in triples)
