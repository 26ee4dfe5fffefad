"""One update of heads in service: trained on recent traffic and the run's own conversations, then judged.

Its files are in the folder of the log, so that deleting the log deletes them too:

    LOG/update/train.jsonl, validation.jsonl   training texts; texts for model selection and tuning
    LOG/update/plan.json                       written after these: their provenance
    LOG/update/states, train, heads            hidden states, training, and the trained heads

A killed update resumes. Once judged, the update moves to the run's folder and this folder is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headstart.adapt.gate import compare_rounds, refusals, replay_heads
from headstart.adapt.options import LEAST, AdaptOptions
from headstart.adapt.service import BUSY, Service
from headstart.data.conversations.records import Conversation, read_conversations, tokens_key, write_conversations
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.sources import shuffled
from headstart.data.served.log import PLAN, UPDATE, Served, delete_update
from headstart.data.served.reading import choose_requests, read_log, to_conversation
from headstart.data.states.shards import StateKind, build_store
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.io import load_heads, version_of
from headstart.hub.format import ANSWERS, export_heads, read_heads
from headstart.model.model import Target
from headstart.pipeline.data_stages import aux_layers, conversations
from headstart.pipeline.run import Run
from headstart.recipes.recipe import Recipe, load_recipe
from headstart.recipes.values import packaged_recipes
from headstart.support.answer_file import read_answers
from headstart.support.artifacts import link_or_copy, referred
from headstart.support.files import no_folder, read_json, write_json, write_text
from headstart.support.lock import locked
from headstart.support.terminal import progress_bar, tell
from headstart.train.trainer import train
from headstart.train.training_artifact import RESULT, is_finished
from headstart.tree.tree import TreeShape
from headstart.tuning.tune import Tuning, tune

_JUDGING = 4
"""The newest 1/4 of the requests is held out to judge the heads."""
_VALIDATION = 8
"""1/8 of the training texts is held out for model selection."""


class Waiting(UserError):
    """Not enough traffic yet."""


@dataclass
class Update:
    """An update of a run's heads from a log. `overrides` change settings of its training."""

    run: Run
    log: Path
    options: AdaptOptions = field(default_factory=AdaptOptions)
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.options.mix < 1:
            raise UserError(f"--mix is {self.options.mix}.", "Give a share from 0 to below 1.")
        self.service = Service(self.run.folder)
        self.folder = self.log / UPDATE

    @property
    def target(self) -> Target:
        return self.run.target

    @property
    def planned(self) -> bool:
        """Whether the training texts are on disk."""
        return (self.folder / PLAN).is_file()

    @property
    def trained(self) -> bool:
        return self.planned and (self.folder / "heads").is_dir()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the log against other updates and deletion."""
        if not self.log.is_dir():
            raise no_folder(self.log, "Serve with a log first: headstart chat HEADS --log FOLDER.")
        with locked(self.log, BUSY):
            if self.planned and read_json(self.folder / PLAN)["of"] != version_of(self.service.heads(0)):
                raise UserError(
                    f"The update under way in {self.log} is of the heads of another run.",
                    "Judge that update first (headstart adapt gate), or use a separate log.",
                )
            yield

    def train(self) -> Path:
        """Train the heads of the update, or resume training. Returns their folder.

        Raises:
            Waiting: too few requests since the update before.
            Busy: another process adapts these heads, or uses this log.
            UserError: nothing to learn from, or training refuses its settings.
        """
        with self._lock():
            if not self.planned:
                with self.service.lock():
                    self._plan()
            if not self.trained:
                plan = read_json(self.folder / PLAN)
                recipe = self._recipe(plan)
                if not is_finished(self.folder / "train"):
                    train(recipe, self.target, *self._stores(recipe), self._subfolder("train"), self.run.console)
                self._tune(recipe, plan)
        return self.folder / "heads"

    def gate(self) -> dict[str, Any]:
        """Judge the heads of the update, store them with the figures, and serve them if they pass. Returns the figures.

        Raises:
            Waiting: too few requests came after the training texts.
            UserError: no heads to judge.
        """
        service = self.service
        with self._lock(), service.lock():
            if not self.trained:
                raise UserError("There is no update to judge.", "Train one: headstart adapt train RUN --log FOLDER.")
            plan = read_json(self.folder / PLAN)
            judged = next((each for each in service.updates() if each["plan"] == plan), None)
            if judged is None:
                judged = {"number": service.next_number, **self._judge(plan)}
                service.add(judged["number"], self.folder / "heads", judged)
            if judged["accepted"]:
                service.serve(judged["number"], "accepted")
            delete_update(self.log)
        return judged

    def _plan(self) -> None:
        self.service.check_current()
        if not any(self.log.glob("*.jsonl")):
            raise Waiting(f"The log in {self.log} is empty.", "Serve with it first.")
        served, left_out = read_log(self.log, self.target)
        before = max((each["plan"]["seen"] for each in self.service.updates()), default=0.0)
        new = sum(item.time > before for item in served)
        if new < self.options.requests:
            raise Waiting(
                f"{new} requests are new in {self.log}, and an update needs {self.options.requests}. "
                f"{left_out.notice}".strip(),
                "Serve more, or lower --requests.",
            )
        recent = served[-self.options.recent :]
        first_later = len(recent) - len(recent) // _JUDGING
        learnt = choose_requests(recent[:first_later], self.options.per_source, left_out)
        own, share = conversations(self.run, "train"), self.options.mix / (1 - self.options.mix)
        own = shuffled(own, self.service.next_number)[: round(share * len(learnt))]
        texts = {"traffic": list(map(to_conversation, learnt)), "own": own}
        data = self.run.recipe.data
        kind = StateKind(self.target, tuple(aux_layers(self.run)), data.states_dtype)
        needed = sum(kind.bytes(len(text.tokens)) for part in texts.values() for text in part)
        fraction = 1e9 * data.cache_gigabytes / max(needed, 1)
        if fraction < 1:  # the same fraction of both, keeping the newest requests
            texts = {name: part[len(part) - int(fraction * len(part)) :] for name, part in texts.items()}
            left_out.add("beyond data.cache_gigabytes", count=len(learnt) - len(texts["traffic"]))
        splits: dict[str, list[Conversation]] = {"train": [], "validation": []}
        for part in texts.values():
            for place, text in enumerate(part):
                splits["validation" if place % _VALIDATION == _VALIDATION - 1 else "train"].append(text)
        if not all(splits.values()):
            raise Waiting(f"{len(texts['traffic'])} requests are usable. {left_out.notice}", "Serve more.")
        delete_update(self.log)
        for split, part in splits.items():
            write_conversations(self._subfolder() / f"{split}.jsonl", part)
        plan = {
            "of": version_of(self.service.heads(0)),
            "base": self.service.serving,
            "until": recent[first_later - 1].time,
            "seen": served[-1].time,
            "requests": len(texts["traffic"]),
            "answer_tokens": sum(sum(text.supervised) for text in texts["traffic"]),
            "own_conversations": len(texts["own"]),
            "left_out": left_out.counts,
        }
        write_json(self.folder / PLAN, plan)
        counts = f"{plan['requests']} requests and {plan['own_conversations']} conversations of the run"
        tell(self.run.console, f"An update of {counts}.")
        if left_out.notice:
            tell(self.run.console, f"    {left_out.notice}")

    def _recipe(self, plan: dict[str, Any]) -> Recipe:
        """Return the run's recipe with the `adapt` recipe's training, started from the heads in service."""
        low_rank = yaml.safe_load(packaged_recipes()["adapt"].read_text(encoding="utf-8"))["train"]
        start = str(self.service.heads(plan["base"]))
        section = {"steps": None, "minutes": None, "epochs": 4, **low_rank, "start_from": start}
        file = self.folder / "recipe.yaml"
        values = {"extends": str((self.run.folder / "recipe.yaml").resolve()), "train": section}
        write_text(file, yaml.safe_dump(values, sort_keys=False))
        return load_recipe(str(file), self.overrides)

    def _stores(self, recipe: Recipe) -> tuple[StateStore, StateStore]:
        """Prefill the texts for hidden states, reusing the run's shards of its own conversations."""
        shards, data = self._subfolder("states/shards"), recipe.data
        existing = referred(self.run.folder, "states")
        for file in existing.glob("shard-*.safetensors") if existing is not None else ():
            if not (shards / file.name).exists():
                link_or_copy(file, shards / file.name)
        stores = []
        for split in ("train", "validation"):
            texts, folder = read_conversations(self.folder / f"{split}.jsonl"), self.folder / "states" / split
            with progress_bar(self.run.console, f"hidden states ({split})", unit="tokens") as bar:
                store = build_store(
                    folder,
                    texts,
                    self.target,
                    aux_layers(self.run),
                    budget_bytes=int(1e9 * data.cache_gigabytes),
                    shards=shards,
                    states_dtype=data.states_dtype,
                    advance=bar.update,
                )
                stores.append(store)
            if stores[-1].notice:
                tell(self.run.console, f"    {stores[-1].notice}")
        return stores[0], stores[1]

    def _tune(self, recipe: Recipe, plan: dict[str, Any]) -> None:
        """Recalibrate the heads at the costs measured for the heads in service."""
        heads = load_heads(self.folder / "train" / "best", self.target).to(self.target.dtype)
        texts = read_conversations(self.folder / "validation.jsonl")
        before = Tuning.from_json(self._read(plan["base"])[2])
        tuning = tune(self.target, heads, texts, recipe.tune, self.run.console, before=before)
        facts = {
            "adapted from": f"update {plan['base']} ({version_of(self.service.heads(plan['base']))})",
            "requests learnt": str(plan["requests"]),
            "conversations of the run": str(plan["own_conversations"]),
        }
        file = self.service.heads(plan["base"]) / ANSWERS  # of the run's own texts: traffic stays in the log
        answers = read_answers(file) if file.is_file() else []
        export_heads(self.folder / "heads", heads, self.target, tuning.to_json(), {"training": facts}, answers)

    def _judge(self, plan: dict[str, Any]) -> dict[str, Any]:
        left_out, target, console = LeftOut(), self.target, self.run.console
        learnt = (read_conversations(self.folder / f"{split}.jsonl") for split in ("train", "validation"))
        known = {tokens_key(text.tokens[: text.supervised.index(True)]) for part in learnt for text in part}
        served: list[Served] = [item for item in read_log(self.log, target)[0] if item.time > plan["until"]]
        new, _, _ = read_heads(self.folder / "heads", target)
        later = []
        for item in choose_requests(served[-self.options.recent :], self.options.per_source, left_out, known):
            if len(item.answer) > new.draft_steps + 1:
                later.append(to_conversation(item))
            else:
                left_out.add("too short to draft in")
        if len(later) < LEAST:
            raise Waiting(
                f"{len(later)} usable requests came after the training texts, and the gate needs {LEAST}. "
                f"{left_out.notice}",
                "Serve more, then judge again: headstart adapt gate RUN --log FOLDER.",
            )
        own = conversations(self.run, "validation")
        serving = self.service.serving
        old, shape, _ = self._read(serving)
        paths = (shape if shape.size > 1 else TreeShape.chain(old.draft_steps)).paths
        of_new = replay_heads(target, new, [*later, *own], paths, console)
        of_old = replay_heads(target, old, [*later, *own], paths, console)
        baselines = {f"the heads in service (update {serving})": compare_rounds(of_new, of_old, own)}
        if serving:  # so that undetected small falls do not add up
            of_run = replay_heads(target, self._read(0)[0], own, paths, console)
            baselines["the run's heads"] = compare_rounds(of_new, of_run, own)
        on_later = compare_rounds(of_new, of_old, later, traffic=True)
        reasons = refusals(on_later, baselines, self.options.fall)
        result = read_json(self.folder / "train" / RESULT)
        return {
            "accepted": not reasons,
            "why": reasons,
            "version": version_of(self.folder / "heads"),
            "judged": time.time(),
            "later": {**on_later, "left_out": left_out.counts},
            "own": baselines,
            "training": {"steps": result["steps"], "seconds": result["elapsed_seconds"]},
            "plan": plan,
        }

    def _read(self, number: int) -> tuple[DraftHead, TreeShape, dict[str, Any]]:
        return read_heads(self.service.heads(number), self.target)

    def _subfolder(self, name: str = "") -> Path:
        self.folder.mkdir(mode=0o700, exist_ok=True)  # conversations stay private in a readable log folder
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
