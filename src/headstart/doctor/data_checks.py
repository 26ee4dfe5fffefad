"""Checks of the data: chat template, answers, mask, and hidden states.

Shape suffixes: T tokens, S supervised tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import added_tokens, prompt_tokens, render, with_tools
from headstart.data.states.identify import every_layer, identify, layer_name
from headstart.data.states.shard_format import AUTO
from headstart.decode.prefix_cache import common_prefix_length
from headstart.doctor.findings import Finding, bad, good, unknown
from headstart.doctor.subject import SPLITS, Absent, Subject
from headstart.errors import UserError
from headstart.eval.replay import spread
from headstart.replay.patch import FINAL

_MIN_AGREEMENT, _MIN_AGREEMENT_INT8 = 0.95, 0.85
"""Required argmax agreement. Near-ties flip in other batches: 1-2 % in bfloat16, 5 % with int8 products."""
_MAX_EXCESS = 0.5
"""Allowed excess surprisal in nats per token: 0 for the target's own samples, within 0.1 over a few thousand tokens."""
_ANSWER_TOKENS = 512
"""Maximum answer tokens whose logits are compared: this many rows of logits are in memory at once."""
_PREFILL_TOKENS = 128
"""Tokens of a conversation that are prefilled again: a causal model's first states do not depend on the rest."""


def template(subject: Subject) -> Finding:
    """Check that the target's chat template and tokenizer still give the stored tokens."""
    tokenizer = subject.target.tokenizer
    answered = [(split, item) for split, _, item in subject.sample() if _has_answer(item)]
    if not answered:
        raise Absent("the conversations keep no messages to render")
    differing: list[str] = []
    for split, item in answered:
        tokens, _ = _render_again(item, subject)
        stored = list(item.tokens[: len(tokens)])  # `mask` checks the rest, after the last turn
        if stored != tokens:
            index = common_prefix_length([stored, tokens])
            old, new = (tokenizer.decode(text[index : index + 1]) for text in (stored, tokens))
            differing.append(f"{item.id!r} ({split}) differs from token {index} on: stored {old!r}, now {new!r}")
    if not differing:
        return good(f"{len(answered)} conversations, rendered again, give the stored tokens.")
    where = f"{len(differing)} of {len(answered)} conversations now render differently: conversation {differing[0]}."
    if "strftime_now" in str(tokenizer.chat_template):
        return unknown(f"The chat template writes the date. {where}")
    return bad(
        f"The chat template or the tokenizer has changed since the data were written. {where} Prompts in decoding "
        "differ from the training prompts.",
        "Decode with the run's target/tokenizer, or write the data again in another --run-dir.",
    )


def _has_answer(item: Conversation) -> bool:
    return any(message["role"] == "assistant" for message in item.messages)


def _render_again(item: Conversation, subject: Subject) -> tuple[list[int], list[bool]]:
    """Render tokens and mask again, copying the target's own answers: their text may tokenize differently."""
    tokenizer, ends = with_tools(subject.target.tokenizer, item.tools), subject.target.end_tokens
    if _origin(item) == "given":
        tokens, mask = encode(item.messages, tokenizer)
        return tokens[: len(item.tokens)], mask[: len(item.tokens)]
    tokens, mask = list[int](), list[bool]()
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


def teacher(subject: Subject) -> Finding:
    """Check that the training answers are on-policy."""
    answered = [item for split in SPLITS for item in subject.conversations[split] if any(item.supervised)]
    # Greedy answers are the most informative ones, sampled ones the least.
    kind = next((kind for kind in ("greedy", "given", "sampled") if kind in map(_origin, answered)), None)
    if kind is None:
        raise Absent("there are no conversations")
    items = [item for item in answered if _origin(item) == kind]
    compared = [_on_policy(subject, items[index]) for index in spread(len(items), 4 if subject.quick else 16)]
    tokens, chosen, excess = (sum(column) for column in zip(*compared, strict=True))
    if not tokens:
        return unknown("No answer is longer than a token.")
    agreement, excess = chosen / tokens, excess / tokens
    least = _MIN_AGREEMENT_INT8 if kind == "greedy" and subject.in_int8 else _MIN_AGREEMENT
    figures = {"answers": kind, "tokens": tokens, "agreement": round(agreement, 4), "excess_nats": round(excess, 4)}
    choice = f"the target itself would choose {agreement:.0%} of their tokens ({tokens} checked)"
    if excess > _MAX_EXCESS if kind == "sampled" else agreement < least:
        reason = {
            "greedy": f"they are marked as greedy, but {choice}",
            "given": f"they came with the prompts, and {choice}",
            "sampled": f"they are marked as sampled from the target, but surprise it by {excess:.2f} nats per token "
            f"more than its own samples ({tokens} tokens checked)",
        }[kind]
        remedy = "Set data.regenerate=true: the target then answers the same prompts itself. Then train again."
        return bad(f"The answers are off-policy: {reason}.", remedy, **figures)
    return good(f"The answers are {kind}, and {choice}.", **figures)


def _origin(item: Conversation) -> str:
    """Return how the answers were generated: greedy, sampled, or given with the prompts."""
    if "temperature" not in item.sampling:
        return "given"
    return "sampled" if item.sampling["temperature"] else "greedy"


@torch.no_grad()
def _on_policy(subject: Subject, item: Conversation) -> tuple[int, int, float]:
    """Return supervised tokens, those at the argmax, and excess nats: negative log-probability less entropy, summed."""
    final_TE = subject.target.hidden_states([item.tokens], [FINAL])[0][FINAL]
    # Skip the first token of an answer: with a shifted mask it is the template's.
    later = [index for start, stop in item.supervised_spans for index in range(start + 1, stop)][:_ANSWER_TOKENS]
    log_SV = subject.target.lm_head(final_TE[[index - 1 for index in later]]).float().log_softmax(-1)
    tokens_S = torch.tensor([item.tokens[index] for index in later], dtype=torch.long, device=log_SV.device)
    excess = (log_SV.exp() * log_SV).sum() - log_SV.gather(1, tokens_S[:, None]).sum()
    return len(later), int((log_SV.argmax(-1) == tokens_S).sum()), float(excess)


class _StoredMask(NamedTuple):
    """A conversation's tokens and mask as stored in one file, and the expected mask (None if unknown)."""

    file: str
    id: str
    tokens: list[int]
    mask: list[bool]
    expected: list[bool] | None


def mask(subject: Subject) -> Finding:
    """Check that exactly the assistant's tokens are supervised, in the conversations and in the stores."""
    items = list(_masks(subject))
    if not items:
        raise Absent("there are no conversations")
    share = sum(sum(item.mask) for item in items) / max(1, sum(len(item.mask) for item in items))
    figures: dict[str, Any] = {"conversations": len(items), "supervised_share": round(share, 4)}
    wrong = [item for item in items if not any(item.mask)]
    sentence, shift = "Nothing is supervised: the heads learn nothing from such texts.", 0
    if not wrong and (wrong := [item for item in items if item.expected not in (None, item.mask)]):
        sentence, shift = _difference(wrong[0], subject.target.end_tokens)
    if wrong:
        return bad(
            f"{sentence} Seen in {wrong[0].id!r} of {wrong[0].file}; {len(wrong)} of {len(items)} masks are wrong.",
            "Build the data again: headstart data build RECIPE, in another --run-dir or with data/ removed.",
            shift=shift,
            **figures,
        )
    if all(item.expected is None for item in items):
        return unknown(
            f"Not checked: the template now gives other tokens (see template). {share:.0%} of tokens are supervised.",
            **figures,
        )
    return good(f"Exactly the assistant's tokens are supervised: {share:.0%} of all.", **figures)


def _masks(subject: Subject) -> Iterator[_StoredMask]:
    """Yield the masks of the same conversations from the conversation files and from the stores."""
    try:
        stores = subject.stores
    except (Absent, UserError):  # none yet, or `states` reports it
        stores = {}
    for split, index, item in subject.sample():
        expected: list[bool] | None = None
        if _has_answer(item):
            tokens, mask_now = _render_again(item, subject)
            if list(item.tokens[: len(tokens)]) == tokens and any(mask_now):
                expected = mask_now + [False] * (len(item.tokens) - len(tokens))
        file = f"{split}.jsonl"
        yield _StoredMask(file, item.id, list(item.tokens), list(map(bool, item.supervised)), expected)
        if split in stores and (number := stores[split].number_of(index)) is not None:
            folder, sample = stores[split].folder, stores[split].get(number)
            tokens = sample.tokens_T.tolist()
            if tokens != list(item.tokens):
                raise UserError(
                    f"The store {folder} was built from other conversations than {file}: number {index} differs from "
                    f"token {common_prefix_length([tokens, item.tokens])} on.",
                    "Remove the shards in its manifest and build the states again (headstart data build).",
                )
            yield _StoredMask(str(folder), item.id, tokens, sample.supervised_T.tolist(), expected)


def _difference(item: _StoredMask, ends: frozenset[int]) -> tuple[str, int]:
    """Describe how a mask is wrong, and by how many tokens it is late (negative: early; 0: wrong in another way)."""
    expected = item.expected or []
    late = item.mask.index(True) - expected.index(True)
    padding, size = [False] * abs(late), "one token" if abs(late) == 1 else f"{abs(late)} tokens"
    if late > 0 and item.mask == padding + expected[:-late]:
        return f"The mask is {size} late: the beginning of each answer is not learned.", late
    if late < 0 and item.mask == expected[-late:] + padding:
        return f"The mask is {size} early: the heads learn the template's text before each answer.", late
    index = common_prefix_length([[int(flag) for flag in flags] for flags in (item.mask, expected)])
    if not item.mask[index]:
        if not any(expected[index + 1 : index + 2]):
            return "The mask ends early: the end of each turn is not learned.", 0
        return f"Token {index} is the assistant's and not supervised.", 0
    if item.tokens[index - 1] in ends:
        return "Tokens after the end of the turn are supervised: padding, or the template's own text.", 0
    return f"Token {index} is supervised and not the assistant's.", 0


def states(subject: Subject) -> Finding:
    """Check that stored states are finite (all of them, unless quick) and are the target's at their aux layers."""
    target = subject.target
    problems: dict[int, str] = {}
    distances: list[float] = []
    for store in subject.stores.values():
        if store.target_fingerprint not in (None, target.identity().fingerprint):
            return bad(
                f"The states in {store.folder} are from another model than {target.name}, or from other weights.",
                "Use the target that wrote the data, or build the data again in another --run-dir.",
            )
        for index in spread(len(store), 8 if subject.quick else len(store)):
            for aux_layer, state_TE in store.get(index).states.items():
                if not state_TE.isfinite().all():
                    where = f"{layer_name(aux_layer)}, conversation {index} of {store.folder}"
                    problems.setdefault(aux_layer, f"Stored states are not finite ({where})")
        for index in spread(len(store), 1 if subject.quick else 3):
            sample, rounded = store.get(index), store.states_dtype != AUTO or subject.in_int8
            fresh = target.hidden_states([sample.tokens_T[:_PREFILL_TOKENS].tolist()], every_layer(target))[0]
            for aux_layer in store.aux_layers:
                distance, problem = identify(
                    aux_layer, sample.states[aux_layer][:_PREFILL_TOKENS], fresh, target, rounded
                )
                distances.append(distance)
                if problem:
                    problems.setdefault(aux_layer, f"The store's {problem} (conversation {index} of {store.folder})")
    figures: dict[str, Any] = {"distance": max(distances, default=0.0), "wrong": problems}
    if problems:
        return bad(
            f"{'; '.join(problems.values())}.",
            "Remove the shards in its manifest and build the states again (headstart data build), with "
            "target.dtype=float32 if they stay infinite; then train again.",
            **figures,
        )
    notices = [store.notice for store in subject.stores.values() if store.left_out]
    return good(" ".join(["The stored states are the target's own at their layers.", *notices]), **figures)
