"""All contents of a folder of heads are checked before use."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.heads.io import WEIGHTS, load_heads
from headstart.hub.engine_tuning import DraftsRow, EngineTuning, write_engine_tuning
from headstart.hub.format import check_folder, export_heads, read_heads
from headstart.model.model import Target
from tests.hub.helpers import TUNING

IDS, FUSION = "draft_to_target_D", "fc.weight"
NAN, INF = math.nan, math.inf
CURVES = {"log_probs": [[-2.0, -1.0, 0.0]] * 2, "accepted": [[0.1, 0.4, 0.8]] * 2, "reached": [[0.7, 0.5]]}
CALIBRATION = {prefix + name: curve for prefix in ("", "sampled_") for name, curve in CURVES.items()}
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Export EAGLE-3 heads with a draft vocabulary, a calibration and measurements of an engine."""
    settings = {"family": "eagle3", "draft_steps": 2, "aux_layers": [1, 2, 3], "draft_vocab_size": 50}
    config = make_config(settings, tiny_target)
    heads = family(config.family)(config)
    heads.set_draft_vocabulary(torch.arange(50) * 2)
    heads.warm_start(tiny_target)
    folder = tmp_path_factory.mktemp("exported") / "heads"
    export_heads(folder, heads, tiny_target, {**TUNING, "calibration": CALIBRATION}, {}, [[1, 2, 3, 4]])
    row = DraftsRow(1, 2, 20.0, 12.0, 0.9, (0.6, 0.3), 70.0, 50.0, 1.4)
    write_engine_tuning(folder, EngineTuning("vllm", "0.32", "tiny", 4, 16, (4, 4), (row,)))
    return folder


def put(*keys: Any) -> Change:
    """Set the JSON value at a path; the last argument is the new value."""
    *path, last, value = keys

    def change(values: Any) -> Any:
        reduce(getitem, path, values)[last] = value
        return values

    return change


def drop(*keys: Any) -> Change:
    *path, last = keys

    def change(values: Any) -> Any:
        del reduce(getitem, path, values)[last]
        return values

    return change


def with_tensor(name: str, changed: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: {**tensors, name: changed(tensors[name]).contiguous()}


def number(at: int, value: float) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return changed


CONFIG = [
    (put("heads", "rms_norm_eps", INF), "rms_norm_eps"),
    (put("heads", "rms_norm_eps", NAN), "rms_norm_eps"),
    (put("heads", "rms_norm_eps", -1e-6), "rms_norm_eps"),
    (put("heads", "rope_parameters", "rope_theta", 0.0), "rope_theta"),
    (put("heads", "rope_parameters", "rope_theta", NAN), "rope_theta"),
    (put("heads", "rope_parameters", "rope_theta", None), "rope_theta"),
    (put("heads", "num_key_value_heads", 3), "key heads"),
    (put("heads", "hidden_size", -64), "hidden_size"),
    (put("heads", "hidden_size", 10**30), "hidden_size"),
    (put("heads", "intermediate_size", 1 << 20), "down.weight"),
    (put("heads", "aux_layers", [1, 2, 4]), "aux_layers"),
    (put("heads", "draft_steps", 17), "draft_steps"),
    (put("heads", "draft_vocab_size", 51), IDS),
    (put("heads", "draft_vocab_size", 0), IDS),
    (put("heads", None), "family"),
    (put("target", "sketch", "weights", {"x": {"shape": [8]}}), "sketch"),
    (put("target", "sketch", "weights", 7), "sketch"),
    (put("target", "sketch", {}), "sketch"),
    (put("target", "fingerprint", 7), "fingerprint"),
    (drop("target", "spec"), "spec"),
    (put("target", None), "target"),
    (put("format_version", "1"), "not written by headstart export"),
    (lambda _: [], "not written by headstart export"),
]
TENSORS = [
    (with_tensor(IDS, lambda ids: ids[[0, 0, *range(2, 50)]]), IDS),
    (with_tensor(IDS, number(0, -1)), IDS),
    (with_tensor(IDS, lambda ids: ids.flip(0)), IDS),
    (with_tensor(IDS, number(49, 1 << 40)), IDS),
    (with_tensor(IDS, lambda ids: ids.float()), IDS),
    (with_tensor(IDS, lambda ids: ids[:49]), IDS),
    (with_tensor(FUSION, number(5, NAN)), FUSION),
    (with_tensor(FUSION, number(5, -INF)), FUSION),
    (with_tensor(FUSION, lambda weight: weight.to(torch.int32)), FUSION),
    (with_tensor(FUSION, lambda weight: weight.to(torch.float8_e4m3fn)), FUSION),
    (with_tensor(FUSION, lambda weight: weight[:, 1:]), FUSION),
    (with_tensor(FUSION, lambda weight: weight[0]), FUSION),
    (lambda tensors: {name: tensors[name] for name in tensors if name != FUSION}, FUSION),
    (lambda tensors: {**tensors, "more.weight": torch.zeros(1)}, "more.weight"),
]
TREE = [
    (lambda _: {"paths": [[0, 0, 0]]}, "3 deep"),
    (lambda _: {"paths": [[50]]}, "51 drafts"),
    (lambda _: {"paths": [[0.5]]}, "paths"),
    (lambda _: {"paths": [[]]}, "paths"),
    (lambda _: {"paths": [[rank % 50, rank // 50] for rank in range(2500)]}, "paths"),
    (lambda _: {}, "paths"),
    (lambda _: [], "paths"),
]
TUNED = [
    (put("calibration", "accepted", 1, [0.1, 0.4]), "accepted"),
    (put("calibration", "accepted", [[0.1, 0.4, 0.8]]), "accepted"),
    (put("calibration", "accepted", 0, 1, 1.5), "accepted"),
    (put("calibration", "accepted", 0, 1, -0.1), "accepted"),
    (put("calibration", "accepted", 0, 1, NAN), "accepted"),
    (put("calibration", "accepted", 0, [0.8, 0.4, 0.1]), "accepted"),
    (put("calibration", "log_probs", 0, [-1.0, -2.0, 0.0]), "log_probs"),
    (put("calibration", "log_probs", 0, [-INF, -2.0, 0.0]), "log_probs"),
    (put("calibration", "reached", [[0.7], [0.5]]), "reached"),
    (put("calibration", "reached", 0, 0, 2.0), "reached"),
    (put("calibration", "sampled_log_probs", 0, [NAN, -2.0, 0.0]), "log_probs"),
    (drop("calibration", "sampled_accepted"), "accepted"),
    (put("calibration", "drown_accepted", [[0.5]]), "drown_accepted"),
    (put("calibration", 7), "calibration"),
    (put("node_counts", [1, 4, 2]), "node_counts"),
    (put("node_counts", [2, 3, 4]), "node_counts"),
    (put("node_counts", [1, 2]), "node_counts"),
    (put("node_counts", []), "node_counts"),
    (put("verify_ms", 0, 0.0), "verify_ms"),
    (put("verify_ms", 1, NAN), "verify_ms"),
    (put("verify_ms", 1, -1.0), "verify_ms"),
    (put("draft_ms", -0.1), "draft_ms"),
    (put("level_ms", INF), "level_ms"),
    (put("read_ms", NAN), "read_ms"),
    (put("acceptance", 0, [2.0, 0.1]), "acceptance"),
    (put("acceptance", 0, []), "acceptance"),
    (put("acceptance", 0, 1, NAN), "acceptance"),
    (put("curve", [[1]]), "curve"),
    (put("curve", 0, 1, INF), "curve"),
    (put("chain", 3), "chain"),
    (put("chain", -1), "chain"),
    (put("tree", "wide"), "tree"),
    (put("packed", "perhaps"), "packed"),
    (put("predicted", "speedup", NAN), "predicted"),
    (put("settings", []), "settings"),
    (put("settings", "conditions", {"machine": "another"}), "Conditions.device"),
    (put("settings", "conditions", "threads", "two"), "Conditions.threads"),
    (put("kinds", [7]), "kinds"),
    (drop("draft_ms"), "draft_ms"),
    (lambda _: [], "calibration"),
]
ENGINES = [
    (put("vllm", "rows", 0, "drafts", -1), "vllm.rows.0.drafts"),
    (put("vllm", "rows", 0, "plain_tokens_per_second", 0.0), "vllm.rows.0.plain_tokens_per_second"),
    (put("vllm", "rows", 0, "expected", NAN), "vllm.rows.0.expected"),
    (drop("vllm", "rows"), "vllm.rows"),
]
CHANGES = [
    *(("config.json", *case) for case in CONFIG),
    *((WEIGHTS, *case) for case in TENSORS),
    *(("tree.json", *case) for case in TREE),
    *(("calibration.json", *case) for case in TUNED),
    *(("engines.json", *case) for case in ENGINES),
]


@pytest.mark.parametrize(
    ("name", "change", "field"), CHANGES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_value_is_refused_by_file_and_field(
    exported: Path, tmp_path: Path, tiny_target: Target, name: str, change: Change, field: str
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "heads"))
    file = folder / name
    if name == WEIGHTS:
        save_file(change(load_file(file)), file)
    else:
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    readers: list[Callable[[], Any]] = []
    if name != "engines.json":
        readers.append(lambda: read_heads(folder, tiny_target))
    if field != "aux_layers":
        readers.append(lambda: check_folder(folder))
    if name == WEIGHTS:
        readers.append(lambda: load_heads(folder))
    for read in readers:
        with pytest.raises(UserError) as caught:
            read()
        assert name in caught.value.problem and field in caught.value.problem, caught.value.problem
        assert caught.value.remedy


@pytest.mark.parametrize("name", ["config.json", "tree.json", "calibration.json"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe{", b"[" * 100_000, b"1" * 10_000, b"null"], ids=["bytes", "deep", "number", "null"]
)
def test_broken_json_is_named(exported: Path, tmp_path: Path, tiny_target: Target, name: str, content: bytes) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "heads"))
    (folder / name).write_bytes(content)
    for read in (check_folder, lambda where: read_heads(where, tiny_target)):
        with pytest.raises(UserError, match=name):
            read(folder)


def test_intact_folder_passes(exported: Path, tiny_target: Target) -> None:
    check_folder(exported)
    assert read_heads(exported, tiny_target)[2]["calibration"] == CALIBRATION
