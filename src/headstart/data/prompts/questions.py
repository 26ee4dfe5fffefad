"""Question files: what a report is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.errors import UserError
from headstart.support.files import read_jsonl


@dataclass(frozen=True)
class Question:
    """One line of a question file: what the user says turn by turn, and the line's own id, or its number."""

    question_id: str | int
    category: str
    turns: list[str]


def read_questions(path: Path) -> list[Question]:
    """Read a question file: JSON objects a line, with `turns` and optionally `category` and `question_id`.

    A UserError names the file that is missing or empty, and the line that is malformed.
    """
    questions: list[Question] = []
    for number, row in read_jsonl(path):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise UserError(
                f"{path}, line {number}: 'turns' is {'not a list of texts' if 'turns' in row else 'missing'}.",
                'Write {"turns": ["first question", ...]}, each a text that is not blank.',
            )
        name = row.get("question_id", number)
        category = row.get("category") or ""
        if isinstance(name, bool) or not isinstance(name, str | int) or not isinstance(category, str):
            raise UserError(
                f"{path}, line {number}: 'question_id' must be text or a whole number, and 'category' text.",
                "Correct the line.",
            )
        questions.append(Question(name, category, list(turns)))
    if not questions:
        raise UserError(f"{path} holds no question.", 'Write one {"turns": ["..."]} a line.')
    return questions
