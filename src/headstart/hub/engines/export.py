"""Export of heads in engine formats, and checks of such files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.errors import UserError, nearest
from headstart.heads.exchange.published import MARKOV_LM_HEAD, SUCCESSORS, Layout, Published, digest
from headstart.heads.io import heads_folder
from headstart.hub.card import ENGINE_FILES, is_engine_folder, is_hub_id, is_untuned, write_engine_card
from headstart.hub.engine_tuning import EngineTuning, read_engine_tunings
from headstart.hub.engines.base import SAY_WHERE, Finding, Format, rounded
from headstart.hub.engines.facts import facts_of_heads, facts_of_spec, facts_of_target
from headstart.hub.engines.folders import FolderFormat, Sglang, Speculators, Vllm
from headstart.hub.engines.gguf import Gguf
from headstart.hub.engines.known_engines import KNOWN_ENGINES, serve_commands
from headstart.hub.format import TREE, check_folder
from headstart.hub.pull import has_heads
from headstart.hub.target_facts import TargetFacts
from headstart.model.frozen import FrozenModel
from headstart.model.loading import load_target, read_embeddings
from headstart.model.model import Target
from headstart.support.files import no_folder, read_json, refuse_foreign_code, write_atomic
from headstart.support.terminal import program

FORMATS: dict[str, Format] = {format.name: format for format in (Vllm(), Sglang(), Speculators(), Gguf())}
_SAME = 0.02
"""Relative error allowed for rounding to int8 or bfloat16."""


@dataclass(frozen=True)
class Exported:
    """Result of an export; `drafts` are measured chain lengths by engine and concurrent requests."""

    folder: Path
    engines: tuple[str, ...]
    published: Published
    facts: TargetFacts
    drafts: Mapping[str, Mapping[int, int]]
    remarks: tuple[str, ...] = ()

    @property
    def commands(self) -> dict[str, str]:
        """Command lines that serve target and heads, by engine."""
        words = serve_commands(self.engines, self.folder, self.published, self.facts, self.drafts)
        return {engine: shlex.join(each) for engine, each in words.items()}

    def words(self, drafts: Mapping[str, Mapping[int, int]]) -> dict[str, list[str]]:
        """Return commands for measurements, as argument lists; the engines verify all drafts, as replays do."""
        always = replace(self.published, confidence=False)
        return serve_commands(self.engines, self.folder, always, self.facts, drafts)


def _format_named(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"Unknown format {name!r}.", nearest(name, ["headstart", "checkpoint", *FORMATS]))
    return FORMATS[name]


def export_for(
    heads: Path,
    out: Path,
    formats: str | Sequence[str],
    target: FrozenModel | str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write heads in one or several engine formats, atomically; see `headstart.export`.

    Also raises UserError if files of two formats collide.
    """
    chosen = [_format_named(name) for name in dict.fromkeys([formats] if isinstance(formats, str) else formats)]
    folder_formats = [format.name for format in chosen if isinstance(format, FolderFormat)]
    if len(folder_formats) > 1:
        raise UserError(
            f"{' and '.join(folder_formats)} both write config.json and model.safetensors.",
            "Write each into its own folder; --format gguf can be combined with any of them.",
        )
    for format in chosen:
        if dtype and dtype not in format.dtypes:
            raise UserError(f"{format.name} has no dtype {dtype!r}.", nearest(dtype, format.dtypes))
    refuse_foreign_code(out, ENGINE_FILES if is_engine_folder(out) else ())
    published, facts = publish(heads, target, trust_remote_code)
    measured = read_engine_tunings(heads_folder(heads))
    engines, remarks = _served(chosen, published, facts)
    remarks += _drafting_remarks(heads_folder(heads), chosen, published, measured)
    embeddings_VE = (
        _embeddings(target, facts) if any(format.stores_embeddings(published) for format in chosen) else None
    )
    drafts = {name: tuning.drafts for name, tuning in measured.items() if tuning.drafts}

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        for format in chosen:
            stored = published if embeddings_VE is None else format.with_embeddings(published, embeddings_VE)
            format.write(stored, facts, partial, dtype or format.dtypes[0])
        elsewhere = replace(facts, folder=facts.spec if is_hub_id(facts.spec) else "TARGET", gguf=None)
        commands = serve_commands(engines, "HEADS", published, elsewhere, drafts)
        write_engine_card(partial, published, facts, commands, measured)
        for format in chosen:
            if findings := format.check(partial, format.engines[0]):
                raise AssertionError(f"the export fails its own check: {findings[0].problem}")

    write_atomic(out, write)
    return Exported(out, tuple(engines), published, facts, drafts=drafts, remarks=tuple(remarks))


def check_heads(name: str, published: Published, facts: TargetFacts) -> list[str]:
    """Raise a UserError if a format or its engines do not support the heads; return remarks on its other engines."""
    return _served([_format_named(name)], published.with_context(facts.context), facts)[1]


def _served(formats: Sequence[Format], published: Published, facts: TargetFacts) -> tuple[list[str], list[str]]:
    """Return the engines that can serve heads in some formats, and remarks; see `check_heads`."""
    engines: dict[str, None] = {}
    remarks = []
    for format in formats:
        for engine in format.readers:
            limit = next(iter(format.limits(published, facts, engine)), None)
            if limit is None:
                engines[engine] = None
            elif engine in format.engines:
                raise UserError(*limit)
            else:
                remarks.append(f"Not for {engine}: {limit[0]}")
    return list(engines), remarks + [each for engine in engines for each in KNOWN_ENGINES[engine].remarks(published)]


def _drafting_remarks(
    folder: Path, formats: Sequence[Format], published: Published, measured: Mapping[str, EngineTuning]
) -> Iterator[str]:
    """Yield remarks on untuned heads, heads or engines where drafts do not pay, and tokens without pair scores."""
    tune = f"Tune it in an engine: {program()} tune {folder} --engine NAME"
    if is_untuned(folder) and not measured:
        yield f"The number of drafts is untuned. {tune}"
    elif not measured and not read_json(folder / TREE)["paths"]:
        yield f"No tree pays where the heads were tuned, so the printed number of drafts is only the default. {tune}"
    read_by = {engine for format in formats for engine in format.readers}
    for engine, tuning in measured.items():
        if engine in read_by and not tuning.drafts:
            best = max(tuning.rows, key=lambda row: row.expected)
            yield (
                f"No number of drafts pays in {engine} on {tuning.machine}: the best, {best.drafts}, is expected to "
                f"reach {best.expected:.2f} times the plain speed."
            )
    table_VR = published.tensors.get(MARKOV_LM_HEAD, published.tensors.get(SUCCESSORS))
    if table_VR is not None and (missing := int((~table_VR.any(-1)).sum())):
        yield (
            f"Engines draft from all {published.vocab_size} tokens, and {missing} of them were outside the draft "
            "vocabulary in training. Their logits do not depend on the preceding token. To train for all tokens, set "
            "heads.draft_vocab_size=0."
        )


def publish(
    heads: Path, target: FrozenModel | str | None = None, trust_remote_code: bool = False
) -> tuple[Published, TargetFacts]:
    """Return heads in published form and facts of their target; the target is loaded only if its weights are needed."""
    folder = heads_folder(heads)
    built = check_folder(folder)
    facts = facts_of_heads(folder, None if isinstance(target, FrozenModel) else target, trust_remote_code)
    if built.publishing_reads_target:
        built.bind(target if isinstance(target, FrozenModel) else _load(facts, "float32"))
    published, logits = built.float().publish().with_context(facts.context), facts.logits
    if published.layout is Layout.DFLASH2 and _spec(facts):  # scores add to the target's logits
        published = replace(published, output_multiplier=logits.scale, final_logit_softcapping=logits.cap or 0.0)
    return published, facts


def _embeddings(target: FrozenModel | str | None, facts: TargetFacts) -> torch.Tensor:
    """Read the target's embeddings [V, E], without the other weights if possible."""
    if isinstance(target, FrozenModel):
        return target.embedding_weight.detach()
    embeddings_VE = read_embeddings(_spec(facts))
    return _load(facts, "auto").embedding_weight.detach() if embeddings_VE is None else embeddings_VE


def _load(facts: TargetFacts, dtype: str) -> Target:
    return load_target(_spec(facts), dtype, "cpu", trust_remote_code=facts.trust_remote_code)


def _spec(facts: TargetFacts) -> str:
    if not facts.spec:
        raise UserError(f"This export reads weights of {facts.name}, which is not on this machine.", SAY_WHERE)
    return facts.spec


# -- checks ------------------------------------------------------------------------------------------------------------


def is_published(folder: Path) -> bool:
    """Whether a folder or GGUF file holds heads in an engine format."""
    with suppress(UserError):
        return bool(formats_of(folder))
    return False


def formats_of(folder: Path) -> list[Format]:
    """Detect the formats of a folder of heads, the preferred one first. Raises UserError if there are none."""
    if has_heads(str(folder)):
        raise UserError(
            f"{folder} holds heads in headstart's own format, which no engine reads.",
            f"For an engine: {program()} export {folder} --format {next(iter(FORMATS))} --out FOLDER",
        )
    formats = [format for format in FORMATS.values() if format.recognizes(folder)]
    if not formats and not folder.is_dir():
        raise no_folder(folder, "Give a folder of draft heads, or a GGUF file.")
    if not formats:
        raise UserError(f"{folder} holds no draft heads.", "Give a folder with config.json, or a GGUF file.")
    return formats


def readers_of(folder: Path, engines: Sequence[str] = ()) -> dict[str, Format]:
    """Map engines to the format they read a folder in; by default each format's main engine."""
    formats = formats_of(folder)
    read_by = {engine: format for format in reversed(formats) for engine in format.readers}
    names = engines or [format.engines[0] for format in formats]
    return {engine: read_by[engine] for engine in names if engine in read_by}


def _unread(folder: Path, engines: Sequence[str], readers: Mapping[str, Format]) -> Iterator[Finding]:
    """Report engines that do not read a folder. Raises UserError for an unknown engine."""
    format_for = {engine: name for name, format in reversed(FORMATS.items()) for engine in format.readers}
    for engine in engines:
        if engine not in format_for:
            raise UserError(f"Unknown engine {engine!r}.", nearest(engine, format_for))
        if engine not in readers:
            names = " or ".join(format.name for format in formats_of(folder))
            problem = f"It does not read the format {names} of {folder}."
            again = f"{program()} export HEADS --format {format_for[engine]} --out FOLDER"
            yield Finding(engine, problem, f"Write another folder: {again}")


def check_export(
    folder: Path,
    engines: Sequence[str] = (),
    against: Path | None = None,
    target: FrozenModel | str | None = None,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Report problems that engines have with a folder of heads or a GGUF file.

    `engines` defaults to the main engine of each format. `against` is the folder of the headstart heads that it should
    contain; `target` overrides the location of their target.
    """
    readers = readers_of(folder, engines)
    published = None if against is None else publish(against, target, trust_remote_code)
    heads, facts = published or (None, _facts(None, target, trust_remote_code))
    findings = [*_unread(folder, engines, readers)]
    findings += [finding for engine, format in readers.items() for finding in format.check(folder, engine, facts)]
    if heads is not None and not findings:
        for format in dict.fromkeys(readers.values()):
            theirs, ours = format.read(folder, facts), format.as_stored(heads)
            if digest(theirs) != digest(rounded(ours, "float32")):
                problems = _differences(theirs, ours)
                findings += [Finding(format.engines[0], problem, "Export these heads again.") for problem in problems]
    return findings


def export_remarks(
    folder: Path,
    engines: Sequence[str] = (),
    against: Path | None = None,
    target: FrozenModel | str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Return remarks on a folder without faults; arguments as in `check_export`."""
    facts, readers = _facts(against, target, trust_remote_code), readers_of(folder, engines).items()
    return [
        remark for engine, format in readers for remark in KNOWN_ENGINES[engine].remarks(format.read(folder, facts))
    ]


def _facts(against: Path | None, target: FrozenModel | str | None, trust_remote_code: bool) -> TargetFacts | None:
    if isinstance(target, FrozenModel):
        return facts_of_target(target)
    if against is not None:
        return facts_of_heads(heads_folder(against), target, trust_remote_code)
    return None if target is None else facts_of_spec(target, trust_remote_code)


def _differences(theirs: Published, ours: Published) -> Iterator[str]:
    for name, setting in ours.settings.items():
        if name != "layer" and theirs.settings[name] != setting:
            yield f"{name} is {theirs.settings[name]!r}, and the heads have {setting!r}."
    if theirs.layer is not None and ours.layer is not None:
        base, our_base = (layer.rope_parameters["rope_theta"] for layer in (theirs.layer, ours.layer))
        if abs(base - our_base) > 1e-5 * our_base:
            yield f"The rotary base is {base:g}, and the heads have {our_base:g}."
    ids_D, our_ids_D = theirs.draft_ids_D, ours.draft_ids_D
    if ids_D is not our_ids_D and (ids_D is None or our_ids_D is None or not torch.equal(ids_D, our_ids_D)):
        yield "The draft vocabulary (d2t) differs from the heads'."
    for name, tensor in ours.tensors.items():
        other = theirs.tensors.get(name)
        if other is None or other.shape != tensor.shape:
            continue
        if (other.float() - tensor.float()).norm() > _SAME * tensor.float().norm():
            yield f"{name} differs from the heads'."
