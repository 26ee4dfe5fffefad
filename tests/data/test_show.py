"""Showing a conversation marks its supervised text, with and without colours."""

from __future__ import annotations

import io

from rich.console import Console

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation, show_conversation
from tests.tiny import tiny_tokenizer


def shown(colours: bool, sampling: dict[str, object], is_answered: bool = True) -> str:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "[red]Hi[/red]"}, {"role": "assistant", "content": "Hello."}]
    tokens, supervised = encode(messages, tokenizer)
    mask = [is_answered and flag for flag in supervised]
    conversation = Conversation("self-3", tokens, mask, messages, "chat", sampling)
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=colours, color_system="standard" if colours else None)
    show_conversation(conversation, tokenizer, console)
    return out.getvalue()


def test_readable_without_colour() -> None:
    text = shown(False, {"source": "given"})
    assert "<|im_start|>user\n[red]Hi[/red]<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n" in text
    assert "self-3  chat" in text
    assert "27 tokens, 7 supervised (26%), in ⟦this style⟧; answers as given" in text
    assert "\x1b" not in text


def test_coloured() -> None:
    text = shown(True, {"temperature": 0.7})
    assert "\x1b[1;4;32m⟦Hello.<|im_end|>⟧" in text
    assert "answers generated with" in text
    assert "temperature=0.7" in text


def test_prompts_and_logged_answers_without_settings() -> None:
    assert "27 tokens, 0 supervised (0%), in ⟦this style⟧; no answers\n" in shown(False, {}, is_answered=False)
    assert "27 tokens, 7 supervised (26%), in ⟦this style⟧; answers generated\n" in shown(False, {})
