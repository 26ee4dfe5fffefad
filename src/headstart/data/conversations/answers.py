"""The target answers prompts, batch by batch: conversations with the exact tokens that it read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import Message, Unfit, added_tokens, prompt_tokens, render, with_tools
from headstart.data.prompts.loading import REFUSED, LeftOut
from headstart.data.prompts.shapes import Prompt
from headstart.data.writing.in_process import InProcess
from headstart.data.writing.writer import CANDIDATES, Continuation, RowStates, TurnCaches, Writer
from headstart.recipes.sections import DataSection
from headstart.target.model import Target


class KeepsStates(Protocol):
    """Takes hidden states that writing computes anyway (`headstart.data.states.shards.Capture`)."""

    aux_layers: tuple[int, ...]

    def keep(self, written: Sequence[tuple[Conversation, Mapping[int, Tensor]]]) -> None:
        """Take conversations with the states [T, E] of their tokens, by layer."""


class Answers:
    """Lets the target answer prompts: in this process by default.

    `capture` takes the hidden states of what is written; `check` is called now and then, and ends the work by raising.
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        writer: Writer | None = None,
        capture: KeepsStates | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._settings = target, settings
        self._writer = writer or InProcess(target)
        self._capture, self._check = capture, check

    def answered(
        self, prompts: Sequence[Prompt], seed: int, sampled_fraction: float, left_out: LeftOut
    ) -> list[Conversation]:
        """Answer every user turn of each prompt of a batch, shortest prompts first.

        Prompts that come with answers keep them when `regenerate` is off; the others are answered all the same, this
        share of them at temperature 1. What the chat template makes nothing to learn from of is left out and counted.
        """
        settings, target = self._settings, self._target
        given = [] if settings.regenerate else [item for item in prompts if item.messages[-1]["role"] == "assistant"]
        running = [_Running(prompt, target.tokenizer) for prompt in prompts if prompt not in given]
        sampled = round(sampled_fraction * len(running))
        for index, row in enumerate(running):
            row.temperature = 1.0 if index < sampled else settings.temperature
        turn, turns = 0, TurnCaches()
        while any(row.remaining for row in running):
            turn += self._next_turn(running, seed * 31 + turn, turns)
        for row in running:
            if row.cut:
                left_out.add(f"later turns {row.cut}" if any(row.supervised) else row.cut, row.why or row.prompt.id)
        learnt = [row for row in running if any(row.supervised)]
        sampling = {"max_new_tokens": settings.max_new_tokens, "top_k": CANDIDATES, "seed": seed}
        written = [row.conversation(sampling) for row in learnt]
        if self._capture is not None:
            self._capture.keep([(item, row.states) for item, row in zip(written, learnt, strict=True) if row.states])
        fitting = _fitting(given, lambda prompt: _given(prompt, target), left_out)
        for item in fitting:
            answers = sum(message["role"] == "assistant" for message in item.messages)
            if len(item.tokens) < target.max_length and (lost := answers - len(item.supervised_spans)):
                left_out.add("earlier answers that the chat template rewrites", item.id, lost)
        return [*fitting, *written]

    def openings(self, prompts: Sequence[Prompt], left_out: LeftOut) -> list[Conversation]:
        """The prompts without answers; those that the chat template refuses are counted."""
        return _fitting(prompts, lambda prompt: _unanswered(prompt, self._target.tokenizer), left_out)

    def _next_turn(self, running: Sequence[_Running], seed: int, turns: TurnCaches) -> bool:
        """Ask each conversation's next user turn, if it has one, and answer; false when none could be asked."""
        target, settings = self._target, self._settings
        limits = settings.max_prompt_tokens, settings.max_new_tokens, self._writer.window
        asking = [row for row in running if row.remaining and row.ask(*limits)]
        asking.sort(key=lambda row: len(row.tokens))
        if not asking:
            return False
        turns.begin([(running.index(row), bool(row.remaining), row.states) for row in asking])
        continuation = Continuation(
            settings.max_new_tokens,
            [row.temperature for row in asking],
            target.end_tokens,
            seed,
            check=self._check,
            states=None if self._capture is None else RowStates(self._capture.aux_layers),
            turns=turns,
        )
        answers = self._writer.continue_rows([row.tokens for row in asking], continuation)
        states = {} if continuation.states is None else continuation.states.of_row
        for number, (row, answer) in enumerate(zip(asking, answers, strict=True)):
            if number in continuation.refused:
                row.refuse(continuation.refused[number])
                continue
            row.answer(answer, target)
            row.states = states.get(number, {})
        return True


def _fitting(
    prompts: Sequence[Prompt], read: Callable[[Prompt], Conversation], left_out: LeftOut
) -> list[Conversation]:
    """The conversations of the prompts that the chat template takes as they are; the others are counted."""
    fitting = []
    for prompt in prompts:
        try:
            fitting.append(read(prompt))
        except Unfit as misfit:
            left_out.add(misfit.reason, f"{prompt.id}: {misfit.problem}")
    return fitting


class _Running:
    """A conversation that is being written: the exact tokens that the target read and wrote, and the messages that
    remain to be asked. Its states are those of all tokens so far, by layer; empty where they are not known.

    Where it ends before a turn that cannot be asked, `cut` gives the reason for `LeftOut`, and `why` a server's words.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        self.prompt, self._tokenizer = prompt, with_tools(tokenizer, prompt.tools)
        self.remaining = prompt.asked
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.supervised: list[bool] = []
        self.temperature = 0.0
        self.states: dict[int, Tensor] = {}
        self.cut = self.why = ""

    def ask(self, longest: int, answer: int, window: int) -> bool:
        """Append the next user turn (with a system turn before it) and the generation prompt; whether there is one.

        The conversation ends before a turn that is too long (of more than `longest` tokens, or of more than `window`
        with what comes before and an `answer`), before one that the template refuses, and before one at which it
        rewrites earlier turns (dropped thinking, say): what the target read and wrote would no longer be what the
        template shows.
        """
        turn: list[Message] = []
        while self.remaining:
            turn.append(self.remaining.pop(0))
            if turn[-1]["role"] == "user":
                break
        tokens = self._rendered(turn)
        if tokens is not None and len(tokens) > longest:
            self.cut = f"over {longest} tokens"
        elif tokens is not None and len(self.tokens) + len(tokens) + answer > window:
            self.cut = f"that a context of {window} tokens does not hold"
        if tokens is None or self.cut:
            self.remaining = []
            return False
        self.messages.extend(turn)
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[False] * len(tokens)]
        return True

    def _rendered(self, turn: list[Message]) -> list[int] | None:
        """Tokens that these messages add; None, and `cut` says why, where the template refuses or rewrites messages."""
        tokenizer = self._tokenizer
        try:
            if not self.tokens:
                return prompt_tokens(turn, tokenizer)
            before = render(self.messages, tokenizer, answer=False)
            after = render([*self.messages, *turn], tokenizer, answer=True)
        except Unfit as misfit:
            self.cut = misfit.reason
            return None
        if after.startswith(before):
            return added_tokens(before, after, self.tokens[-1], tokenizer)
        self.cut = "at which the chat template rewrites the answers before them"
        return None

    def answer(self, tokens: list[int], target: Target) -> None:
        """Append the target's answer; one that was cut ends the conversation."""
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[True] * len(tokens)]
        self.messages.append({"role": "assistant", "content": target.text_of(tokens)})
        if tokens[-1] not in target.end_tokens:
            self.remaining = []

    def refuse(self, why: str) -> None:
        """A server refuses the newest turn: the conversation ends before it."""
        end = max((index + 1 for index, answered in enumerate(self.supervised) if answered), default=0)
        self.tokens, self.supervised = self.tokens[:end], self.supervised[:end]
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()
        self.remaining, self.cut, self.why = [], REFUSED, why

    def conversation(self, sampling: dict[str, Any]) -> Conversation:
        how, prompt = {**sampling, "temperature": self.temperature}, self.prompt
        return Conversation(
            prompt.id, self.tokens, self.supervised, self.messages, prompt.category, sampling=how, tools=prompt.tools
        )


def _given(prompt: Prompt, target: Target) -> Conversation:
    tokenizer = with_tools(target.tokenizer, prompt.tools)
    tokens, supervised = encode(prompt.messages, tokenizer, max_tokens=target.max_length)
    how = {"source": "given"}
    return Conversation(
        prompt.id, tokens, supervised, prompt.messages, prompt.category, sampling=how, tools=prompt.tools
    )


def _unanswered(prompt: Prompt, tokenizer: Any) -> Conversation:
    tokens = prompt_tokens(prompt.opening, with_tools(tokenizer, prompt.tools))
    return Conversation(
        prompt.id, tokens, [False] * len(tokens), prompt.asked, category=prompt.category, tools=prompt.tools
    )
