"""C kernels for draft heads with a few rows on a CPU: 8-bit products, norms, attention and drafts, and complete levels
and trees if all weights are in 8 bits. Also an argmax over any number of rows.

A draft level has a few rows and eighty operators, so torch spends most of it on dispatch; its 8-bit product is three
times slower. The kernels run in inference mode only. Torch is the reference, equal up to rounding, and the fallback
without a compiler or AVX2. See `draft_kernels.c`.

Shape suffixes: B rows of a batch, W new entries of each, F fields of an entry, I inputs, N outputs, E hidden size, H
all heads, P positions, R ranks, D draft vocabulary, V embeddings of a table, d head size.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headstart.kernels.memory import address, check_status
from headstart.support.compiled import vector_library
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Request, Tree

SOURCE = Path(__file__).with_suffix(".c")
ROWS = 12
"""Maximum rows: with more, 8-bit weights are not faster. Levels of a tree grown in one call may have more."""
MOST_NODES = 1024
"""Nodes of a tree grown in one call, which keeps them on the stack."""
FIELDS = 4
"""Fields of an entry before its further slots."""

_UNKNOWN = Calibration()
_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Map(ctypes.Structure):
    _fields_: ClassVar = [("weight", _P), ("scale", _P), ("inputs", _N), ("outputs", _N)]


class _LayerWeights(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _Map) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _P) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        ("own", _N),
        ("eps", ctypes.c_float),
    ]


class _Recurrent(ctypes.Structure):
    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(_LayerWeights)),
        *((name, _Map) for name in ("lm_head", "fusion")),
        *((name, _P) for name in ("norm", "table", "embedding_norm", "fed_norm")),
        *((name, _N) for name in ("depth", "vocabulary", "feeds_normed", "normed_stream")),
        ("eps", ctypes.c_float),
    ]


class _KVView(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _P) for name in ("cos", "sin", "keys", "values", "entries", "last")),
        *((name, _N) for name in ("positions", "slots", "count", "further", "requested", "heads", "key_heads", "size")),
        *((name, _N) for name in ("row_stride", "head_stride")),
    ]


class _Curves(ctypes.Structure):
    _fields_: ClassVar = [*((name, _P) for name in ("knots", "shares", "reached", "starts")), ("depths", _N)]


class _Growth(ctypes.Structure):
    _fields_: ClassVar = [
        ("of_path", _Curves * 2),
        ("tokens", _P),
        *((name, ctypes.c_double) for name in ("threshold", "level_threshold")),
        *((name, _N) for name in ("max_nodes", "most_children", "levels", "ranks", "base")),
    ]


@dataclass(frozen=True)
class Int8Matrix:
    """An 8-bit matrix, `rows()[o, i] * scale_N[o]`; rows past `outputs` are padding.

    Attributes:
        data: row-major, or in panels.
    """

    data: Tensor
    scale_N: Tensor
    outputs: int

    @property
    def in_panels(self) -> bool:
        """Whether it has the layout of the C kernels."""
        return self.data.dim() == 4

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * (2 if self.in_panels else 1)

    def rows(self) -> Tensor:
        """int8_NI; a copy if in panels."""
        return self.data.transpose(1, 2).reshape(-1, self.inputs) if self.in_panels else self.data


def in_panels(functions: Any, int8_NI: Tensor) -> Tensor:
    """Repack to the C layout [panels, pairs of inputs, outputs of a panel, 2]; outputs are a multiple of 32, inputs of
    2."""
    return int8_NI.view(-1, functions.outputs_of_a_panel(), int8_NI.shape[1] // 2, 2).transpose(1, 2).contiguous()


@cache
def compiled(dtype: torch.dtype) -> Any:
    """Compile the kernels for a dtype; None if unsupported."""
    functions = vector_library(SOURCE, dtype) if dtype in (torch.bfloat16, torch.float32) else None
    if functions is None:
        return None
    for name, arguments in {
        "product": [*[_P] * 3, _N, ctypes.c_int],
        "norm": [*[_P] * 3, *[_N] * 3, ctypes.c_float],
        "attend": [*[_P] * 3, ctypes.c_int],
        "level": [*[_P] * 9, ctypes.c_int],
        "grow": [*[_P] * 8, ctypes.c_int],
        "best_drafts": [_P, *[_N] * 3, *[_P] * 2],
        "argmax_rows": [_P, _P, _N, _N, ctypes.c_int],
        "outputs_of_a_panel": [],
    }.items():
        function = getattr(functions, name)
        function.argtypes = arguments
        if name in ("product", "attend", "level", "grow", "argmax_rows"):
            function.errcheck = check_status
    functions.norm.restype = functions.best_drafts.restype = None
    functions.outputs_of_a_panel.restype = functions.grow.restype = ctypes.c_int64
    return functions


def has_few_rows(x: Tensor) -> bool:
    """Whether x [.., I] has at most `ROWS` rows on a CPU."""
    return x.is_cpu and x.numel() <= ROWS * x.shape[-1]


def kernels_for(x: Tensor) -> Any:
    """Return the kernels if they serve x [.., I]: a few rows on a CPU, in inference mode; else None."""
    served = torch.is_inference_mode_enabled() and has_few_rows(x) and x.numel() > 0
    return compiled(x.dtype) if served and not torch.is_autocast_enabled("cpu") else None


def product(functions: Any, x: Tensor, matrix: Int8Matrix) -> Tensor:
    """Multiply x [.., I] by a matrix: [.., N]."""
    x, inputs = x.contiguous(), x.shape[-1]
    out = x.new_empty(*x.shape[:-1], matrix.outputs)
    pointers = ctypes.byref(_map(matrix)), x.data_ptr(), out.data_ptr()
    functions.product(*pointers, x.numel() // inputs, torch.get_num_threads())
    return out


def norms(functions: Any, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Concatenate the `F.rms_norm` of several [.., I], each with its own weight."""
    size, count = parts[0].shape[-1], len(parts)
    out = parts[0].new_empty(*parts[0].shape[:-1], count * size)
    start, rows = out.data_ptr(), parts[0].numel() // size
    for x, weight_I in zip(parts, weights, strict=True):
        x = x.contiguous()
        functions.norm(x.data_ptr(), weight_I.data_ptr(), start, rows, size, count * size, eps)
        start += size * out.itemsize
    return out


class Layer:
    """The weights of an 8-bit layer with a SwiGLU MLP.

    Args:
        maps: qkv, attention output, gate and up, down.
        norms: input, query, key and MLP norms; None to skip one.
        own_heads: number of leading key heads that attend only to their own position.
    """

    def __init__(
        self, maps: Sequence[Int8Matrix], norms: Sequence[Tensor | None], eps: float, own_heads: int = 0
    ) -> None:
        self._kept = maps, norms  # keeps the weights alive
        self.weights = _LayerWeights(*map(_map, maps), *map(address, norms), own_heads, eps)


class EmbeddingInput(NamedTuple):
    """Weights for the first layer's input: the normed embedding and the normed feedback, concatenated.

    Attributes:
        table_VE: embeddings.
        norms_E: weights of the two norms.
        normed_stream: whether the residual stream starts from the feedback after its norm, or before it.
        fusion: maps target states to the initial feedback; None if it is not in 8 bits.
    """

    table_VE: Tensor
    norms_E: tuple[Tensor, Tensor]
    normed_stream: bool
    fusion: Int8Matrix | None = None


@dataclass(frozen=True)
class Growth:
    """Settings to grow one row's tree deterministically.

    Attributes:
        request: with its calibration, and without a shape.
        draft_to_target_D: int64, tokens of the draft vocabulary.
        levels: maximum.
        ranks: maximum children of a node.
        base: slot of the root's entry.
    """

    request: Request
    draft_to_target_D: Tensor
    levels: int
    ranks: int
    base: int

    def for_c(self) -> _Growth:
        request, calibration = self.request, self.request.calibration or _UNKNOWN
        sides = [(side.flat, len(side.log_probs)) for side in (calibration, calibration.after(True))]
        curves = [_Curves(*(part.buffer_info()[0] for part in parts), depths) for parts, depths in sides]
        max_children = 1 if request.chain else request.max_nodes - 1
        sizes = request.max_nodes, max_children, self.levels, min(self.ranks, len(self.draft_to_target_D)), self.base
        thresholds = request.threshold, request.level_threshold
        growth = _Growth((_Curves * 2)(*curves), self.draft_to_target_D.data_ptr(), *thresholds, *sizes)
        growth.kept = sides  # keeps the buffers alive
        return growth


class Recurrent:
    """Recurrent heads with all weights in 8 bits.

    Args:
        lm_head: over the draft vocabulary.
        norm_E: weight of the final norm, if any.
        feeds_normed: whether the feedback is the normed stream or the raw one.
        embedding_input: input of the first layer; None if the caller computes it.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        lm_head: Int8Matrix,
        norm_E: Tensor | None,
        feeds_normed: bool,
        eps: float,
        embedding_input: EmbeddingInput | None = None,
    ) -> None:
        weights = (_LayerWeights * len(layers))(*(layer.weights for layer in layers))
        self._kept, self._lm_head, self.embedding_input = (layers, weights, lm_head, norm_E), lm_head, embedding_input
        self._weights = _Recurrent(
            layers=weights,
            lm_head=_map(lm_head),
            norm=address(norm_E),
            depth=len(layers),
            feeds_normed=feeds_normed,
            eps=eps,
        )
        if embedding_input is not None:
            table_VE, norms_E, normed_stream, fusion = embedding_input
            self._weights.fusion, self._weights.table = _map(fusion), table_VE.data_ptr()
            self._weights.embedding_norm, self._weights.fed_norm = map(address, norms_E)
            self._weights.vocabulary, self._weights.normed_stream = len(table_VE), normed_stream

    def run_from_hidden(
        self, functions: Any, read_BWI: Tensor, stream_BWE: Tensor, views: Sequence[KVView]
    ) -> tuple[Tensor, Tensor]:
        """Run a level from the first layer's input and the residual stream: logits [B, requested of a row, D] and
        feedback [.., E]."""
        read_BWI, stream_BWE = read_BWI.contiguous(), stream_BWE.contiguous()
        return self._level(functions, stream_BWE, stream_BWE.shape, (read_BWI, stream_BWE, None, None, None), views)

    def run_from_tokens(
        self, functions: Any, tokens_BW: Tensor, parents: array[int] | None, above_BWX: Tensor, views: Sequence[KVView]
    ) -> tuple[Tensor, Tensor]:
        """Run a level from tokens (int64) through `embedding_input`. `above_BWX` is the previous level's feedback,
        indexed by `parents` over all rows, or without parents the target states before each token.

        Raises:
            IndexError: the table has no such token.
        """
        tokens_BW, above_BWX = tokens_BW.contiguous(), above_BWX.contiguous()
        return self._level(functions, above_BWX, tokens_BW.shape, (None, None, tokens_BW, parents, above_BWX), views)

    @property
    def grows(self) -> bool:
        """Whether `grow` is supported."""
        return self.embedding_input is not None and self.embedding_input.fusion is not None

    def grow(
        self, functions: Any, pending: array[int], above_1PX: Tensor, views: Sequence[KVView], growth: Growth
    ) -> Tree:
        """Grow one row's tree; the last pending token is its root. `above_1PX` are the target states before each of
        them, `views` describe their entries.

        Raises:
            IndexError: the table has no such token.
        """
        above_1PX, most = above_1PX.contiguous(), growth.request.max_nodes
        at = (_KVView * len(views))(*(view.for_c(above_1PX.dtype) for view in views))
        nodes, probs, drafted = array("q", bytes(8 * 4 * most)), array("d", bytes(8 * 2 * most)), ctypes.c_int64()
        nodes[0] = pending[-1]
        weights, rules = ctypes.byref(self._weights), ctypes.byref(growth.for_c())
        inputs = weights, rules, at, pending.buffer_info()[0], above_1PX.data_ptr()
        outputs = nodes.buffer_info()[0], probs.buffer_info()[0], ctypes.byref(drafted), torch.get_num_threads()
        size = functions.grow(*inputs, *outputs)
        if size < 0:
            raise IndexError(f"the table has {self._weights.vocabulary} rows")
        tokens, parents = nodes[:size].tolist(), nodes[2 * most : 2 * most + size].tolist()
        return Tree(tokens, parents, probs[:size].tolist(), levels=drafted.value)

    def _level(
        self,
        functions: Any,
        like: Tensor,
        shape: Sequence[int],
        inputs: Sequence[Tensor | array[int] | None],
        views: Sequence[KVView],
    ) -> tuple[Tensor, Tensor]:
        requested = shape[1] if views[-1].last_B is None else 1
        feedback, logits = (
            like.new_empty(shape[0], requested, size) for size in (self._weights.lm_head.inputs, self._lm_head.outputs)
        )
        pointers = (part.buffer_info()[0] if isinstance(part, array) else address(part) for part in inputs)
        at = (_KVView * len(views))(*(view.for_c(like.dtype) for view in views))
        outputs = feedback.data_ptr(), logits.data_ptr(), torch.get_num_threads()
        if functions.level(ctypes.byref(self._weights), *pointers, at, *outputs):
            raise IndexError(f"the table has {self._weights.vocabulary} rows")
        return logits, feedback


def _map(matrix: Int8Matrix | None) -> _Map:
    if matrix is None:
        return _Map()
    return _Map(matrix.data.data_ptr(), matrix.scale_N.data_ptr(), matrix.inputs, matrix.outputs)


class KVView(NamedTuple):
    """New entries of a layer, and the slots they attend to.

    Attributes:
        entries: fields [B, W, F] as in `Entries`, and their shape.
        last_B: the entry of each row to compute an output for; None for all.
        kv: cache of rotated keys and of values, [B, key heads, slots, d].
        angles: (cos, sin) [P, d]; later positions are clamped.
        heads: number of query heads.
    """

    entries: tuple[array[int], tuple[int, int, int]]
    last_B: array[int] | None
    kv: tuple[Tensor, Tensor]
    angles: tuple[Tensor, Tensor]
    heads: int

    def for_c(self, dtype: torch.dtype) -> _KVView:
        """Convert for C, with activations of this dtype."""
        (keys, values), (cos, sin), (entries, (rows, width, fields)) = self.kv, self.angles, self.entries
        assert dtype == cos.dtype == keys.dtype, "all in one dtype"
        _, key_heads, slots, size = keys.shape
        last, requested = (None, rows * width) if self.last_B is None else (self.last_B.buffer_info()[0], rows)
        pointers = (part.data_ptr() for part in (cos, sin, keys, values))
        sizes = (
            len(cos),
            slots,
            rows * width,
            fields - FIELDS,
            requested,
            self.heads,
            key_heads,
            size,
            *keys.stride()[:2],
        )
        return _KVView(*pointers, entries.buffer_info()[0], last, *sizes)


def attend(functions: Any, qkv_BWHd: Tensor, view: KVView) -> Tensor:
    """Attend with merged queries, keys and values: [B, requested of a row, heads * d]."""
    qkv_BWHd = qkv_BWHd.contiguous()
    rows, width, _, size = qkv_BWHd.shape
    out = qkv_BWHd.new_empty(rows, width if view.last_B is None else 1, view.heads * size)
    functions.attend(
        qkv_BWHd.data_ptr(), ctypes.byref(view.for_c(qkv_BWHd.dtype)), out.data_ptr(), torch.get_num_threads()
    )
    return out


def best_drafts(functions: Any, logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor) -> Tensor:
    """See `headstart.drafters.draft_graphs.best_drafts`."""
    logits_BWD = logits_BWD.contiguous()
    *shape, size = logits_BWD.shape
    assert ranks <= size == len(draft_to_target_D), "one target token per draft token"
    out = torch.empty(3, *shape, ranks, dtype=torch.int32)
    functions.best_drafts(logits_BWD.data_ptr(), prod(shape), size, ranks, draft_to_target_D.data_ptr(), out.data_ptr())
    return out


def argmax(logits: Tensor) -> Tensor:
    """Argmax [..] of logits [.., V], equal to torch's, including ties (first) and NaN (largest), but many times faster
    on a CPU. Takes any number of rows, in any mode."""
    functions = compiled(logits.dtype) if logits.is_cpu and logits.is_contiguous() and logits.numel() else None
    if functions is None:
        return logits.max(-1).indices  # equals argmax, and is five times faster in bfloat16
    out = torch.empty(logits.shape[:-1], dtype=torch.long)
    functions.argmax_rows(logits.data_ptr(), out.data_ptr(), out.numel(), logits.shape[-1], torch.get_num_threads())
    return out
