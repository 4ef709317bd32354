"""A tiny model under a layout against one process: losses, gradient norms and weights of three steps.

Its sizes are odd, so that parts are uneven: a vocabulary of 515, rows of 33 tokens, one layer more than stages divide.
The one process is rank 0, on its own device; every rank draws the same weights and rows under one seed.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.apply.parallelize import clip_grad_norm, parallelize_model
from hf_parallel.apply.weights import full_state_dict
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.check.report import FAILED, OK, SKIPPED, Row
from hf_parallel.check.room import Room
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, WIDTH, SEED, STEPS, RATE = 515, 33, 8, 7, 3, 0.1
#: Relative for losses and norms, absolute for weights that the steps move by 1e-3 and more. fp32: sums in another
#: order. 16 bits: one rounding is 4e-3 (bf16), and layouts round at other places.
TOLERANCES = {torch.float32: (1e-5, 1e-5, 2e-6), torch.bfloat16: (2e-2, 5e-2, 2e-2)}


@dataclass
class Trained:
    """The results of three steps: numbers alike on all ranks, weights on rank 0."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


# ---- which layouts ---------------------------------------------------------------------------------------------


def list_default_layouts(world: int) -> list[str]:
    """Return every axis, alone as far as it goes, and one product of two axes and the data."""
    alone = []
    for axis in ParallelConfig.mesh_axes:
        # All ranks for shards of the data; else as many as sit in a node at most
        if axis.name == "dp_shard":
            size = world
        elif axis.name == "dp_replicate":
            size = _find_smallest_factor(world)
        else:
            size = max(size for size in range(1, min(8, world) + 1) if world % size == 0)
        spec = f"{axis.name}={size}"
        if size > 1:
            alone.append(spec if size == world else f"{spec},dp_shard=-1")
    product = choose_default_product(world)
    return [*alone, *([product] if product not in alone else [])]


def choose_default_product(world: int) -> str:
    """Return tp, pp and shards, of two ranks each where there are eight."""
    tp = _find_smallest_factor(world)
    pp = _find_smallest_factor(world // tp)
    rest = world // tp // pp
    sizes = {"tp": tp, "pp": pp, "dp_shard": rest}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp_shard=-1"


def _find_smallest_factor(number: int) -> int:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


# ---- the model and its rows ------------------------------------------------------------------------------------


def make_tiny_config(config: ParallelConfig) -> LlamaConfig:
    """Choose sizes that the layout can cut: every tp rank has a key/value head, and three query heads for it."""
    from transformers import LlamaConfig

    heads = config.tp_size * config.cp_size
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=3 * WIDTH * heads,
        intermediate_size=20 * config.tp_size,
        num_hidden_layers=max(3, config.pipeline_stages + 1),
        num_attention_heads=3 * heads,
        num_key_value_heads=heads,
        head_dim=WIDTH,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="eager",
    )


def make_tiny_model(config: ParallelConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Make a tiny model, alike on every rank; random numbers go on as before."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        return LlamaForCausalLM(make_tiny_config(config)).to(dtype).train()


def train_tiny_model(
    model: nn.Module, config: ParallelConfig, share: int | None, device: torch.device
) -> tuple[list, list]:
    """Train on the rows of data rank `share`, or of all; return each step's loss, a tensor, and gradient norm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=True)  # foreach: CUDA's default
    losses, norms = [], []
    rows = 2 * max(2, config.pp_size)  # as many for each data rank: the mean of their means is then the mean of all
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(SEED + step)
        tokens = torch.randint(0, VOCABULARY, (rows * config.data_parallel_size, LENGTH), generator=generator)
        tokens = tokens if share is None else tokens[share :: config.data_parallel_size]
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        norms.append(clip_grad_norm(model, math.inf))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return losses, norms


def train_together(mesh: ParallelMesh, dtype: torch.dtype) -> Trained:
    """Train on all ranks."""
    model = parallelize_model(make_tiny_model(mesh.config, dtype), mesh=mesh)
    config = model._hf_parallel.config
    losses, norms = train_tiny_model(model, config, mesh.data_rank, mesh.device)
    total = torch.stack(losses)
    if mesh.data_size > 1:
        dist.all_reduce(total, group=mesh.data_group)
        total /= mesh.data_size
    return Trained(total.tolist(), [x.item() for x in norms], full_state_dict(model))


# ---- comparing -------------------------------------------------------------------------------------------------


def check_layout(spec: str, device: torch.device, dtype: torch.dtype, room: Room, asked: bool) -> Iterator[Row]:
    """Yield a row on rank 0. Collective over all ranks. A layout that nobody `asked` for may be refused."""
    name = f"{spec} {str(dtype).removeprefix('torch.')}"
    room.step(f"parity of {name}", 2)
    try:
        config = ParallelConfig.parse(spec).resolve(dist.get_world_size())
        with use_full_precision():
            mesh = ParallelMesh.create(config, device)
            ours = train_together(mesh, dtype)
    except SpecError as error:  # on all ranks, as all ask the same
        room.gather(None)
        if dist.get_rank() == 0:
            yield Row("parity", name, f"refused: {error}", status=FAILED if asked else SKIPPED)
        return
    everyone = room.gather((ours.losses, ours.norms))
    if everyone:
        with use_full_precision():
            model = make_tiny_model(mesh.config, dtype).to(device)
            losses, norms = train_tiny_model(model, mesh.config, None, device)
            theirs = Trained([x.item() for x in losses], [x.item() for x in norms], full_state_dict(model))
        del model
        gaps = {
            "loss": max(_compute_relative_difference(losses, theirs.losses) for losses, _ in everyone),
            "gradient norm": max(_compute_relative_difference(norms, theirs.norms) for _, norms in everyone),
            "weights": _compare_weights(ours.weights, theirs.weights),
        }
        limits = dict(zip(gaps, TOLERANCES[dtype], strict=True))
        shown = ", ".join(f"{what} {gap:.0e}" for what, gap in gaps.items())
        expected = "at most " + ", ".join(f"{limit:.0e}" for limit in limits.values())
        right = all(gap <= limits[what] for what, gap in gaps.items())  # NaN never is
        values = {"gaps": gaps, "losses": ours.losses, "losses_alone": theirs.losses}
        yield Row("parity", name, shown, expected, OK if right else FAILED, values)
    gc.collect()


@contextlib.contextmanager
def use_full_precision() -> Iterator[None]:
    """Multiply in fp32 without rounding to TF32."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


def _compute_relative_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in zip(ours, theirs, strict=True))


def _compare_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return math.inf
    gaps = [(ours[name].double() - theirs[name].double()).abs().max().item() for name in ours]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)
