"""Multi-token-prediction modules that a target's checkpoint brings along, read from its files.

transformers leaves these tensors out when it loads a model. A module is a norm of the token's embedding and one of the
state before it, a linear map that joins them, one decoder layer of the target's own kind, and a norm. The layer and
that norm become a model of one layer of the target's class, which transformers fills and which takes token trees as any
target does; its embeddings are whatever is joined. Three arrangements are published:

    DeepSeek-V3, GLM-4.5   model.layers.{L + k}.  enorm, hnorm, eh_proj, shared_head.norm and the layer; embedding first
    Qwen3-Next, Qwen3.5    mtp.                   pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.{k}; the
                                                  same order
    MiMo                   model.mtp_layers.{k}.  token_layernorm, hidden_layernorm, input_proj, final_layernorm and the
                                                  layer; the state first, read before the target's final norm

Shape suffixes: B rows, W entries, E hidden size, V vocabulary, N numbers of all entries.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from headstart.errors import UserError
from headstart.target.cache import TreeCache
from headstart.target.fitting import FINAL
from headstart.target.loading import loadable_folder, silent, tensor_files
from headstart.target.model import Target
from headstart.tree.tree import Tree, TreeBatch

_VOCABULARY = 8
"""Tokens of the model of one layer, whose own embeddings and LM head are not used."""


@dataclass(frozen=True)
class Arrangement:
    """How a checkpoint names the parts of its modules.

    Attributes:
        found_by: matches the joining map's name; its group is the module's number, if any.
        parts: of the norm of the embedding, of that of the state, the joining map and the last norm.
        layer: where the decoder layer lies below a module's own names.
        once: whether all modules share what is not in their layers.
        state_first: whether the joining map reads the state before the embedding.
        final: whether the state is the one after the target's final norm.
    """

    found_by: str
    parts: tuple[str, str, str, str]
    layer: str = ""
    once: bool = False
    state_first: bool = False
    final: bool = True


ARRANGEMENTS = (
    Arrangement(r"^(?:.*\.)?layers\.(\d+)\.eh_proj\.weight$", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    Arrangement(
        r"^(?:.*\.)?mtp\.fc\.weight$",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "layers.{number}.",
        once=True,
    ),
    Arrangement(
        r"^(?:.*\.)?mtp_layers\.(\d+)\.input_proj\.weight$",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        state_first=True,
        final=False,
    ),
)
_SHARED = ("shared_head.head.weight", "embed_tokens.weight")
"""Copies of the target's LM head and embeddings that lie beside a module."""


class Inputs(nn.Module):
    """Stands for the embeddings of a model of one layer: entry i of a forward is row i of what was put there."""

    weight: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", like, persistent=False)

    def forward(self, index_BW: Tensor) -> Tensor:
        return F.embedding(index_BW, self.weight)


class ShippedModule:
    """A model of one layer and the norm after it, the norms of embedding and state, and the joining map."""

    def __init__(self, layer: Target, norms: tuple[nn.Module, nn.Module], join: nn.Module, state_first: bool) -> None:
        self.layer, self._norms, self._join, self._state_first = layer, norms, join, state_first
        self._inputs = Inputs(layer.embedding_weight.detach())
        layer.model.set_input_embeddings(self._inputs)

    @property
    def parameters(self) -> int:
        """Numbers that a draft reads, all experts counted."""
        norms = sum(p.numel() for part in (*self._norms, self._join) for p in part.parameters())
        return norms + sum(p.numel() for p in self.layer.layers.parameters())

    @property
    def bytes_per_token(self) -> int:
        """Of its keys and values, of each token of a row."""
        return self.layer.kv_bytes_per_token

    def new_cache(self, rows: int, capacity: int) -> TreeCache:
        return self.layer.new_cache(rows, capacity)

    def joined(self, embedded: Tensor, state: Tensor) -> Tensor:
        parts = [self._norms[0](embedded), self._norms[1](state)]
        joined: Tensor = self._join(torch.cat(parts[::-1] if self._state_first else parts, dim=-1))
        return joined

    def read(self, cache: TreeCache, joined_BWE: Tensor, counts: Sequence[int]) -> Tensor:
        """Read and commit the first entries of each row, as many as `counts` says (one at least); what the module makes
        of them, [B, W, E]."""
        width = joined_BWE.shape[1]
        self._inputs.weight = joined_BWE.flatten(0, 1)
        entries = [list(range(row * width, row * width + count)) for row, count in enumerate(counts)]
        made: Tensor = self.layer.prefill(cache, entries, (FINAL,)).aux_hidden_states[FINAL]
        return F.pad(made, (0, 0, 0, width - made.shape[1]))

    def read_tree(self, cache: TreeCache, joined_BWE: Tensor, parents: Sequence[Sequence[int]]) -> Tensor:
        """The same of a tree of entries, given as each row's parents; nothing is committed. Rows may have fewer entries
        than W."""
        rows, width = joined_BWE.shape[:2]
        self._inputs.weight = joined_BWE.flatten(0, 1)
        entries = [list(range(row * width, row * width + len(parents[row]))) for row in range(rows)]
        trees = [Tree(row, list(own)) for row, own in zip(entries, parents, strict=True)]
        batch = TreeBatch.of(trees, joined_BWE.device)
        made: Tensor = self.layer.forward_tree(cache, batch, (FINAL,)).aux_hidden_states[FINAL]
        return made


@dataclass(frozen=True)
class Shipped:
    """All modules of a target: the first reads its states at `state_layer`. LM head and embeddings are there where they
    are not the target's."""

    modules: list[ShippedModule]
    state_layer: int
    lm_head_VE: Tensor | None = None
    embedding_VE: Tensor | None = None


def read_shipped(target: Target) -> Shipped:
    """The modules that a target's checkpoint brings along.

    Raises:
        UserError: no such tensors, some of them missing, packed ones, or layers that cannot take token trees.
    """
    folder = _folder(target)
    files = tensor_files(folder, getattr(target.config, "_commit_hash", None)) if folder else {}
    named = ((arrangement, _joins(arrangement, files, target.num_layers)) for arrangement in ARRANGEMENTS)
    arranged = next(((arrangement, joins) for arrangement, joins in named if joins), None)
    if arranged is None:
        raise UserError(
            f"The checkpoint of {target.name} has no multi-token-prediction modules: there are no tensors "
            f"model.layers.{target.num_layers}.eh_proj, mtp.fc or model.mtp_layers.0.input_proj. transformers leaves "
            "them out of what it saves.",
            "Name the checkpoint as it was published (a hub id or a folder with its safetensors files), or train MTP "
            "heads: headstart run mtp target=...",
        )
    arrangement, joins = arranged
    modules: list[ShippedModule] = []
    shared: dict[str, Tensor] = {}
    for number, join in enumerate(joins):
        head = join.removesuffix(f"{arrangement.parts[2]}.weight")
        below = head + arrangement.layer.format(number=number)
        wanted = [name for name in files if name.startswith(below)]
        wanted += [f"{head}{part}.weight" for part in arrangement.parts]
        tensors = _tensors(target, folder, files, wanted)
        if packed := next((name for name in tensors if name.endswith(("_scale_inv", "_scale", ".qweight"))), None):
            raise UserError(
                f"The multi-token-prediction modules of {target.name} are packed in few bits ({packed}).",
                "Take the checkpoint in bfloat16.",
            )
        outer = [tensors.pop(f"{head}{part}.weight") for part in arrangement.parts]
        inner = {name.removeprefix(below): tensor for name, tensor in tensors.items()}
        shared |= {name: inner.pop(name) for name in _SHARED if name in inner}
        modules.append(_module(target, inner, outer, state_first=arrangement.state_first, where=f"{below}*"))
    of_target = (target.lm_head_weight, target.embedding_weight)
    others = [_if_other(shared.get(name), weight) for name, weight in zip(_SHARED, of_target, strict=True)]
    return Shipped(modules, FINAL if arrangement.final else target.num_layers, *others)


def _module(
    target: Target, inner: Mapping[str, Tensor], outer: Sequence[Tensor], state_first: bool, where: str
) -> ShippedModule:
    sparse = any(name.startswith("mlp.experts.") for name in inner)
    cls = type(target.model)
    config = _config(target.config, sparse)
    base = cls.base_model_prefix
    tensors = {f"{base}.layers.0.{name}": tensor for name, tensor in inner.items()}
    tensors[f"{base}.norm.weight"] = outer[3]
    options: dict[str, Any] = {"dtype": target.dtype, "output_loading_info": True}
    try:
        with silent():
            model, info = cls.from_pretrained(None, config=config, state_dict=tensors, **options)
    except Exception as error:  # transformers raises many kinds; all mean the same to the user
        raise UserError(
            f"The layer {where} of {target.name} cannot be built: {type(error).__name__}: {error}",
            "Update transformers, or take another drafter.",
        ) from error
    lacking = sorted(name for name in info["missing_keys"] if ".layers." in name)
    if lacking:
        raise UserError(
            f"The checkpoint of {target.name} lacks tensors of its layer {where}: {', '.join(lacking[:3])}.",
            "Fetch the checkpoint again, all of its files.",
        )
    layer = Target(model.to(target.device), None, f"{target.name} {where}", "tokens")
    norms = []
    for weight in outer[:2]:
        norm = copy.deepcopy(layer.decoder.norm)
        norm.weight.copy_(weight)
        norms.append(norm)
    join = nn.Linear(outer[2].shape[1], outer[2].shape[0], bias=False, device=target.device, dtype=target.dtype)
    join.requires_grad_(False).weight.copy_(outer[2])
    return ShippedModule(layer, (norms[0], norms[1]), join, state_first)


def _config(known: Any, sparse: bool) -> Any:
    config = copy.deepcopy(known)
    config.num_hidden_layers, config.vocab_size = 1, _VOCABULARY
    config.tie_word_embeddings = False
    config.__dict__.pop("quantization_config", None)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    one_layer = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in one_layer.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _folder(target: Target) -> str:
    """Folder or hub id of the checkpoint; of a model that somebody else loaded, what transformers noted, if it did."""
    try:
        return loadable_folder(target.spec or str(getattr(target.config, "_name_or_path", "")))
    except UserError:
        return ""


def _joins(arrangement: Arrangement, names: Mapping[str, Any], layers: int) -> list[str]:
    numbered: list[tuple[int, str]] = []
    for name in names:
        if match := re.match(arrangement.found_by, name):
            number = int(match[1]) if match.groups() else 0
            if arrangement is not ARRANGEMENTS[0] or number >= layers:
                numbered.append((number, name))
    joins = [name for _, name in sorted(numbered)]
    if joins and arrangement.once:
        below = joins[0].removesuffix(f"{arrangement.parts[2]}.weight") + "layers."
        count = len({name.removeprefix(below).partition(".")[0] for name in names if name.startswith(below)})
        return joins * max(1, count)
    return joins


def _tensors(target: Target, folder: str, files: Mapping[str, str], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint by name; a `UserError` where some are missing or cannot be read."""
    if missing := sorted(set(wanted) - files.keys()):
        raise UserError(
            f"The checkpoint of {target.name} lacks {missing[0]} of its multi-token-prediction modules.",
            "Fetch the checkpoint again, all of its files.",
        )
    revision = getattr(target.config, "_commit_hash", None)
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in wanted}):
        try:
            with safe_open(str(cached_file(folder, file, revision=revision)), "pt") as held:
                tensors |= {name: held.get_tensor(name) for name in wanted if files[name] == file}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"The file {file} of {target.name} cannot be read: {error}", "Fetch the checkpoint again."
            ) from error
    return tensors


def _if_other(shipped: Tensor | None, weight: Tensor) -> Tensor | None:
    """A module's copy of the target's weights, where it differs from them."""
    if shipped is None or (shipped.shape == weight.shape and torch.equal(shipped.to(weight), weight)):
        return None
    return shipped.to(weight)
