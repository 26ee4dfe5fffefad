"""Hidden-states connector for vLLM's CPU build, which lacks the CUDA streams of the stock connector.

vLLM imports a copy of this module in its own environment; headstart itself does not (see `states_servers`).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]  # of its own environment
    example_hidden_states_connector as stock,
)


class _Copied:
    """Stand-in for a completed CUDA event."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStates(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]  # Any here
    """Connector that writes the stock connector's files synchronously."""

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
