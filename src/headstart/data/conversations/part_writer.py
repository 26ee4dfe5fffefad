"""Writes one part of conversations: in the process that plans them, or in another one that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.data.conversations.answers import answer_prompts
from headstart.data.conversations.conversations import prompt_tokens, with_template_kwargs
from headstart.data.conversations.from_server import Servers
from headstart.data.conversations.generator import Generator, InProcess
from headstart.data.conversations.jobs import Job
from headstart.data.conversations.sampling import Room
from headstart.data.prompts.overlap import Excluded
from headstart.data.prompts.prompts import LeftOut, Prompt, deduplicate
from headstart.data.prompts.selfprompt import write_prompts
from headstart.data.states.shards import Capture, owner_of
from headstart.recipes.sections import DataSection
from headstart.target.model import Target

SPLITS = ("heldout", "calibration", "train")
PART = "part"
"""Kind of these jobs."""
_OF_PLANNING = {"conversations", "heldout", "validation", "minutes", "cache_gigabytes"}
"""Settings that say how many parts there are, and nothing of what is in them."""


@dataclass(frozen=True)
class PartJob(Job):
    """A part that is still to be written.

    Attributes:
        number: among the parts of all splits.
        split: its name.
        prompts: of given prompts, the range in their order that it answers.
        size: conversations at most.
        first: whether the split has none before it.
    """

    number: int
    split: str
    prompts: tuple[int, int]
    size: int
    first: bool


class PartWriter:
    """Writes parts: the same for the same settings and number, whoever does.

    Args:
        target: the model, with its tokenizer.
        settings: the recipe's data section.
        say: told when memory is short.
        capture: of hidden states.
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        say: Callable[[str], None] | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.target = target.with_tokenizer(with_template_kwargs(target.tokenizer, settings.chat_template_kwargs))
        self._settings = settings
        self._capture = capture
        self._excluded = Excluded(settings.exclude)
        self._generator: Generator = (
            Servers(settings.server, target, settings.server_requests)
            if settings.server
            else InProcess(target, Room(say))
        )

    @property
    def shareable(self) -> bool:
        """Whether several parts may be written at once."""
        return self._generator.shareable

    def job(
        self, split: str, number: int, prompts: tuple[int, int], given: Sequence[Prompt] | None, size: int, first: bool
    ) -> PartJob:
        """A part to write.

        Args:
            split: its name.
            number: among the parts of all splits.
            prompts: range of given prompts.
            given: what it answers; None for prompts that the target writes.
            size: conversations at most.
            first: whether the split has none before it.
        """
        what: dict[str, Any] = {
            "kind": PART,
            "target": owner_of(self.target),
            "settings": self._settings.model_dump(mode="json", exclude=_OF_PLANNING),
            "split": split,
            "number": number,
            "prompts": None if given is None else [asdict(prompt) for prompt in given],
            "size": size,
            "states": None if self._capture is None else list(self._capture.aux_layers),
        }
        return PartJob(f"{number:05d}-{split}", what, number, split, prompts, size, first)

    def write(self, what: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
        """Write the part of a job; `check` is called now and then."""
        split, number = str(what["split"]), int(what["number"])
        seed, left_out = self._seed(split, number), LeftOut()
        given = what["prompts"]
        asked = (
            self._written(split, number, check, left_out)[: what["size"]]
            if given is None
            else [Prompt(**one) for one in given]
        )
        # Calibration answers stay at the data's temperature: they stand for decoding as it is judged.
        share = self._settings.sampled_fraction if split == "train" else 0.0
        settings = self._settings.model_copy(update={"sampled_fraction": share})
        written = answer_prompts(
            self.target, asked, settings, seed, split != "heldout", check, left_out, self._generator, self._capture
        )
        return {
            "conversations": [item.to_json() for item in written],
            "left_out": left_out.counts,
            "examples": left_out.examples,
        }

    def _seed(self, split: str, number: int) -> int:
        """A seed of its own for each part."""
        return (self._settings.seed * 1_000_003 + number) * len(SPLITS) + SPLITS.index(split)

    def _written(self, split: str, number: int, check: Callable[[], None], left_out: LeftOut) -> list[Prompt]:
        """Self-prompts: the same for the same settings, whatever was written before."""
        target, seed, settings = self.target, self._seed(split, number), self._settings
        drafts = write_prompts(
            target, settings.batch_size, settings.seed_prompts, target.end_tokens, seed, check, self._generator
        )
        prompts = [
            Prompt([{"role": "user", "content": draft.text}], draft.category, f"{split}-{number}-{i}")
            for i, draft in enumerate(drafts)
        ]
        limit = settings.max_prompt_tokens
        fitting = [prompt for prompt in prompts if len(prompt_tokens(prompt.messages, target.tokenizer)) <= limit]
        return deduplicate([prompt for prompt in fitting if not self._gives_away(prompt, left_out)])

    def _gives_away(self, prompt: Prompt, left_out: LeftOut) -> bool:
        reason = self._excluded.reason(prompt.turns)
        if reason:
            left_out.add(reason, prompt.id)
        return reason is not None


def help_writing(
    target: Target, what: dict[str, Any], shards: Path | None, check: Callable[[], None]
) -> dict[str, Any]:
    """Write the part of a job that another process has planned.

    Args:
        target: the model that the job asks for.
        what: the job.
        shards: folder of hidden states that are kept on the way; None where the job keeps none.
        check: called now and then.
    """
    settings = DataSection.model_validate(what["settings"])
    capture = None
    if what["states"]:
        assert shards is not None, "the run refers to them before it has jobs"
        capture = Capture(shards, target, what["states"], settings.states_dtype)
    return PartWriter(target, settings, None, capture).write(what, check)
