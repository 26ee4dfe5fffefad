"""Evaluation questions, from files or from published question sets by name.

Published sets are files of Hub datasets, downloaded once into the Hub's cache. A `local_copy` is preferred.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import NOT_UTF8, Message, Unusable, is_utf8
from headstart.data.prompts.shapes import parse_prompt, tools_of
from headstart.errors import UserError, close
from headstart.support.files import read_jsonl


@dataclass(frozen=True)
class Question:
    """One line of a question file: the user's turns, the line's id or number, a system message and tools, if any."""

    question_id: str | int
    category: str
    turns: list[str]
    system: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)

    def messages(self, turns: int) -> list[Message]:
        """Return the system message and the first `turns` user turns, without answers."""
        said = [("system", self.system)] * bool(self.system) + [("user", turn) for turn in self.turns[:turns]]
        return [{"role": role, "content": text} for role, text in said]


def read_questions(path: Path) -> list[Question]:
    """Read JSONL with `turns` (or a single `prompt`) and optional `category`, `question_id`, `system` and `tools`.

    Raises UserError for a missing or empty file, or a malformed line.
    """
    questions: list[Question] = []
    for number, row in read_jsonl(path):
        key = "prompt" if "prompt" in row and "turns" not in row else "turns"
        turns = [row[key]] if key == "prompt" else row.get(key)
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            expected = "not a text" if key == "prompt" else "not a list of texts"
            raise UserError(
                f"{path}, line {number}: {key!r} is {expected if key in row else 'missing'}.",
                'Write {"turns": ["first question", ...]} or {"prompt": "question"}; no text may be blank.',
            )
        name = row.get("question_id", number)
        category, system, tools = row.get("category") or "", row.get("system") or "", tools_of(row.get("tools"))
        if type(name) not in (str, int) or not isinstance(category, str) or not isinstance(system, str):
            raise UserError(
                f"{path}, line {number}: 'question_id' must be text or a whole number, 'category' and 'system' text.",
                "Correct the line.",
            )
        if not is_utf8([name, category, turns, system, tools]):
            raise UserError(f"{path}, line {number}: a question {NOT_UTF8}.", "Replace lone surrogates.")
        questions.append(Question(name, category, list(turns), system, tools))
    if not questions:
        raise UserError(f"{path} holds no question.", 'Write one {"turns": ["..."]} or {"prompt": "..."} per line.')
    return questions


# -- published question sets ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions.

    Attributes:
        columns: renames columns to the names of `headstart.data.prompts.shapes`.
        category: default category of its questions.
        limit: default number of questions; None for all.
        revision: commit of the dataset; None for the newest.
        prepared: name of the file that SPEED-Bench's script writes from this one, with all categories.
    """

    dataset: str
    file: str
    columns: Mapping[str, str] = field(default_factory=dict)
    category: str = ""
    limit: int | None = None
    revision: str | None = None
    prepared: str = ""

    @property
    def local_copy(self) -> Path:
        """Path of a local copy, preferred to the Hub."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "headstart" / "suites" / self.dataset / (self.prepared or self.file)

    def how_to_copy(self) -> str:
        """Return instructions for creating the local copy."""
        if self.prepared:
            place, config = shlex.quote(str(self.local_copy.parent)), Path(self.prepared).stem
            return (
                f"write {self.local_copy} with curl -LsSf {_PREPARE} | python3 - --config {config} --output_dir "
                f"{place} (it needs datasets, pandas and tiktoken, and for some texts a Hub login)."
            )
        from huggingface_hub import hf_hub_url

        return f"save {hf_hub_url(self.dataset, self.file, repo_type='dataset')} as {self.local_copy}."


_TABLE = "test-00000-of-00001.parquet"
_MT_BENCH = QuestionFile("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", {"prompt": "turns"})
_HUMANEVAL = QuestionFile("openai/openai_humaneval", f"openai_humaneval/{_TABLE}", {"task_id": "id"}, "code")
_GSM8K = QuestionFile("openai/gsm8k", f"main/{_TABLE}", {"question": "prompt"}, "math", limit=80)
_ALPACA_TABLE = "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"
_ALPACA = QuestionFile("tatsu-lab/alpaca", _ALPACA_TABLE, category="instructions", limit=80)
_SPEC_BENCH = [
    QuestionFile("RedHatAI/speculator_benchmarks", f"{task}.jsonl", category=task)
    for task in ("translation", "summarization", "qa", "math_reasoning", "rag")
]
_REVISION = "454f88454792dfa3ccfd7ef15fff248efde44cd1"
_SCRIPTS = "aeda1da41ec2888848ffa094305b7669df493f6c"
_PREPARE = f"https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/{_SCRIPTS}/nemo_skills/dataset/speed-bench/prepare.py"
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # start of a prompt that the script must fetch
_SPEED_BENCH = {
    "qualitative": "coding humanities math multilingual qa rag reasoning roleplay stem summarization writing",
    **{f"throughput_{size}": "low_entropy mixed high_entropy" for size in ("1k", "2k", "8k", "16k", "32k")},
}
"""SPEED-Bench's configs and their categories. The five throughput configs default to 20 questions per category."""
SUITES: dict[str, tuple[QuestionFile, ...]] = {
    "mt-bench": (_MT_BENCH,),
    "humaneval": (_HUMANEVAL,),
    "gsm8k": (_GSM8K,),
    "spec-bench": (_MT_BENCH, *_SPEC_BENCH),
    "alpaca": (_ALPACA,),
    **{
        config.replace("qualitative", "speed-bench").replace("throughput_", "speed-bench-"): tuple(
            QuestionFile("nvidia/SPEED-Bench", f"{config}/{_TABLE}", {}, category, limit, _REVISION, f"{config}.jsonl")
            for category in categories.split()
            for limit in [None if config == "qualitative" else 20]
        )
        for config, categories in _SPEED_BENCH.items()
    },
}
"""Question sets by name; long ones default to 80 questions, as in the EAGLE papers. Spec-bench is MT-bench plus
RedHatAI's copy of the other tasks, one file each."""


def find_questions(name: str, limit: int | None = None) -> tuple[list[Question], bool]:
    """Return the questions of a file or suite, and whether it is a suite: suites are asked with all turns.

    "SUITE:CATEGORY" names one part of a suite. Parts are interleaved, so that `limit` takes equally many of each.

    Raises:
        UserError: neither a suite nor a file has this name, or its questions cannot be read or fetched.
    """
    path = Path(name).expanduser()
    if path.exists():
        return read_questions(path), False
    suite, _, category = name.partition(":")
    if suite not in SUITES:
        hint = f"Did you mean {meant}? " if (meant := close(suite, SUITES)) else ""
        raise UserError(f"No file at {name}.", f"{hint}Name a JSONL file, or one of {', '.join(SUITES)}.")
    chosen = [part for part in SUITES[suite] if category in ("", part.category)]
    if not chosen:
        known = [part.category for part in SUITES[suite] if part.category]
        if len(SUITES[suite]) == 1:
            raise UserError(f"{suite} has no parts, and {name!r} names one.", f"Write {suite}.")
        meant = close(category, known)
        hint = f"Did you mean {suite}:{meant}? " if meant else ""
        raise UserError(f"{suite} has no part {category!r}.", f"{hint}Leave it out, or name one of {', '.join(known)}.")
    parts = [islice(_read(suite, part), part.limit if limit is None else None) for part in chosen]
    interleaved = (question for each in zip_longest(*parts) for question in each if question is not None)
    return list(islice(interleaved, limit)), True


def _read(suite: str, part: QuestionFile) -> Iterable[Question]:
    file = part.local_copy if part.local_copy.is_file() else _fetch(suite, part)
    for number, row in _rows(file):
        if part.prepared and row.get("category") != part.category:
            continue
        try:
            named = {part.columns.get(column, column): value for column, value in row.items()}
            prompt = parse_prompt(named, f"{part.category}-{number}")
        except (ValueError, Unusable) as error:
            problem = f"{file}, record {number}: {error}."
            raise UserError(problem, f"It should be {part.file} of {part.dataset}; delete it and try again.") from None
        if prompt.turns[0].startswith(_PLACEHOLDER):
            problem = f"{suite}, question {prompt.id}: only a placeholder, for a text of {row.get('source')}."
            raise UserError(problem, f"To read it, {part.how_to_copy()}")
        yield Question(prompt.id, prompt.category or part.category, prompt.turns)


def _rows(file: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    if file.suffix == ".jsonl":
        return read_jsonl(file)
    from pyarrow import parquet  # type: ignore[import-untyped]  # a dependency of datasets

    batches = parquet.ParquetFile(file).iter_batches(batch_size=256)
    return enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def _fetch(suite: str, part: QuestionFile) -> Path:
    from huggingface_hub import hf_hub_download

    from headstart.support.hub_errors import explained

    try:
        with explained(f"Cannot fetch {part.file} of {suite} from", part.dataset):
            return Path(hf_hub_download(part.dataset, part.file, repo_type="dataset", revision=part.revision))
    except UserError as error:
        raise UserError(error.problem, f"{error.remedy} Or {part.how_to_copy()}") from error
