"""Where a run happens, as far as its bytes depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.config import RunConfig


@dataclass(frozen=True)
class Target:
    """See the module's text."""

    on_gpu: bool
    activation_bytes: int
    """2 for bfloat16."""
    total_bytes: int | None = None
    """Of the device's memory, where it is known: what a share in `rollout.kv_cache_memory` is of."""
    free_bytes: int | None = None
    """Of it, what the run may take, where that is known: not all of it for what only makes the update faster."""

    @classmethod
    def of(
        cls, config: RunConfig, *, on_gpu: bool = True, total_bytes: int | None = None, free_bytes: int | None = None
    ) -> Target:
        """What `model.dtype` means there."""
        narrow = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and on_gpu)
        return cls(on_gpu, 2 if narrow else 4, total_bytes, free_bytes)
