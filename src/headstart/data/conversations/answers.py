"""The target answers prompts, batch by batch: conversations with the exact tokens that it read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headstart.data.conversations.conversations import Conversation, Unfit, added_tokens, encode, prompt_tokens, render
from headstart.data.conversations.generator import Generator, InProcess
from headstart.data.conversations.sampling import CANDIDATES, RowStates, Turns
from headstart.data.prompts.prompts import LeftOut, Prompt
from headstart.recipes.sections import DataSection
from headstart.target.model import Target

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.data.states.shards import Capture


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    settings: DataSection,
    seed: int,
    answered: bool,
    check: Callable[[], None],
    left_out: LeftOut | None = None,
    generator: Generator | None = None,
    capture: Capture | None = None,
) -> list[Conversation]:
    """Answer every user turn of each prompt with the target, shortest prompts first; a share of them at temperature 1.

    Prompts that come with answers keep them when `regenerate` is off; the others are answered all the same. What the
    chat template makes nothing to learn from of is left out and counted.

    Args:
        target: the model, with its tokenizer.
        prompts: of one batch.
        settings: the recipe's data section.
        seed: of the batch.
        answered: whether answers are wanted; the openings alone otherwise.
        check: called now and then; what it raises ends the work.
        left_out: takes the count.
        generator: that writes; the target in this process by default.
        capture: keeps the hidden states of what is written.
    """
    left_out = LeftOut() if left_out is None else left_out
    generator = generator or InProcess(target)
    if not answered:
        return _fitting(prompts, lambda prompt: _unanswered(prompt, target.tokenizer), left_out)
    kept = [] if settings.regenerate else [item for item in prompts if item.messages[-1]["role"] == "assistant"]
    running = [
        _Running(prompt, [turn for turn in prompt.messages if turn["role"] != "assistant"])
        for prompt in prompts
        if prompt not in kept
    ]
    sampled = round(settings.sampled_fraction * len(running))
    for index, row in enumerate(running):
        row.temperature = 1.0 if index < sampled else settings.temperature
    turn, turns = 0, Turns()
    while any(row.left for row in running):
        turn += _next_turn(target, running, settings, seed * 31 + turn, check, generator, capture, turns)
    for row in running:
        if not any(row.supervised):
            left_out.add("that the chat template refuses, or too long", row.prompt.id)
    sampling = {"max_new_tokens": settings.max_new_tokens, "top_k": CANDIDATES, "seed": seed}
    learnt = [row for row in running if any(row.supervised)]
    written = [row.conversation(sampling) for row in learnt]
    if capture is not None:
        capture.keep([(item, row.states) for item, row in zip(written, learnt, strict=True) if row.states])
    return [*_fitting(kept, lambda prompt: _given(prompt, target), left_out), *written]


def _next_turn(
    target: Target,
    running: Sequence[_Running],
    settings: DataSection,
    seed: int,
    check: Callable[[], None],
    generator: Generator,
    capture: Capture | None,
    turns: Turns,
) -> bool:
    """Ask each conversation's next user turn, if it has one, and answer; false when none could be asked."""
    asking = [row for row in running if row.left]
    for row in asking:
        row.ask(target.tokenizer, settings.max_prompt_tokens, target.max_length - settings.max_new_tokens)
    asking = sorted((row for row in asking if row.asked), key=lambda row: len(row.tokens))
    if not asking:
        return False
    turns.begin([(running.index(row), bool(row.left), row.states) for row in asking])
    states = None if capture is None else RowStates(capture.aux_layers)
    answers = generator.continue_rows(
        [row.tokens for row in asking],
        max_new_tokens=settings.max_new_tokens,
        temperatures=[row.temperature for row in asking],
        top_p=1.0,
        ends=target.end_tokens,
        seed=seed,
        check=check,
        states=states,
        turns=turns,
    )
    for number, (row, answer) in enumerate(zip(asking, answers, strict=True)):
        row.answer(answer, target.tokenizer, target.end_tokens)
        row.states = {} if states is None else states.of_row.get(number, {})
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
    """A conversation that is being written: the exact tokens that the target read and wrote."""

    def __init__(self, prompt: Prompt, left: list[dict[str, str]]) -> None:
        self.prompt = prompt
        self.left = left
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.supervised: list[bool] = []
        self.temperature = 0.0
        self.asked = False
        self.states: dict[int, Tensor] = {}  # of all tokens so far

    def ask(self, tokenizer: Any, longest: int, room: int) -> None:
        """Append the next user turn (with a system turn before it) and the generation prompt.

        The conversation ends before a turn that is too long, before one that the template refuses, and before one at
        which it rewrites earlier turns (dropped thinking, say): what the target read and wrote would no longer be what
        the template shows.

        Args:
            tokenizer: with a chat template.
            longest: most tokens of the turn.
            room: most tokens of the conversation with it.
        """
        asked: list[dict[str, str]] = []
        while self.left:
            asked.append(self.left.pop(0))
            if asked[-1]["role"] == "user":
                break
        fresh = self._rendered(asked, tokenizer)
        self.asked = fresh is not None and len(fresh) <= longest and len(self.tokens) + len(fresh) <= room
        if fresh is None or not self.asked:
            self.left = []
            return
        self.messages.extend(asked)
        self.tokens = [*self.tokens, *fresh]
        self.supervised = [*self.supervised, *[False] * len(fresh)]

    def _rendered(self, asked: list[dict[str, str]], tokenizer: Any) -> list[int] | None:
        """Tokens that these messages add; None when the template refuses them or rewrites what came before."""
        try:
            if not self.tokens:
                return prompt_tokens(asked, tokenizer)
            before = render(self.messages, tokenizer, answer=False)
            after = render([*self.messages, *asked], tokenizer, answer=True)
        except Unfit:
            return None
        return added_tokens(before, after, self.tokens[-1], tokenizer) if after.startswith(before) else None

    def answer(self, tokens: list[int], tokenizer: Any, ends: frozenset[int]) -> None:
        """Append the target's answer; one that was cut ends the conversation."""
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[True] * len(tokens)]
        self.messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
        if tokens[-1] not in ends:
            self.left = []

    def conversation(self, sampling: dict[str, Any]) -> Conversation:
        """What was written, and how."""
        return Conversation(
            id=self.prompt.id,
            tokens=self.tokens,
            supervised=self.supervised,
            messages=self.messages,
            category=self.prompt.category,
            sampling={**sampling, "temperature": self.temperature},
        )


def _given(prompt: Prompt, target: Target) -> Conversation:
    if prompt.calls_tools:
        raise Unfit(
            "Calls of tools are not rendered.",
            "Let the target write the answers (data.regenerate=true).",
            "with given answers that call tools",
        )
    tokens, supervised = encode(prompt.messages, target.tokenizer, max_tokens=target.max_length)
    return Conversation(prompt.id, tokens, supervised, prompt.messages, prompt.category, {"source": "given"})


def _unanswered(prompt: Prompt, tokenizer: Any) -> Conversation:
    asked = [turn for turn in prompt.messages if turn["role"] != "assistant"]
    tokens = prompt_tokens(prompt.opening, tokenizer)
    return Conversation(prompt.id, tokens, [False] * len(tokens), asked, prompt.category, {})
