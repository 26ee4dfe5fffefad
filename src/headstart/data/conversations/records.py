"""Tokenised conversations with loss mask and messages, and their JSONL format."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headstart.data.prompts.chat import Message
from headstart.errors import UserError
from headstart.support.files import read_jsonl, write_jsonl


def tokens_key(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:24]


def spans_of(supervised: Sequence[bool]) -> list[tuple[int, int]]:
    """Return [start, stop) of every run of supervised tokens."""
    return [run.span() for run in re.finditer(b"\x01+", bytes(supervised))]


@dataclass(frozen=True)
class Conversation:
    """A conversation ready for training; tokens and mask take five bytes a token.

    Attributes:
        id: unique within its file.
        tokens: token ids, kept as an int32 array.
        supervised: loss mask as bytes: the assistant's tokens up to and including the end of its turn.
        tools: tool definitions in the prompt.
        sampling: sampling settings of the answers (temperature, seed, ...); {"source": "given"} for given answers.
            Empty for held-out prompts, and for answers from a log of served requests without settings.
    """

    id: str
    tokens: Sequence[int]
    supervised: Sequence[bool]
    messages: list[Message]
    category: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.supervised), "one mask entry per token"
        object.__setattr__(self, "tokens", array("i", self.tokens))
        object.__setattr__(self, "supervised", bytes(self.supervised))

    @property
    def supervised_spans(self) -> list[tuple[int, int]]:
        """[start, stop) of every run of supervised tokens.

        >>> Conversation("a", [5, 6, 7, 8], [False, True, True, False], []).supervised_spans
        [(1, 3)]
        """
        return spans_of(self.supervised)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the mask as runs."""
        return {
            "id": self.id,
            "category": self.category,
            "messages": self.messages,
            **({"tools": self.tools} if self.tools else {}),
            "sampling": self.sampling,
            "tokens": list(self.tokens),
            "supervised": [list(span) for span in self.supervised_spans],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Conversation:
        """Invert `to_json`; raises KeyError, TypeError, ValueError, AttributeError or OverflowError on other input."""
        tokens = array("i", row["tokens"])
        supervised = [False] * len(tokens)
        for start, stop in row["supervised"]:
            if not 0 <= start < stop <= len(tokens):
                raise ValueError(f"supervised run [{start}, {stop}) of {len(tokens)} tokens")
            supervised[start:stop] = [True] * (stop - start)
        messages: list[Message] = [
            {name: value if name == "tool_calls" else str(value) for name, value in message.items()}
            for message in row["messages"]
        ]
        category, sampling, tools = str(row.get("category", "")), dict(row.get("sampling", {})), row.get("tools", [])
        return cls(str(row["id"]), tokens, supervised, messages, category, sampling=sampling, tools=list(tools))


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file of conversations; raise a UserError for a missing file or a malformed line."""
    return list(each_conversation(path))


def each_conversation(path: Path) -> Iterator[Conversation]:
    for number, row in read_jsonl(path):
        try:
            yield Conversation.from_json(row)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"{path}, line {number}: not a tokenised conversation ({reason}).",
                "If headstart wrote it, delete it and run the command again; pass a file of your own as data.prompts.",
            ) from None


def write_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    write_jsonl(path, (conversation.to_json() for conversation in conversations))


# -- as training sees them ---------------------------------------------------------------------------------------------


_SUPERVISED = "bold green underline"
_OPEN, _CLOSE = "⟦", "⟧"


def show_conversation(conversation: Conversation, tokenizer: Any, console: Console) -> None:
    """Print a conversation with special tokens and the origin of its answers; supervised text is coloured and in
    ⟦brackets⟧."""
    title = Text(conversation.id, style="bold")
    if conversation.category:
        title.append(f"  {conversation.category}", style="cyan")
    console.rule(title, align="left")
    text = Text()
    pairs = zip(conversation.tokens, conversation.supervised, strict=True)
    for flag, run in groupby(pairs, key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        text.append(f"{_OPEN}{piece}{_CLOSE}" if flag else piece, style=_SUPERVISED if flag else "dim")
    console.print(text, soft_wrap=True)
    supervised, total = sum(conversation.supervised), len(conversation.tokens)
    legend = Text(f"{total} tokens, {supervised} supervised ({supervised / max(1, total):.0%}), in ")
    legend.append(f"{_OPEN}this style{_CLOSE}", style=_SUPERVISED)
    sampling = ", ".join(f"{key}={value}" for key, value in conversation.sampling.items())
    answers = "as given" if sampling == "source=given" else f"generated with {sampling}" if sampling else "generated"
    legend.append(f"; answers {answers}" if supervised else "; no answers")
    console.print(legend, style="dim")
