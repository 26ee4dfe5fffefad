"""The subject of an examination: a recipe, a run or heads, read lazily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.prompts.chat import prompt_tokens, with_template_kwargs, with_tools
from headstart.data.prompts.questions import Question, read_questions
from headstart.data.states.shard_format import damage_error
from headstart.data.states.store import StateStore
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.eval.audit import PROMPTS
from headstart.eval.replay import spread
from headstart.heads.base import DraftHead
from headstart.heads.io import CONFIG, RUN_RECIPE, is_exported, load_heads
from headstart.hub.format import heads_target, read_heads
from headstart.hub.pull import locate
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.pipeline.run import CONVERSATIONS, HEADS, STATES, TRAIN
from headstart.recipes.recipe import Recipe, load_recipe
from headstart.recipes.values import packaged_recipes
from headstart.support.artifacts import references, referred
from headstart.support.files import no_folder, read_json
from headstart.tuning.acceptance import Text

SPLITS = ("train", "validation")

_QUESTIONS = PROMPTS[8:]
"""Prompts if no file of questions is given."""


class Absent(Exception):
    """An optional input of a check is missing; the text names it."""


@dataclass
class Subject:
    """The inputs of the checks. Properties raise `Absent` for missing data, UserError for unreadable data.

    With `quick`, checks read less.
    """

    target: Target
    recipe: Recipe | None = None
    run: Path | None = None
    heads_folder: Path | None = None
    questions: Sequence[Question] = ()
    quick: bool = False

    @cached_property
    def heads(self) -> DraftHead:
        """The heads as they decode: bound to the target, in its dtype, frozen."""
        if self.heads_folder is None:
            raise Absent("there are no trained heads yet")
        if is_exported(read_json(self.heads_folder / CONFIG)):
            heads = read_heads(self.heads_folder, self.target)[0]
        else:
            heads = load_heads(self.heads_folder, self.target)
        return heads.to(self.target.dtype).eval().requires_grad_(False)

    @property
    def in_int8(self) -> bool:
        """Whether the training data may have been generated with int8 products."""
        return self.recipe is not None and self.recipe.data.in_int8

    @cached_property
    def conversations(self) -> dict[str, list[Conversation]]:
        files = {split: self.run / CONVERSATIONS / f"{split}.jsonl" for split in SPLITS} if self.run else {}
        if not files or not all(file.is_file() for file in files.values()):
            raise Absent("there are no conversations of a run here")
        return {split: read_conversations(file) for split, file in files.items()}

    def sample(self) -> list[tuple[str, int, Conversation]]:
        """Return some conversations of each split, as (split, index in it, conversation)."""
        return [
            (split, index, items[index])
            for split, items in self.conversations.items()
            for index in spread(len(items), 8 if self.quick else 64)
        ]

    @cached_property
    def stores(self) -> dict[str, StateStore]:
        """The run's hidden states by split; all files are verified unless quick."""
        shared = [folder for name in references(self.run) if (folder := referred(self.run, name))] if self.run else []
        if shared and not any(folder.is_dir() for folder in shared):
            raise UserError(
                f"{self.run} refers to artifacts in {shared[0].parent.parent}, and all of them are missing.",
                "Copy the whole folder of runs, artifacts included.",
            )
        if self.run is None or not (self.run / STATES / "train").is_dir():
            raise Absent("there are no stored hidden states here")
        stores = {split: StateStore(self.run / STATES / split) for split in SPLITS}
        for store in stores.values():
            if not self.quick and (broken := store.damaged_files()):
                raise damage_error(broken[0])
        return stores

    @cached_property
    def heldout(self) -> list[Conversation]:
        """A few texts outside the training set: validation answers, or answers that the target generates now."""
        try:
            return [item for item in self.conversations["validation"] if any(item.supervised)][: self._few]
        except Absent:
            return self.other_answers

    @cached_property
    def other_answers(self) -> list[Conversation]:
        """Answers that the target generates now: to the questions, or to requests that no data are made from."""
        prompts = self.question_prompts or self._prompts([Question("", "", [text]) for text in _QUESTIONS])
        answers = DecodeLoop(self.target).generate(prompts, DecodeOptions(max_new_tokens=48 if self.quick else 96))
        generated = []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text, sampling = Text.of(prompt, answer.tokens), {"temperature": 0.0}
            name = f"written now {number}"
            generated.append(Conversation(name, text.tokens, text.supervised, [], sampling=sampling))
        return generated

    @cached_property
    def question_prompts(self) -> list[list[int]]:
        """The first turn of a few questions, as prompts."""
        return self._prompts(self.questions)

    def _prompts(self, questions: Sequence[Question]) -> list[list[int]]:
        tokenizer = self.target.tokenizer
        few = questions[: self._few]
        return [prompt_tokens(question.messages(1), with_tools(tokenizer, question.tools)) for question in few]

    @property
    def _few(self) -> int:
        return 3 if self.quick else 8


def find_subject(
    path: str,
    run_dir: Path | None = None,
    questions: Path | None = None,
    target: str | None = None,
    quick: bool = False,
    trust_remote_code: bool = False,
) -> Subject:
    """Resolve a name or path and load its target: a packaged recipe, a recipe file, a run folder, a folder of heads, or
    a Hub id of heads.

    Args:
        run_dir: the run of a recipe or of heads; by default runs/<name>, or a parent folder of the heads.
        questions: a file of the questions expected in use.
        target: overrides the target of the recipe or the heads.
        quick: sample less of everything.
        trust_remote_code: run code of the target's repository; a recipe can set it as well.
    """
    expected = read_questions(questions) if questions else []
    if run_dir is not None and not run_dir.is_dir():
        raise no_folder(run_dir, "Give the folder of a run, such as runs/quickstart.")
    recipe, run, heads_folder = _locate(path, run_dir)
    if recipe is None:
        assert heads_folder is not None, "_locate finds a recipe or heads"
        return Subject(
            _target_of_heads(heads_folder, target, trust_remote_code), None, run, heads_folder, expected, quick
        )
    trained = [run / HEADS, run / TRAIN / "best"] if run else []
    heads_folder = heads_folder or next((folder for folder in trained if folder.is_dir()), None)
    section = recipe.target
    revision, adapter = (None, None) if target else (section.revision, section.adapter)
    loaded = load_target(
        target or section.spec,
        section.dtype,
        section.device,
        revision,
        adapter=adapter,
        quantization=section.quantization,
        trust_remote_code=trust_remote_code or section.trust_remote_code,
    )
    loaded = loaded.with_tokenizer(with_template_kwargs(loaded.tokenizer, recipe.data.chat_template_kwargs))
    return Subject(loaded, recipe, run, heads_folder, expected, quick)


def _locate(path: str, run_dir: Path | None) -> tuple[Recipe | None, Path | None, Path | None]:
    """Resolve a name or path to the recipe, the run and the folder of heads."""
    folder = Path(path).expanduser()
    if (folder / RUN_RECIPE).is_file():
        return load_recipe(str(folder / RUN_RECIPE)), folder, None
    if path in packaged_recipes() or folder.is_file() or folder.suffix in (".yaml", ".yml"):
        recipe = load_recipe(path)
        run = run_dir or Path("runs") / recipe.name
        return recipe, run if run.is_dir() else None, None
    if "/" not in path and not folder.is_dir():
        load_recipe(path)  # suggests the closest recipe
    folder = locate(path)
    candidates = [run_dir] if run_dir else list(folder.absolute().parents)[:2]
    run_of_heads = next((parent for parent in candidates if (parent / RUN_RECIPE).is_file()), None)
    recipe_of_run = load_recipe(str(run_of_heads / RUN_RECIPE)) if run_of_heads else None
    return recipe_of_run, run_of_heads or run_dir, folder


def _target_of_heads(folder: Path, target: str | None, trust_remote_code: bool) -> Target:
    if not is_exported(read_json(folder / CONFIG)):
        if target is None:
            raise UserError(f"The heads in {folder} do not name their target.", "Name it with --target.")
        return load_target(target, trust_remote_code=trust_remote_code)
    trained_on = heads_target(folder)
    spec, adapter = target or trained_on.spec, trained_on.adapter_spec(folder)
    return trained_on.with_variables(load_target(spec, adapter=adapter, trust_remote_code=trust_remote_code))
