"""Stages before training: load the target, write conversations, compute their hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart.data.conversations.building import ConversationBuild, build_conversations
from headstart.data.conversations.identity import identity, pin_as_begun, pin_to, requested_revisions
from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.prompts.chat import check_prompts
from headstart.data.prompts.sources import find_origin, is_here
from headstart.data.states.served import ServedStates
from headstart.data.states.shards import Capture, StateKind, build_store, compute_states
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.hub.engines.export import check_heads
from headstart.hub.engines.facts import facts_of_target
from headstart.model.frozen import FrozenModel
from headstart.model.loading import WEIGHT_SUFFIXES, gguf_file
from headstart.model.model import Target
from headstart.model.outline import Outline
from headstart.model.teacher import load_teacher, save_teacher, teacher_folder, teacher_problem
from headstart.pipeline.generation_servers import generation_servers
from headstart.pipeline.run import (
    CONVERSATIONS,
    QUESTIONS,
    STATES,
    TARGET,
    Outcome,
    Run,
    Stage,
    before,
    content,
    flat,
)
from headstart.pipeline.states_servers import refuse_without_hooks, served_states
from headstart.pipeline.workload import counted_lengths
from headstart.replay.patch import FINAL
from headstart.servers.engines import ENGINES
from headstart.support.artifacts import (
    Artifact,
    add_reference,
    artifact,
    forget,
    lock_artifact,
    read_note,
    referred,
    root_of,
)
from headstart.support.files import format_bytes, need_disk, read_json, write_json, write_jsonl
from headstart.support.lock import Busy
from headstart.support.terminal import progress_bar, tell

_TOKENIZER = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
"""Tokenizer files that the target stage keeps."""
_SPLITS = ("train", "validation")
_STATES_VERSION = 1
"""Raise it when the same settings produce other states; conversations have a version of their own."""


def state_kind(run: Run) -> StateKind:
    """Return layers and format of the run's hidden states; `run.described` is enough to tell their size."""
    return StateKind(run.described, tuple(aux_layers(run)), run.recipe.data.states_dtype)


def states_artifact(run: Run) -> Artifact:
    target = run.described
    identity = {
        "version": _STATES_VERSION,
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": target.dtype_name,
        "int8": run.recipe.data.in_int8,  # states captured while writing are rounded, too
    }
    return artifact(run.folder, "states", Path(target.name).name, identity)


def _target_settings(run: Run) -> dict[str, Any]:
    target = run.recipe.target
    paths = [Path(spec).expanduser() for spec in (target.spec, target.adapter) if spec]
    folders = [sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path] for path in paths]
    # A folder with a config and no weights is not the target that the run began with.
    files = [file for held in folders if any(file.suffix in WEIGHT_SUFFIXES for file in held) for file in held]
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    return {**flat("target", target), "the target's files": stamps}


def check_formats(run: Run, target: FrozenModel) -> list[str]:
    """Return remarks on the formats of `export.formats` and `eval.engine`; a UserError if one cannot hold the heads."""
    formats, engine = list[str](run.recipe.export.formats), ENGINES.get(run.recipe.eval.engine or "")
    if engine is not None:
        formats = [*dict.fromkeys((*formats, engine.format))]
        if engine.needs_gguf and gguf_file(run.recipe.target.spec) is None:
            problem = f"eval.engine={engine.name} needs a GGUF file, but {run.recipe.target.spec} is not one."
            raise UserError(problem, "Set eval.engine=vllm or null.")
    if not formats:
        return []
    config = make_config(run.recipe.heads, target)
    heads = family(config.family)(config)
    if heads.publishing_reads_target:
        heads.bind(run.frozen() if isinstance(target, Outline) else target)
    facts, remarks = facts_of_target(target), list[str]()
    for name in formats:
        try:
            remarks += check_heads(name, heads.publish(), facts)
        except UserError as error:
            raise UserError(
                error.problem, f"{error.remedy} Or leave {name} out of export.formats and eval.engine."
            ) from None
    return remarks


def _target(run: Run) -> Outcome:
    target = run.described
    check_prompts(target.tokenizer, run.recipe.data.self_share > 0)
    aux_layers(run)  # a mistake in the heads' settings shows now, not after the data
    if run.recipe.data.states_source == ("vllm",):
        refuse_without_hooks(target)
    for remark in check_formats(run, target):
        tell(run.console, remark)
    if run.recipe.data.minutes is None and not run.recipe.data.online:
        _need_room_for_states(run)
    target.tokenizer.save_pretrained(run.folder / TARGET / "tokenizer")
    loaded = f"{target.dtype_name} on {target.device}"
    where = "not loaded where servers run it" if target.device.type == "meta" else loaded
    return Outcome(
        f"{target.name}, {target.parameters / 1e6:.1f} M parameters, {where}", identity=target.whole_identity
    )


def _need_room_for_states(run: Run) -> None:
    """Raise a UserError if the disk cannot hold the hidden states within data.cache_gigabytes."""
    data, target = run.recipe.data, run.described
    lengths = counted_lengths(data, target.tokenizer, target.max_length)
    size = state_kind(run).bytes(int((data.conversations + data.validation) * lengths.tokens))
    existing = sum(file.stat().st_size for file in states_artifact(run).folder.glob("shard-*.safetensors"))
    need_disk(run.folder, min(size, int(1e9 * data.cache_gigabytes)) - existing, "Keeping hidden states")


def aux_layers(run: Run) -> list[int]:
    """Return the hidden states that the heads read, FINAL included. Cached in a file: later calls load no model."""
    file, record = run.folder / "data" / "aux_layers.json", run.finished_record("target")
    key = {"heads": run.recipe.heads.to_recipe(), "target": record.identity if record else ""}
    if file.is_file() and (known := read_json(file)).items() >= key.items():
        return [int(layer) for layer in known["aux_layers"]]
    target = run.described if record is None else run.frozen()
    config = make_config(run.recipe.heads, target)
    with torch.device("meta"):
        needed = sorted({*family(config.family)(config).aux_layers, FINAL})
    write_json(file, {**key, "target": target.whole_identity, "aux_layers": needed})
    return needed


def _conversation_settings(run: Run) -> dict[str, Any]:
    data = run.recipe.data
    contents = [_prompts_content(source.source) for source in data.sources]
    return {
        **flat("data", data),
        "data.server": bool(data.server),
        "the excluded questions": [content(file) for file in data.exclude],
        "the prompts' content": _prompts_content(data.prompts) if isinstance(data.prompts, str) else contents,
        "states of a token": len(aux_layers(run)),
        **{name: content(run.folder / TARGET / "tokenizer" / name) for name in _TOKENIZER},
    }


def _prompts_content(source: str) -> str | None:
    """Return the hash of a local file or folder of prompts; None for other sources."""
    return find_origin(source).content if is_here(source) else None


def _conversations(run: Run) -> Outcome:
    data, target = run.recipe.data, _writer(run)
    slug = "-".join([*["self"] * (data.self_share > 0), *(Path(source.source).stem for source in data.sources)][:3])
    settings = data.model_dump(mode="json")
    earlier = {} if run.earlier is None else run.earlier.settings
    prompts, revision = (earlier.get(f"data.{key}", settings[key]) for key in ("prompts", "revision"))
    if requested_revisions(prompts, revision) != requested_revisions(settings["prompts"], settings["revision"]):
        forget(run.folder, "conversations")  # an attempt that fails now must not find its commits again
    made = _conversations_artifact(run, slug)
    folder = run.folder / CONVERSATIONS
    if not data.online:
        states = states_artifact(run)
        try:
            with lock_artifact(states, wait=False):
                add_reference(run.folder, "states", states)
        except Busy:
            # Another run may compute states there for hours; both add complete shards.
            add_reference(run.folder, "states", states)
    with lock_artifact(made, run.console) as path:
        add_reference(run.folder, "conversations", made)
        data, (max_tokens, capture) = pin_to(data, made.identity), _limit_and_capture(run)
        with generation_servers(run) as servers:
            splits = build_conversations(
                target, data, folder, run.console, shared=path, max_tokens=max_tokens, capture=capture, servers=servers
            )
    questions = [
        {
            "question_id": item.id,
            "category": item.category,
            "turns": [turn["content"] for turn in item.messages if turn["role"] == "user"],
            "system": next((turn["content"] for turn in item.messages[:1] if turn["role"] == "system"), ""),
            "tools": item.tools,
        }
        for item in splits.heldout
    ]
    write_jsonl(run.folder / QUESTIONS, questions)
    used = [content(folder / f"{split}.jsonl") for split in (*_SPLITS, "heldout")]
    return Outcome(
        f"{splits.counts['train']} conversations with {splits.answer_tokens} answer tokens; "
        f"{splits.counts['validation']} for validation, {splits.counts['heldout']} held out",
        identity=" ".join(map(str, [made.name, *used])),
    )


def _writer(run: Run) -> Target:
    """Return the target for writing conversations; not loaded if servers write or all answers are given."""
    data = run.recipe.data
    return run.described if data.server or not data.own_answers else run.target


def _conversations_artifact(run: Run, slug: str = "") -> Artifact:
    """Return the artifact of the recipe's conversations, at the Hub commits that the run began with."""
    known = referred(run.folder, "conversations")
    data = pin_as_begun(run.recipe.data, {} if known is None else read_note(known))
    return artifact(run.folder, "conversations", slug, identity(run.described, data))


def shared_data(run: Run) -> dict[str, Path]:
    """Return the existing artifacts that the data stages would extend, by stage. Asks the Hub only if there are any."""
    if not root_of(run.folder).is_dir():
        return {}
    made = {"conversations": _conversations_artifact(run)}
    if not run.recipe.data.online:
        made["states"] = states_artifact(run)
    return {stage: each.folder for stage, each in made.items() if each.folder.is_dir()}


def _limit_and_capture(run: Run) -> tuple[float, Capture | None]:
    """Return the number of tokens with states in the byte budget, and the sink for states captured in generation."""
    data = run.recipe.data
    if data.online:
        return math.inf, None
    kind = state_kind(run)
    return 1e9 * data.cache_gigabytes / kind.bytes(1), Capture(states_artifact(run).folder, kind)


def help_with_data(run: Run, done: set[str]) -> None:
    """Generate conversations and hidden states for the process that holds the run; add finished stages to `done`.

    Helpers send no requests to servers: one process starts engines and limits the number of requests.
    """
    data, path = run.recipe.data, referred(run.folder, "conversations")
    if path is None or (made := _conversations_artifact(run)).folder != path:
        return  # the main process has not reached this recipe's conversations yet
    if not data.server and "conversations" not in done:
        max_tokens, capture = _limit_and_capture(run)
        settings = pin_to(data, made.identity)
        build = ConversationBuild(_writer(run), settings, path, max_tokens=max_tokens, capture=capture)
        build.run(records_time=False)
        done.add("conversations")
    computes_states = not (data.online or data.states_source or "states" in done)
    if computes_states and run.finished_record("conversations") is not None:
        kind = replace(state_kind(run), target=run.target)
        for _, texts, budget in splits_in_budget(run):
            compute_states(kind, kind.fit(texts, budget), states_artifact(run).folder)
        done.add("states")


def splits_in_budget(run: Run) -> Iterator[tuple[str, list[Conversation], int]]:
    """Yield each split, its conversations and the byte budget for their states.

    Validation comes first, so only training text is cut to data.cache_gigabytes. Conversations with non-finite states
    count too: they are found late, and all processes must plan the same shards.
    """
    budget, kind = int(1e9 * run.recipe.data.cache_gigabytes), state_kind(run)
    for split in reversed(_SPLITS):
        texts = conversations(run, split)
        yield split, texts, budget
        budget -= kind.bytes(sum(len(item.tokens) for item in kind.fit(texts, budget)))


def conversation_files(run: Run) -> dict[str, Path]:
    return {split: run.folder / CONVERSATIONS / f"{split}.jsonl" for split in _SPLITS}


def conversations(run: Run, split: str) -> list[Conversation]:
    return read_conversations(conversation_files(run)[split])


def _state_settings(run: Run) -> dict[str, Any]:
    data = run.recipe.data
    names = ("data.states",) if data.online else ("data.states", "data.states_dtype", "data.cache_gigabytes")
    return {**{name: flat("data", data)[name] for name in names}, "layers of the heads": aux_layers(run)}


def _states(run: Run) -> Outcome:
    if run.recipe.data.states_source == ("vllm",):
        run.release()  # a target that wrote the conversations: engines need the GPU's memory
    if run.recipe.data.online:
        (run.folder / STATES).mkdir(parents=True, exist_ok=True)
        forget(run.folder, "states")
        parts = ["online", before(run, "target"), before(run, "conversations"), *map(str, aux_layers(run))]
        how = "training streams them from servers" if run.recipe.data.states_source else "training computes them"
        return Outcome(f"nothing to store: {how} (data.states=online)", identity=" ".join(parts))
    stores = both_stores(run)
    notice = "".join(f"; {split}: {store.notice}" for split, store in stores.items() if store.notice)
    size = format_bytes(sum(part.bytes for part in stores.values()))
    return Outcome(
        f"hidden states of {sum(part.tokens for part in stores.values())} tokens, {size}{notice}",
        identity=" ".join([*(part.fingerprint for part in stores.values()), *map(str, aux_layers(run))]),
    )


def _broken_states(run: Run) -> str | None:
    if run.recipe.data.online:
        return None
    try:
        store = kept_stores(run)["train"]
        return teacher_problem(teacher_folder(store.shards, store.target_fingerprint, store.dtype))
    except (UserError, KeyError, TypeError) as error:
        return error.problem if isinstance(error, UserError) else "a manifest is damaged"


def kept_stores(run: Run) -> dict[str, StateStore]:
    """Open the hidden states of both splits; a UserError where they are missing or broken."""
    return {split: StateStore(run.folder / STATES / split) for split in _SPLITS}


def both_stores(run: Run) -> dict[str, StateStore]:
    """Compute missing hidden states of both splits, and keep the target's teacher beside them."""
    served = run.recipe.data.states_source is not None
    target, stores, shared = run.described if served else run.target, dict[str, StateStore](), states_artifact(run)
    with lock_artifact(shared, run.console) as shards, ExitStack() as stack:
        add_reference(run.folder, "states", shared)
        layers = make_config(run.recipe.heads, target).start_layers
        teacher = save_teacher(shards, target, layers, run.recipe.target.revision)

        @cache
        def client() -> ServedStates:  # lazy: engines start only if states are missing
            # A teacher on the CPU leaves the whole GPU to the engines.
            unloaded = None if teacher is None or "target" in vars(run) else load_teacher(teacher, torch.device("cpu"))
            return stack.enter_context(served_states(run, unloaded or run.target, aux_layers(run)))

        for split, texts, budget in splits_in_budget(run):
            with progress_bar(run.console, f"hidden states ({split})", unit="tokens") as bar:
                stores[split] = build_store(
                    run.folder / STATES / split,
                    texts,
                    target,
                    aux_layers(run),
                    budget_bytes=budget,
                    shards=shards,
                    states_dtype=run.recipe.data.states_dtype,
                    advance=bar.update,
                    compute=(lambda rows, layers: client().states(rows, layers)) if served else None,
                )
    return stores


DATA_STAGES = (
    Stage(
        name="target",
        title="loading and checking the target",
        version=1,
        outputs=(TARGET,),
        after=(),
        settings=_target_settings,
        work=_target,
    ),
    Stage(
        name="conversations",
        title="the target writes and answers prompts",
        version=3,
        outputs=(CONVERSATIONS, QUESTIONS),
        after=("target",),
        settings=_conversation_settings,
        work=_conversations,
        takes_memory="data.batch_size or data.max_new_tokens",
    ),
    Stage(
        name="states",
        title="computing hidden states",
        version=_STATES_VERSION,
        outputs=(STATES,),
        after=("target", "conversations"),
        settings=_state_settings,
        work=_states,
        takes_memory="data.max_new_tokens and data.max_prompt_tokens, or set target.device=all or cpu",
        broken=_broken_states,
    ),
)
