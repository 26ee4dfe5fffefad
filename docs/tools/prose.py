"""Report sentences that may need a second reading: per room, or each of them with --list. A report, not a check.

    python docs/tools/prose.py [--list] [PATH ...]

The patterns are hints. Read a listed sentence aloud, and rewrite it if an engineer of this field would not say it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [
    *sorted(path for path in (ROOT / "src/headstart").iterdir() if path.is_dir()),
    *map(ROOT.joinpath, ("tests", "docs")),
]
PATTERNS = {
    "whose, of which": r"\b(of|in|by|from|with|to|for|after|before) (which|whom|whose)\b|\bwhose\b",
    "those that, that of": r"\bthose (that|of|which|who|whose|with|in|from)\b|\bthat of\b|\bof (these|those)\b",
    "what as a noun": r"(^|[.:;,(] )[Ww]hat (is|was|are|were|a|an|the|it|they|has|have|[a-z]+s)\b",
    "vague amount": r"\b(so many|as many|so much|some of it|nothing of)\b",
    "person": r"\b(nobody|whoever|somebody|anybody|who (asks|knows|writes|reads|waits|says))\b",
    "text that speaks": r"\b(says?|said|tells?|told|asks?|asked for) (what|which|how|so|it|that|whether|of)\b",
    "vague pronoun": r"\b(the ones?|the others?|one of (them|these|those|several)|there is none)\b",
}
"""Constructions that readers stumbled over."""


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of strings and comments of Python, or of lines of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in "|`<")
        return
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and len(node.value) > 24
            and " " in node.value
        ):
            yield node.lineno, " ".join(node.value.split())
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield number, line.strip()


def main(arguments: list[str]) -> None:
    for root in [Path(word) for word in arguments if not word.startswith("-")] or PATHS:
        files = (
            [root]
            if root.is_file()
            else [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".md", ".c", ".h", ".j2")]
        )
        count, found = 0, Counter[str]()
        for file in files:
            for number, passage in passages(file):
                hits = [name for name, pattern in PATTERNS.items() if re.search(pattern, passage)]
                count, found = count + 1, found + Counter(hits)
                if hits and "--list" in arguments:
                    print(f"{file}:{number}: [{'; '.join(hits)}] {passage[:200]}")
        if count:
            print(f"{found.total():5} in {count:5} passages  {root.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
