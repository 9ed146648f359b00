"""Checkpoints of a run: what is needed to go on as if nothing had happened.

    <output_dir>/checkpoints/step-000020/
        adapter/                adapters (and trained norms) in PEFT's layout, fp32
        optimizer.safetensors   the optimizer's state by parameter name; torch's generator states
        state.json              step, data position, learning-rate and noise state, other generators, the run's config

Checkpoints are taken between steps only; a step that was cut short is replayed whole, from the same random keys. A
folder is written under a temporary name, flushed to disk, then renamed: what has the final name is complete. Nothing is
pickled. The frozen base is not in it: its folder is named in the config.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl.config import RunConfig
from qerl.formats.writing import flush
from qerl.nn.lora import load_adapter_weights

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

# Settings that may differ between a run and its resumption: they change what is written, or memory and speed, not what
# is computed (beyond rounding). So a run that ran out of memory goes on with less.
FREE_SETTINGS = (
    "output_dir",
    "save_every",
    "keep_checkpoints",
    "log_completions",
    "report_to",
    "rewards.timeout_s",
    "rollout.max_batch_size",
    "rollout.kv_cache_tokens",
    "rollout.kv_cache_memory",
    "rollout.prefill_tokens",
    "rollout.cuda_graphs",
    "optimizer.micro_batch_tokens",
    "optimizer.logprob_chunk",
    "optimizer.gradient_checkpointing",
    "optimizer.offload_activations",
)


def save_checkpoint(
    output_dir: Path,
    *,
    step: int,
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    config: RunConfig,
) -> Path:
    """Write the state after `step` steps and prune older checkpoints; returns the folder. OSError: no room."""
    root = output_dir / "checkpoints"
    target = root / f"step-{step:06d}"
    if target.exists():
        return target
    staging = root / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    numpy_state: Any = np.random.get_state()
    record = {
        "step": step,
        **state,
        "python_random": random.getstate(),
        "numpy_random": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "config": config.model_dump(mode="json"),
    }
    try:
        save_adapter(model, staging / "adapter")
        save_file(_optimizer_tensors(model, optimizer) | _generator_states(), staging / "optimizer.safetensors")
        (staging / "state.json").write_text(json.dumps(record, indent=1))
        for path in [*staging.rglob("*"), staging]:
            flush(path)
    except (SafetensorError, OSError) as error:  # no room, most likely
        shutil.rmtree(staging, ignore_errors=True)
        newest = list_checkpoints(output_dir)[-1:]
        kept = f"; {newest[0]} is whole: --resume goes on from there" if newest else ""
        raise OSError(f"{target} cannot be written ({error}){kept}") from None
    staging.rename(target)
    flush(root)
    for old in list_checkpoints(output_dir)[: -config.keep_checkpoints]:
        old.rename(root / f".{old.name}.{os.getpid()}.tmp")  # half removed, it has not the name of a whole one
    for leftover in root.glob(".step-*.tmp"):  # also of a run that was killed while it wrote or removed one
        shutil.rmtree(leftover, ignore_errors=True)
    return target


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter in PEFT's layout, to a temporary name first."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(str(staging))
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


_locks: dict[Path, IO[str]] = {}


def lock(output_dir: Path) -> None:
    """Let no other process write a run there until this one ends. ValueError: one does already.

    A file system that has no locks is left as it is.
    """
    path = (output_dir / ".lock").resolve()
    if fcntl is None or path in _locks:
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return
        file.seek(0)
        raise ValueError(
            f"{output_dir}: another process ({file.read().strip() or 'unknown'}) writes a run there: wait until it "
            "ends, or choose another output_dir"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()}")
    file.flush()
    _locks[path] = file  # closing it would give the lock back


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(output_dir.glob("checkpoints/step-*/"))


def read_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's state.json."""
    return json.loads((folder / "state.json").read_text())


def check_same_run(state: dict[str, Any], config: RunConfig, folder: Path) -> None:
    """Refuse to go on with settings that would have given another run; ValueError lists them."""
    old, new = _flatten(state["config"]), _flatten(config.model_dump(mode="json"))
    changed = [
        key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and key not in FREE_SETTINGS
    ]
    if changed:
        lines = [f"  {key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now" for key in changed]
        raise ValueError(
            f"{folder} was made with other settings:\n"
            + "\n".join(lines)
            + "\nUse the same ones, or start anew in another output_dir; "
            + f"lora.start_from={folder / 'adapter'} begins it from what was learned so far."
        )


def load_parameters(folder: Path, model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """Put the adapter's and the optimizer's tensors back, bit for bit."""
    load_adapter_weights(model, folder / "adapter")
    tensors = load_file(folder / "optimizer.safetensors")
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        by_parameter.setdefault(name, {})[part] = tensor
    counts_in_tensors = isinstance(optimizer, torch.optim.AdamW)  # bitsandbytes counts steps in integers
    for name, parameter in _trainable(model):
        state: dict[str, Any] = {key: t.to(parameter.device) for key, t in by_parameter.get(name, {}).items()}
        if "step" in state:
            state["step"] = state["step"].cpu() if counts_in_tensors else int(state["step"])
        optimizer.state[parameter] = state


def load_generators(folder: Path) -> None:
    """Put the global random generators back. The project draws from none of them; a user's reward function may."""
    tensors = load_file(folder / "optimizer.safetensors")
    torch.set_rng_state(tensors["rng/torch"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    state = read_state(folder)
    name, keys, *rest = state["numpy_random"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python_random"]
    random.setstate((version, tuple(internal), gauss))


def _trainable(model: PeftModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _optimizer_tensors(model: PeftModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": torch.as_tensor(value).detach().to("cpu", copy=True)  # some share memory
        for name, parameter in _trainable(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _generator_states() -> dict[str, Tensor]:
    states = {"rng/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
