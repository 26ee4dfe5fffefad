"""Generation of the target's answers to prompts, with their exact token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation, spans_of
from headstart.data.generation.generator import CANDIDATES, Continuation, TextGenerator, TurnState
from headstart.data.generation.in_process import InProcess
from headstart.data.prompts.chat import Message, Unfit, added_tokens, prompt_tokens, render, with_tools
from headstart.data.prompts.loading import REFUSED, LeftOut
from headstart.data.prompts.shapes import Prompt
from headstart.model.model import Target
from headstart.recipes.sections import DataSection


class StateSink(Protocol):
    """A sink for hidden states computed during generation (`headstart.data.states.shards.Capture`)."""

    aux_layers: tuple[int, ...]

    def store(self, states: Sequence[tuple[Conversation, Mapping[int, Tensor]]]) -> None:
        """Store conversations with their tokens' states [T, E], by layer."""


class AnswerGenerator:
    """Generator of the target's answers, in this process by default; `check` is polled and aborts by raising."""

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        generator: TextGenerator | None = None,
        capture: StateSink | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._settings = target, settings
        self._generator = generator or InProcess(target)
        self._capture, self._check = capture, check

    def answer(
        self, prompts: Sequence[Prompt], seed: int, sampled_fraction: float, left_out: LeftOut
    ) -> list[Conversation]:
        """Answer every user turn of each prompt of a batch, shortest prompts first.

        Given answers are kept when `regenerate` is off; `sampled_fraction` of the remaining prompts are answered at
        temperature 1. `left_out` counts dropped conversations and turns, and answers cut short.
        """
        settings = self._settings
        given = [] if settings.regenerate else [item for item in prompts if item.messages[-1]["role"] == "assistant"]
        ongoing = [_Ongoing(prompt, self._target.tokenizer) for prompt in prompts if prompt not in given]
        sampled = round(sampled_fraction * len(ongoing))
        for index, row in enumerate(ongoing):
            row.temperature = 1.0 if index < sampled else settings.temperature
        turn = 0
        while self._next_turn(ongoing, seed * 31 + turn):
            turn += 1
        for row in ongoing:
            if not any(row.supervised):
                left_out.add(row.cut, row.why or row.prompt.id)
            elif row.cut:
                left_out.add(f"later turns {row.cut}", row.why or row.prompt.id, row.dropped)
            if row.is_clipped:
                left_out.add(f"ends of answers over {settings.max_new_tokens} tokens", row.prompt.id)
        answered = [row for row in ongoing if any(row.supervised)]
        sampling = {"max_new_tokens": settings.max_new_tokens, "top_k": CANDIDATES, "seed": seed}
        conversations = [row.conversation(sampling) for row in answered]
        if self._capture is not None:
            pairs = zip(conversations, answered, strict=True)
            self._capture.store([(item, row.turn.states) for item, row in pairs if row.turn.states])
        return [*_fitting(given, lambda prompt: self._encode_given(prompt, left_out), left_out), *conversations]

    def openings(self, prompts: Sequence[Prompt], left_out: LeftOut) -> list[Conversation]:
        """Return prompts without answers; count prompts that the chat template refuses."""

        def unanswered(prompt: Prompt) -> Conversation:
            tokens = prompt_tokens(prompt.opening, with_tools(self._target.tokenizer, prompt.tools))
            return Conversation(
                prompt.id, tokens, [False] * len(tokens), prompt.without_answers, prompt.category, tools=prompt.tools
            )

        return _fitting(prompts, unanswered, left_out)

    def _encode_given(self, prompt: Prompt, left_out: LeftOut) -> Conversation:
        """Encode a prompt with its own answers, up to the first turn with a prompt that does not fit. The last answer
        may be cut at the context window."""
        longest, window = self._settings.max_prompt_tokens, self._target.max_length
        end = before = 0
        tokens, supervised = encode(prompt.messages, with_tools(self._target.tokenizer, prompt.tools))
        spans = spans_of(supervised)
        if rewritten := sum(message["role"] == "assistant" for message in prompt.messages) - len(spans):
            left_out.add("earlier answers that the chat template rewrites", prompt.id, rewritten)
        for number, (start, stop) in enumerate(spans):
            cut = ""
            if start >= window:
                cut = f"that a context of {window} tokens does not hold"
            elif start - before > longest and not rewritten:
                cut = f"over {longest} tokens"
            if cut and not number:
                raise Unfit(f"A prompt {cut}.", "Shorten it.", cut)
            if cut:
                left_out.add(f"later turns {cut}", prompt.id, len(spans) - number)
                break
            if stop > window:
                left_out.add(f"ends of answers that a context of {window} tokens does not hold", prompt.id)
            end, before = min(stop, window), stop
        sampling = {"source": "given"}
        return Conversation(
            prompt.id, tokens[:end], supervised[:end], prompt.messages, prompt.category, sampling, prompt.tools
        )

    def _next_turn(self, ongoing: Sequence[_Ongoing], seed: int) -> bool:
        """Answer the next user turn of each conversation; return False when no turn is left."""
        settings = self._settings
        limits = settings.max_prompt_tokens, settings.max_new_tokens, self._generator.window
        rows = [row for row in ongoing if row.remaining and row.add_turn(*limits)]
        rows.sort(key=lambda row: len(row.tokens))
        if not rows:
            return False
        for row in rows:
            row.turn.has_more = bool(row.remaining)
        continuation = Continuation(
            settings.max_new_tokens,
            [row.temperature for row in rows],
            self._target.end_tokens,
            seed,
            check=self._check,
            aux_layers=() if self._capture is None else self._capture.aux_layers,
            turns=[row.turn for row in rows],
        )
        answers = self._generator.continue_rows([row.tokens for row in rows], continuation)
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if number in continuation.refused:
                row.refuse(continuation.refused[number])
            else:
                row.add_answer(answer, self._target)
        return True


def _fitting(
    prompts: Sequence[Prompt], read: Callable[[Prompt], Conversation], left_out: LeftOut
) -> list[Conversation]:
    """Return the conversations of prompts that fit the chat template; count misfits."""
    fitting = []
    for prompt in prompts:
        try:
            fitting.append(read(prompt))
        except Unfit as misfit:
            left_out.add(misfit.reason, f"{prompt.id}: {misfit.problem}")
    return fitting


class _Ongoing:
    """A conversation in progress: exact tokens, state between turns, and remaining messages.

    If it ends early, `cut` holds the reason for `LeftOut`, `why` the server's message and `dropped` the number of lost
    turns. `is_clipped` marks a last answer without an end token.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        self.prompt, self._tokenizer = prompt, with_tools(tokenizer, prompt.tools)
        self.remaining = prompt.without_answers
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.supervised: list[bool] = []
        self.temperature = 0.0
        self.turn = TurnState()
        self.cut = self.why = ""
        self.dropped, self.is_clipped = 0, False

    def add_turn(self, max_tokens: int, max_new_tokens: int, window: int) -> bool:
        """Append the next user turn (after any system turn) and the generation prompt.

        Ends the conversation and returns False if the turn exceeds `max_tokens`, leaves no room in `window` for an
        answer, or the template refuses it or rewrites earlier turns (dropped thinking, say).
        """
        turn: list[Message] = []
        while self.remaining:
            turn.append(self.remaining.pop(0))
            if turn[-1]["role"] == "user":
                break
        try:
            tokens = self._turn_tokens(turn)
        except Unfit as misfit:
            return self._end(misfit.reason, turn)
        if len(tokens) > max_tokens:
            return self._end(f"over {max_tokens} tokens", turn)
        if len(self.tokens) + len(tokens) + max_new_tokens > window:
            return self._end(f"that a context of {window} tokens does not hold", turn)
        self.messages.extend(turn)
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[False] * len(tokens)]
        return True

    def _end(self, reason: str, turn: Sequence[Message] = ()) -> bool:
        """Drop the remaining messages; return False."""
        self.dropped = sum(message["role"] == "user" for message in [*turn, *self.remaining])
        self.remaining, self.cut = [], reason if self.dropped else ""
        self.turn.drop()
        return False

    def _turn_tokens(self, turn: list[Message]) -> list[int]:
        """Return the tokens these messages add; `Unfit` if the template refuses them or rewrites earlier answers."""
        tokenizer = self._tokenizer
        if not self.tokens:
            return prompt_tokens(turn, tokenizer)
        before = render(self.messages, tokenizer, answer=False)
        after = render([*self.messages, *turn], tokenizer, answer=True)
        if after.startswith(before):
            return added_tokens(before, after, self.tokens[-1], tokenizer)
        reason = "at which the chat template rewrites the answers before them"
        raise Unfit("The chat template rewrites earlier answers.", "Give single turns.", reason)

    def add_answer(self, tokens: list[int], target: Target) -> None:
        """Append the target's answer; end the conversation if it has no end token."""
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[True] * len(tokens)]
        self.messages.append({"role": "assistant", "content": target.text_of(tokens)})
        if tokens[-1] not in target.end_tokens:
            self.is_clipped = True
            self._end(f"after an answer over {len(tokens)} tokens")

    def refuse(self, why: str) -> None:
        """End the conversation before the newest turn, which the server refused."""
        end = max((stop for _, stop in spans_of(self.supervised)), default=0)
        self.tokens, self.supervised, turn = self.tokens[:end], self.supervised[:end], list[Message]()
        while self.messages and self.messages[-1]["role"] != "assistant":
            turn.append(self.messages.pop())
        self._end(REFUSED, turn)
        self.why = why

    def conversation(self, sampling: dict[str, Any]) -> Conversation:
        sampling, prompt = {**sampling, "temperature": self.temperature}, self.prompt
        return Conversation(
            prompt.id, self.tokens, self.supervised, self.messages, prompt.category, sampling, prompt.tools
        )
