"""`TargetFacts` from a folder of heads, a spec or a loaded target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.hub.format import display_name, heads_target
from headstart.hub.target_facts import TargetFacts
from headstart.model.frozen import FrozenModel
from headstart.model.lm_head import LogitTransform
from headstart.model.loading import gguf_file, load_config, load_target, loadable_folder

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def facts_of_heads(folder: Path, spec: str | None = None, trust_remote_code: bool = False) -> TargetFacts:
    """Describe the target of a folder of heads without loading its weights; `spec` overrides its location.

    Raises UserError if the target has an adapter, which engines cannot serve.
    """
    target = heads_target(folder)
    if target.adapter is not None and spec is None:
        raise UserError(
            f"The heads in {folder} are for {target.name}, which has an adapter that engines cannot serve.",
            f"Save it with its adapter merged (in Python: headstart.load({str(folder)!r}).target.save('merged')), then "
            "name that folder with --target.",
        )
    model_type, layers, size, vocab = target.sketch["architecture"].split()
    where = spec or (target.spec if _is_loadable(target.spec) else "")
    config = load_config(where, trust_remote_code) if where else None
    return TargetFacts(
        spec=where,
        name=target.name,
        fingerprint=target.fingerprint,
        model_type=model_type,
        num_layers=int(layers),
        hidden_size=int(size),
        vocab_size=int(vocab),
        folder=loadable_folder(where) if where else "",
        gguf=gguf_file(where) if where else None,
        trust_remote_code=trust_remote_code,
        chat_template_kwargs=target.chat_template_kwargs,
        context=_context(config),
        logits=LogitTransform.of(config.get_text_config() if config else None),
        architectures=tuple(getattr(config, "architectures", None) or ()),
        tokens={name: number for name in _SPECIAL if isinstance(number := getattr(config, name, None), int)},
    )


def facts_of_spec(spec: str, trust_remote_code: bool = False) -> TargetFacts:
    """Describe a target by its spec; it is loaded only if it has no config."""
    config = load_config(spec, trust_remote_code)
    if config is None:
        return facts_of_target(load_target(spec, device="cpu", trust_remote_code=trust_remote_code))
    text = config.get_text_config()
    return _facts(spec, spec, "", text, text.vocab_size)


def facts_of_target(target: FrozenModel) -> TargetFacts:
    fingerprint = target.identity().fingerprint
    return _facts(target.spec, display_name(target), fingerprint, target.config, target.vocab_size)


def _facts(spec: str, name: str, fingerprint: str, config: Any, vocab_size: int) -> TargetFacts:
    sizes = config.num_hidden_layers, config.hidden_size, vocab_size
    logits = LogitTransform.of(config)
    return TargetFacts(spec, name, fingerprint, config.model_type, *sizes, context=_context(config), logits=logits)


def _is_loadable(spec: str) -> bool:
    """Whether a spec may be loaded here: a packaged name, a file or folder, a Hub id."""
    try:
        gguf_file(spec)
    except UserError:  # a path on another machine
        return False
    return bool(spec)


def _context(config: Any) -> int:
    return getattr(config, "max_position_embeddings", None) or 0
