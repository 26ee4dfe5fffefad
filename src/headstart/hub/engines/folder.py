"""Formats that are Hugging Face folders: all of them are read and checked by what their config says."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from headstart.heads.exchange.published import Published
from headstart.hub.engines.base import Finding, Format, TargetFacts
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint, open_checkpoint
from headstart.hub.engines.reading import read_published
from headstart.hub.engines.rules import check_checkpoint


class FolderFormat(Format):
    """A format of config.json and safetensors files; `knows` tells its folders from those of the others."""

    @abstractmethod
    def knows(self, checkpoint: Checkpoint) -> bool:
        """Whether a folder's config is of this format."""

    def holds(self, folder: Path) -> bool:
        return (folder / CONFIG).is_file() and self.knows(open_checkpoint(folder))

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return read_published(open_checkpoint(folder), facts)

    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        return check_checkpoint(open_checkpoint(folder), engine, facts)
