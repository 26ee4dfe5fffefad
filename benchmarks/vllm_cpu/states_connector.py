"""vLLM's connector that writes hidden states, for its CPU build: the stock one copies by way of CUDA streams.

vLLM imports this module itself; nothing of headstart is imported here. Start it so:

    PYTHONPATH=benchmarks/vllm_cpu vllm serve TARGET ... --kv-transfer-config '{"kv_connector": "CpuHiddenStates",
        "kv_connector_module_path": "states_connector", ...}'
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]  # of its own environment
    example_hidden_states_connector as stock,
)


class _Copied:
    """Stands for a CUDA event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStates(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]  # Any here
    """Writes what the stock connector writes, in the same files."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        slots_BS = torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)
        states_TLE = stock.extract_from_kv_cache(self._kv_cache, slots_BS.flatten(), len(pending.token_ids))
        tensors = {"hidden_states": states_TLE.contiguous().clone(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        event = _Copied()
        self._req_copy_events[pending.req_id] = event
        self._write_tensors(tensors, event, pending.filename, self._lock_fds.pop(pending.req_id, None))
