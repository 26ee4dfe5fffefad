"""What a format is: how heads are written for some engines, how such files are checked, how an engine is started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOTE = "headstart"
"""Where a file of ours says what it was written from, see `Written`."""
_KINDS = {
    Layout.EAGLE3: "EAGLE-3",
    Layout.EAGLE: "EAGLE-1",
    Layout.MEDUSA: "Medusa",
    Layout.DFLASH: "DFlash",
    Layout.DSPARK: "DSpark",
}


@dataclass(frozen=True)
class TargetFacts:
    """What formats say of a target, or depend on.

    Attributes:
        spec: what `load_target` takes; empty where it is not known here.
        vocab_size: rows of the LM head.
        folder: that transformers loads, or a Hub id; empty where there is none.
        gguf: the target as a GGUF file, where it is one.
        architectures: of transformers.
        tokens: special tokens' ids by their name in a config.
    """

    spec: str
    name: str
    fingerprint: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    folder: str = ""
    gguf: Path | None = None
    architectures: tuple[str, ...] = ()
    tokens: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Finding:
    """What an engine would get wrong, and what to do about it, each as one sentence."""

    engine: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Written:
    """What files of ours say of themselves.

    Attributes:
        version: of headstart.
        digest: of the heads that the file holds, in its own rounding, see `headstart.heads.exchange.published.digest`.
        target: name, fingerprint, `model_type` and `num_layers` of the target.
        steps: how far the heads were trained to draft.
    """

    version: str
    digest: str
    target: Mapping[str, Any]
    steps: int

    @classmethod
    def of(cls, values: Any) -> Written | None:
        """From what a file holds; None where that is not ours."""
        if not isinstance(values, Mapping) or not isinstance(values.get("digest"), str):
            return None
        target = values.get("target")
        return cls(
            str(values.get("version", "")),
            values["digest"],
            target if isinstance(target, Mapping) else {},
            int(values.get("steps", 0)),
        )


class Format(ABC):
    """A way of writing heads that some engines read.

    Attributes:
        name: that users type.
        engines: that read it, the one it is mainly for first.
        dtypes: that weights can be written in, the usual one first.
    """

    name: str
    engines: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")

    def holds_embeddings(self, published: Published) -> bool:
        """Whether its files have the target's embeddings beside the heads."""
        return False

    @abstractmethod
    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        """Refuse heads that the format or each of its engines cannot hold.

        Returns:
            What the user should know: engines of this format that cannot serve these heads, and why.

        Raises:
            UserError: naming the reason and what to do instead.
        """

    def remarks(self, published: Published, engine: str) -> list[str]:
        """What the user should know of heads that an engine reads as they are, and does not serve everywhere."""
        return []

    def as_held(self, published: Published) -> Published:
        """The same heads as the format's files hold them, which draft the same."""
        return published

    @abstractmethod
    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        """Write the format's files into an empty folder."""

    @abstractmethod
    def holds(self, folder: Path) -> bool:
        """Whether a folder's files are of this format."""

    @abstractmethod
    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        """The heads that a folder holds.

        Raises:
            UserError: they are not whole, or not to be told.
        """

    @abstractmethod
    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        """What an engine would refuse, ignore, or fill with noise."""

    @abstractmethod
    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        """The words of the command that serves target and heads, for each engine that can.

        `drafts` are tokens of a chain by engine, where they were measured.
        """


def kind_of(published: Published) -> str:
    """What the arrangement is called in messages."""
    return _KINDS[published.layout]


def drafts_of(published: Published, drafts: int = 0) -> int:
    """Tokens of the chain that an engine drafts: those measured to pay, else a few; later ones are seldom accepted.

    A block drafts all of its tokens at once, and was trained to: it is asked for all.
    """
    return min(drafts or (published.steps if published.layout in BLOCKS else 3), published.steps)


def drafts_to_try(published: Published, usual: Sequence[int]) -> list[int]:
    """Numbers of drafts to measure in an engine: the usual ones as far as the heads reach, and a block as a whole."""
    whole = {published.steps} if published.layout in BLOCKS else set()
    return sorted({count for count in usual if count <= published.steps} | whole)


def refuse_activation(published: Published, engine: str) -> None:
    """Refuse an MLP that engines do not compute.

    Raises:
        UserError: it is not SiLU's.
    """
    if published.layer is not None and published.layer.hidden_act != "silu":
        raise UserError(
            f"The heads' MLP uses {published.layer.hidden_act}, and {engine} computes silu alone.",
            "Train them with heads.hidden_act=silu.",
        )
