"""A conversation as training sees it."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from headstart.data.conversations.records import Conversation

_SUPERVISED = "bold green underline"
_OPEN, _CLOSE = "⟦", "⟧"


def show_conversation(conversation: Conversation, tokenizer: Any, console: Console) -> None:
    """Print a conversation with its special tokens; what the heads learn from is coloured and stands in ⟦brackets⟧."""
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
    drawn = ", ".join(f"{key}={value}" for key, value in conversation.sampling.items())
    legend.append(f"; answers drawn with {drawn}" if drawn else "; answers as given")
    console.print(legend, style="dim")
