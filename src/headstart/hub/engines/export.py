"""Writing heads in a format of engines, and checking such files, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.errors import UserError, nearest
from headstart.files import write_atomic
from headstart.heads import DraftHead, families
from headstart.heads.io import WEIGHTS, build_heads, heads_folder
from headstart.heads.published import Published, digest
from headstart.hub.engines.base import Finding, Format, TargetFacts
from headstart.hub.engines.card import MARK, write_engine_card
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.engines.gguf import Gguf
from headstart.hub.engines.huggingface import rounded
from headstart.hub.engines.sglang import Sglang
from headstart.hub.engines.speculators import Speculators
from headstart.hub.engines.vllm import Vllm
from headstart.hub.format import check_folder, read_config
from headstart.hub.measured import EngineTuning, read_engine_tunings, tuned_drafts
from headstart.target import Target, load_target

HEADSTART = "headstart"
"""The name of our own format."""
FORMATS: dict[str, Format] = {one.name: one for one in (Vllm(), Sglang(), Speculators(), Gguf())}


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: where.
        format: its name.
        published: the heads, as engines know them.
        facts: of their target.
        drafts: tokens of the chain by engine, where they were measured.
        remarks: what the user should know.
    """

    folder: Path
    format: str
    published: Published
    facts: TargetFacts
    drafts: Mapping[str, int]
    remarks: tuple[str, ...] = ()

    @property
    def commands(self) -> dict[str, str]:
        """That serve target and heads, by engine."""
        return self.commands_with(self.drafts)

    def commands_with(self, drafts: Mapping[str, int]) -> dict[str, str]:
        """The same with other numbers of drafts."""
        return FORMATS[self.format].commands(self.folder, self.published, self.facts, drafts)


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
    heads: Path, out: Path, format: str, target: Target | str | None = None, dtype: str | None = None
) -> Exported:
    """Write heads in the format of an engine; nothing is left behind when that fails.

    Args:
        heads: a folder of heads, or of the run that they belong to.
        out: folder to write; it must not hold anything but an earlier export.
        format: one of `FORMATS`.
        target: where the target is, when it is not where the heads say, or the loaded target.
        dtype: of the weights; the format's usual one by default.

    Raises:
        UserError: no such heads or format, heads that the format cannot hold, or a folder in use.
    """
    one = format_named(format)
    kind = dtype or one.dtypes[0]
    if kind not in one.dtypes:
        raise UserError(f"{one.name} has no dtype {kind!r}.", nearest(kind, one.dtypes))
    refuse_used(out)
    published, facts = publish(heads, target)
    measured = read_engine_tunings(heads_folder(heads))
    remarks = [*one.check_heads(published, facts), *_not_paying(one, measured)]

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        one.write(published, facts, partial, kind)
        write_engine_card(partial, [one], published, facts, measured)
        if found := one.check(partial, one.engines[0], None):
            raise AssertionError(f"an export that its own check refuses: {found[0].problem}")

    write_atomic(out, write)
    return Exported(out, one.name, published, facts, tuned_drafts(measured), tuple(remarks))


def _not_paying(one: Format, measured: Mapping[str, EngineTuning]) -> Iterator[str]:
    """What to say of engines in which plain decoding was found to be faster."""
    for engine in one.engines:
        if engine in measured and not measured[engine].drafts:
            row = measured[engine].best
            yield (
                f"{engine} was measured here with these heads: no number of drafts pays, the best of them, "
                f"{row.drafts}, makes {row.expected:.2f} times its plain speed."
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
        if not isinstance(target, Target):
            if not facts.spec:
                raise UserError(
                    f"Exporting these heads reads weights of {facts.name}, which is not on this machine.",
                    "Say where it is with --target.",
                )
            target = load_target(facts.spec, "float32", "cpu")
        built.bind(target)
    return built.float().publish(), facts


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
    known = {"README.md", "config.json", "model.safetensors", "heads.gguf"}
    ours = not names or ("README.md" in names and _is_ours(out))
    if others := sorted(names - known) or ([] if ours else sorted(names)):
        raise UserError(
            f"{out} holds something else, which would be lost: {', '.join(others[:3])}.",
            "Move that away, or choose another folder.",
        )


def _is_ours(folder: Path) -> bool:
    return MARK in (folder / "README.md").read_text(encoding="utf-8", errors="replace")


def format_of(folder: Path) -> Format:
    """The format of a folder of heads, whoever wrote it.

    Raises:
        UserError: none that engines read.
    """
    if folder.suffix == ".gguf" or sorted(folder.glob("*.gguf")):
        return FORMATS["gguf"]
    if not folder.is_dir():
        raise UserError(f"No folder at {folder}.", "Give a folder of draft heads, or a GGUF file.")
    for one in FORMATS.values():
        if one.holds(folder):
            return one
    raise UserError(f"{folder} holds no draft heads.", "Give a folder with config.json, or a GGUF file.")


def check_export(
    folder: Path, engines: Sequence[str] = (), against: Path | None = None, target: Target | str | None = None
) -> list[Finding]:
    """What engines would get wrong with a folder of heads, whoever wrote it.

    Args:
        folder: to check, or a GGUF file.
        engines: that it is for; the one that its format is mainly for by default.
        against: heads of ours that it should hold: settings and numbers are compared.
        target: of these heads, where it is not where they say.

    Raises:
        UserError: no such folder or engine.
    """
    one = format_of(folder)
    for engine in engines:
        if engine not in engine_names():
            raise UserError(f"Unknown engine {engine!r}.", nearest(engine, engine_names()))
        if engine not in one.engines:
            raise UserError(
                f"{engine} does not read the format {one.name}, which {folder} has.",
                f"Export with --format {next(name for name, other in FORMATS.items() if engine in other.engines)}.",
            )
    held, facts = (None, None) if against is None else publish(against, target)
    found = [finding for engine in engines or one.engines[:1] for finding in one.check(folder, engine, facts)]
    if held is not None and not found:
        found += _compare(one, folder, one.as_held(held))
    return found


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
