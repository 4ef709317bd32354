"""Saving and loading weights and AdamW's state: accelerate's full state dict of FSDP2, and hf_parallel's streams.

    python benchmarks/checkpoints.py [--ranks 2 4] [--hidden 768] [--layers 12] [--folder /a/disk]

The same sharded model and optimizer for both. Prints times; the peak of private memory above what was held before, on
rank 0 and on the fullest other rank; and bytes that ranks handed to the disk. Ours includes checksums and the wait for
the disk (fsync); accelerate's does neither, so a second figure adds the wait. Times depend on the machine: the ratios
are the result.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_parallel.checkpoint  # before the ranks are forked
from hf_parallel import parallelize
from tests.distributed import run
from tests.reliability.test_loading_memory import MB, watched


def build(hidden: int, layers: int, ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    """A Llama sharded over all ranks, and AdamW with its moments."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        use_cache=False,
    )
    model = parallelize(AutoModelForCausalLM.from_config(config), f"dp_shard={ranks}")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def accelerates(model: Any, optimizer: Any, folder: str) -> dict[str, Callable[[], None]]:
    """What accelerate does for FSDP2 with FULL_STATE_DICT, by its own functions."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    PartialState(cpu=True)  # its logger asks for it
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    rank = dist.get_rank()
    facts = {
        "num_processes": dist.get_world_size(),
        "process_index": rank,
        "is_fsdp2": True,
        "is_main_process": not rank,
    }
    stand_in = types.SimpleNamespace(**facts, wait_for_everyone=dist.barrier)

    def save() -> None:
        fsdp_utils.save_fsdp_model(plugin, stand_in, model, folder)
        fsdp_utils.save_fsdp_optimizer(plugin, stand_in, optimizer, model, folder)
        dist.barrier()

    def flush() -> None:
        for file in Path(folder).iterdir() if rank == 0 else ():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        dist.barrier()

    def load() -> None:
        fsdp_utils.load_fsdp_model(plugin, stand_in, model, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, stand_in, optimizer, model, folder)
        dist.barrier()

    return {"save": save, "flush": flush, "load": load}


def ours(model: Any, optimizer: Any, folder: str) -> dict[str, Callable[[], None]]:
    """A checkpoint folder with manifest, as Trainer's save makes it."""
    mesh = model._hf_parallel.mesh

    def save() -> None:
        saving = hf_parallel.checkpoint.Checkpoint(mesh, folder)
        saving.begin()
        with hf_parallel.checkpoint.make_save_current(saving):
            model.save_pretrained(saving.folder)
            hf_parallel.checkpoint.save_optimizer_state(model, optimizer, mesh, saving.folder)
        saving.commit()

    def load() -> None:
        found = hf_parallel.checkpoint.find_damages(folder, mesh.rank, dist.get_world_size())
        assert not found, found
        hf_parallel.checkpoint.load_weights(model, folder)
        hf_parallel.checkpoint.load_optimizer_state(model, optimizer, folder)
        dist.barrier()

    return {"save": save, "flush": lambda: None, "load": load}


def measure(kind: str, hidden: int, layers: int, ranks: int, folder: str) -> dict[str, Any]:
    """Seconds and peak bytes of each step, after a first save that warms up what is lazy."""
    torch.set_num_threads(1)
    model, optimizer = build(hidden, layers, ranks)
    small = build(96, 1, ranks)
    make = {"accelerate": accelerates, "hf_parallel": ours}[kind]
    for step in make(*small, f"{folder}-warm").values():
        step()
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for name, step in make(model, optimizer, folder).items():
        dist.barrier()
        before, start = written(), time.perf_counter()
        _, peak, _ = watched(step)
        found[name] = time.perf_counter() - start, peak, written() - before
    return found


def written() -> int:
    """Bytes that this process has caused to be sent to disks (Linux; 0 for a folder in memory)."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("write_bytes")).split()[1])


def main() -> None:
    """Run both, interleaved twice, and print the better of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    for ranks in args.ranks:
        found: dict[str, list[list[dict[str, Any]]]] = {"accelerate": [], "hf_parallel": []}
        for _ in range(args.rounds):
            for kind, rows in found.items():
                with tempfile.TemporaryDirectory(dir=args.folder) as place:
                    sizes = (args.hidden, args.layers, ranks)
                    rows.append(run(measure, ranks, kind, *sizes, f"{place}/saved", timeout=600))
        show(found, ranks)


def show(found: dict[str, list[list[dict[str, Any]]]], ranks: int) -> None:
    """A table of the better time of each, and of peaks and bytes as "rank 0 / fullest other rank"."""
    parameters = found["accelerate"][0][0]["parameters"]
    print(f"{parameters / 1e6:.0f} M parameters, fp32, AdamW, {ranks} ranks; MB: rank 0 / fullest other rank")
    print(f"{'':12}{'save':>8}{'on disk':>9}{'peak':>12}{'written':>13}{'load':>8}{'peak':>12}")
    for kind, rows in found.items():
        save, load = (min(row[0][step][0] for row in rows) for step in ("save", "load"))
        flushed = min(row[0]["save"][0] + row[0]["flush"][0] for row in rows)
        peaks = {step: _two([[rank[step][1] for rank in row] for row in rows]) for step in ("save", "load")}
        size = _two([[sum(rank[step][2] for step in ("save", "flush")) for rank in row] for row in rows])
        print(f"{kind:12}{save:7.2f}s{flushed:8.2f}s{peaks['save']:>12}{size:>13}{load:7.2f}s{peaks['load']:>12}")


def _two(rows: list[list[int]]) -> str:
    return f"{max(row[0] for row in rows) / MB:.0f} / {max(max(row[1:]) for row in rows) / MB:.0f}"


if __name__ == "__main__":
    main()
