"""Kernels, bytes sent and host time of a step beside accelerate's FSDP2, Transformers' `tp_plan` and one process.

    python -m tests.cuda.beside

The same Llama and batch on two pretended devices, forward and backward pass. What a layer adds is the difference
between four layers and two: what a GPU is bound by where layers are small.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass

for _name, _value in {"PRETENDED_CUDA_BACKEND": "cpu:gloo,cuda:nccl", "OMP_NUM_THREADS": "1"}.items():
    os.environ.setdefault(_name, _value)

import tests.cuda.device  # noqa: E402, F401 - before torch

import pretended_cuda as native  # noqa: E402 # isort: skip - the device makes it known
import torch  # noqa: E402
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import hf_parallel  # noqa: E402
from tests import distributed, models  # noqa: E402

ONE, FSDP2, TP_PLAN = "one process", "accelerate's FSDP2", "Transformers' tp_plan"
#: Whose counts those of a layout may not exceed; bytes by a hundredth, for sums of gradients of norms; seconds of the
#: host by as much as they differ from run to run.
PAIRS = {"dp_shard=2": FSDP2, "tp=2": TP_PLAN, "tp=2,sequence_parallel=false": TP_PLAN}
STEPS, ROWS, LENGTH = 9, 4, 32
ALLOWED = {"launches": 1.0, "sent": 1.01, "host_ms": 1.2}
#: Layers of the two models whose difference is counted.
FEW, MORE = 2, 4


@dataclass
class Counts:
    """What one step of one rank does."""

    launches: float
    sent: float
    host_ms: float

    def per_layer(self, fewer: Counts) -> Counts:
        """Return what each of the further layers adds."""
        ours, theirs = vars(self).values(), vars(fewer).values()
        return Counts(*((more - few) / (MORE - FEW) for more, few in zip(ours, theirs, strict=True)))


def count(way: str, folder: str) -> Counts:
    """Run the model in `folder` forward and backward, and count the last pass; `way`: a spec, or another way."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if way == TP_PLAN:
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    model = model.train()
    if way == FSDP2:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        model, _ = Accelerator(fsdp_plugin=plugin).prepare(model, torch.optim.SGD(model.parameters()))
    elif way in (ONE, TP_PLAN):
        model.to(device)
    else:
        hf_parallel.parallelize(model, way)
    ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % models.VOCABULARY).to(device)
    ids = ids.chunk(2)[device.index] if way in (FSDP2, "dp_shard=2") else ids
    counts = []
    for _ in range(STEPS):
        begun = native.launches(), native.sent(), time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        ended = native.launches(), native.sent(), time.process_time()
        model.zero_grad()
        counts.append([after - before for after, before in zip(ended, begun, strict=True)])
    host_s = min(step[2] for step in counts[1:])
    return Counts(counts[-1][0], counts[-1][1], 1e3 * host_s)


def table() -> dict[str, Counts]:
    """Return by way what one layer adds to a step."""
    found: dict[str, list[Counts]] = {}
    for layers in (FEW, MORE):
        with tempfile.TemporaryDirectory() as folder:
            models.build("llama", num_hidden_layers=layers).save_pretrained(folder)
            for way in (ONE, FSDP2, TP_PLAN, *PAIRS):
                ranks = (
                    [distributed.run_alone(count, way, folder)]
                    if way == ONE
                    else distributed.run(count, 2, way, folder, timeout=300)
                )
                found.setdefault(way, []).append(ranks[0])
    return {way: more.per_layer(few) for way, (few, more) in found.items()}


def main() -> int:
    """Print the table; return how many counts of ours are above those of the other library."""
    found, above = table(), 0
    print("| a layer and step of | kernels | bytes sent | host ms |\n| --- | ---: | ---: | ---: |")
    for way, counts in found.items():
        print(f"| {way} | {counts.launches:.1f} | {counts.sent:,.0f} | {counts.host_ms:.2f} |")
        other = found.get(PAIRS.get(way, ""))
        above += other is not None and any(
            getattr(counts, name) > factor * getattr(other, name) for name, factor in ALLOWED.items()
        )
    print(f"{above} of {len(PAIRS)} layouts launch, send or take more of the host than the other library")
    return above


if __name__ == "__main__":
    sys.exit(main())
