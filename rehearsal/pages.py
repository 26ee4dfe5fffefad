"""The commands that pages print: lines of fenced blocks, complete scripts, and commands in sentences.

Blocks marked ```text hold no commands. The rehearsal runs the text found here, so a changed page changes its commands.

>>> list(commands_in("page.md", "Do `headstart gc`.\\n```\\nmake \\\\\\n  test  # all of them\\n```\\n"))
[Command(page='page.md', line=1, text='headstart gc'), Command(page='page.md', line=3, text='make test')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("docs/log.md", "CHANGELOG.md")
"""Pages about the past."""
PAGES = (
    "README.md",
    *(
        page.relative_to(ROOT).as_posix()
        for folder in (ROOT, ROOT / "docs", ROOT / "examples", *sorted(ROOT.glob("examples/*/")))
        for page in sorted(folder.glob("*.md"))
        if page != ROOT / "README.md" and page.relative_to(ROOT).as_posix() not in LEFT_OUT
    ),
)
"""README first, since a command counts where it comes first."""
_PROGRAMS = "headstart accelerate torchrun make vllm python curl llama-server pip srun rsync convert_hf_to_gguf.py"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IN_SENTENCE = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:\S*/)?(?:" + "|".join(map(re.escape, _PROGRAMS.split())) + r")\s[^`]+)`"
)


@dataclass(frozen=True)
class Command:
    """One command, or a whole script (of more than one line), and where it is printed."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def printed() -> list[Command]:
    """Return the commands of all pages, in the order of the pages; each text once, where it comes first."""
    commands: dict[str, Command] = {}
    for page in PAGES:
        for command in commands_in(page, (ROOT / page).read_text(encoding="utf-8")):
            commands.setdefault(command.text, command)
    return list(commands.values())


def commands_in(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of a Markdown page from top to bottom; joined where `\\` or a sentence breaks the line."""
    sentences = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    at = [(match.start(1), sentences, " ".join(match[1].split())) for match in _IN_SENTENCE.finditer(sentences)]
    commands = [Command(page, _line(where, whole), command) for where, whole, command in at]
    for block in _FENCED.finditer(text):
        if block[1] == "text":
            continue
        if block[1] in ("bash", "python"):
            commands.append(Command(page, _line(block.start(2), text), block[2].strip()))
            continue
        for match in re.finditer(r"(?:[^\n]*\\\n)*[^\n]+\n", block[2]):
            command = re.sub(r"\s+# .*|\s*\\\n\s*", lambda part: "" if "#" in part[0] else " ", match[0]).strip()
            commands.append(Command(page, _line(block.start(2) + match.start(), text), command))
    return iter(sorted(commands, key=lambda command: command.line))


def _line(position: int, text: str) -> int:
    return text.count("\n", 0, position) + 1
