"""300 steps of a small model with ZeRO++'s compression, beside the same steps without: the loss at the end.

    python -m benchmarks.compression [--steps 300]

Four ranks on this machine, as two nodes of two. Says for each setting the mean loss of the last 20 steps and its
ratio to that of no compression, which is to be within 1 %, and the relative error of the first gradient.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_parallel import parallelize
from tests.distributed import run

_NODES = "dp_shard=4,hierarchical_shard=2"
SETTINGS = {
    "none": "dp_shard=4",
    "qwZ int8": "dp_shard=4,quantize_weights=int8",
    "qwZ fp8": "dp_shard=4,quantize_weights=fp8",
    "qgZ int8": "dp_shard=4,quantize_gradients=int8",
    "qgZ int4": "dp_shard=4,quantize_gradients=int4",
    "all": f"{_NODES},quantize_weights=int8,quantize_gradients=int4",
    "all, error feedback": f"{_NODES},quantize_weights=int8,quantize_gradients=int4,gradient_error_feedback=true",
}
VOCABULARY, LENGTH, ROWS = 515, 32, 2
LAST = 20


def _model() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads))


def _rows(step: int, rank: int) -> torch.Tensor:
    """Sequences whose next token is mostly decided by the last one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        follows = torch.rand(ROWS, generator=generator) < 0.8
        tokens[:, place] = torch.where(follows, (7 * tokens[:, place - 1] + 3) % VOCABULARY, tokens[:, place])
    return tokens


def _train(spec: str, steps: int) -> dict[str, Any]:
    model = parallelize(_model(), spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, first = [], []
    for step in range(steps):
        tokens = _rows(step, dist.get_rank())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if not step:
            first = [p.grad.full_tensor().flatten() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return {"loss": sum(losses[-LAST:]) / len(losses[-LAST:]), "first": losses[0], "gradient": torch.cat(first)}


def compare(steps: int, settings: dict[str, str] = SETTINGS) -> dict[str, dict[str, float]]:
    """Of each setting the loss at the end, its ratio to that without compression, and the first gradient's error."""
    found = {name: run(_train, 4, spec, steps, timeout=600)[0] for name, spec in settings.items()}
    base = found["none"]
    return {
        name: {
            "start": one["first"],
            "loss": one["loss"],
            "ratio": one["loss"] / base["loss"],
            "error": ((one["gradient"] - base["gradient"]).norm() / base["gradient"].norm()).item(),
        }
        for name, one in found.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    print(f"{'':20} {'first':>8} {'last 20':>8} {'ratio':>8} {'gradient error':>15}")
    for name, one in compare(parser.parse_args().steps).items():
        print(f"{name:20} {one['start']:8.4f} {one['loss']:8.4f} {one['ratio']:8.4f} {one['error']:15.2e}")


if __name__ == "__main__":
    main()
