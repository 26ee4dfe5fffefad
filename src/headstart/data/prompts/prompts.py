"""Prompts from files and datasets, whatever shape their records have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.data.conversations.conversations import (
    Message,
    Unfit,
    check_offsets,
    check_template,
    has_template,
    prompt_tokens,
)
from headstart.data.prompts.mixture import in_turns
from headstart.data.prompts.overlap import Excluded, normalise
from headstart.data.prompts.sources import Origin, find_origin, read_records
from headstart.errors import UserError
from headstart.recipes.sections import DataSection, PromptSource

SHAPES = (
    '{"turns": [text, ...]}',
    '{"messages": [{"role", "content"}, ...]}',
    '{"conversations": [{"from", "value"}, ...]} (ShareGPT)',
    '{"instruction", "input", "output"} (Alpaca)',
    '{"prompt": text}',
    '{"text": text} (plain text, for targets without a chat template)',
)
"""Shapes of records that are understood; the first whose column is there and not null counts."""

MISSHAPEN = "of a shape that is not understood"
PLAIN = "of plain text, which only targets without a chat template go on with"
CHAT = "of conversations, which a target without a chat template cannot answer"

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""By role or speaker, in small letters."""

_CHARACTERS_PER_TOKEN = 64
"""More than tokens have: so much of a long text is read to cut its beginning off."""

_TRIES = 1000
"""Rows of a dataset after which one that nothing can be made of is given up."""


@dataclass(frozen=True)
class Prompt:
    """What a user asks.

    Attributes:
        messages: the turns as given, from the system message or the first user message on. Where no answers were
            given, two user messages follow one another.
        category: kind of request, for reports; may be empty.
        id: the record's own, or its file and line.
        plain: the one message is a text to go on with, not a request.
        calls_tools: an answer that was given calls tools, which the messages do not show.
    """

    messages: list[Message]
    category: str = ""
    id: str = ""
    plain: bool = False
    calls_tools: bool = False

    @property
    def opening(self) -> list[Message]:
        """The messages before the first answer: system message and first user message."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: first + 1]

    @property
    def turns(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


class LeftOut:
    """Records that cannot be used, counted by reason; one object may be shared by threads."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}
        self._lock = Lock()

    def add(self, reason: str, example: str = "") -> None:
        """Count one.

        Args:
            reason: what is said of it, such as "repeated"; see `notice`.
            example: the record and what is wrong with it; the first of each reason is kept.
        """
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1
            self.examples.setdefault(reason, example)

    def add_all(self, other: LeftOut) -> None:
        """Count what another has counted as well."""
        self.add_counts(other.counts, other.examples)

    def add_counts(self, counts: Mapping[str, int], examples: Mapping[str, str]) -> None:
        """Count what was counted elsewhere."""
        for reason, count in counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.examples.setdefault(reason, examples[reason])

    @property
    def notice(self) -> str:
        """One sentence, the most frequent reason first; empty when nothing was left out.

        Of records of a shape that is not understood, which somebody may want to correct, the first is named.

        >>> left_out = LeftOut()
        >>> for reason in ("repeated", "over 384 tokens", "repeated"):
        ...     left_out.add(reason)
        >>> left_out.notice
        'Left out: 2 repeated, 1 over 384 tokens.'
        """
        if not self.counts:
            return ""
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        said = [f"{count} {reason}" for reason, count in ordered]
        if MISSHAPEN in self.counts:
            place = [reason for reason, _ in ordered].index(MISSHAPEN)
            said[place] += f" (the first: {self.examples[MISSHAPEN]})"
        return f"Left out: {', '.join(said)}."


@dataclass(frozen=True)
class Prompts:
    """What `load_prompts` found.

    Attributes:
        prompts: in the order in which they were drawn.
        left_out: the other records that were read on the way.
        origins: the content that they were drawn from, source by source.
        used_up: sources among several that had no more; the others gave their share.
    """

    prompts: list[Prompt]
    left_out: LeftOut
    origins: list[Origin]
    used_up: list[str]

    @property
    def origin(self) -> Origin:
        """The content of the only source."""
        (origin,) = self.origins
        return origin


_COLUMNS = ("messages", "conversations", "turns", "instruction", "prompt", "conversation", "text")
"""The columns that tell a shape, in the order in which they are looked for."""
_WITH_SYSTEM = ("conversations", "conversation", "instruction")
"""Those of formats in which a system message may stand in a column of its own, `system`."""


class Unusable(Exception):
    """A well-formed record that makes no prompt; the reason is worded for `LeftOut`."""


def load_prompts(
    source: str | Sequence[PromptSource],
    split: str,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    revision: str | None = None,
    whole: bool = True,
    prefix_tokens: int = 64,
    exclude: Sequence[str] = (),
) -> Prompts:
    """Read prompts; those that cannot be used, are repeated or too long are left out and counted.

    With a seed they are drawn from the whole source, in an order that depends on its content and the seed alone: a
    larger `limit` gives the same prompts and then more. Several sources are each drawn from in such an order, in turns
    by their weights.

    Args:
        source: a .jsonl file, a .json file with a list, or a name (or folder) that `datasets.load_dataset` knows;
            "name:config" chooses a configuration. Or several of them with their weights.
        split: split of a dataset.
        tokenizer: needed with `max_tokens`. Without a chat template only rows of plain text are taken, with one all
            others.
        max_tokens: leave out prompts whose first turn is longer, rendered by the chat template.
        limit: stop after so many prompts.
        seed: of the order; None takes the records as they stand.
        revision: branch, tag or commit of a dataset on the hub.
        whole: a dataset of the hub may be downloaded as a whole; when false only what is read is.
        prefix_tokens: tokens of a plain text that are the prompt; at most `max_tokens`.
        exclude: question files; prompts that give one of their questions away are left out.

    Raises:
        UserError: missing file, malformed line (file and line are named), unknown dataset, split or revision, or no
            prompt left in one of the sources.
    """
    if max_tokens is not None and tokenizer is None:
        check_template(tokenizer)
    alone = isinstance(source, str)
    sources = (PromptSource(source=source, split=split, revision=revision),) if isinstance(source, str) else source
    rule = _Rule(tokenizer, max_tokens, prefix_tokens, Excluded(exclude))
    readings = [_Reading(one, one.split or split, seed, whole, rule) for one in sources]
    prompts: list[Prompt] = []
    for number, prompt in in_turns([iter(one) for one in readings], [one.weight for one in sources]):
        # Files of the same name give the same ids.
        prompts.append(prompt if alone else replace(prompt, id=f"{number + 1}-{prompt.id}"))
        if len(prompts) == limit:
            break
    left_out = LeftOut()
    for reading in readings:
        left_out.add_all(reading.left_out)
    used_up = [] if alone else [reading.where for reading in readings if reading.used_up]
    return Prompts(prompts, left_out, [reading.origin for reading in readings], used_up)


def prompts_for(
    data: DataSection, tokenizer: Any, limit: int, *, seed: int | None = None, whole: bool = True
) -> Prompts:
    """The prompts that a recipe names, when the target does not write its own.

    Args:
        data: of the recipe.
        tokenizer: of the target.
        limit: see `load_prompts`, as for the others.
        seed: of the order.
        whole: whether a dataset may be downloaded as a whole.

    Raises:
        UserError: as `load_prompts`.
    """
    return load_prompts(
        data.prompts if isinstance(data.prompts, str) else data.sources,
        data.split,
        tokenizer,
        max_tokens=data.max_prompt_tokens,
        limit=limit,
        seed=seed,
        revision=data.revision,
        whole=whole,
        prefix_tokens=data.prefix_tokens,
        exclude=data.exclude,
    )


class _Rule:
    """Which records make a prompt; those of all sources, so that none is repeated.

    Args:
        tokenizer: of the target; None leaves texts as they are.
        max_tokens: of a prompt at most.
        prefix_tokens: of a plain text that are the prompt.
        excluded: questions that no prompt may give away.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None, prefix_tokens: int, excluded: Excluded) -> None:
        self._tokenizer, self._max_tokens, self._excluded = tokenizer, max_tokens, excluded
        self._prefix_tokens = min(prefix_tokens, max_tokens or prefix_tokens)
        self._plain = tokenizer is not None and not has_template(tokenizer)
        self._seen: set[str] = set()

    def prompt(self, row: Mapping[str, Any], name: str) -> Prompt:
        """The prompt that a record makes.

        Raises:
            ValueError: as `parse_prompt`.
            Unusable: it makes none, is repeated, too long or excluded.
        """
        prompt = parse_prompt(row, name)
        if prompt.plain is not self._plain:
            raise Unusable(PLAIN if prompt.plain else CHAT)
        if reason := self._excluded.reason(prompt.turns):
            raise Unusable(reason)
        if prompt.plain:
            text = beginning(prompt.turns[0], self._tokenizer, self._prefix_tokens)
            prompt = replace(prompt, messages=[{"role": "user", "content": text}])
        key = _key(prompt)
        if key in self._seen:
            raise Unusable("repeated")
        if self._max_tokens is not None:
            _check_length(prompt, self._tokenizer, self._max_tokens)
        self._seen.add(key)
        return prompt


class _Reading:
    """The usable prompts of a source, in their order.

    Attributes:
        origin: what the source holds.
        left_out: its records that make no prompt.
        where: the source, for people.
        used_up: whether there are no more.
    """

    def __init__(self, source: PromptSource, split: str, seed: int | None, whole: bool, rule: _Rule) -> None:
        self.origin = find_origin(source.source, source.revision)
        self.left_out = LeftOut()
        self.where = source.source if _is_file(source.source) else f"{source.source!r}, split {split!r}"
        self.used_up = False
        self._split, self._seed, self._whole, self._rule = split, seed, whole, rule

    def __iter__(self) -> Iterator[Prompt]:
        read = found = hopeless = 0
        for record in read_records(self.origin, self._split, self._seed, whole=self._whole):
            read += 1
            try:
                prompt = self._rule.prompt(record.row, record.id)
            except UserError:  # of the tokenizer, not of this record
                raise
            except ValueError as error:
                hopeless += 1
                self.left_out.add(MISSHAPEN, f"{record.location}: {error}")
            except Unusable as reason:
                hopeless += str(reason) in (PLAIN, CHAT)
                self.left_out.add(str(reason), record.location)
            else:
                found += 1
                yield prompt
            if hopeless == read == _TRIES:
                break
        if not found:
            raise _none_left(self.where, read, self.left_out)
        self.used_up = True


def beginning(text: str, tokenizer: Any, tokens: int) -> str:
    """The text of the first `tokens` tokens; all of a shorter text.

    Raises:
        UserError: a tokenizer that does not tell where its tokens lie in a text.
    """
    check_offsets(tokenizer)
    offsets = tokenizer(text[: _CHARACTERS_PER_TOKEN * tokens], add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    return text[: max(stop for _, stop in offsets[:tokens])] if offsets else text


def _check_length(prompt: Prompt, tokenizer: Any, max_tokens: int) -> None:
    try:
        tokens = prompt_tokens(prompt.opening, tokenizer)
    except Unfit as refusal:
        raise Unusable(refusal.reason) from None
    if len(tokens) > max_tokens:
        raise Unusable(f"over {max_tokens} tokens")


def _none_left(where: str, read: int, left_out: LeftOut) -> UserError:
    if not read:
        return UserError(f"No usable prompt in {where}: there is none.", "Give a file with prompts in it.")
    said = [f"{count} {reason} (the first: {left_out.examples[reason]})" for reason, count in left_out.counts.items()]
    problem = f"No usable prompt in {where}: {read} read, {', '.join(said)}."
    if CHAT in left_out.counts:
        return UserError(
            f"{problem} The target's tokenizer has no chat template.",
            'Give rows of plain text ({"text": ..}), choose an instruction-tuned target, or set '
            "tokenizer.chat_template and save it with the model.",
        )
    if PLAIN in left_out.counts:
        return UserError(
            problem,
            "Give requests or conversations, or a target without a chat template (a base model). " + _accepted(),
        )
    if MISSHAPEN in left_out.counts:
        return UserError(problem, _accepted())
    return UserError(problem, "Raise data.max_prompt_tokens, or give other prompts.")


def _is_file(source: str) -> bool:
    return Path(source).suffix in (".jsonl", ".json")


def deduplicate(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Keep the first of those that ask the same; see `normalise`."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(_key(prompt), prompt)
    return list(first.values())


def parse_prompt(row: Mapping[str, Any], name: str) -> Prompt:
    """A prompt from one record of any of `SHAPES`.

    Messages of the assistant without a text (calls of tools, say) are answers that were not given. The parts of a
    content that is a list are put together when all of them are text.

    Args:
        row: the record.
        name: its id, when it has none of its own.

    Raises:
        ValueError: a shape that is not understood; the message says what is wrong.
        Unusable: the shape is right, but this record makes no prompt.
    """
    messages: list[Message]
    there = [name for name in _COLUMNS if name in row]
    column = next((name for name in there if row[name] is not None), next(iter(there), None))
    if column in ("messages", "conversations", "conversation"):
        messages = _turns(row[column], column)
    elif column == "turns":
        if not isinstance(row["turns"], list):
            raise ValueError(f"'turns' is a {type(row['turns']).__name__}, not a list of texts")
        messages = [{"role": "user", "content": _text(turn)} for turn in row["turns"]]
    elif column == "instruction":
        parts = [_text(row.get(key) or "") for key in ("instruction", "input")]
        messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]
        if output := _text(row.get("output") or ""):
            messages.append({"role": "assistant", "content": output})
    elif column == "prompt":
        if isinstance(row["prompt"], list):
            messages = _turns(row["prompt"], "prompt")
        else:
            messages = [{"role": "user", "content": _text(row["prompt"])}]
    elif column == "text":
        messages = [{"role": "user", "content": _text(row["text"])}]
        if not messages[0]["content"].strip():
            raise Unusable("without a text")
    else:
        raise ValueError(f"unknown shape with the keys {', '.join(map(str, row)) or '(none)'}")
    while messages and messages[0]["role"] == "assistant":  # a greeting that nobody asked for
        messages = messages[1:]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not all(text.strip() for text in asked) or not asked:
        raise Unusable("in which the user says nothing")
    if (
        column in _WITH_SYSTEM
        and messages[0]["role"] != "system"
        and (system := _text(row.get("system") or "")).strip()
    ):
        messages = [{"role": "system", "content": system}, *messages]
    known = next((row[key] for key in ("id", "question_id", "prompt_id") if row.get(key) is not None), name)
    return Prompt(
        messages,
        str(row.get("category") or ""),
        str(known),
        plain=column == "text",
        calls_tools=column in ("messages", "prompt") and _calls_tools(row[column]),
    )


def _turns(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{field!r} is a {type(value).__name__}, not a list of messages")
    messages = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping):
            raise ValueError(f"message {number} of {field!r} is a {type(turn).__name__}, not an object")
        # Files with {"from", "value"} in `messages` and the other way round are common.
        keys = (("role", "content"), ("from", "value"))
        (role_key, text_key), (other_role, other_text) = reversed(keys) if field.startswith("conv") else keys
        said = turn.get(role_key, turn.get(other_role))
        text = turn.get(text_key, turn.get(other_text))
        role = _ROLES.get(said.lower()) if isinstance(said, str) else None
        if role is None:
            raise Unusable(f"with a message of the role {said!r}")
        if text is None and role == "assistant":
            continue
        message = {"role": role, "content": _text(text)}
        if role == "assistant" and isinstance(reasoning := turn.get("reasoning_content"), str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        messages.append(message)
    return messages


def _calls_tools(turns: Any) -> bool:
    return isinstance(turns, list) and any(turn.get("tool_calls") or turn.get("function_call") for turn in turns)


def _text(value: Any) -> str:
    """A text, or the texts of a list of parts put together."""
    if isinstance(value, list):
        return "".join(_part(part) for part in value)
    if value is None:
        raise Unusable("with a message without a text")
    if not isinstance(value, str):
        raise Unusable(f"with a {type(value).__name__} in the place of a text")
    return value


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return _text(part)
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        raise Unusable(f"with {part['type']} content")
    return _text(part.get("text"))


def _key(prompt: Prompt) -> str:
    return "\x00".join(normalise(turn) for turn in prompt.turns)


def _accepted() -> str:
    return "Accepted records: " + "; ".join(SHAPES) + "."
