"""A row of a model's vocabulary that no text uses, for heads that read a placeholder where a token is not known yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|<\|?mask|dummy|<pad\d", re.IGNORECASE)
"""How tokenizers call tokens that are kept for later."""


def spare_token(tokenizer: Any, vocab_size: int, blank: Callable[[int], bool] = lambda token_id: False) -> int | None:
    """The id of the first of these that there is:

    1. the first row after those of the tokenizer, where the embeddings were rounded up;
    2. the tokenizer's own mask token;
    3. a reserved token by its name;
    4. the last added token that neither the chat template nor the tokenizer gives a meaning;
    5. the padding token, where it ends nothing.

    Args:
        tokenizer: of the model; None where there is none.
        vocab_size: rows of the embeddings.
        blank: whether a row says nothing (zeros or no numbers, as rounding up may leave them), so that the next one is
            taken.

    Returns:
        None where every token has a meaning, or none is known.
    """
    if tokenizer is None:
        return None
    return next((one for one in _candidates(tokenizer) if one < vocab_size and not blank(one)), None)


def _candidates(tokenizer: Any) -> Iterator[int]:
    known: dict[str, int] = tokenizer.get_vocab()
    yield 1 + max(known.values(), default=-1)
    mask: int | None = getattr(tokenizer, "mask_token_id", None)
    if mask is not None:
        yield mask
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "unk", "sep", "cls")}
    pad: int | None = getattr(tokenizer, "pad_token_id", None)
    template = getattr(tokenizer, "chat_template", None)
    rendered = template if isinstance(template, str) else " ".join((template or {}).values())
    decoder = sorted(tokenizer.added_tokens_decoder.items())
    added: dict[int, str] = {token_id: str(token) for token_id, token in decoder}
    special: dict[int, bool] = {token_id: getattr(token, "special", True) for token_id, token in decoder}
    free = {
        token_id: text
        for token_id, text in added.items()
        if special[token_id] and token_id not in roles | {pad} and text not in rendered
    }
    yield from (token_id for token_id, text in free.items() if _RESERVED.search(text))
    yield from sorted(free, reverse=True)
    if pad is not None and pad not in roles:
        yield pad
