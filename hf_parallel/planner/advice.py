"""Why a layout was chosen as it is, and why not one that people expect; warnings in the words of practice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.layers import AUTO, TORCH_FLASH
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.candidates import Goal, do_heads_divide, list_sizes_of, list_ways_of, make_config
from hf_parallel.planner.choices import Choice, TooLarge, find_leanest, iterate_variants, predict_choice
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.prediction import EXPERTS, MEASURED, TRANSFERRED

#: Tokens per step from which more data ranks mostly buy noise: GPT-3 trained with 3.2 M (Brown et al., 2020, table
#: 2.1), Llama 3 405B with 16 M from its second phase on (Dubey et al., 2024, section 3.4.1).
LARGE_BATCH = 16e6
#: So many times faster must a layout be whose transfers round to be named.
WORTH_ROUNDING = 1.2
#: What the kinds of memory are that a name alone does not tell.
_KINDS = {
    "temporaries": "temporaries (logits, or a layer computed again)",
    "gathered": "gathered (weights and gradients that are whole for a while)",
    "optimizer": "optimizer state",
}


def list_warnings_about(choice: Choice, goal: Goal) -> Iterator[str]:
    """Yield what an experienced user would say about a layout: of links, of the batch, of memory."""
    config, prediction, cluster = choice.config, choice.prediction, goal.cluster
    if config.tp_size > cluster.per_node:
        yield f"tp={config.tp_size} crosses nodes of {cluster.per_node}: every layer waits for {cluster.between.name}"
    if config.tp_size > 1 and "pcie" in cluster.inside.name:
        yield f"tp={config.tp_size} without NVLink: its collectives run over {cluster.inside.name}; prefer pp or dp"
    # ZeRO-3 over a network where shards of a node would fit.
    exposed = prediction.breakdown.time.get("ZeRO-3 communication", 0.0) / prediction.step_time_s
    slow = cluster.nodes > 1 and cluster.between.bandwidth < 0.2 * cluster.inside.bandwidth
    inside = max(1, cluster.per_node // config.tp_size)
    replicas = config.dp_shard_size // inside
    shareable = config.dp_replicate_size == 1 and min(replicas, inside) > 1 and config.dp_shard_size % inside == 0
    states = sum(prediction.breakdown.memory.get(kind, 0.0) for kind in ("weights", "gradients", "optimizer"))
    fits = prediction.memory_gib + states * (replicas - 1) < cluster.gpu.memory_gib
    if exposed > 0.1 and slow and shareable and fits:
        yield (
            f"{exposed:.0%} of the step waits for weights over {cluster.between.name}: hybrid sharding "
            f"(dp_replicate={replicas},dp_shard={inside}) keeps them in the node"
        )
    whole = config.pp_size == 1 and config.data_parallel_size > 1 and not config.reduces_each_micro_batch
    if choice.accumulation > 1 and whole:
        yield (
            f"gradient_accumulation_steps={choice.accumulation} holds whole gradients between the calls, not shards; "
            "a larger batch per call, or fewer rows per step, does not"
        )
    if prediction.bubble > 0.2:
        link = cluster.between if cluster.nodes > 1 else cluster.inside
        travels = f"stages wait for what travels over {link.name}, or the slowest of them"
        why = f"{travels}; larger micro-batches wait less often"
        few = prediction.job.micro_batches < 4 * config.pp_size
        why = "more micro-batches, or fewer stages" if few else why
        yield f"{prediction.bubble:.0%} of the pipeline is idle: {why}"
    tokens = goal.seq * choice.rows * choice.accumulation * config.data_parallel_size
    if tokens > LARGE_BATCH:
        yield f"{tokens / 1e6:.0f} M tokens per step: beyond {LARGE_BATCH / 1e6:.0f} M models hardly learn faster"
    if prediction.job.micro_batch * goal.seq < 1024:
        yield f"{prediction.job.micro_batch * goal.seq} tokens per micro-batch: kernels this small leave a GPU idle"
    if config.precision != "auto" and config.precision not in goal.cluster.gpu.peaks:
        yield f"precision={config.precision}: its products are timed like those of 16 bits, as no rate is known"
    needed, there = choice.needed_gib, goal.cluster.gpu.memory_gib
    if needed > goal.cluster.gpu.compute_room_gib():
        yield f"needs {needed:.1f} of {there:.1f} GiB: --verify before a long run"


def explain_why_not(goal: Goal, choice: Choice, best: Choice | None) -> str:
    """Say in one line that a layout does not fit, or what it spends its time on instead."""
    prediction, memory = choice.prediction, goal.cluster.gpu.memory_gib
    if choice.needed_gib > goal.room_gib:
        held = {kind: size for kind, size in prediction.breakdown.memory.items() if "held" not in kind}
        kind, size = max(held.items(), key=lambda item: item[1])
        kept = f" ({goal.headroom:g} % stay free)" if choice.needed_gib <= memory else ""
        needs = f"needs {choice.needed_gib:.0f} GiB of {memory:.0f}{kept}"
        return f"{needs}, {size:.0f} of them {_KINDS.get(kind, kind)}"
    if best is None:
        return "fits"
    if choice.seconds_per_row < best.seconds_per_row:
        return (
            f"{1 - choice.seconds_per_row / best.seconds_per_row:.0%} faster by prediction, less than it can tell; "
            f"needs {choice.needed_gib:.0f} GiB, the best {best.needed_gib:.0f}"
        )
    ratio = choice.seconds_per_row / best.seconds_per_row
    if ratio < 1.02:
        return f"as fast as the best within {max(0, ratio - 1):.0%}"
    ours, scale = prediction.breakdown.time, choice.step_time_s / ratio / best.step_time_s  # for as many rows
    theirs = {kind: seconds * scale for kind, seconds in best.prediction.breakdown.time.items()}
    kind = max(ours, key=lambda name: ours[name] - theirs.get(name, 0.0))
    more = (ours[kind] - theirs.get(kind, 0.0)) / prediction.step_time_s
    crosses = prediction.cluster.nodes > 1 and any(word in kind for word in ("ZeRO", "gradients", "gather"))
    link = f" over {prediction.cluster.between.name}" if crosses else ""
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return f"{times} x the time of the best: {more:.0%} of its step is additional {kind}{link}"


def suggest_rounding(best: Choice, other: Choice | None) -> Iterator[str]:
    """Yield what would be faster if transfers may round; it is not chosen, as it changes the numbers."""
    if other is None:
        return
    config, gain = other.config, best.seconds_per_row / other.seconds_per_row
    keys = {"quantize_weights": config.quantize_weights, "quantize_gradients": config.quantize_gradients}
    said = ",".join(f"{name}={value}" for name, value in keys.items() if value != "none")
    same = make_config(config, quantize_weights="none", quantize_gradients="none")
    where = "" if list_sizes_of(same) == list_sizes_of(best.config) else f" ({config.to_spec()})"
    yield f"with {said}: predicted {gain:.1f}x faster, changes the numbers{where}; docs/zero.md says by how much"


def explain_nothing_fits(goal: Goal, needed: float, others: Iterable[tuple[str, Choice | None]]) -> str:
    """Return what to do when no layout fits.

    Args:
        others: what was tried in its place, such as `--lora`, and the best layout that it allows, or None.
    """
    there, kept = goal.cluster.gpu.memory_gib, f" ({goal.headroom:g} % stay free)" if goal.headroom else ""
    advice = [f"the leanest layout needs {needed:.1f} GiB of {there:.1f}{kept}"] if needed < math.inf else []
    for name, choice in others:
        if choice is None:
            advice.append(f"with {name} it does not fit either")
        else:
            advice.append(f"with {name} it fits: {choice.config.to_spec()}, {choice.step_time_s:.3g} s per step")
    if goal.lora and not goal.four_bit:
        advice.append("a base of 4 bits (--load-in-4bit, docs/qlora.md) takes a quarter of the weights")
    return "; ".join(advice)


def list_notes_about(goal: Goal, positions: int | None) -> Iterator[str]:
    """Yield what holds for every layout of a plan.

    Args:
        positions: the longest row that the model was made for, if it says so.
    """
    gpu, experts = goal.cluster.gpu, any(block.top_k for block in goal.shape.blocks)
    if gpu.like:
        yield (
            f"nobody published runs on {gpu.name} that we could compare with: its efficiencies are those of "
            f"{gpu.like}, so seconds may be off by {TRANSFERRED:.0%} (one in ten); the order of layouts is surer"
        )
    elif gpu.name != "cpu" and not experts:
        yield f"seconds are within {MEASURED:.0%} for nine of ten runs that were not fitted; the order is surer"
    if gpu.note:
        yield f"{gpu.name} {gpu.note}"
    if goal.precision == "bf16" and not goal.lora:
        yield "bf16 as Transformers trains it: weights, gradients and moments in bf16 and no fp32 copy of the weights"
    if experts:
        yield (
            f"nothing was fitted on models with experts: seconds may be off by {EXPERTS:.0%} (one in ten); "
            "experts are assumed to get equally many tokens"
        )
    if positions and goal.seq > positions:
        yield f"--seq {goal.seq}: the model was made for {positions} positions"


# ---- why this one: of each setting, what the one beside it would need or take --------------------------------------


def list_reasons(goal: Goal, choice: Choice) -> Iterator[str]:
    """Yield a line for what is trained, what is sharded, what is computed again, and what computes attention."""
    if goal.lora:
        base = " in 4 bits" if goal.four_bit else ""
        yield f"adapters of rank {goal.lora}: the frozen weights{base} have neither gradients nor optimizer states"
    config = choice.config
    if config.dp_shard_size > 1:  # against whole copies on each data rank, which only reduce gradients
        ranks = config.dp_replicate_size * config.dp_shard_size
        copied = {"dp_replicate_size": ranks, "dp_shard_size": 1, "zero_stage": 3, "hierarchical_shard": None}
        whole = _describe_other(goal, choice, **copied)
        less = "" if config.zero_stage == 3 else f", zero_stage=3 {_describe_other(goal, choice, zero_stage=3)}"
        asked = f"dp_shard={config.dp_shard_size},zero_stage={config.zero_stage}"
        yield f"{asked}: whole weights on each rank {whole}{less}"
    elif config.data_parallel_size > 1:
        yield f"dp_replicate={config.dp_replicate_size}: whole weights fit, and nothing is gathered"
    way = config.activation_checkpointing
    if way == "none":  # the cheapest one, against what it saves; others against the ways that compute less again
        needed = f"{choice.needed_gib:.1f} of {goal.cluster.gpu.memory_gib:.0f} GiB"
        full = _describe_other(goal, choice, activation_checkpointing="full")
        yield f"activation_checkpointing={way}: all activations fit ({needed}); full {full}"
    else:
        ways = ("none", "selective")[: 1 if way == "selective" else 2]
        lines = [f"{other} {_describe_other(goal, choice, activation_checkpointing=other)}" for other in ways]
        yield f"activation_checkpointing={way}: {', '.join(lines)}"
    # Loops, and scripts that compute the loss themselves, do not have it in chunks.
    size = choice.prediction.job.micro_batch
    if predict_choice(goal, make_config(config, lean_loss="false"), size).needed_gib > goal.room_gib:
        said = _describe_other(goal, choice, lean_loss="false")
        yield f"lean_loss={config.lean_loss}: a Trainer's step with the model's own loss; whole logits {said}"
    yield from explain_attention(goal, choice)


def explain_attention(goal: Goal, choice: Choice) -> Iterator[str]:
    """Yield the kernel, and what others would need and take: the same layers, so by the goal alone."""
    config = choice.config
    if config.cp_size > 1 or not any(block.attentions for block in goal.shape.blocks):
        return
    others = [name for name in (TORCH_FLASH, "sdpa", "eager") if name != goal.attention.name]
    lines = [f"{name} {_describe_other(goal, choice, attention=name)}" for name in others]
    auto = f"auto is {goal.attention.auto}" if goal.attention.asked == AUTO else goal.attention.asked
    yield f"attention={auto}: {goal.attention.why}; {', '.join(lines)}"


def _describe_other(goal: Goal, choice: Choice, **settings: Any) -> str:
    """Say what the layout with other settings would need and take."""
    other = predict_choice(goal, make_config(choice.config, **settings), choice.prediction.job.micro_batch)
    there, ratio = goal.cluster.gpu.memory_gib, other.seconds_per_row / choice.seconds_per_row
    if other.needed_gib > goal.room_gib:
        return f"would need {other.needed_gib:.1f} of {there:.0f} GiB"
    return f"would need {other.needed_gib:.1f} GiB and take {ratio:.2f} x the time"


# ---- layouts that one would expect ----------------------------------------------------------------------------------


def explain_usual_layouts(goal: Goal, best: Choice | None) -> Iterator[tuple[str, str]]:
    """Yield the layouts that people ask about first, and what keeps them from being the best."""
    gpus, inside = goal.cluster.gpus, min(goal.cluster.per_node, goal.cluster.gpus)
    stages = math.gcd(goal.cluster.nodes, 8)
    asked = {
        "plain data parallelism": {"dp_replicate": gpus},
        "ZeRO-3 over all GPUs": {"dp_shard": gpus},
        "tensor parallelism in the node": {"tp": inside, "dp_shard": gpus // inside},
        "tensor parallelism across nodes": {"tp": min(2 * inside, gpus), "dp_shard": gpus // min(2 * inside, gpus)},
        "hybrid sharding in the node": {"dp_replicate": gpus // inside, "dp_shard": inside},
        "tp in the node, pp between nodes": {"tp": inside, "pp": stages, "dp_shard": gpus // inside // stages},
    }
    seen = {list_sizes_of(best.config)} if best else set()
    for name, sizes in asked.items():
        if math.prod(sizes.values()) != gpus:  # nodes that are not full
            continue
        config = make_config(ParallelConfig.from_mapping(sizes).resolve(gpus), **goal.settings)
        if list_sizes_of(config) not in seen and (config.tp_size <= inside or goal.cluster.nodes > 1):
            seen.add(list_sizes_of(config))
            yield f"{name} ({config.to_spec()})", explain_absence(goal, config, best)


def choose_expected_layout(goal: Goal, expected: ParallelConfig | str) -> Choice:
    """Return the leanest way in which the layout that the user expects fits.

    Raises:
        SpecError: none does.
    """
    config = ParallelConfig.parse(expected).resolve(goal.cluster.gpus)
    fitting = [choice for choice in list_variants_of(goal, config) if isinstance(choice, Choice)]
    if not fitting or find_obstacle_of_overlap(goal.cluster, config):
        refuse(
            f"--parallel {config.to_spec()}", explain_absence(goal, config, None), do="drop --parallel, or --verify"
        )
    return find_leanest(fitting)


def list_variants_of(goal: Goal, config: ParallelConfig) -> list[Choice | TooLarge]:
    """Return the batches with which a layout can run, in the ways to save memory that it names, or else in all."""
    given = config.activation_checkpointing != "none" or config.offload != "none"
    mine = {"activation_checkpointing": config.activation_checkpointing, "offload": config.offload}
    return list(iterate_variants(goal, config, math.inf, [mine] if given else list_ways_of(goal)))


def find_obstacle_of_overlap(cluster: Cluster, config: ParallelConfig) -> str:
    """Return why products of compiled layers cannot be fused with their collectives on these GPUs; "" if they can."""
    if not config.tp_overlap or config.compile == "none":
        return ""
    asked, gpu = f"tp_overlap=true with compile={config.compile}: symmetric memory needs", cluster.gpu
    if gpu.is_of_amd or gpu.capability == (0, 0):
        return f"{asked} NVIDIA GPUs, not {gpu.name}; tp_overlap=false works"
    if min(cluster.per_node, cluster.gpus) % config.tp_size:
        return f"{asked} blocks of tp={config.tp_size} inside nodes of {cluster.per_node} GPUs; tp_overlap=false works"
    return ""


def explain_absence(goal: Goal, config: ParallelConfig, best: Choice | None) -> str:
    """Say in one line what keeps a layout from being first."""
    if obstacle := find_obstacle_of_overlap(goal.cluster, config):
        return obstacle
    if not do_heads_divide(goal.shape, config.tp_size):
        return f"tp={config.tp_size} does not divide the attention heads"
    if config.pp_size > goal.shape.layers:
        return f"pp={config.pp_size}: the model has {goal.shape.layers} layers"
    if goal.share(config) is None:
        ranks = config.data_parallel_size
        return f"a global batch of {goal.global_batch} does not divide among {ranks} data ranks"
    found = list_variants_of(goal, config)
    if not found:
        return f"a global batch of {goal.global_batch} leaves too few micro-batches"
    fitting = [choice for choice in found if isinstance(choice, Choice)]
    if fitting:
        return explain_why_not(goal, find_leanest(fitting), best)
    least = min((choice for choice in found if isinstance(choice, TooLarge)), key=lambda choice: choice.gib)
    return explain_why_not(goal, predict_choice(goal, least.config, least.size), best)
