"""Plans of unlike GPUs as text: a table, reasons, and the lines that start the first layout on its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import yaml

from hf_parallel.planner.mixed import MixedChoice, MixedFound
from hf_parallel.planner.prediction import TRANSFERRED
from hf_parallel.planner.report import make_wide_console


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
