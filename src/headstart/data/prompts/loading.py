"""Loading prompts: filtering the records of files and datasets, and interleaving several sources."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from headstart.data.prompts.chat import (
    NOT_UTF8,
    Unfit,
    Unusable,
    check_offsets,
    has_template,
    prompt_tokens,
    with_tools,
)
from headstart.data.prompts.overlap import Excluded, prompt_key
from headstart.data.prompts.shapes import SHAPES, Prompt, parse_prompt
from headstart.data.prompts.sources import READY_MADE, Origin, find_origin, read_records
from headstart.errors import UserError
from headstart.recipes.sections import DataSection, PromptSource

MISSHAPEN = "of a shape that is not understood"
PLAIN = "of plain text, which only targets without a chat template continue"
REFUSED = "that a server refused"
CHAT = "of conversations, which a target without a chat template cannot answer"
REPEATED = "repeated"
OTHER_SPLIT = "that begin like a prompt of another split"
_REMEDIES = {
    "a context of": "shorten them, lower data.max_new_tokens, or use a longer context",
    "ends of answers|after an answer": "raise data.max_new_tokens",
    r"over \d+ tokens": "raise data.max_prompt_tokens",
    f"^{REPEATED}": "let them differ in system message, tools or turns",
    OTHER_SPLIT: "lower data.heldout or data.validation",
    "a message of the role": "name speakers system, user, assistant or tool, or set data.regenerate=true",
    "rewrites (earlier|each)|an answer to learn from|does not render|earlier answers": "set data.regenerate=true",
    "template refuses": "start with the user, after at most one system message, and alternate",
    NOT_UTF8: "replace lone surrogates (half of an emoji)",
    PLAIN: "give requests or conversations, or use a target without a chat template (a base model)",
    CHAT: 'give rows of plain text ({"text": ..}), or use an instruction-tuned target',
}
"""Remedies by regular expression of a reason; the first match wins."""

_CHARACTERS_PER_TOKEN = 64
"""Upper bound, so that only the start of a long text is tokenised."""
_TRIES = 1000
"""A source is abandoned if its first rows, up to this number, all have an unusable shape."""

T = TypeVar("T")


class LeftOut:
    """Counts of unusable records by reason, with the first of each in `examples`.

    A reason continues the count, as "over 512 tokens" does in "3 over 512 tokens".
    """

    def __init__(self, counts: Mapping[str, int] | None = None, examples: Mapping[str, str] | None = None) -> None:
        self.counts = Counter(counts or {})
        self.examples = dict(examples or {})

    def add(self, reason: str, example: str = "", count: int = 1) -> None:
        reason, example = (text.encode(errors="backslashreplace").decode() for text in (reason, example))
        self.counts[reason] += count
        self.examples.setdefault(reason, example)

    def add_all(self, other: LeftOut) -> None:
        for reason, count in other.counts.items():
            self.add(reason, other.examples[reason], count)

    @property
    def notice(self) -> str:
        """Counts by reason, most frequent first, and remedies; empty if nothing was left out."""
        phrases = []
        for reason, count in self.counts.most_common():
            first = f" (the first: {self.examples[reason]})" if reason == MISSHAPEN or reason.endswith(REFUSED) else ""
            phrases.append(f"{count} {reason}{first}")
        remedies = f" To keep them: {self.remedies}." if self.remedies else ""
        return f"Left out: {', '.join(phrases)}.{remedies}" if phrases else ""

    @property
    def remedies(self) -> str:
        """Known remedies, by frequency of their reasons."""
        reasons = [reason for reason, _ in self.counts.most_common()]
        found = [next((do for why, do in _REMEDIES.items() if re.search(why, reason)), "") for reason in reasons]
        return "; ".join(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class Prompts:
    """Prompts in their order of use, unusable records, and exhausted sources with the index after their last prompt."""

    prompts: list[Prompt]
    left_out: LeftOut
    used_up: dict[str, int]


def load_prompts(
    data: DataSection, tokenizer: Any = None, *, limit: int | None = None, seed: int | None = None, stream: bool = False
) -> Prompts:
    """Load a recipe's prompts; unusable, repeated and too long ones are left out and counted.

    With a seed, the order of a source depends on its content and the seed alone, so a larger `limit` extends the same
    sequence; without one, it is the file's. Several sources are interleaved by weight. Length is checked only with a
    tokenizer. With a chat template plain-text rows are left out, without one all others. `stream` reads Hub
    datasets without downloading them first. A UserError names a source that is unreadable or has no prompt.
    """
    sources, left_out = data.sources, LeftOut()
    reader, names = _Reader(data, tokenizer, seed, stream), [_name(source) for source in sources]
    origins = [find_origin(source.source, source.revision) for source in sources]
    of_sources = [LeftOut() for _ in sources]
    given = list(map(reader.prompts, sources, origins, of_sources))
    prompts, last = list[Prompt](), [0] * len(sources)
    for number, prompt in interleave(given, [source.weight for source in sources]):
        if len(sources) > 1:  # files of the same name give the same ids; prompts default to their source's category
            category = prompt.category or sources[number].source
            prompt = replace(prompt, id=f"{number + 1}-{prompt.id}", category=category)
        prompts.append(prompt)
        last[number] = len(prompts)
        if len(prompts) == limit:
            break
    for of_source in of_sources:
        left_out.add_all(of_source)
    used_up = {name: end for name, end in zip(names, last, strict=True) if name in reader.used_up}
    return Prompts(prompts, left_out, used_up)


def interleave(sources: Sequence[Iterator[T]], weights: Sequence[float]) -> Iterator[tuple[int, T]]:
    """Interleave sources in proportion to their weights (above 0); yield (source number, item).

    Every prefix is proportional to within one item for two sources, and a few for more. Exhausted sources are skipped.

    >>> "".join(item for _, item in interleave([iter("aaaaaa"), iter("BB")], [3, 1]))
    'aaBaaaBa'
    """
    due = [0.0] * len(sources)
    remaining = list(range(len(sources)))
    while remaining:
        for number in remaining:
            due[number] += weights[number]
        chosen = max(remaining, key=lambda number: (due[number], -number))
        try:
            item = next(sources[chosen])
        except StopIteration:
            remaining.remove(chosen)
            continue
        due[chosen] -= sum(weights[number] for number in remaining)
        yield chosen, item


class _Reader:
    """Converter of records to prompts, shared by all sources so that no prompt repeats."""

    def __init__(self, data: DataSection, tokenizer: Any, seed: int | None, stream: bool) -> None:
        self._tokenizer, self._max_tokens, self._seed, self._stream = tokenizer, data.max_prompt_tokens, seed, stream
        self._prefix_tokens = min(data.prefix_tokens, data.max_prompt_tokens)
        self._excluded = Excluded(data.exclude)
        self._plain = tokenizer is not None and not has_template(tokenizer)
        self._keeps_answers = not data.regenerate
        self._seen: set[str] = set()
        self.used_up: set[str] = set()

    def prompts(self, source: PromptSource, origin: Origin, left_out: LeftOut) -> Iterator[Prompt]:
        """Yield the usable prompts of a source, in order; a UserError if there are none."""
        read = usable = misshapen = 0
        for location, name, row in read_records(origin, source.split or "train", self._seed, stream=self._stream):
            read += 1
            try:
                prompt = self._prompt(row, name)
            except UserError:  # of the tokenizer, not of this record
                raise
            except ValueError as error:
                misshapen += 1
                left_out.add(MISSHAPEN, f"{location}: {error}")
            except Unusable as reason:
                misshapen += str(reason) in (PLAIN, CHAT)
                left_out.add(str(reason), location)
            else:
                usable += 1
                yield prompt
            if misshapen == read == _TRIES:
                break
        if not usable:
            raise _none_left(_name(source), read, left_out)
        self.used_up.add(_name(source))

    def _prompt(self, row: Mapping[str, Any], name: str) -> Prompt:
        """Convert a record; raises as `parse_prompt`, and `Unusable` if repeated, too long or excluded."""
        prompt = parse_prompt(row, name, keeps_answers=self._keeps_answers)
        if prompt.plain is not self._plain:
            raise Unusable(PLAIN if prompt.plain else CHAT)
        system = [message["content"] for message in prompt.messages if message["role"] == "system"]
        if reason := self._excluded.reason([*prompt.turns, *system]):
            raise Unusable(reason)
        if prompt.plain:
            text = beginning(prompt.turns[0], self._tokenizer, self._prefix_tokens)
            prompt = replace(prompt, messages=[{"role": "user", "content": text}])
        # AnswerGenerator that will be regenerated are not part of the prompt.
        key = prompt_key(prompt.messages if self._keeps_answers else prompt.without_answers, prompt.tools)
        if key in self._seen:
            raise Unusable(REPEATED)
        if self._tokenizer is not None:
            try:
                length = len(prompt_tokens(prompt.opening, with_tools(self._tokenizer, prompt.tools)))
            except Unfit as refusal:
                raise Unusable(refusal.reason) from None
            if length > self._max_tokens:
                raise Unusable(f"over {self._max_tokens} tokens")
        self._seen.add(key)
        return prompt


def _name(source: PromptSource) -> str:
    is_file = source.source == READY_MADE or Path(source.source).suffix in (".jsonl", ".json")
    return source.source if is_file else f"{source.source!r}, split {source.split or 'train'!r}"


def _none_left(where: str, read: int, left_out: LeftOut) -> UserError:
    if not read:
        return UserError(f"No usable prompt in {where}: there is none.", "Give a file with prompts in it.")
    counts = left_out.counts
    reasons = [f"{count} {reason} (the first: {left_out.examples[reason]})" for reason, count in counts.items()]
    problem = f"No usable prompt in {where}: {read} read, {', '.join(reasons)}."
    if CHAT in counts:
        problem = f"{problem} The target's tokenizer has no chat template."
    remedy = f"To use them: {left_out.remedies}." if left_out.remedies else ""
    if MISSHAPEN in counts or PLAIN in counts or not remedy:
        remedy = f"{remedy} Accepted records: {'; '.join(SHAPES)}.".strip()
    return UserError(problem, remedy)


def beginning(text: str, tokenizer: Any, tokens: int) -> str:
    """Truncate a text to its first `tokens` tokens."""
    check_offsets(tokenizer)
    read = text[: _CHARACTERS_PER_TOKEN * tokens]
    offsets = tokenizer(read, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: max(stop for _, stop in offsets[:tokens])] if offsets else text
