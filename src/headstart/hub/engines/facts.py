"""What formats need to know of a target, from a folder of heads or from the target itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.hub.engines.base import TargetFacts
from headstart.hub.format import adapter_spec, named, read_config
from headstart.target.frozen import FrozenModel
from headstart.target.loading import gguf_file, load_config, loadable_folder

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def facts_of_heads(folder: Path, spec: str | None = None) -> TargetFacts:
    """The target of an exported folder of heads; its weights are not loaded.

    Args:
        folder: of heads.
        spec: where the target is, when it is not where the heads say.

    Raises:
        UserError: not a folder of ours, or heads of an old headstart that does not say what the target is like.
    """
    config = read_config(folder)
    target = config["target"]
    where = spec or target["spec"]
    if adapter_spec(folder) is not None and spec is None:
        raise UserError(
            f"The heads in {folder} belong to {target['name']}, and engines serve whole models.",
            "Save it with its adapter merged, then name that folder with --target. In Python: "
            f"headstart.load({str(folder)!r}).target.save('merged').",
        )
    sketch = target.get("sketch")
    parts = str(sketch.get("architecture", "")).split() if isinstance(sketch, dict) else []
    if len(parts) != 4 or not all(part.isdigit() for part in parts[1:]):
        raise UserError(
            f"{folder} does not say what its target is like; an older headstart wrote it.",
            "Export the run again with this version.",
        )
    model_type, layers, size, vocab = parts[0], *map(int, parts[1:])
    if where and not spec and not _is_here(where):
        where = ""  # it was on another machine, or was never a file
    return TargetFacts(
        spec=where,
        name=target["name"],
        fingerprint=target["fingerprint"],
        model_type=model_type,
        num_layers=layers,
        hidden_size=size,
        vocab_size=vocab,
        folder=loadable_folder(where) if where else "",
        gguf=gguf_file(where) if where else None,
        **_config_facts(where),
    )


def _is_here(spec: str) -> bool:
    """Whether a target can be found by what it is called: a packaged name, a file or folder, a Hub id."""
    try:
        gguf_file(spec)
    except UserError:
        return False
    return True


def facts_of_target(target: FrozenModel) -> TargetFacts:
    """The same from a loaded target."""
    identity = target.identity()
    known = TargetFacts(
        spec=target.spec,
        name=named(target),
        fingerprint=identity.fingerprint,
        model_type=target.config.model_type,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )
    return known


def _config_facts(spec: str) -> dict[str, Any]:
    """Architecture and special tokens, where the target's config can be had."""
    config = load_config(spec) if spec else None
    if config is None:
        return {}
    tokens = {name: getattr(config, name, None) for name in _SPECIAL}
    return {
        "architectures": tuple(config.architectures or ()),
        "tokens": {name: value for name, value in tokens.items() if isinstance(value, int)},
    }
