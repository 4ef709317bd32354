"""The lines of rank 0 at the start and at the end: the layout in force, and the file that has all of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from tqdm import tqdm

from hf_parallel.apply.parallelize import gather_parameters_per_rank
from hf_parallel.ask.keys.layers import REGISTERED_FLASH, TORCH_FLASH
from hf_parallel.axes.experts.axis import EXPERTS
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.axes.pipeline.timeline import count_versions_held
from hf_parallel.checkpoint.folder import LAYOUT
from hf_parallel.hooks import after_import, runtime
from hf_parallel.hooks.accelerate.shares import cut_of, list_notes_on_workers
from hf_parallel.monitor.noise import describe_critical_batch
from hf_parallel.planner.batch import StepBatch
from hf_parallel.plans.examine import format_bytes, report_of
from hf_parallel.prove.certificate import format_line_about
from hf_parallel.ranks.mesh import list_axis_ranks
from hf_parallel.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Trainer

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.ranks.mesh import ParallelMesh

#: Of the notes, which stand in order of weight, the console shows so many, less the sentence about a choice.
_NOTES_SHOWN = 2


def say(message: str) -> None:
    """Print one line from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _print(f"hf_parallel: {message}")


def say_here(mesh: ParallelMesh, message: str) -> None:
    """Print one line from the only stage that knows, by its first rank."""
    if mesh.data_rank == 0 and mesh.index("tp") == 0:
        _print(f"hf_parallel: {message}")


def _print(text: str) -> None:
    """Print above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class AxisFacts(TypedDict):
    """The ranks along an axis, and which of them are together."""

    size: int
    ranks: list[list[int]]


class Facts(TypedDict):
    """The facts of a run: `hf_parallel.json`."""

    spec: str
    config: dict[str, object]
    plan: dict
    axes: dict[str, AxisFacts]
    data_ranks: int
    model: str
    parameters_per_rank: list[int]
    global_batch: int
    batch: str
    batch_of_one_process: str
    examples_per_data_rank: list[int] | None
    tokens_per_step: int
    attention: str | None
    loss: str
    estimated_state_bytes_per_rank: list[int]
    notes: list[str]
    auto: list[str]
    proof: str | None
    versions: dict[str, str]


def report_at_first_batch(trainer: Trainer, batches: list, loss_of: Callable[[Trainer], str]) -> None:
    """Print the layout in eight lines, and write all facts to a file, once the first batch is known. Collective.

    `monitor=full` prints all facts.

    Args:
        loss_of: how a trainer's loss is computed, in words.
    """
    state = runtime.find_parallel_state(trainer.model)
    if state is None or state.reported or not batches:
        return
    state.reported = True
    facts = describe_run(trainer, batches, loss_of(trainer))
    if dist.get_rank() != 0:
        return
    path = os.path.join(trainer.args.output_dir, LAYOUT)
    lines = format_all_lines(facts) if state.config.parts_waits else format_short_lines(facts, path)
    _print("\n".join(lines))
    _write_facts(facts, trainer.args.output_dir)


def report_at_end(trainer: Trainer, critical_batch: float | None) -> None:
    """Name the file of facts, the command that draws the run, and the critical batch if it was measured."""
    state, folder = runtime.find_parallel_state(trainer.model), trainer.args.output_dir
    if state is None or not state.reported:
        return
    path = os.path.join(folder, LAYOUT)
    drawn = "" if state.config.monitor == "off" else f"; `hf-parallel report {folder}` writes {folder}/report.html"
    say(f"the facts of this run are in {path}{drawn}")
    if critical_batch is not None:
        say(describe_critical_batch(critical_batch, trainer.get_total_train_batch_size(trainer.args)))


def _write_facts(facts: Facts, folder: str) -> None:
    """A disk that is full costs the file, not the training."""
    path = os.path.join(folder, LAYOUT)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
    except OSError as error:
        say(f"cannot write {path}, the facts of this run: {error.strerror or error}; training goes on without it")


def describe_run(trainer: Trainer, batches: list, loss: str) -> Facts:
    """Return the facts of this run, JSON-ready. Collective."""
    mesh, model = runtime.mesh(), trainer.model
    state = runtime.find_parallel_state(model)
    per_rank = gather_parameters_per_rank(model)
    config = state.config if state is not None else mesh.config
    speaks = dist.get_rank() == 0  # the table of all ranks is made once
    plan = report_of(state.plan).to_dict() if speaks and state is not None and state.plan is not None else {}
    read = [batch for batch in batches if hasattr(batch, "get")]  # prompts of trainers that generate come as a list
    batch = StepBatch(trainer.args.train_batch_size, trainer.args.gradient_accumulation_steps, mesh.data_size)
    cut = cut_of(trainer.accelerator.gradient_state)
    rows, calls = trainer.args.train_batch_size, trainer.args.gradient_accumulation_steps
    micro_batches = calls * count_micro_batches(rows, config) if config.delays_updates else 1
    tokens = sum(b["input_ids"].numel() for b in read if torch.is_tensor(b.get("input_ids")))
    made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # by the first batch there is one
    optimizer = str(trainer.args.optim) if made is None else type(made).__name__
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
    # Not of this package, which may be a checkout that is not installed.
    versions = {library: importlib.metadata.version(library) for library in ("torch", "transformers", "accelerate")}
    return {
        "spec": config.to_spec(),
        "config": config.to_dict(),
        "plan": plan,
        "axes": {
            axis: {"size": n, "ranks": list_axis_ranks(mesh.config, axis)} for axis, n in mesh.config.sizes.items()
        },
        "data_ranks": mesh.data_size,
        "model": type(model).__name__,
        "parameters_per_rank": per_rank,
        "global_batch": trainer.get_total_train_batch_size(trainer.args),
        "batch": batch.product,
        "batch_of_one_process": batch.advice(optimizer),
        "examples_per_data_rank": None if cut is None else list(cut),
        "tokens_per_step": tokens * mesh.data_size if cut is None else tokens * sum(cut) // cut[mesh.data_rank],
        "attention": TORCH_FLASH if kernel == REGISTERED_FLASH else kernel,
        "loss": loss,
        "estimated_state_bytes_per_rank": _list_state_bytes(trainer, config, per_rank, micro_batches),
        "notes": [
            *_list_inexact_numbers(trainer, mesh.data_size),
            *after_import.list_process_warnings(dist.get_world_size(), mesh.data_size),
            *(state.notes if state else ()),
        ],
        "auto": list(current.chosen_because) if (current := runtime.current()) is not None else [],
        "proof": format_line_about(sys.argv[0], config.to_spec()),
        "versions": {"hf-parallel": VERSION, **versions},
    }


def format_short_lines(facts: Facts, path: str) -> list[str]:
    """Return what a person wants to know of a start, in at most eight lines.

    Args:
        path: of the file that has all facts.
    """
    notes, (parameters, memory, batch) = facts["notes"], _format_sizes(facts)
    alone = facts["batch_of_one_process"]
    shown = max(0, _NOTES_SHOWN - bool(facts["auto"]) - bool(facts["proof"]) - bool(alone))
    hidden = len(notes) - shown
    kernels = [f"  attention     {facts['attention']}", f"  head and loss {facts['loss']}"]
    if facts["auto"] and facts["proof"] and alone:  # else there would be nine lines
        kernels = [f"  attention     {facts['attention']}; head and loss: {facts['loss']}"]
    more = f" ({hidden} more note{'s' * (hidden > 1)})" if hidden > 0 else ""
    return [
        f"hf_parallel: {facts['model']} under {facts['spec']}",
        f"  each rank     {parameters} parameters; {memory}",
        f"  global batch  {batch}",
        *([f"  learning rate {alone}"] if alone else []),
        *kernels,
        *([f"  prove         {facts['proof']}"] if facts["proof"] else []),
        *(f"  note          {note}" for note in notes[:shown]),
        f"  everything    {path}{more}; monitor=full prints it here",
    ]


def format_all_lines(facts: Facts) -> list[str]:
    """Return all facts for people: axes with their ranks, the plan, every note."""
    lines, (parameters, memory, batch) = [f"hf_parallel: {facts['model']} under {facts['spec']}"], _format_sizes(facts)
    for axis, where in facts["axes"].items():
        if where["size"] > 1:
            groups = where["ranks"]
            shown = " ".join(str(tuple(ranks)) for ranks in groups[:4]) + (" …" if len(groups) > 4 else "")
            lines.append(f"  {axis:<12} {where['size']:>3}   ranks {shown}")
    lines.append(f"  parameters per rank  {parameters}")
    lines += [f"  {name:<20} {value}" for name, value in facts["plan"].get("facts", {}).items()]
    lines.append(f"  global batch         {batch}")
    lines += [f"  learning rate        {alone}"] if (alone := facts["batch_of_one_process"]) else []
    if facts["examples_per_data_rank"] is not None:
        lines.append(
            f"  examples per rank    {' '.join(map(str, facts['examples_per_data_rank']))} of each micro-step"
        )
    lines.append(f"  attention            {facts['attention']}")
    lines.append(f"  head and loss        {facts['loss']}")
    lines.append(f"  memory per rank      {memory}")
    lines += [f"  hf-parallel prove    {facts['proof']}"] if facts["proof"] else []
    return lines + [f"  note                 {note}" for note in facts["notes"]]


def _format_sizes(facts: Facts) -> tuple[str, str, str]:
    """Return the parameters and the memory of each rank, and the batch."""
    least, most = min(facts["parameters_per_rank"]), max(facts["parameters_per_rank"])
    parameters = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    memory = format_bytes(max(facts["estimated_state_bytes_per_rank"]))
    tokens = f", {facts['tokens_per_step']:,} tokens in the first step" if facts["tokens_per_step"] else ""
    batch = f"{facts['global_batch']} sequences ({facts['batch']}){tokens}"
    return parameters, f"{memory} of weights, gradients and optimizer state", batch


def _list_inexact_numbers(trainer: Trainer, data_ranks: int) -> list[str]:
    """Return lines about numbers that are known not to be those of one process."""
    if data_ranks == 1:
        return []
    notes = list_notes_on_workers(trainer.accelerator.gradient_state.active_dataloader)
    config, state = getattr(trainer.model, "config", None), runtime.find_parallel_state(trainer.model)
    experts = None if state is None or state.plan is None else state.plan.part(EXPERTS)
    if getattr(config, "output_router_logits", False) and not (experts is not None and experts.balanced):
        notes.append(
            "each data rank balances experts over its own rows, so losses differ; output_router_logits=False is exact"
        )
    if trainer.can_return_loss and not (state is not None and state.parts):  # around models that is noted already
        notes.append("the loss compares the rows of a batch, and each data rank compares only its own, as under DDP")
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        notes.append(
            "NEFTune sizes its noise by the padded length of a data rank's own batch, as under DDP; a collator that "
            "pads all batches to one length gives that of one process"
        )
    return notes


def _list_state_bytes(trainer: Trainer, config: ParallelConfig, per_rank: list[int], micro_batches: int) -> list[int]:
    """Versions of weights and gradients, copies of both, and the optimizer's moments, of each rank."""
    width = next(p.dtype.itemsize for p in trainer.model.parameters())
    moments, found = 2 if "adam" in str(trainer.args.optim).lower() else 0, []
    for pipeline in list_axis_ranks(config, "pp"):
        for place, rank in enumerate(pipeline):
            versions = count_versions_held(config.pipeline_schedule, place, len(pipeline), micro_batches)
            copied = 2 * per_rank[pipeline[-1 - place]] if config.mirrors_stages else 0
            found.append((rank, width * (per_rank[rank] * (sum(versions) + moments) + copied)))
    return [size for _, size in sorted(found)]
