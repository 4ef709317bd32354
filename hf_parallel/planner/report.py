"""Plans as text: a table, reasons, the lines that start the first layout; specs in files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hf_parallel.planner.advice import explain_attention
from hf_parallel.planner.batch import StepBatch
from hf_parallel.planner.choices import Choice, Found
from hf_parallel.planner.mixed import MixedChoice, MixedFound
from hf_parallel.planner.prediction import TRANSFERRED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_parallel.planner.dryrun.run import DryRun


def show(found: Found, dollars: float | None = None) -> None:
    """Print the ranked table and what is to be said about it.

    Args:
        dollars: per GPU and hour, for a column with the cost of 1e9 tokens.
    """
    console = make_wide_console()
    cluster, shape = found.goal.cluster, found.goal.shape
    where, source = f"{cluster.gpus} x {cluster.gpu.name}", cluster.gpu.source
    if cluster.gpus > 1:
        between = f", {cluster.between.name} between" if cluster.nodes > 1 else ""
        where += f" ({cluster.inside.name} in nodes of {cluster.per_node}{between})"
    batch = f"{found.goal.global_batch or 'rows'} x {found.goal.seq} tokens per step"
    what = f"{shape.name}, {shape.parameters / 1e9:.2f} B parameters"
    heading = f"{what}, on {where}: {batch}; {found.looked_at} layouts looked at"
    measured = [f"  rates of this machine, {source} (hf-parallel check --calibrate)"] if "calibrated" in source else []
    for line in (heading, *measured, *(f"  {note}" for note in found.notes)):
        console.print(line, markup=False)
    console.print(make_table(found, dollars))
    for line in _list_plan_remarks(found, dollars):
        console.print(line, markup=False)
    if found.best:
        gpus, spec = found.best.prediction.layout.gpus, found.best.config.to_spec()
        arguments = f"--per_device_train_batch_size {found.best.rows}"
        if found.best.accumulation > 1:
            arguments += f" --gradient_accumulation_steps {found.best.accumulation}"
        command = f"hf-parallel launch --num_processes {gpus} --parallel {spec} train.py {arguments}"
        console.print(f"Run the first:  {command}", markup=False, soft_wrap=True)


def _list_plan_remarks(found: Found, dollars: float | None) -> Iterator[str]:
    """Yield remarks on the first layout, on all that share a warning, and on what is missing."""
    room = f"{found.goal.cluster.gpu.memory_gib:.1f} GiB"
    yield (
        "GiB of the fullest GPU: allocated by tensors; reserved by torch, which gives back the rest before it fails; "
        f"free of {room}, {found.goal.headroom:g} % at least (--headroom), beside tensors, CUDA and communicators"
    )
    if found.best:
        first, critical, p = found.best, found.goal.critical_batch, found.best.prediction
        rate = p.tokens_per_s_per_gpu * p.layout.gpus
        price = f" and ${p.cost_per_billion_tokens(dollars):,.0f}" if dollars else ""
        kinds = sorted(p.breakdown.memory.items(), key=lambda item: -item[1])
        kinds = [(kind, size) for kind, size in kinds if size > 0.02 * first.needed_gib and "held" not in kind]
        parts = ", ".join(f"{kind} {size:.1f}" for kind, size in kinds)
        hours = f"{1e9 / rate / 3600:.1f} h{price} for 1e9 tokens"
        yield f"The first: {rate:,.0f} tokens/s in all, {hours}; GiB: {parts}"
        if (on_host := first.host_gib) > 0:
            of_node = found.goal.cluster.gpu.host.memory_gib
            yield f"  offloaded to the host: {on_host:.0f} GiB of a node's memory, of {of_node:.0f}"
        if critical is not None:
            yield (
                f"  ranked by time to a loss: steps are in proportion to 1 + {critical:g} / batch (arXiv:1812.06162); "
                f"the first, with {first.batch}, takes {first.steps_factor(critical):.3g} times the fewest steps, "
                f"each {first.step_time_s:.3g} s"
            )
        yield from (f"  {line}" for line in format_batch_lines(found))
        yield from (f"  {reason}" for reason in explain_attention(found.goal, found.best))
    shared: dict[str, list[str]] = {}
    for i, choice in enumerate(found.choices, 1):
        for warning in choice.warnings:
            shared.setdefault(warning, []).append(str(i))
    yield from (f"  {', '.join(numbers)}: {warning}" for warning, numbers in shared.items())
    if found.why_not:
        yield "Why not"
    yield from (f"  {name}: {reason}" for name, reason in found.why_not)
    yield from found.suggestions


def format_batch_lines(found: Found) -> Iterator[str]:
    """Say the effective batch of the first, and what one process needs for it or what the learning rate needs."""
    first, goal = found.choices[0], found.goal
    batch = StepBatch(first.rows, first.accumulation, first.config.data_parallel_size)
    yield f"a step has {batch.in_words(goal.seq)}"
    if goal.global_batch is None:
        yield from filter(None, [batch.advice(goal.optimizer)])
    elif batch.data_ranks > 1:
        alone = StepBatch(batch.rows, batch.accumulation * batch.data_ranks, 1)
        yield f"the same batch in one process: {alone.arguments}; the learning rate stays"


def make_wide_console() -> Console:
    """Return the terminal; in a file or a pipe lines are as long as they need to be."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


#: GiB of the fullest GPU.
_MEMORY = ("allocated", "reserved", "free")


def make_table(found: Found, dollars: float | None = None) -> Table:
    """Make a rich table, the best layout first."""
    from rich.table import Table

    shown = Table(header_style="bold")
    shown.add_column("#", justify="right")
    shown.add_column("--parallel", overflow="fold")
    critical = found.goal.critical_batch
    headings = ["rows x calls", "s / step", "tokens/s/GPU", "MFU", *_MEMORY, "idle"]
    headings = [*(["batch", "x steps", "x time to loss"] if critical is not None else []), *headings]
    if found.measured:
        headings.insert(headings.index("s / step") + 1, "measured here")
    for heading in [*headings, *(["$ / 1e9 tokens"] if dollars else [])]:
        shown.add_column(heading, justify="right")
    for i, choice in enumerate(found.choices, 1):
        p, spec = choice.prediction, choice.config.to_spec()
        cells = [str(i), spec]
        if critical is not None:  # steps in multiples of the fewest, time in multiples of the first layout's
            times = choice.seconds_to_loss(critical) / found.choices[0].seconds_to_loss(critical)
            cells += [str(choice.batch), f"{choice.steps_factor(critical):.3g}", f"{times:.2f}"]
        cells += [f"{choice.rows} x {choice.accumulation}", f"{p.step_time_s:.3g}"]
        if found.measured:
            took = found.measured.get(spec)
            cells.append("" if took is None else f"{took:.3g}")
        cells += [f"{p.tokens_per_s_per_gpu:,.0f}", f"{p.mfu:.1%}"]
        cells += [f"{size:.1f}" for size in (p.allocated_gib, p.reserved_gib, choice.free_gib)]
        cells += [f"{p.bubble:.1%}", *([f"{p.cost_per_billion_tokens(dollars):,.0f}"] if dollars else [])]
        shown.add_row(*cells)
    return shown


def write_specs(folder: str | Path, found: Found) -> list[Path]:
    """Write a YAML file per layout, as --parallel takes it; predictions stand in comments."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for i, choice in enumerate(found.choices, 1):
        path, p = folder / f"{i:02}.yaml", choice.prediction
        lines = [
            f"# {found.goal.shape.name} on {found.goal.where}",
            f"# predicted: {p.step_time_s:.3g} s per step, {choice.needed_gib:.1f} GiB, MFU {p.mfu:.1%}",
            f"# with per_device_train_batch_size={choice.rows}, gradient_accumulation_steps={choice.accumulation}",
            *(f"# note: {warning}" for warning in choice.warnings),
        ]
        default = type(choice.config)().to_dict()
        values = {key: value for key, value in choice.config.to_dict().items() if value != default[key]}
        text = "\n".join(lines) + "\n" + yaml.safe_dump(values or {"dp_shard_size": -1}, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def show_verified(choice: Choice, runs: list[DryRun], device: str) -> None:
    """Print analytic memory beside that of dry runs, in GiB, and the bytes that each axis sends."""
    from rich.table import Table

    console = make_wide_console()
    title = f"Dry run of {choice.config.to_spec()} on {device}"
    shown = Table(title=title, header_style="bold", title_justify="left")
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
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        console.print(note)


# ---- Plans for groups of unlike GPUs --------------------------------------------------------------------------------


def show_mixed(found: MixedFound) -> None:
    """Print the ranked layouts, why the first is first, and what starts it."""
    from rich.table import Table

    console, goal = make_wide_console(), found.goal
    kinds = [f"{group.cluster.gpus} x {group.cluster.gpu.name} ({group.name})" for group in found.mixed.groups]
    console.print(
        f"{goal.shape.name}, {goal.shape.parameters / 1e9:.2f} B parameters, on {' + '.join(kinds)}, "
        f"{found.mixed.between.name} between them: {goal.global_batch} x {goal.seq} tokens per step; "
        f"{found.looked_at} layouts looked at",
        markup=False,
    )
    shown = Table(header_style="bold")
    for heading in ("#", "--parallel", "where", "rows x calls", "s / step", "GiB needed"):
        shown.add_column(heading, justify="left" if heading in ("--parallel", "where") else "right", overflow="fold")
    for at, choice in enumerate(found.choices, 1):
        needed = ", ".join(f"{load.group.name} {load.needed_gib:.0f}" for load in choice.loads)
        rows = f"{choice.rows} x {choice.accumulation}"
        spec = choice.config.to_spec()
        shown.add_row(str(at), spec, choice.where(), rows, f"{choice.step_time_s:.3g}", needed)
    console.print(shown)
    remarks = [
        f"nobody published runs of unlike GPUs together: seconds may be off by {TRANSFERRED:.0%} (one in ten), the "
        f"order is surer; {found.goal.headroom:g} % of each GPU stay free (--headroom)"
    ]
    if len(set(found.kernels.values())) > 1:
        named = ", ".join(f"{kernel} on {name}" for name, kernel in found.kernels.items())
        remarks.append(f"attention: {named}")
    remarks += [*found.reasons(), *(list_commands(found, found.best) if found.best else [])]
    for line in remarks:
        console.print(line, markup=False, soft_wrap=True)


def describe_layout(choice: MixedChoice) -> str:
    """Return a layout, where it runs, its step and what each group needs of its memory."""
    rows = choice.rows * choice.accumulation * choice.config.data_parallel_size
    needed = ", ".join(
        f"{load.needed_gib:.3g} of {load.group.cluster.gpu.memory_gib:.3g} GiB on {load.group.name}"
        for load in choice.loads
    )
    return (
        f"{choice.config.to_spec()} ({choice.where()}): {choice.step_time_s:.3g} s per step of {rows} rows, {needed}"
    )


def list_commands(found: MixedFound, choice: MixedChoice, run: str = "Run the first") -> Iterator[str]:
    """Yield what to paste on each node: groups start in the order of the layout, so that their ranks do.

    Args:
        run: begins the first line.
    """
    spec, mixed = f"--parallel {choice.config.to_spec()}", found.mixed
    script = f"train.py --per_device_train_batch_size {choice.rows}"
    if choice.accumulation > 1:
        script += f" --gradient_accumulation_steps {choice.accumulation}"
    clusters = [load.group.cluster for load in choice.loads]
    gpus, nodes = sum(cluster.gpus for cluster in clusters), sum(cluster.nodes for cluster in clusters)
    if mixed.one_node or nodes == 1:
        first, devices = 0, dict[str, list[int]]()
        for group in mixed.groups:
            devices[group.name] = list(range(first, first + group.cluster.gpus))
            first += group.cluster.gpus
        chosen = [device for name in choice.groups for device in devices[name]]
        in_order = not mixed.one_node or chosen == list(range(first))  # of the machine, whose devices are all in use
        visible = "" if in_order else f"CUDA_VISIBLE_DEVICES={','.join(map(str, chosen))} "
        yield f"{run}:  {visible}hf-parallel launch --num_processes {gpus} {spec} {script}"
        return
    ends = list(itertools.accumulate(cluster.nodes for cluster in clusters))
    firsts = [end - cluster.nodes for end, cluster in zip(ends, clusters, strict=True)]
    ranks = [
        f"{first} on {name}" if end == first + 1 else f"{first}-{end - 1} on {name}"
        for first, end, name in zip(firsts, ends, choice.groups, strict=True)
    ]
    alike = {cluster.per_node for cluster in clusters}
    if len(alike) == 1 and not any(cluster.gpus % cluster.per_node for cluster in clusters):
        where = f"--num_machines {nodes} --machine_rank R --main_process_ip HOST --main_process_port 29500"
        yield f"{run} on each node, R = {', '.join(ranks)}:"
        yield f"  hf-parallel launch {where} --num_processes {gpus} {spec} {script}"
        return
    yield f"{run} on each node, R = {', '.join(ranks)}, K = its number of GPUs:"
    where = f"--nnodes {nodes} --node-rank R --nproc-per-node K --master-addr HOST --master-port 29500"
    yield f"  torchrun {where} -m hf_parallel {spec} {script}"


def write_mixed_specs(folder: str | Path, found: MixedFound) -> None:
    """Write each layout as a YAML file that --parallel takes, with what starts it in comments."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for at, choice in enumerate(found.choices, 1):
        default = type(choice.config)().to_dict()
        values = {key: value for key, value in choice.config.to_dict().items() if value != default[key]}
        said = [f"predicted: {choice.step_time_s:.3g} s per step; {choice.where()}", *list_commands(found, choice)]
        text = "".join(f"# {line}\n" for line in said) + yaml.safe_dump(
            values or {"dp_shard_size": -1}, sort_keys=False
        )
        (folder / f"{at:02}.yaml").write_text(text, encoding="utf-8")


def explain_mixed_misfit(found: MixedFound) -> str:
    """Say that no layout fits, of all groups or of one."""
    names = ", ".join(found.mixed.to_dict()["groups"])
    return f"no layout over {names} or of one of them; --lora, --optimizer adamw_8bit or --headroom 0 may fit"
