"""Generation of one batch of conversations, which is the same in any process up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from headstart.data.conversations.answers import AnswerGenerator, StateSink
from headstart.data.conversations.records import Conversation
from headstart.data.generation.generator import TextGenerator
from headstart.data.generation.in_process import InProcess
from headstart.data.generation.servers import Servers
from headstart.data.prompts.chat import prompt_tokens, with_template_kwargs
from headstart.data.prompts.loading import LeftOut, interleave
from headstart.data.prompts.overlap import Excluded, normalise
from headstart.data.prompts.self_prompts import generate_prompts
from headstart.data.prompts.shapes import Prompt
from headstart.data.workers import Workers
from headstart.model.model import Target
from headstart.recipes.sections import DataSection

SPLITS = {"heldout": "heldout", "validation": "validation", "train": "conversations"}
"""Splits in writing order, each with the setting for its number of conversations."""


class BatchGenerator:
    """Generator of batches of conversations; `capture` receives the hidden states."""

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        capture: StateSink | None = None,
        servers: Servers | None = None,
    ) -> None:
        self.target = target.with_tokenizer(with_template_kwargs(target.tokenizer, settings.chat_template_kwargs))
        self.settings = settings
        self._capture = capture
        self._excluded = Excluded(settings.exclude)
        self._generator: TextGenerator = servers or InProcess(target)

    @cached_property
    def _int8_generator(self) -> TextGenerator:
        return InProcess(self.target.in_int8())

    @property
    def requests(self) -> int | None:
        """Concurrent requests to servers; None if the target runs in this process."""
        return self._generator.requests if isinstance(self._generator, Servers) else None

    def workers(self, count: int) -> Workers:
        size = self.settings.batch_size
        return Workers(self.target.device, -(-count // size), self._generator.concurrent_batches(size))

    def generate(
        self, split: str, number: int, size: int, given: Sequence[Prompt], check: Callable[[], None]
    ) -> tuple[list[Conversation], LeftOut]:
        """Answer at most `size` prompts: the given ones, filled up with prompts by the target if it has a share.

        Held-out prompts get no answers.
        """
        # Held-out and validation text comes from the unquantised target.
        generator = self._int8_generator if split == "train" and self.settings.in_int8 else self._generator
        seed = (self.settings.seed * 1_000_003 + number) * len(SPLITS) + list(SPLITS).index(split)
        prompts, left_out, own_share = list(given), LeftOut(), self.settings.self_share
        missing = size - len(prompts)
        if own_share and missing:
            # With given prompts a margin, since some of these are unusable; without, later batches make up for them.
            count = missing + -(-missing // 4) if prompts else self.settings.batch_size
            own = self._self_prompts(generator, f"{split}-{number}", count, seed, check, left_out)[:missing]
            turns = interleave([iter(prompts), iter(own)], [1 - own_share, own_share])
            prompts = [prompt for _, prompt in turns] if prompts else own
        answers = AnswerGenerator(self.target, self.settings, generator, self._capture, check)
        if split == "heldout":
            return answers.openings(prompts, left_out), left_out
        # Validation answers keep the configured temperature, at which decoding is judged.
        sampled_fraction = self.settings.sampled_fraction if split == "train" else 0.0
        return answers.answer(prompts, seed, sampled_fraction, left_out), left_out

    def _self_prompts(
        self, generator: TextGenerator, name: str, count: int, seed: int, check: Callable[[], None], left_out: LeftOut
    ) -> list[Prompt]:
        """Generate at most `count` prompts; deterministic for the same settings."""
        settings = self.settings
        drafts = generate_prompts(self.target, count, settings.seed_prompts, seed, generator=generator, check=check)
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
