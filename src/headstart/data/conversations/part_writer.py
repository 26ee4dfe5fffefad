"""Writes one part of conversations, in the planning process or in a helper process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from headstart.data.conversations.answers import Answers, KeepsStates
from headstart.data.conversations.jobs import Workers
from headstart.data.prompts.chat import prompt_tokens, with_template_kwargs
from headstart.data.prompts.loading import LeftOut, in_turns
from headstart.data.prompts.overlap import Excluded, normalise
from headstart.data.prompts.self_prompts import write_prompts
from headstart.data.prompts.shapes import Prompt
from headstart.data.writing.in_process import InProcess
from headstart.data.writing.servers import Servers
from headstart.data.writing.writer import Writer
from headstart.model.model import Target
from headstart.recipes.sections import DataSection

SPLITS = {"heldout": "heldout", "validation": "validation", "train": "conversations"}
"""Splits in writing order, each with the setting for its number of conversations."""
PART = "part"
"""Kind of these jobs."""
_OF_PLANNING = {"conversations", "heldout", "validation", "minutes", "cache_gigabytes"}
"""Settings that change the number of parts, not their content."""


class PartWriter:
    """Writer of parts; a part is the same in any process, up to rounding. `capture` takes hidden states."""

    def __init__(self, target: Target, settings: DataSection, capture: KeepsStates | None = None) -> None:
        self.target = target.with_tokenizer(with_template_kwargs(target.tokenizer, settings.chat_template_kwargs))
        self.settings = settings
        self._capture = capture
        self._excluded = Excluded(settings.exclude)
        self._writer: Writer = (
            Servers(settings.server, target, settings.server_requests) if settings.server else InProcess(target)
        )

    @cached_property
    def _training_writer(self) -> Writer:
        """Writer of the training split, created on first use."""
        return InProcess(self.target.in_int8()) if self.settings.in_int8 else self._writer

    @property
    def requests(self) -> int | None:
        """Concurrent requests to servers; None if the target runs in this process."""
        return self._writer.requests if isinstance(self._writer, Servers) else None

    def workers(self, count: int) -> Workers:
        size = self.settings.batch_size
        return Workers(self.target.device, -(-count // size), self._writer.batches(size))

    def job(self, part: dict[str, Any], given: Sequence[Prompt]) -> dict[str, Any]:
        """Return the job of a part: `part` (split, number, prompt range, maximum size) with these given prompts.

        Prompts written by the target fill up the rest, if the settings ask for any.
        """
        return {
            **part,
            "kind": PART,
            # Requests to servers are limited within one process, so no other process helps.
            "target": "" if self.settings.server else self.target.whole_identity,
            "settings": self.settings.model_dump(mode="json", exclude=_OF_PLANNING),
            "prompts": [asdict(prompt) for prompt in given],
            "states": None if self._capture is None else list(self._capture.aux_layers),
        }

    def write(self, what: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
        split, number = str(what["split"]), int(what["number"])
        # Held-out and validation text comes from the unquantised target.
        writer = self._training_writer if split == "train" else self._writer
        seed = (self.settings.seed * 1_000_003 + number) * len(SPLITS) + list(SPLITS).index(split)
        left_out = LeftOut()
        prompts = [Prompt(**prompt) for prompt in what["prompts"]]
        share, missing = self.settings.self_share, what["size"] - len(prompts)
        if share and missing:
            # A margin: some of the written prompts are unusable.
            count = missing + -(-missing // 4) if prompts else self.settings.batch_size
            own = self._self_prompts(writer, f"{split}-{number}", count, seed, check, left_out)[:missing]
            turns = in_turns([iter(prompts), iter(own)], [1 - share, share])
            prompts = [prompt for _, prompt in turns] if prompts else own
        answers = Answers(self.target, self.settings, writer, capture=self._capture, check=check)
        if split == "heldout":
            written = answers.openings(prompts, left_out)
        else:
            # Validation answers keep the configured temperature, at which decoding is judged.
            share = self.settings.sampled_fraction if split == "train" else 0.0
            written = answers.answered(prompts, seed, share, left_out)
        return {
            "conversations": [item.to_json() for item in written],
            "left_out": left_out.counts,
            "examples": left_out.examples,
        }

    def _self_prompts(
        self, writer: Writer, name: str, count: int, seed: int, check: Callable[[], None], left_out: LeftOut
    ) -> list[Prompt]:
        """Let the target write at most `count` prompts; deterministic for the same settings."""
        settings = self.settings
        drafts = write_prompts(self.target, count, settings.seed_prompts, seed, writer=writer, check=check)
        prompts: dict[str, Prompt] = {}
        for number, (text, category) in enumerate(drafts):
            prompt = Prompt([{"role": "user", "content": text}], category, f"{name}-{number}")
            if len(prompt_tokens(prompt.messages, self.target.tokenizer)) > settings.max_prompt_tokens:
                continue
            if reason := self._excluded.reason(prompt.turns):
                left_out.add(reason, prompt.id)
            else:
                prompts.setdefault(normalise(text), prompt)
        return list(prompts.values())


def help_writing(
    target: Target,
    what: dict[str, Any],
    capture: Callable[[Sequence[int], str], KeepsStates],
    check: Callable[[], None],
) -> dict[str, Any]:
    """Write a part planned by another process; `capture(layers, dtype)` creates the sink if the job keeps states."""
    settings = DataSection.model_validate(what["settings"])
    states = capture(what["states"], settings.states_dtype) if what["states"] else None
    return PartWriter(target, settings, states).write(what, check)
