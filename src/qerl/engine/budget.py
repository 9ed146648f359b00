"""How many pages of keys and values a run allows, next to the runner's spare one.

    rollout.kv_cache_tokens   tokens / PAGE_SIZE
    rollout.kv_cache_memory   bytes, or a share of all memory, / bytes of a page; the spare page is in them

Both may be given, then the smaller one counts. Called by engine.py, before it makes a cache and to refuse what can
never fit into one, and by plan/memory.py.
"""

from __future__ import annotations

import math
import os

import torch

from qerl.config import RolloutConfig, parse_memory
from qerl.engine.kv_cache import PAGE_SIZE


def allowed_pages(config: RolloutConfig, page_bytes: int, total_bytes: int) -> dict[str, int]:
    """Pages, by the key that allows no more; empty without a limit.

    page_bytes: keys and values of one page, of all layers; total_bytes: the device's memory.
    """
    limits: dict[str, int] = {}
    if config.kv_cache_tokens is not None:
        limits["kv_cache_tokens"] = config.kv_cache_tokens // PAGE_SIZE
    if config.kv_cache_memory is not None:
        limits["kv_cache_memory"] = max(0, parse_memory(config.kv_cache_memory, total_bytes) // page_bytes - 1)
    return limits


def num_pool_pages(config: RolloutConfig, page_bytes: int, total_bytes: int, *, slots: int, pages_per_slot: int) -> int:
    """Pages of the pool: what all slots can ever need, or what is allowed."""
    # One page more a slot than its sequence has: the prompt's last one, once it was copied.
    return min([slots * (pages_per_slot + 1), *allowed_pages(config, page_bytes, total_bytes).values()])


def check_pages(config: RolloutConfig, page_bytes: int, total_bytes: int, needed: int, what: str) -> None:
    """ValueError, with the key and the smallest value that works, if so many pages are more than is allowed."""
    for key, pages in allowed_pages(config, page_bytes, total_bytes).items():
        if pages < needed:
            smallest = str(needed * PAGE_SIZE) if key == "kv_cache_tokens" else _written((needed + 1) * page_bytes)
            raise ValueError(
                f"{what} take {needed * PAGE_SIZE} tokens of KV cache, and rollout.{key} = {getattr(config, key)} "
                f"holds {pages * PAGE_SIZE}: set it to {smallest} at least, or lower rollout.max_completion_length"
            )


def total_bytes(device: torch.device) -> int:
    """All memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _written(size: int) -> str:
    return f"{math.ceil(size / 2**20)}MiB" if size >= 2**24 else f"{math.ceil(size / 2**10)}KiB"
