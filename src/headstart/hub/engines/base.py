"""What a format is: how heads are written for some engines, and how such files are checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.errors import UserError
from headstart.heads.exchange.published import EMBEDDINGS, Published, digest
from headstart.hub.target_facts import TargetFacts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOTE = "headstart"
"""Where a file of ours says what it was written from, see `Written`."""
Faults = Iterator[tuple[str, str]]
"""(what is wrong, what to do), each as one sentence."""
HEADS_GGUF = "heads.gguf"
"""What a folder calls heads for llama.cpp."""
AGAIN = "Export or fetch the heads again, or take another checkpoint."
EAGLE3, DFLASH, DSPARK = "LlamaForCausalLMEagle3", "DFlashDraftModel", "Qwen3DSparkModel"
EAGLE3_NORMED = "Eagle3Qwen3ForCausalLM"
"""What engines call heads, `EAGLE3_NORMED` those whose layers norm queries and keys; EAGLE-1 heads have names of their
own in each."""
SGLANG_EAGLE = "LlamaForCausalLMEagle"


@dataclass(frozen=True)
class Finding:
    """What an engine would get wrong, and what to do about it."""

    engine: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Written:
    """What a file of ours says of itself: the digest of its heads in their own rounding, and what they are for."""

    digest: str
    target: Mapping[str, Any]
    steps: int

    @classmethod
    def of(cls, note: Any) -> Written | None:
        """From what `note_of` made; None for anything else."""
        if not isinstance(note, Mapping) or not isinstance(note.get("digest"), str):
            return None
        target = note.get("target")
        return cls(note["digest"], target if isinstance(target, Mapping) else {}, int(note.get("steps", 0)))


def note_of(published: Published, facts: TargetFacts) -> dict[str, Any]:
    """What a file with these heads says of itself, see `Written`."""
    target = {name: getattr(facts, name) for name in ("name", "fingerprint", "model_type", "num_layers")}
    return {
        "version": headstart.__version__,
        "digest": digest(published),
        "steps": published.steps,
        "target": target,
    }


def infinite(published: Published) -> Faults:
    """Tensors that would make every draft meaningless."""
    for name in published.not_finite:
        yield f"{name} holds numbers that are not finite: every draft would be noise.", AGAIN


class Format(ABC):
    """A way of writing heads that some engines read.

    Attributes:
        name: that users type.
        engines: that must be able to serve what is written, the one it is mainly for first.
        also: that read it too, where they know such heads.
        dtypes: that weights can be written in, the usual one first.
    """

    name: str
    engines: tuple[str, ...]
    also: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    @property
    def readers(self) -> tuple[str, ...]:
        """Engines that read its files, those included that may not know the heads in them."""
        return (*self.engines, *self.also)

    def holds_embeddings(self, published: Published) -> bool:
        """Whether its files have the target's embeddings beside the heads."""
        return False

    def with_embeddings(self, published: Published, embeddings_VE: torch.Tensor) -> Published:
        """The heads with the target's embeddings, where the files hold them."""
        if not self.holds_embeddings(published):
            return published
        return published.with_tensors({**published.tensors, EMBEDDINGS: embeddings_VE})

    def as_held(self, published: Published) -> Published:
        """The same heads as the format's files hold them, which draft the same."""
        return published

    @abstractmethod
    def limits(self, published: Published, facts: TargetFacts, engine: str) -> Faults:
        """Why an engine could not serve these heads; a UserError where the format cannot hold them."""

    @abstractmethod
    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        """Write the format's files into an empty folder."""

    @abstractmethod
    def holds(self, folder: Path) -> bool:
        """Whether a folder's files are of this format."""

    @abstractmethod
    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        """The heads that a folder holds; a UserError where they are not whole, or not to be told."""

    @abstractmethod
    def faults(self, folder: Path, engine: str, facts: TargetFacts | None) -> Faults:
        """What an engine would refuse, ignore, or fill with noise; a UserError where nothing else can be checked."""

    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        """All faults of a folder's files."""
        findings = []
        try:
            for fault in self.faults(folder, engine, facts):
                findings.append(Finding(engine, *fault))  # one at a time: a later one may raise
            if not findings:
                findings += [Finding(engine, *fault) for fault in infinite(self.read(folder, facts))]
        except UserError as error:
            findings.append(Finding(engine, error.problem, error.remedy))
        return findings


def rounded(published: Published, dtype: str) -> Published:
    """The heads in the numbers that a file of this dtype holds."""
    return published.with_tensors({name: tensor.to(DTYPES[dtype]) for name, tensor in published.tensors.items()})
