"""How a plan reads: a table, why not, what to run; specs in files; each formula with its numbers and source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hf_parallel.planner.activations import is_cut, kept_bytes, terms_of
from hf_parallel.planner.advice import attending
from hf_parallel.planner.choices import Choice, Found
from hf_parallel.planner.ledger import ring_factor
from hf_parallel.planner.memory import fullest
from hf_parallel.planner.pipeline import make_stages, stages_by_rank
from hf_parallel.planner.predict import Prediction
from hf_parallel.planner.shape import distinct
from hf_parallel.planner.states import adapter_bytes, state_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_parallel.planner.dryrun.run import DryRun


def show(found: Found, dollars: float | None = None) -> None:
    """Print the ranked table and what is to be said about it.

    Args:
        dollars: per GPU and hour, for a column with the cost of 1e9 tokens.
    """
    console = wide_console()
    for line in (_heading(found), *(f"  {note}" for note in found.notes)):
        console.print(line, markup=False)
    console.print(table(found, dollars))
    for line in _remarks(found, dollars):
        console.print(line, markup=False)
    if found.best:
        console.print(f"Run the first:  {command(found.best)}", markup=False, soft_wrap=True)


def _heading(found: Found) -> str:
    cluster, shape = found.goal.cluster, found.goal.shape
    where = f"{cluster.gpus} x {cluster.gpu.name}"
    if cluster.gpus > 1:
        between = f", {cluster.between.name} between" if cluster.nodes > 1 else ""
        where += f" ({cluster.inside.name} in nodes of {cluster.per_node}{between})"
    batch = f"{found.goal.global_batch or 'rows'} x {found.goal.seq} tokens per step"
    what = f"{shape.name}, {shape.parameters / 1e9:.2f} B parameters"
    return f"{what}, on {where}: {batch}; {found.looked_at} layouts looked at"


def _remarks(found: Found, dollars: float | None) -> Iterator[str]:
    """What is to be said of the first, of all that share a warning, and of what is missing."""
    if found.best:
        yield f"The first: {_in_words(found.best, dollars)}"
        yield from (f"  {reason}" for reason in attending(found.goal, found.best))
    shared: dict[str, list[str]] = {}
    for i, choice in enumerate(found.choices, 1):
        for warning in choice.warnings:
            shared.setdefault(warning, []).append(str(i))
    yield from (f"  {', '.join(numbers)}: {warning}" for warning, numbers in shared.items())
    if found.why_not:
        yield "Why not"
    yield from (f"  {name}: {reason}" for name, reason in found.why_not)
    yield from found.suggestions


def _in_words(choice: Choice, dollars: float | None) -> str:
    p = choice.prediction
    rate = p.tokens_per_s_per_gpu * p.layout.gpus
    price = f" and ${p.cost_per_billion_tokens(dollars):,.0f}" if dollars else ""
    kinds = sorted(p.breakdown.memory.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{kind} {size:.1f}" for kind, size in kinds if size > 0.02 * choice.needed_gib and "held" not in kind
    )
    return f"{rate:,.0f} tokens/s in all, {1e9 / rate / 3600:.1f} h{price} for 1e9 tokens; GiB: {parts}"


def wide_console() -> Console:
    """The terminal; in a file or a pipe lines are as long as they need to be."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def table(found: Found, dollars: float | None = None) -> Table:
    """A rich table, the best layout first."""
    from rich.table import Table

    shown = Table(header_style="bold")
    shown.add_column("#", justify="right")
    shown.add_column("--parallel", overflow="fold")
    headings = ["rows x calls", "s / step", "tokens/s/GPU", "MFU", "GiB", "idle"]
    for heading in [*headings, *(["$ / 1e9 tokens"] if dollars else [])]:
        shown.add_column(heading, justify="right")
    for i, choice in enumerate(found.choices, 1):
        shown.add_row(str(i), choice.config.to_spec(), *_cells(choice, dollars))
    return shown


def _cells(choice: Choice, dollars: float | None) -> Iterable[str]:
    p = choice.prediction
    yield f"{choice.rows} x {choice.accumulation}"
    yield f"{p.step_time_s:.3g}"
    yield f"{p.tokens_per_s_per_gpu:,.0f}"
    yield f"{p.mfu:.1%}"
    yield f"{choice.needed_gib:.1f}"
    yield f"{p.bubble:.1%}"
    if dollars:
        yield f"{p.cost_per_billion_tokens(dollars):,.0f}"


def command(choice: Choice) -> str:
    """The line that runs a choice."""
    gpus = choice.prediction.layout.gpus
    batch = f"--per_device_train_batch_size {choice.rows}"
    if choice.accumulation > 1:
        batch += f" --gradient_accumulation_steps {choice.accumulation}"
    return f"hf-parallel launch --num_processes {gpus} --parallel {choice.config.to_spec()} train.py {batch}"


def write_specs(folder: str | Path, found: Found) -> list[Path]:
    """One YAML file per layout, as --parallel takes it; predictions stand in comments."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for i, choice in enumerate(found.choices, 1):
        path = folder / f"{i:02}.yaml"
        path.write_text(spec_file(found, choice), encoding="utf-8")
        written.append(path)
    return written


def spec_file(found: Found, choice: Choice) -> str:
    """The text of one such file."""
    p = choice.prediction
    lines = [
        f"# {found.goal.shape.name} on {found.goal.where}",
        f"# predicted: {p.step_time_s:.3g} s per step, {p.memory_gib:.1f} GiB, MFU {p.mfu:.1%}",
        f"# with per_device_train_batch_size={choice.rows}, gradient_accumulation_steps={choice.accumulation}",
        *(f"# note: {warning}" for warning in choice.warnings),
    ]
    default = type(choice.config)().to_dict()
    values = {key: value for key, value in choice.config.to_dict().items() if value != default[key]}
    return "\n".join(lines) + "\n" + yaml.safe_dump(values or {"dp_shard_size": -1}, sort_keys=False)


def show_verified(choice: Choice, runs: list[DryRun]) -> None:
    """Analytic memory beside that of dry runs, in GiB, and the bytes that each axis sends."""
    from rich.table import Table

    console = wide_console()
    shown = Table(title="Dry run of " + choice.config.to_spec(), header_style="bold", title_justify="left")
    for heading in ("rank", "planned GiB", "dry run GiB", "of which", "sent per step", "s"):
        shown.add_column(heading, justify="left" if heading in ("of which", "sent per step") else "right")
    planned = {memory.rank: memory for memory in choice.prediction.breakdown.ranks}
    for run in runs:
        parts = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in run.peak.most_common())
        sent = {axis: sum(t.sent for t in kinds.values()) for axis, kinds in run.communication.items()}
        moved = ", ".join(f"{axis} {size / 2**30:.2f} GiB" for axis, size in sent.items())
        counted = planned[run.place["pp"]].tensors / 2**30
        place = f"{run.rank} (pp={run.place['pp']})"
        shown.add_row(
            place, f"{counted:.2f}", f"{run.peak_bytes / 2**30:.2f}", parts, moved or "nothing", f"{run.seconds:.1f}"
        )
    console.print(shown)
    console.print("Both count tensors: CUDA's context, communicators and the allocator's slack come on top.")


# ---- the formulas ---------------------------------------------------------------------------------------------------


def explain(p: Prediction) -> str:
    """The whole derivation, section by section."""
    return "\n".join([*_model(p), *_hardware(p), *_states(p), *_activations(p), *_communication(p), *_time(p)])


def _title(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"


def _model(p: Prediction) -> Iterable[str]:
    shape, length = p.shape, p.job.seq
    yield _title(f"Model: {shape.name}")
    yield f"parameters {shape.parameters / 1e9:.3f}e9 in {shape.layers} layers, embedding and head"
    for block, count in distinct(shape.blocks).items():
        kind = "gated MLP" if block.gated else "MLP"
        experts = f", {block.top_k} experts at work" if block.top_k else ""
        yield (
            f"  {count} x {block.parameters / 1e6:.1f}e6: {kind} of {block.inner:.0f}{experts}; forward "
            f"{block.flops(length) / 1e6:.1f} MFLOP per token (2 per weight, 2 h (d_qk + d_v) per visible key)"
        )
    yield f"  head and loss: forward {shape.head_flops / 1e6:.1f} MFLOP per token; a backward costs twice a forward"


def _hardware(p: Prediction) -> Iterable[str]:
    gpu, cluster = p.cluster.gpu, p.cluster
    yield _title(f"Hardware: {cluster.gpus} x {gpu.name}, {cluster.per_node} in a node")
    peak, memory = gpu.peak(p.job.precision) / 1e12, gpu.bandwidth / 1e9
    yield f"peak {peak:.0f} TFLOP/s {p.job.precision}, memory {gpu.memory_gib} GiB at {memory:.0f} GB/s [{gpu.source}]"
    if gpu.like:
        yield f"no published runs: efficiencies of {gpu.like}; seconds within {p.uncertainty:.0%} in nine of ten"
    if p.job.offload != "none":
        host = gpu.host
        yield (
            f"host: PCIe {host.pcie / 1e9:g} GB/s per GPU, memory {host.bandwidth / 1e9:g} GB/s, NVMe "
            f"{host.nvme / 1e9:g} GB/s, shared by the node's GPUs [{host.source}]"
        )
    for place, link, part in (
        ("inside a node", cluster.inside, gpu.efficiency.link),
        ("between nodes", cluster.between, gpu.efficiency.network),
    ):
        speed = f"{link.bandwidth / 1e9:g} GB/s per GPU, of which {part:.0%} reached"
        yield f"{place}: {link.name}, {speed} [{link.source}]"


def _states(p: Prediction) -> Iterable[str]:
    stage = p.layout.zero_stage
    rank = fullest(list(p.breakdown.ranks)).rank
    yield _title(f"Memory of pipeline rank {rank}, the fullest: {p.memory_gib:.1f} GiB")
    per = adapter_bytes(p.job) if p.job.lora else state_bytes(p.job, stage)
    yield (
        f"bytes per trained parameter: weights {per.weights:g}, gradients {per.gradients:g}, optimizer "
        f"{per.optimizer:g}; ZeRO-{stage} over {p.layout.shards} ranks divides {_DIVIDED[stage]} "
        "[arXiv:1910.02054, table 1]"
    )
    if p.job.habits.fsdp2:
        yield "gathered: weights that FSDP2 holds whole, and gradients between micro-batches [docs/dry_run.md]"
    yield from (f"  {kind:<24}{size:8.2f} GiB" for kind, size in p.breakdown.memory.items() if size >= 0.005)


_DIVIDED = ("nothing", "the optimizer", "optimizer and gradients", "optimizer, gradients and weights")


def _activations(p: Prediction) -> Iterable[str]:
    layout, job, block, hidden = p.layout, p.job, p.shape.blocks[0], p.shape.hidden
    tokens = job.tokens(layout)
    yield _title(f"Activations of a layer, {tokens:.0f} tokens, recompute={job.recompute}")
    for term in terms_of(block, hidden, job):
        size = (term.bytes + term.squared * job.seq) / hidden
        if size:
            cut = f"/ tp={layout.tp}" if is_cut(term, layout) else "whole on each tp rank"
            yield f"  {term.name:<32}{size:7.2f} bytes x s b h   {cut}"
    kept = kept_bytes(block, hidden, layout, job)
    yield f"kept: {kept / hidden:.2f} bytes x s b h = {tokens * kept / 2**20:.0f} MiB [method: arXiv:2205.05198]"


def _communication(p: Prediction) -> Iterable[str]:
    yield _title("Communication of a rank per step (ring formulas: all-reduce 2 (N-1)/N S, others (N-1)/N S)")
    for t in p.breakdown.communication:
        factor = ring_factor(t.kind, t.group.size)
        yield (
            f"  {t.axis:<12}{t.kind:<15}{t.count:8.0f} x {t.payload / 2**20:10.2f} MiB x {factor:.3f} = "
            f"{t.bytes / 2**30:8.2f} GiB over {t.group.size} ranks, {t.group.link.name}: {t.what}"
        )


def _time(p: Prediction) -> Iterable[str]:
    e = p.cluster.gpu.efficiency
    yield _title(f"Step: {p.step_time_s:.4g} s, {p.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU {p.mfu:.1%}")
    yield (
        f"large matrix products at {e.gemm:.0%} of the peak, attention at {e.attention:.0%}, memory at {e.memory:.0%} "
        f"with {e.passes:g} times the fewest bytes [fitted, docs/planner.md]"
    )
    for kind, seconds in sorted(p.breakdown.time.items(), key=lambda item: -item[1]):
        yield f"  {kind:<28}{seconds:10.4f} s {seconds / p.step_time_s:7.1%}"
    if p.layout.pp > 1:
        by_rank = stages_by_rank(make_stages(p.shape, p.layout, p.job), p.layout)
        counts = [sum(stage.layers for stage in mine) for mine in by_rank]
        yield f"{p.layout.schedule}: layers per rank {counts}, simulated bubble {p.bubble:.1%}"
