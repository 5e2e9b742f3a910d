"""How much memory tensors take at most, on any device: a GPU's own counter without the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Within it, `peak` is the most that tensors made within have held at one time; those made before do not count."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        # Held, not only noted: the address of one that was freed would be given to a tensor made within.
        self._before = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in before)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return made
