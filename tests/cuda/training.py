"""A short training on the pretended device, in one process or on the ranks of a layout; only where it is loaded."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import pretended_cuda as native
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_parallel
from hf_parallel.axes import activation_offload
from tests import distributed, models
from tests.cuda.layouts import Layout

STEPS = 5  # what ranks compare in the first four, and then ever more rarely, is over
ROWS, LENGTH = 8, 33


@dataclass
class Run:
    """What one rank did: losses of each step, the last norm, and what happened in the last step."""

    losses: list[float]
    norm: float
    waits: dict[str, int]
    launches: int
    sent: int
    faults: dict[str, int]
    tokens: list[list[int]] | None = None


@dataclass
class Row:
    """A layout beside one process."""

    layout: Layout
    gap: float = float("nan")
    norm_gap: float = float("nan")
    nan: bool = False
    waits: int = 0
    alone: int = 0
    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    launches: tuple[int, int] = (0, 0)
    sent: int = 0
    error: str = ""

    @property
    def wrong(self) -> list[str]:
        """What a test fails with."""
        if self.error:
            return [self.error]
        found = [f"stream: {fault}" for fault in self.faults]
        if self.nan:
            found.append("a loss or a norm is NaN: something was read before it had arrived")
        elif not (self.gap <= self.layout.gap and self.norm_gap <= 10 * self.layout.gap):
            found.append(
                f"losses are off by {self.gap:.1e}, norms by {self.norm_gap:.1e}, {self.layout.gap:.0e} is allowed"
            )
        if self.waits > self.alone + self.layout.waits:
            found.append(f"{self.waits} waits, one process {self.alone}, {self.layout.waits} more are allowed")
            found += self.lines
        return found


def compare(layout: Layout, references: dict[Any, Run], planted: tuple[str, str] | None = None) -> Row:
    """Run a layout, and one process unless `references` has it."""
    row = Row(layout)
    try:
        key = (layout.model, layout.dtype, layout.autocast, layout.scaler, layout.lora, layout.adam, layout.accumulate)
        key += (layout.padded, layout.evaluate, _layers(layout))
        if key not in references:
            references[key] = distributed.run_alone(train, layout, None, timeout=200)
        alone = references[key]
        with tempfile.TemporaryDirectory() as folder:
            spec = layout.spec.replace("FOLDER", folder)
            ranks = distributed.run(train, layout.ranks, layout, spec, planted, timeout=200)
    except distributed.RankFailure as error:
        row.error = f"{error.kind}: {error}"[-3000:]
        return row
    first = ranks[0]
    if first.tokens != alone.tokens:
        row.error = f"generated {first.tokens}, one process {alone.tokens}"
    numbers = torch.tensor([*first.losses, first.norm])
    row.nan = bool(numbers.isnan().any())
    pairs = list(zip(alone.losses, first.losses, strict=True))
    row.gap = max(abs(a - b) / abs(a) for a, b in pairs)
    row.norm_gap = abs(alone.norm - first.norm) / alone.norm
    busiest = max(ranks, key=lambda run: sum(run.waits.values()))
    row.waits, row.alone = sum(busiest.waits.values()), sum(alone.waits.values())
    row.lines = [f"{count:4d} {line}" for line, count in sorted(busiest.waits.items(), key=lambda one: -one[1])]
    row.faults = sorted({fault for run in ranks for fault in run.faults})
    row.launches, row.sent = (max(run.launches for run in ranks), alone.launches), max(run.sent for run in ranks)
    return row


def train(layout: Layout, spec: str | None, planted: tuple[str, str] | None = None) -> Run:
    """Train for a few steps; `spec` is None in one process."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if layout.small is not None:
        activation_offload.SMALL = layout.small
    model, share, shares, group = _built(layout, spec, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = torch.optim.AdamW if layout.adam else torch.optim.SGD
    settings = {"lr": 1e-2} if layout.adam else {"lr": 0.1, "momentum": 0.9, "foreach": True}
    optimizer = kind(trained, **settings)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=layout.scaler)
    losses = []
    if planted is not None:
        native.plant(*planted)
    for step in range(STEPS):
        if step == STEPS - 1:
            native.count_waits(True)
            begun = native.launches(), native.sent()
        loss, norm = _step(layout, step, model, trained, optimizer, scaler, (share, shares), device, spec is None)
        losses.append(loss)
    native.count_waits(False)
    ended = native.launches(), native.sent()
    total = torch.stack([loss.float() for loss in losses])
    if shares > 1:
        dist.all_reduce(total, group=group)
        total /= shares
    tokens = _evaluate(model, device, "pp" in layout.spec) if layout.evaluate else None
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    counted = {"waits": dict(native.waits()), "launches": ended[0] - begun[0], "sent": ended[1] - begun[1]}
    return Run(total.tolist(), float(norm), **counted, faults=dict(native.faults()), tokens=tokens)


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
    if spec is None:
        model.to(device)
    else:
        hf_parallel.parallelize(model, spec)
        mesh = model._hf_parallel.mesh
        share, shares, group = mesh.data_rank, mesh.data_size, mesh.data_group
    if layout.lora:
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model, share, shares, group


def _step(layout, step, model, trained, optimizer, scaler, shares, device, alone) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float16 if layout.scaler else torch.bfloat16
    for micro in range(layout.accumulate):
        ids, mask = _batch(layout, 100 * step + micro, shares, device, model.config.vocab_size)
        labels = ids if not layout.padded else torch.where(mask.bool(), ids, -100)
        with torch.autocast("cuda", dtype, enabled=layout.autocast or layout.scaler):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        scaler.scale(loss / layout.accumulate).backward()
    if layout.scaler:
        scaler.unscale_(optimizer)
    clip = torch.nn.utils.clip_grad_norm_
    norm = clip(trained, 1.0, foreach=True) if alone else hf_parallel.clip_grad_norm(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach(), norm


def _batch(layout, seed, shares, device, vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row has as many targets, so that means over data ranks are those of the batch."""
    share, count = shares
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if layout.padded:
        mask[:, -5:] = 0
    return ids[share::count].to(device), mask[share::count].to(device)


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
