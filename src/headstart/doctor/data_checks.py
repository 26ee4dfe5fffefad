"""Is the data what I think? Template and tokenizer still give these tokens, and the target wrote the answers.

Shape suffixes: T tokens, S supervised tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import added_tokens, prompt_tokens, render
from headstart.data.writing.in_process import common_beginning
from headstart.doctor.findings import Finding, bad, good, unknown
from headstart.doctor.subject import SPLITS, Absent, Subject, spread
from headstart.target.fitting import FINAL

_AGREE = 0.95
"""Greedy answers are the target's own choice, but for near-ties that another batch rounds the other way (1-2 % in
bfloat16)."""
_EXCESS = 0.5
"""Nats a token. The target's own draws surprise it by the entropy; a few thousand of them stay within a tenth of a nat
of that."""
_TOKENS = 512
"""Of an answer that are judged: so many rows of logits exist at once."""


# -- the template ----------------------------------------------------------------------------------------------------


def template(subject: Subject) -> Finding:
    """Whether the target's chat template and tokenizer still give the tokens that are stored."""
    tokenizer = subject.target.tokenizer
    count = 0
    differing: list[str] = []
    for split, _, item in subject.sampled():
        if not has_answer(item):
            continue
        count += 1
        tokens, _ = rendered(item, subject)
        stored = item.tokens[: len(tokens)]  # what stands after the last turn is the mask's concern
        if stored != tokens:
            index = common_beginning([stored, tokens])
            was, now = (tokenizer.decode(text[index : index + 1]) for text in (stored, tokens))
            differing.append(f"{item.id!r} ({split}) parts at token {index}: stored {was!r}, now {now!r}")
    if not count:
        raise Absent("the conversations keep no messages to render")
    if not differing:
        return good(f"{count} conversations rendered again give the tokens that are stored.", conversations=count)
    where = f"{len(differing)} of {count} conversations are rendered otherwise now; conversation {differing[0]}."
    figures = {"conversations": count, "parted": len(differing)}
    if "strftime_now" in str(tokenizer.chat_template):
        return unknown(f"The chat template writes the date. {where}", **figures)
    return bad(
        f"The chat template or the tokenizer is another one than when the data were written. {where} In decoding the "
        "heads read other prompts than those they learned from.",
        "Decode with the tokenizer and template that wrote the data (those in target/tokenizer of the run), or write "
        "the data again in another --run-dir.",
        **figures,
    )


def has_answer(item: Conversation) -> bool:
    """Whether a conversation keeps the messages that it was rendered from."""
    return any(message["role"] == "assistant" for message in item.messages)


def rendered(item: Conversation, subject: Subject) -> tuple[list[int], list[bool]]:
    """Tokens and mask of a conversation as the target's template gives them now, around the answers as they are stored.

    Tokens that the target wrote are not what its tokenizer makes of the same text, so they are taken over; given
    answers are rendered with everything else.
    """
    tokenizer, ends = subject.target.tokenizer, subject.target.end_tokens
    if _written(item) == "given":
        return encode(item.messages, tokenizer, strict=False, max_tokens=len(item.tokens))
    tokens: list[int] = []
    mask: list[bool] = []
    answered = 0
    for turn, message in enumerate(item.messages):
        if message["role"] != "assistant" or len(tokens) > len(item.tokens):
            continue
        if answered:
            before = render(item.messages[:answered], tokenizer, answer=False)
            after = render(item.messages[:turn], tokenizer, answer=True)
            question = added_tokens(before, after, tokens[-1], tokenizer)
        else:
            question = prompt_tokens(item.messages[:turn], tokenizer)
        rest = item.tokens[len(tokens) + len(question) :]
        stop = next((index + 1 for index, token in enumerate(rest) if token in ends), len(rest))
        tokens += [*question, *rest[:stop]]
        mask += [False] * len(question) + [True] * stop
        answered = turn + 1
    return tokens, mask


# -- the answers -----------------------------------------------------------------------------------------------------


def teacher(subject: Subject) -> Finding:
    """Whether the target itself would write the answers that the heads learn from."""
    kind, items = _most_telling(subject)
    judged = [_judged(subject, item) for item in items]
    tokens, chosen, excess = (sum(column) for column in zip(*judged, strict=True))
    if not tokens:
        return unknown("No answer is longer than a token.")
    agreement, excess = chosen / tokens, excess / tokens
    figures = {"answers": kind, "tokens": tokens, "agreement": round(agreement, 4), "excess_nats": round(excess, 4)}
    choice = f"the target itself chooses {agreement:.0%} of their tokens ({tokens} looked at)"
    if excess > _EXCESS if kind == "sampled" else agreement < _AGREE:
        reason = {
            "greedy": f"they are said to be greedy, and {choice}",
            "given": f"they were given, and {choice}; heads learn to draft texts that it does not write",
            "sampled": f"they are said to be drawn from the target, and surprise it by {excess:.2f} nats a token more "
            f"than its own draws would ({tokens} tokens looked at)",
        }[kind]
        return bad(
            f"The answers are off-policy: {reason}.",
            "Set data.regenerate=true: the target then answers the same prompts itself, in the dtype it decodes in. "
            "Then train again.",
            **figures,
        )
    return good(f"The answers are {kind}, and {choice}.", **figures)


def _written(item: Conversation) -> str:
    """How the answers came to be, as the conversation says: greedy, sampled, or given with the prompts."""
    if "temperature" not in item.sampling:
        return "given"
    return "sampled" if item.sampling["temperature"] else "greedy"


def _most_telling(subject: Subject) -> tuple[str, list[Conversation]]:
    """Some conversations of the kind that says most, greedy ones first."""
    answered = [item for split in SPLITS for item in subject.conversations[split] if any(item.supervised)]
    for kind in ("greedy", "given", "sampled"):
        if items := [item for item in answered if _written(item) == kind]:
            return kind, [items[index] for index in spread(len(items), 4 if subject.quick else 16)]
    raise Absent("there are no conversations")


@torch.no_grad()
def _judged(subject: Subject, item: Conversation) -> tuple[int, int, float]:
    """Supervised tokens; how many of them the target would choose; and by how many nats they surprise it more than its
    own draws would on average (negative log-probability less entropy, summed)."""
    final_TE = subject.target.hidden_states([item.tokens], [FINAL])[0][FINAL]
    # The first token of an answer is left out: a shifted mask takes it from the template.
    later = [index for start, stop in item.supervised_spans for index in range(start + 1, stop)][:_TOKENS]
    log_SV = subject.target.lm_head(final_TE[[index - 1 for index in later]]).float().log_softmax(-1)
    tokens_S = torch.tensor([item.tokens[index] for index in later], dtype=torch.long, device=log_SV.device)
    excess = (log_SV.exp() * log_SV).sum() - log_SV.gather(1, tokens_S[:, None]).sum()
    return len(later), int((log_SV.argmax(-1) == tokens_S).sum()), float(excess)
