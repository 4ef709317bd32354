"""A short training of a tiny model, in one process or on the ranks of a layout, on whichever device there is."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from peft import LoraConfig, OFTConfig, VeraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_parallel
from hf_parallel.axes import activation_offload
from tests import models, optimizers
from tests.cuda.layouts import Layout

STEPS = 5  # what ranks compare in the first four, and then ever more rarely, is over
ROWS, LENGTH = 8, 33

#: Adafactor and "norms" step on whole tensors, "lists" on parts, as its trial finds.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "lists": (optimizers.LikeCopies, {"lr": 0.05}),
    "norms": (optimizers.LikeLamb, {"lr": 0.05}),
}


@dataclass
class Counted:
    """What happened in the last step: lines that made the host wait, kernels, bytes sent; and faults of streams."""

    waits: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    sent: int = 0
    faults: dict[str, int] = field(default_factory=dict)


class Counter(Protocol):
    """Counts what happens while it is entered."""

    @property
    def counted(self) -> Counted: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


#: The adapters of `Layout.adapter`.
ADAPTERS: dict[str, tuple[type, dict[str, object]]] = {
    "lora": (LoraConfig, {"r": 4}),
    "mica": (LoraConfig, {"r": 4, "init_lora_weights": "mica"}),
    "vera": (VeraConfig, {"r": 4, "d_initial": 1.0}),
    "oft": (OFTConfig, {"oft_block_size": 4}),
}


@dataclass
class Run(Counted):
    """What one rank did: losses of each step, the last norm, and what happened in the last step."""

    losses: list[float] = field(default_factory=list)
    norm: float = float("nan")
    tokens: list[list[int]] | None = None


def reference_key(layout: Layout) -> tuple:
    """What layouts have in common that are compared with the same run of one process."""
    key = (
        layout.model,
        layout.dtype,
        layout.autocast,
        layout.scaler,
        layout.adapter,
        layout.optimizer,
        layout.accumulate,
    )
    return (*key, layout.padded, layout.packed, layout.resized, layout.evaluate, _layers(layout))


def gaps(layout: Layout, run: Run, alone: Run) -> tuple[float, float]:
    """Largest relative differences of losses, and of the last norm."""
    losses = max(abs(a - b) / abs(a) for a, b in zip(alone.losses, run.losses, strict=True))
    return losses, abs(alone.norm - run.norm) / alone.norm


def train(layout: Layout, spec: str | None, kind: str = "cuda", counter: Counter | None = None) -> Run:
    """Train for a few steps; `spec` is None in one process.

    Args:
        kind: of the device.
        counter: of what happens in the last step.
    """
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind != "cpu" else torch.device("cpu")
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    if layout.small is not None:
        activation_offload.SMALL = layout.small
    model, share, shares, group = _built(layout, spec, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind, settings = KINDS[layout.optimizer]
    optimizer = kind(trained, **settings)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, enabled=layout.scaler)
    losses = []
    for step in range(STEPS):
        counting = counter if counter is not None and step == STEPS - 1 else contextlib.nullcontext()
        with counting:
            given = model, trained, optimizer, scaler, (share, shares), device, spec is None
            loss, norm = _step(layout, step, *given)
        losses.append(loss)
    total = torch.stack([loss.float() for loss in losses])
    if shares > 1:
        dist.all_reduce(total, group=group)
        total /= shares
    tokens = _evaluate(model, device, "pp" in layout.spec) if layout.evaluate else None
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    counted = Counted() if counter is None else counter.counted
    return Run(**vars(counted), losses=total.tolist(), norm=float(norm), tokens=tokens)


def _layers(layout: Layout) -> int:
    """Two stages on each of two ranks need four; so do activations, of which two layers may be on their way."""
    return 4 if "pp" in layout.spec or layout.small is not None else 2


def _built(layout: Layout, spec: str | None, device: torch.device) -> tuple:
    """The model on the device, this rank's share of the batch, how many there are, and their group."""
    config = getattr(models, layout.model)(num_hidden_layers=_layers(layout))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, layout.dtype)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    share, shares, group = 0, 1, None
    if spec is not None:
        hf_parallel.parallelize(model, spec)
        mesh = model._hf_parallel.mesh
        share, shares, group = mesh.data_rank, mesh.data_size, mesh.data_group
    if layout.resized:
        torch.manual_seed(5)
        model.resize_token_embeddings(model.config.vocab_size + 7, mean_resizing=False)
    if spec is None:
        model.to(device)
    if layout.adapter:
        torch.manual_seed(3)
        made, settings = ADAPTERS[layout.adapter]
        model = get_peft_model(model, made(target_modules=["q_proj", "v_proj", "down_proj"], **settings))
    return model, share, shares, group


def _step(layout, step, model, trained, optimizer, scaler, shares, device, alone) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float16 if layout.scaler else torch.bfloat16
    for micro in range(layout.accumulate):
        given = _batch(layout, 100 * step + micro, model.config.vocab_size)
        given = {name: tensor[shares[0] :: shares[1]].to(device) for name, tensor in given.items()}
        with torch.autocast(device.type, dtype, enabled=layout.autocast or layout.scaler):
            loss = model(**{"labels": given["input_ids"], **given}).loss
        scaler.scale(loss / layout.accumulate).backward()
    if layout.scaler:
        scaler.unscale_(optimizer)
    clip = torch.nn.utils.clip_grad_norm_
    norm = clip(trained, 1.0, foreach=True) if alone else hf_parallel.clip_grad_norm(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach(), norm


def _batch(layout, seed, vocabulary) -> dict[str, torch.Tensor]:
    """Every row has as many targets, so that means over data ranks are those of the batch."""
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    if layout.packed:
        positions, first = torch.arange(LENGTH).expand(ROWS, LENGTH), 3 * torch.arange(ROWS)[:, None] + 5
        positions = torch.where(positions < first, positions, positions - first)
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    mask = torch.ones_like(ids)
    if not layout.padded:
        return {"input_ids": ids, "attention_mask": mask}
    mask[:, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _evaluate(model: Any, device: torch.device, pipelined: bool) -> list[list[int]] | None:
    """Logits of a batch; greedy tokens, which a pipeline takes no part in here."""
    ids = torch.arange(4 * LENGTH, device=device).view(4, LENGTH) % model.config.vocab_size
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).logits
    if logits.device != device or not logits.isfinite().all():
        raise AssertionError(f"logits of an evaluation are on {logits.device}, or not finite")
    if pipelined:
        return None
    prompt = ids[:, :5]
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False).tolist()
