"""`hf-parallel plan`: the best layouts for a model, a cluster and a batch; and the timeline of one pipeline.

hf-parallel plan meta-llama/Llama-3.1-8B --gpus 64 --gpu h100-80gb --seq 8192 --global-batch 512
hf-parallel plan ./folder --detect --global-batch 64 --json
hf-parallel plan ./folder --calibrate OUTPUT_DIR --gpus 64
hf-parallel plan --timeline step.svg --parallel pp=4,pipeline_microbatches=8
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import check_model_name, refuse, suggest_file
from hf_parallel.ask.waiting import waiting

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hf_parallel.planner.choices import Found
    from hf_parallel.planner.groups import MixedCluster
    from hf_parallel.planner.hardware import Cluster

#: The name of this machine's devices as a calibration has them.
MEASURED = "measured"
_SHAPE_KEYS = {"hidden", "layers"}
#: What may be planned in the place of a config.
_NUMBERS = (
    'numbers such as {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.description = (
        "Rank the layouts of a model on a cluster by predicted step time, with memory and reasons. Without MODEL, "
        "draw when each rank of a pipeline computes, if layers are equal and a backward pass takes two forward passes."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder with a config.json, that file, or a Hub id")
    where = parser.add_argument_group("cluster")
    where.add_argument("--gpus", type=int, metavar="N", help="number of GPUs on all machines")
    kinds = "kind of GPU, such as h100-80gb; `measured` is this machine, after `hf-parallel check --calibrate`"
    where.add_argument("--gpu", metavar="NAME", help=kinds)
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs in each machine (8)")
    where.add_argument("--network", metavar="NAME", help="link between machines, such as infiniband-ndr, ethernet-25g")
    described = "read the cluster from a file; it may have groups of unlike GPUs (docs/dry_run.md)"
    where.add_argument("--cluster", metavar="FILE.yaml", help=described)
    where.add_argument("--detect", action="store_true", help="use this machine, or all machines of the launcher")
    where.add_argument("--save-cluster", metavar="FILE.yaml", help="write the detected machines to this file")
    measured = "use the speeds that a training recorded in this folder"
    where.add_argument("--calibrate", metavar="OUTPUT_DIR", help=measured)
    where.add_argument("--memory", type=float, metavar="GIB", help="memory to use of each GPU (all of it)")
    where.add_argument("--headroom", type=float, default=8, metavar="PERCENT", help="memory to keep free (8)")
    what = parser.add_argument_group("training")
    what.add_argument("--seq", type=int, default=4096, metavar="N", help="tokens per sequence (4096)")
    what.add_argument("--global-batch", type=int, metavar="N", help="sequences per step on all GPUs (4 per GPU)")
    critical = "critical batch in sequences, as monitor=noise measures it: rank by the time to reach a loss"
    what.add_argument("--critical-batch", type=float, metavar="N", help=critical)
    what.add_argument("--rows", type=int, metavar="N", help="keep this per_device_train_batch_size")
    precisions = "bf16 (default), fp32, or fp32 weights under Trainer's bf16=True (mixed) or fp16=True (fp16)"
    what.add_argument("--precision", default="bf16", metavar="NAME", help=precisions)
    optimizers = "adamw (default), adamw_8bit, sgd or sgd_momentum"
    what.add_argument("--optimizer", default="adamw", metavar="NAME", help=optimizers)
    what.add_argument("--lora", type=int, nargs="?", const=16, default=0, metavar="R", help="train LoRA of rank R")
    packs = "keep the weights under LoRA in 4 bits (QLoRA); needs --lora"
    what.add_argument("--load-in-4bit", action="store_true", help=packs)
    masked = "assume that batches have padding or packed examples, for which sdpa needs a mask"
    what.add_argument("--packed", action="store_true", help=masked)
    what.add_argument("--attn", metavar="NAME", help="attn_implementation that the script sets")
    rounded = "allow layouts that round what they send: faster, but not the numbers of one process"
    what.add_argument("--quantized", action="store_true", help=rounded)
    out = parser.add_argument_group("output")
    out.add_argument("--parallel", metavar="SPEC", help="explain why this layout is not the first")
    out.add_argument("--top", type=int, default=10, metavar="N", help="number of layouts to show (10)")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument("--specs", metavar="FOLDER", help="write each layout as a YAML file that --parallel takes")
    out.add_argument("--picture", metavar="FILE", help="draw the memory of each layout (.svg or .png)")
    out.add_argument("--timeline", metavar="FILE", help="draw a step of the best pipeline (.svg or .png)")
    out.add_argument("--explain", action="store_true", help="print each formula of the first layout with its numbers")
    dry = "run the real code of the first layout, or of SPEC, on tensors without memory"
    out.add_argument("--verify", action="store_true", help=dry)
    branches = "device that --verify stands in for (cpu)"
    out.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=branches)
    out.add_argument("--dollars", type=float, metavar="D", help="price of a GPU hour; adds the cost of 1e9 tokens")
    only = parser.add_argument_group("timeline without MODEL")
    only.add_argument("--micro-batches", type=int, metavar="N", help="default: pipeline_microbatches, or 4 x pp")
    only.add_argument("--layers", type=int, metavar="N", help="layers of the model (one for each stage)")


def plan_layouts(args: argparse.Namespace) -> int:
    """Print the plan; 1 if nothing fits, 2 for a command line that cannot work."""
    try:
        if args.model is None and not args.save_cluster:
            print(_draw_timeline_alone(args))
            return 0
        prints_elsewhere = args.detect and os.environ.get("RANK", "0") != "0"  # of a launcher: rank 0 prints for all
        if prints_elsewhere or args.model is None:
            _read_cluster(args)
            return 0
        return _plan_model(args)
    except (SpecError, OSError) as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2


# ---- a model -----------------------------------------------------------------------------------------------------


def _plan_model(args: argparse.Namespace) -> int:
    check_path(args.model, _NUMBERS)  # before torch is imported, as is what `_read_cluster` refuses
    given = None if args.calibrate else _read_cluster(args)
    if args.device != "cpu" and not args.verify:
        refuse(f"--device {args.device}", "is what --verify runs on", f"--verify --device {args.device}")
    for option in ("critical_batch", "rows", "memory", "dollars", "lora", "gpus_per_node"):
        number = getattr(args, option)
        if number is not None and number <= 0 and (number or option != "lora"):
            refuse(f"--{option.replace('_', '-')} {number:g}", "is more than 0", do="drop it, or give another number")
    if args.load_in_4bit and not args.lora:
        refuse("--load-in-4bit", "packs the frozen weights under adapters", "--lora 16 --load-in-4bit")
    if args.load_in_4bit and args.precision != "bf16":
        refuse(f"--precision {args.precision}", "all but a base in 4 bits is planned in bf16", "--precision bf16")
    if args.lora and args.verify and find_spec("peft") is None:
        refuse("--lora --verify", "runs PEFT's own code", do="pip install 'hf-parallel[lora]'")
    with waiting("importing torch") as say:
        from hf_parallel.planner.groups import MixedCluster
        from hf_parallel.planner.pictures import write_memory, write_timeline
        from hf_parallel.planner.report import show, write_specs

        say("reading the model's config")
        model = read_planned_model(args.model)
    cluster = given or _read_calibrated_run(args, model)
    if isinstance(cluster, MixedCluster):
        return _plan_groups(args, model, cluster)
    with waiting("ranking layouts"):
        found = _search(args, model, cluster)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    elif found.choices:
        show(found, args.dollars)
    if found.best is None:
        print(f"hf_parallel: nothing fits: {found.advice}", file=sys.stderr)
        return 1
    if args.specs:
        write_specs(args.specs, found)
    if args.picture:
        write_memory(args.picture, found)
    if args.timeline:
        piped = [choice for choice in found.choices if choice.config.pp_size > 1]
        if not piped:
            refuse(f"--timeline {args.timeline}", "none of the layouts has a pipeline to draw")
        print(write_timeline(args.timeline, piped[0]), file=sys.stderr if args.json else sys.stdout)
    if args.explain:
        print(found.best.prediction.explain())
    if args.verify:
        _verify(args, found, model)
    return 0


def _search(args: argparse.Namespace, model: PretrainedConfig | dict[str, object], cluster: Cluster) -> Found:
    """Return the ranked layouts, with what their steps took on this machine, where it is the one that is planned."""
    from hf_parallel.hooks.auto import make_engine_options
    from hf_parallel.planner.calibration import find_measured_step, name_device, read_calibration
    from hf_parallel.planner.search import search, search_batches

    batch = _check_positive("--global-batch", args.global_batch or 4 * cluster.gpus)
    ranked = functools.partial(search, global_batch=batch)
    if args.critical_batch is not None:
        ranked = functools.partial(search_batches, args.critical_batch, global_batch=args.global_batch and batch)
    found = ranked(
        model=model,
        cluster=cluster,
        seq=_check_positive("--seq", args.seq),
        precision=args.precision,
        optimizer=args.optimizer,
        lora=args.lora,
        rows=args.rows,
        memory_gib=args.memory,
        top=_check_positive("--top", args.top),
        expected=args.parallel,
        **make_engine_options(model, args.lora, args.load_in_4bit),
        attention=args.attn,
        documents=args.packed,
        quantized=args.quantized,
        headroom=args.headroom,
        four_bit=args.load_in_4bit,
    )
    known = read_calibration() if "calibrated" in found.goal.cluster.gpu.source else None
    if known is None or known.device != name_device(found.goal.cluster):
        return found
    measured, goal = {}, found.goal
    for choice in found.choices:
        ran = {"rows": choice.rows, "calls": choice.accumulation, "seq": goal.seq, "precision": goal.precision}
        took = find_measured_step(known, goal.shape, choice.config, ran)
        if took is not None:
            measured[choice.config.to_spec()] = took
    return dataclasses.replace(found, measured=measured)


#: What holds for GPUs of one kind alone.
_OF_ONE_KIND = (
    "memory",
    "critical_batch",
    "gpus_per_node",
    "parallel",
    "quantized",
    "picture",
    "timeline",
    "explain",
    "verify",
    "dollars",
)


def _plan_groups(args: argparse.Namespace, model: PretrainedConfig | dict[str, object], mixed: MixedCluster) -> int:
    from hf_parallel.hooks.auto import make_engine_options
    from hf_parallel.planner.mixed import search_groups
    from hf_parallel.planner.report import explain_mixed_misfit, show_mixed, write_mixed_specs

    given = next((name for name in _OF_ONE_KIND if getattr(args, name)), None)
    if given is not None:
        names = ", ".join(group.name for group in mixed.groups)
        refuse(
            f"--{given.replace('_', '-')}", f"needs GPUs of one kind, not the groups {names}", do="plan a group alone"
        )
    with waiting("ranking layouts"):
        found = search_groups(
            model=model,
            mixed=mixed,
            seq=_check_positive("--seq", args.seq),
            global_batch=_check_positive("--global-batch", args.global_batch or 4 * mixed.gpus),
            precision=args.precision,
            optimizer=args.optimizer,
            lora=args.lora,
            rows=args.rows,
            top=_check_positive("--top", args.top),
            **make_engine_options(model, args.lora, args.load_in_4bit),
            attention=args.attn,
            documents=args.packed,
            headroom=args.headroom,
            four_bit=args.load_in_4bit,
        )
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    elif found.choices:
        show_mixed(found)
    if found.best is None:
        print(f"hf_parallel: nothing fits: {explain_mixed_misfit(found)}", file=sys.stderr)
        return 1
    if args.specs:
        write_mixed_specs(args.specs, found)
    return 0


def check_path(source: str, others: str = "a Hub id") -> None:
    """Refuse a model that is spelled like a path, and is not there; or a name of the Hub while no Hub answers.

    Args:
        others: what else than a folder would do.
    """
    works = f"a folder with a config.json works, or that file, or {others}"
    if os.path.exists(source):
        return
    if source.startswith((".", "/", "~")) or source.endswith(".json"):
        refuse(source, "no such folder or file", do=suggest_file(source) or works)
    check_model_name(source, suggest_file(source) or works, files=("config.json",), needs_weights=False)


def read_planned_model(source: str) -> PretrainedConfig | dict[str, object]:
    """Read an HF config from a folder, a config.json or a Hub id; or the numbers of a JSON file without model_type.

    Raises:
        SpecError: there is no such model.
    """
    if os.path.isfile(source):
        with open(source, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except ValueError as error:
                refuse(source, f"not JSON ({error})", cause=error)
        if isinstance(values, dict) and "model_type" not in values and values.keys() & _SHAPE_KEYS:
            return values
    from hf_parallel.model.anatomy import read_config

    return read_config(source, others=_NUMBERS)


def _read_cluster(args: argparse.Namespace) -> Cluster | MixedCluster:
    """Return the machines that are named or found, and write them to `--save-cluster`."""
    from hf_parallel.planner.groups import write_machines

    machines = _make_named_cluster(args)
    if args.save_cluster and os.environ.get("RANK", "0") == "0":
        write_machines(args.save_cluster, machines)
        print(f"hf_parallel: --cluster {args.save_cluster} plans for these machines", file=sys.stderr)
    return machines


def _make_named_cluster(args: argparse.Namespace) -> Cluster | MixedCluster:
    from hf_parallel.planner.groups import MixedCluster, gather_devices_of_all, group_devices, read_machines
    from hf_parallel.planner.hardware import find_link, make_cluster

    given = [f"--{name}" for name in ("gpu", "cluster", "detect") if getattr(args, name)]
    if len(given) != 1:
        said = " and ".join(given) or "none of --gpu, --cluster, --detect"
        refuse("plan", f"needs one description of the machines, not {said}", "--gpus 8 --gpu h100-80gb")
    if args.detect:  # the GPUs of all processes of a launcher, or of this machine
        from hf_parallel.planner.detect import detect

        devices = gather_devices_of_all()
        on_first = [host for host, _, _ in devices].count(devices[0][0]) if devices else None
        here = detect(args.gpus or len(devices) or None, args.gpus_per_node or on_first, args.network)
        found = group_devices(here, devices)
        if isinstance(found, MixedCluster) and args.gpus:
            kinds = " and ".join(f"{group.cluster.gpus} x {group.name}" for group in found.groups)
            refuse(f"--gpus {args.gpus}", f"the GPUs here are unlike: {kinds}", do="drop it, or --cluster FILE.yaml")
        return found
    if args.gpu == MEASURED:  # this machine with the rates of its calibration
        from hf_parallel.planner.calibration import choose_calibration_path, read_calibration
        from hf_parallel.planner.detect import detect

        path, do = choose_calibration_path(), "run hf-parallel check --calibrate"
        if read_calibration() is None:
            refuse("--gpu measured", f"{path} is not there", do=do)
        here = detect(args.gpus, args.gpus_per_node, args.network)
        if "calibrated" not in here.gpu.source:
            refuse("--gpu measured", f"{path} is of another device", do=do)
        return here
    if args.cluster:
        if args.gpus_per_node:
            asked = f"--gpus-per-node {args.gpus_per_node}"
            refuse(
                asked, f"{args.cluster} says how many a node has", f"gpus_per_node: {args.gpus_per_node} in the file"
            )
        cluster = read_machines(args.cluster, args.gpus)
        return dataclasses.replace(cluster, between=find_link(args.network)) if args.network else cluster
    if args.gpus is None:
        refuse("--gpu needs --gpus as well", "how many in all", "--gpus 8")
    return make_cluster(args.gpu, args.gpus, args.gpus_per_node or 8, args.network)


def _read_calibrated_run(args: argparse.Namespace, model: PretrainedConfig | dict[str, object]) -> Cluster:
    """Return the cluster of a training's record; its number of GPUs may be another."""
    from hf_parallel.monitor.expected import calibrated

    names = ("gpu", "cluster", "detect", "network", "save_cluster")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    if given:
        refuse(f"--calibrate with {given[0]}", "the record says what the training ran on", "--calibrate alone")
    cluster, lines = calibrated(args.calibrate, model)
    for line in lines:
        print(f"hf_parallel: {line}", file=sys.stderr)
    return dataclasses.replace(
        cluster, gpus=args.gpus or cluster.gpus, per_node=args.gpus_per_node or cluster.per_node
    )


def _check_positive(option: str, number: int) -> int:
    if number < 1:
        refuse(f"{option} {number}", "is one at least", f"{option} 8")
    return number


def _verify(args: argparse.Namespace, found: Found, model: PretrainedConfig | dict[str, object]) -> None:
    """Run the first layout, or the one in `--parallel`, dry: the pipeline ranks with embedding and head."""
    from hf_parallel.hooks.peft.planned_adapters import plan_four_bit, plan_lora
    from hf_parallel.planner.advice import choose_expected_layout
    from hf_parallel.planner.dryrun.run import DryRun, dry_run, end_ranks, find_device
    from hf_parallel.planner.report import show_verified

    if isinstance(model, dict):
        refuse("--verify runs the model's own code", "MODEL must be one of Transformers, not only its numbers")
    device, reason = find_device(args.device)
    if reason:
        print(f"hf_parallel: --device {args.device}: {reason}; the branches for CPUs run", file=sys.stderr)
    choice = found.choices[0] if args.parallel is None else choose_expected_layout(found.goal, args.parallel)
    calls = min(choice.accumulation, 2)  # the third holds what the second does
    ranks, runs = end_ranks(choice.config), list[DryRun]()
    with waiting("running dry") as say:
        for rank in ranks:
            say(f"running rank {rank} of {choice.config.world_size} dry ({len(runs) + 1} of {len(ranks)} ranks)")
            run = dry_run(
                model,
                choice.config,
                rank=rank,
                rows=choice.rows,
                seq=args.seq,
                accumulation=calls,
                optimizer=args.optimizer,
                precision=choice.prediction.job.precision,
                adapt=plan_lora(args.lora) if args.lora else None,
                pack=plan_four_bit() if args.load_in_4bit else None,
                device=device,
            )
            runs.append(run)
    show_verified(choice, runs, device)


# ---- a timeline alone --------------------------------------------------------------------------------------------


def _draw_timeline_alone(args: argparse.Namespace) -> str:
    from hf_parallel.axes.pipeline import energy, timeline

    if args.timeline is None or args.parallel is None:
        refuse("plan", "needs a MODEL", do="or --timeline FILE.svg and --parallel SPEC to draw a pipeline")
    config = ParallelConfig.parse(args.parallel)
    name, ranks = config.pipeline_schedule, config.pp_size
    if ranks < 2:
        refuse(f"pp_size={ranks}", "a timeline shows a pipeline of two ranks or more", "pp=4")
    asked = config.pipeline_microbatches if args.micro_batches is None else args.micro_batches
    stages = config.pipeline_stages
    split = list(config.split_layers or timeline.split_evenly(stages if args.layers is None else args.layers, stages))
    if len(split) != stages or min(split) < 1:
        refuse(f"{sum(split)} layers in {len(split)} parts", f"do not fill {stages} stages", f"--layers {stages}")
    if args.layers not in (None, sum(split)):
        refuse(f"--layers {args.layers}", f"pipeline_split adds to {sum(split)}", f"--layers {sum(split)}")
    count, costs = asked or 4 * ranks, timeline.compute_layer_costs(split)
    saving = ""
    if config.delays_updates:
        drawn, peaks = timeline.simulate_without_flush(ranks, count, *costs), list(range(ranks, 0, -1))
    else:
        actions = timeline.order(name, ranks, config.stages_per_rank, count)
        drawn, peaks = timeline.simulate(actions, *costs), timeline.count_peak_live(actions)
        if config.pipeline_energy != "none":
            seconds = energy.compute_seconds_of(*costs)
            saved = energy.predict_saving(actions, seconds, energy.plan_clocks(actions, seconds))
            saving = f"; pipeline_energy={config.pipeline_energy} saves {saved:.1%} of the energy (by {energy.CURVE})"
    timeline.write_timeline_picture(args.timeline, drawn, name, predicted=drawn.bubble)
    held = f"activations held at most, per rank: {', '.join(map(str, peaks))} forwards"
    return f"{args.timeline}: {name}, bubble {drawn.bubble:.1%}; {held}{saving}"
