"""Four data ranks, one of them twice as slow: seconds per step with even shares, and with `batch_shares=2:2:2:1`.

    python -m benchmarks.uneven [--seconds 0.02] [--steps 5]

Devices are pretended on any machine: each layer sleeps for so many seconds per example in its forward pass and twice
that in its backward pass, on the last rank for twice as long. 56 examples a step are 14 for each rank, or 16 16 16 8.
The step would be 1.75 times as fast if nothing but sleep took time. Both run after each other in the same processes,
as an unchanged Trainer script in ZeRO-3. Fails below 1.6 times, or if the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RANKS, EXAMPLES, LAYERS, SLOW = 4, 56, 4, 2.0
SPECS = {"even": "dp_shard=4", "shared": "dp_shard=4,batch_shares=2:2:2:1"}
PARTS = {"even": [14] * RANKS, "shared": [16, 16, 16, 8]}
WANTED = 1.6


def slowness(rank: int) -> float:
    """How many times as long this rank takes for an example."""
    return SLOW if rank == RANKS - 1 else 1.0


def asleep(name: str, seconds: float) -> float:
    """Seconds that the slowest rank sleeps in a step."""
    return max(3 * LAYERS * seconds * slowness(rank) * count for rank, count in enumerate(PARTS[name]))


# ---- one of the four processes --------------------------------------------------------------------------------------


def _model(seconds: float) -> Any:
    """A Llama whose layers take time by the number of examples."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class Slowly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            time.sleep(seconds)
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(2 * ctx.seconds)
            return gradients[0], None

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape, **heads))
    each = seconds * slowness(int(os.environ["RANK"]))
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, hidden: Slowly.apply(hidden, each * len(hidden)))
    return model


def _train(spec: str, out: str, seconds: float, steps: int) -> dict[str, list[float]]:
    """Seconds and losses of the steps of a Trainer script; the first step is left out of the seconds."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_parallel.hooks import activation

    class Times(TrainerCallback):
        def __init__(self) -> None:
            self.found: dict[str, list[float]] = {"seconds": [], "losses": []}
            self.began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.found["seconds"].append(time.perf_counter() - self.began)

        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            self.found["losses"] += [logs["loss"]] if "loss" in logs else []

    activation.activate(spec, "benchmarks.uneven")
    drawn, times = torch.Generator().manual_seed(1), Times()
    tokens = torch.randint(0, 97, (EXAMPLES * steps, 16), generator=drawn)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    settings: dict[str, Any] = {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "seed": 0}
    arguments = TrainingArguments(out, per_device_train_batch_size=EXAMPLES // RANKS, **settings, **quiet)
    Trainer(model=_model(seconds), args=arguments, train_dataset=rows, callbacks=[times]).train()
    activation.deactivate()
    return {"seconds": times.found["seconds"][1:], "losses": times.found["losses"]}


def train_all(out: str, seconds: float, steps: int) -> None:
    """Train under both specs, one after the other; rank 0 writes what it has found to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found = {name: _train(spec, out, seconds, steps) for name, spec in SPECS.items()}
    if dist.get_rank() == 0:
        with open(f"{out}/found.json", "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


# ---- the whole ------------------------------------------------------------------------------------------------------


def measure(seconds: float, steps: int) -> dict[str, dict[str, list[float]]]:
    """What four processes have found."""
    with tempfile.TemporaryDirectory() as out:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        own = ["-m", "benchmarks.uneven", "--rank", out, "--seconds", str(seconds), "--steps", str(steps)]
        subprocess.run([*launch, *own], check=True, stdout=subprocess.DEVNULL)
        with open(f"{out}/found.json", encoding="utf-8") as file:
            return json.load(file)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if shares gain less than is wanted, or change the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.02, help="of a layer's forward pass per example")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        train_all(options.rank, options.seconds, options.steps)
        return 0
    before = os.getloadavg()[0]
    found = measure(options.seconds, options.steps)
    medians = {name: statistics.median(found[name]["seconds"]) for name in SPECS}
    print(f"{'':8}{'examples':>16}{'s a step':>10}{'asleep':>8}")
    for name in SPECS:
        parts = " ".join(map(str, PARTS[name]))
        print(f"{name:8}{parts:>16}{medians[name]:>10.2f}{asleep(name, options.seconds):>8.2f}")
    gain = medians["even"] / medians["shared"]
    pairs = zip(found["even"]["losses"], found["shared"]["losses"], strict=True)
    off = max(abs(one - other) for one, other in pairs)
    theory = asleep("even", options.seconds) / asleep("shared", options.seconds)
    load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after, of which {RANKS} are these processes"
    print(f"{gain:.2f} times as fast, of {theory:.2f}; losses differ by {off:.1e}; {load}")
    return int(gain < WANTED or off > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
