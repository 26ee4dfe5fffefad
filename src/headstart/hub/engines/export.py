"""Writing heads in a format of engines, and checking such files, whoever wrote them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.errors import UserError, nearest
from headstart.heads.base import DraftHead, families
from headstart.heads.exchange.published import EMBEDDINGS, MARKOV_LM_HEAD, Published, digest
from headstart.heads.io import WEIGHTS, build_heads, heads_folder
from headstart.hub.engines.base import Finding, Format, TargetFacts
from headstart.hub.engines.card import ENGINE_FILES, is_engine_folder, write_engine_card
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.engines.folder import FolderFormat
from headstart.hub.engines.gguf import Gguf
from headstart.hub.engines.huggingface import rounded
from headstart.hub.engines.sglang import Sglang
from headstart.hub.engines.speculators import Speculators
from headstart.hub.engines.vllm import Vllm
from headstart.hub.format import check_folder, read_config
from headstart.hub.measured import EngineTuning, read_engine_tunings, tuned_drafts
from headstart.support.files import write_atomic
from headstart.target.loading import load_target, read_embeddings
from headstart.target.model import Target

HEADSTART = "headstart"
"""The name of our own format."""
FORMATS: dict[str, Format] = {one.name: one for one in (Vllm(), Sglang(), Speculators(), Gguf())}


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: where.
        formats: their names.
        published: the heads, as engines know them.
        facts: of their target.
        drafts: tokens of the chain by engine, where they were measured.
        remarks: what the user should know.
    """

    folder: Path
    formats: tuple[str, ...]
    published: Published
    facts: TargetFacts
    drafts: Mapping[str, int]
    remarks: tuple[str, ...] = ()

    @property
    def commands(self) -> dict[str, str]:
        """That serve target and heads, by engine, as one types them."""
        return {engine: shlex.join(words) for engine, words in self.words(self.drafts).items()}

    def words(self, drafts: Mapping[str, int]) -> dict[str, list[str]]:
        """The same with other numbers of drafts, and in words."""
        every = (FORMATS[name].commands(self.folder, self.published, self.facts, drafts) for name in self.formats)
        return {engine: command for commands in every for engine, command in commands.items()}


def format_named(name: str) -> Format:
    """The format called `name`.

    Raises:
        UserError: there is none.
    """
    if name not in FORMATS:
        raise UserError(f"Unknown format {name!r}.", nearest(name, [HEADSTART, *FORMATS]))
    return FORMATS[name]


def engine_names() -> list[str]:
    """Every engine that a format is for."""
    return sorted({engine for one in FORMATS.values() for engine in one.engines})


def export_for(
    heads: Path,
    out: Path,
    formats: str | Sequence[str],
    target: Target | str | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write heads in formats of engines; nothing is left behind when that fails.

    Args:
        heads: a folder of heads, or of the run that they belong to.
        out: folder to write; it must not hold anything but an earlier export.
        formats: of `FORMATS`; several where their files have different names.
        target: where the target is, when it is not where the heads say, or the loaded target.
        dtype: of the weights; each format's usual one by default.

    Raises:
        UserError: no such heads or format, formats whose files would be in each other's way, heads that a format
            cannot hold, or a folder in use.
    """
    asked = [format_named(name) for name in dict.fromkeys([formats] if isinstance(formats, str) else formats)]
    of_folders = [one.name for one in asked if isinstance(one, FolderFormat)]
    if len(of_folders) > 1:
        raise UserError(
            f"{' and '.join(of_folders)} both write config.json and model.safetensors.",
            "Write each into a folder of its own; --format gguf goes with any of them.",
        )
    for one in asked:
        if dtype and dtype not in one.dtypes:
            raise UserError(f"{one.name} has no dtype {dtype!r}.", nearest(dtype, one.dtypes))
    refuse_used(out)
    published, facts = publish(heads, target)
    measured = read_engine_tunings(heads_folder(heads))
    remarks = [said for one in asked for said in (*one.check_heads(published, facts), *_not_paying(one, measured))]
    remarks += _uncorrected(published)
    embeddings_VE = _embeddings(target, facts) if any(one.holds_embeddings(published) for one in asked) else None

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        for one in asked:
            held = published
            if embeddings_VE is not None and one.holds_embeddings(published):
                held = held.with_tensors({**held.tensors, EMBEDDINGS: embeddings_VE})
            one.write(held, facts, partial, dtype or one.dtypes[0])
        write_engine_card(partial, asked, published, facts, measured)
        for one in asked:
            if found := one.check(partial, one.engines[0], None):
                raise AssertionError(f"an export that its own check refuses: {found[0].problem}")

    write_atomic(out, write)
    return Exported(out, tuple(one.name for one in asked), published, facts, tuned_drafts(measured), tuple(remarks))


def _uncorrected(published: Published) -> Iterator[str]:
    """Tokens that heads with a draft vocabulary never drafted: engines draft them, and nothing corrects them there."""
    table_VR = published.tensors.get(MARKOV_LM_HEAD)
    if table_VR is not None and (missing := int((~table_VR.any(-1)).sum())):
        yield (
            f"Engines draft from all {published.vocab_size} tokens, and {missing} of them were outside of the draft "
            "vocabulary in training: these are drafted without the Markov head's correction. To train it for all of "
            "them, leave out heads.draft_vocab_size."
        )


def _not_paying(one: Format, measured: Mapping[str, EngineTuning]) -> Iterator[str]:
    """What to say of engines in which plain decoding was found to be faster."""
    for engine in one.engines:
        if engine in measured and not measured[engine].drafts:
            row = measured[engine].best
            yield (
                f"{engine} was measured with these heads on {measured[engine].machine}: no number of drafts pays "
                f"there, the best of them, {row.drafts}, makes {row.expected:.2f} times its plain speed."
            )


def publish(heads: Path, target: Target | str | None = None) -> tuple[Published, TargetFacts]:
    """Heads as engines know them, and what is known of their target; it is loaded only where heads read its weights.

    Raises:
        UserError: as `export_for`.
    """
    folder = heads_folder(heads)
    check_folder(folder)
    settings = read_config(folder)["heads"]
    built = build_heads(settings, folder / WEIGHTS)
    if built.publishes is None:
        built.publish()  # says why not
    facts = facts_of_heads(folder, None if isinstance(target, Target) else target)
    if built.publishing_reads_target:
        built.bind(_loaded(target, facts))
    return built.float().publish(), facts


def _loaded(target: Target | str | None, facts: TargetFacts) -> Target:
    """The target itself, where heads are published with weights of it."""
    return target if isinstance(target, Target) else load_target(_spec(facts), "float32", "cpu")


def _embeddings(target: Target | str | None, facts: TargetFacts) -> torch.Tensor:
    """The target's embeddings [V, E], without the rest of it where its files allow."""
    if isinstance(target, Target):
        return target.embedding_weight.detach()
    found = read_embeddings(_spec(facts))
    return load_target(facts.spec, "auto", "cpu").embedding_weight.detach() if found is None else found


def _spec(facts: TargetFacts) -> str:
    if not facts.spec:
        raise UserError(
            f"This export reads weights of {facts.name}, which is not on this machine.",
            "Say where it is with --target.",
        )
    return facts.spec


def refuse_used(out: Path) -> None:
    """Refuse to replace a folder that holds anything but an earlier export for an engine.

    Raises:
        UserError: naming what would be lost.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file.", "Give a folder with --out.")
    names = {path.name for path in out.iterdir()}
    known = set(ENGINE_FILES)
    ours = not names or is_engine_folder(out)
    if others := sorted(names - known) or ([] if ours else sorted(names)):
        raise UserError(
            f"{out} holds something else, which would be lost: {', '.join(others[:3])}.",
            "Move that away, or choose another folder.",
        )


def formats_of(folder: Path) -> list[Format]:
    """The formats that a folder of heads is in, whoever wrote it; the first one is read where one has to do.

    Raises:
        UserError: none that engines read.
    """
    if folder.suffix == ".gguf":
        return [FORMATS["gguf"]]
    if not folder.is_dir():
        raise UserError(f"No folder at {folder}.", "Give a folder of draft heads, or a GGUF file.")
    found = [one for one in FORMATS.values() if one.holds(folder)]
    if not found:
        raise UserError(f"{folder} holds no draft heads.", "Give a folder with config.json, or a GGUF file.")
    return found


def format_of(folder: Path) -> Format:
    """The first of `formats_of`."""
    return formats_of(folder)[0]


def check_export(
    folder: Path, engines: Sequence[str] = (), against: Path | None = None, target: Target | str | None = None
) -> list[Finding]:
    """What engines would get wrong with a folder of heads, whoever wrote it.

    Args:
        folder: to check, or a GGUF file.
        engines: that it is for; those that its formats are mainly for by default.
        against: heads of ours that it should hold: settings and numbers are compared.
        target: of these heads, where it is not where they say.

    Raises:
        UserError: no such folder or engine.
    """
    formats = formats_of(folder)
    read_by = {engine: one for one in reversed(formats) for engine in one.engines}
    for engine in engines:
        if engine not in engine_names():
            raise UserError(f"Unknown engine {engine!r}.", nearest(engine, engine_names()))
        if engine not in read_by:
            raise UserError(
                f"{engine} does not read the format {' or '.join(one.name for one in formats)}, which {folder} has.",
                f"Export with --format {next(name for name, other in FORMATS.items() if engine in other.engines)}.",
            )
    held, facts = (None, None) if against is None else publish(against, target)
    asked = engines or [one.engines[0] for one in formats]
    found = [finding for engine in asked for finding in read_by[engine].check(folder, engine, facts)]
    if held is not None and not found:
        for one in dict.fromkeys(read_by[engine] for engine in asked):
            found += _compare(one, folder, one.as_held(held))
    return found


def export_remarks(folder: Path, engines: Sequence[str] = ()) -> list[str]:
    """What the user should know of a folder without faults; see `check_export` for the arguments."""
    formats = formats_of(folder)
    read_by = {engine: one for one in reversed(formats) for engine in one.engines}
    asked = engines or [one.engines[0] for one in formats]
    return [said for engine in asked for said in read_by[engine].remarks(read_by[engine].read(folder), engine)]


_SAME = 0.02
"""How far, as a share of their size, numbers in 8 bits or bfloat16 are from those they stand for."""


def _compare(one: Format, folder: Path, held: Published) -> list[Finding]:
    """In what a folder's heads are not those given, but for rounding."""
    engine, again = one.engines[0], "Export these heads again."
    try:
        read = one.read(folder)
    except UserError as error:
        return [Finding(engine, error.problem, error.remedy)]
    if digest(read) == digest(rounded(held, "float32")):
        return []
    found = []
    theirs, ours = read.settings, held.settings
    for name in ours:
        if name != "layer" and theirs[name] != ours[name]:
            found.append(Finding(engine, f"{name} is {theirs[name]!r}, and the heads have {ours[name]!r}.", again))
    if read.layer is not None and held.layer is not None:
        base, own = (layer.rope_parameters["rope_theta"] for layer in (read.layer, held.layer))
        if abs(base - own) > 1e-5 * own:
            found.append(Finding(engine, f"The rotary base is {base:g}, and the heads have {own:g}.", again))
    ids, own_ids = read.draft_ids_D, held.draft_ids_D
    if (ids is None) != (own_ids is None) or (
        ids is not None and own_ids is not None and not torch.equal(ids, own_ids)
    ):
        found.append(Finding(engine, "The drafted tokens (d2t) are not those of the heads.", again))
    for name, tensor in held.tensors.items():
        other = read.tensors.get(name)
        if other is None or other.shape != tensor.shape:
            continue
        if (other.float() - tensor.float()).norm() > _SAME * tensor.float().norm():
            found.append(Finding(engine, f"{name} holds other numbers than the heads{_turned(other, tensor)}.", again))
    return found


def _turned(other: torch.Tensor, tensor: torch.Tensor) -> str:
    """Says so where the rows are the heads' own in another order: queries and keys that were not permuted."""
    if tensor.dim() == 2:
        sums, own = (part.float().double().sum(1).sort().values for part in (other, tensor))
        if (sums - own).norm() <= _SAME * own.norm():
            return " in the order of its rows; GGUF files permute queries and keys"
    return ""


def heads_of(published: Published) -> type[DraftHead]:
    """The family that holds a published arrangement."""
    return next(one for one in families().values() if one.publishes is published.layout)
