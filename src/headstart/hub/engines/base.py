"""The `Format` interface: write heads for engines, and check such files."""

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
"""Key of headstart's note in a file, see `Note`."""
Faults = Iterator[tuple[str, str]]
"""(problem, remedy), one sentence each."""
HEADS_GGUF = "heads.gguf"
"""File name of heads for llama.cpp."""
AGAIN = "Export or fetch the heads again, or take another checkpoint."
SAY_WHERE = "Say where it is with --target."
EAGLE3, DFLASH, DFLASH2 = "LlamaForCausalLMEagle3", "DFlashDraftModel", "DFlash2DraftModel"
DSPARK = "Qwen3DSparkModel"
EAGLE3_NORMED = "Eagle3Qwen3ForCausalLM"
"""Architecture names in engines; `EAGLE3_NORMED` has QK norm. Names of EAGLE-1 heads differ by engine."""
SGLANG_EAGLE = "LlamaForCausalLMEagle"


@dataclass(frozen=True)
class Finding:
    """A problem that heads have in an engine, and its remedy."""

    engine: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Note:
    """Provenance that headstart writes into a file: digest of the rounded heads, their target and their draft steps."""

    digest: str
    target: Mapping[str, Any]
    steps: int

    @classmethod
    def of(cls, note: Any) -> Note | None:
        """Parse the output of `note_of`; return None for anything else."""
        if not isinstance(note, Mapping) or not isinstance(note.get("digest"), str):
            return None
        target = note.get("target")
        return cls(note["digest"], target if isinstance(target, Mapping) else {}, int(note.get("steps", 0)))


def note_of(published: Published, facts: TargetFacts) -> dict[str, Any]:
    """Build the note for a file with these heads, see `Note`."""
    target = {name: getattr(facts, name) for name in ("name", "fingerprint", "model_type", "num_layers")}
    return {"version": headstart.__version__, "digest": digest(published), "steps": published.steps, "target": target}


def non_finite(published: Published) -> Faults:
    """Report tensors with NaN or infinity."""
    for name in published.not_finite:
        yield f"{name} is not finite: it holds NaN or infinity.", AGAIN


class Format(ABC):
    """A file format for heads.

    Attributes:
        name: the name users type.
        engines: engines that must be able to serve it, the main one first.
        also: further engines that read it, if they support the heads.
        dtypes: supported weight dtypes, the default first.
    """

    name: str
    engines: tuple[str, ...]
    also: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    @property
    def readers(self) -> tuple[str, ...]:
        """All engines that read the format."""
        return (*self.engines, *self.also)

    def stores_embeddings(self, published: Published) -> bool:
        """Whether the files include the target's embeddings."""
        return False

    def with_embeddings(self, published: Published, embeddings_VE: torch.Tensor) -> Published:
        """Add the target's embeddings if the files include them."""
        if not self.stores_embeddings(published):
            return published
        return published.with_tensors({**published.tensors, EMBEDDINGS: embeddings_VE})

    def as_stored(self, published: Published) -> Published:
        """Convert to the equivalent heads that the files store."""
        return published

    @abstractmethod
    def limits(self, published: Published, facts: TargetFacts, engine: str) -> Faults:
        """Report why an engine cannot serve these heads. Raises UserError if the format cannot hold them."""

    @abstractmethod
    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        """Write the format's files into an empty folder."""

    @abstractmethod
    def recognizes(self, folder: Path) -> bool:
        """Whether a folder's files are of this format."""

    @abstractmethod
    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        """Read the heads of a folder. Raises UserError if they are incomplete or ambiguous."""

    @abstractmethod
    def faults(self, folder: Path, engine: str, facts: TargetFacts | None) -> Faults:
        """Report problems an engine has with a folder's files. Raises UserError if the checks cannot continue."""

    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        """Collect all faults of a folder, NaN and infinity included."""
        findings = []
        try:
            for fault in self.faults(folder, engine, facts):
                findings.append(Finding(engine, *fault))  # one by one: the generator may raise later
            if not findings:
                findings += [Finding(engine, *fault) for fault in non_finite(self.read(folder, facts))]
        except UserError as error:
            findings.append(Finding(engine, error.problem, error.remedy))
        return findings


def rounded(published: Published, dtype: str) -> Published:
    return published.with_tensors({name: tensor.to(DTYPES[dtype]) for name, tensor in published.tensors.items()})
