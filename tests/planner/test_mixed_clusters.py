"""Plans over groups of unlike GPUs: shares, stages, a group left out; files of groups and devices that were found."""

import dataclasses
import itertools
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.pipeline.balance import find_best_split
from hf_parallel.hooks.auto import make_acceptance_test
from hf_parallel.planner.detect import Device
from hf_parallel.planner.dryrun.run import dry_run
from hf_parallel.planner.groups import Group, MixedCluster, group_devices, read_machines
from hf_parallel.planner.hardware import find_gpu, find_link, make_cluster
from hf_parallel.planner.mixed import ALONE, EVEN, SHARES, STAGES, Levers, _Search, deal_examples, search_groups
from hf_parallel.planner.report import list_commands, show_mixed
from tests import models
from tests.planner.test_plan_cli import SMALL

PAGE = Path(__file__).parents[2] / "docs" / "uneven_machines.md"
#: Llama-3.1-8B.
EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
FILE = {
    "groups": [
        {"name": "new", "gpu": "h100-80gb", "nodes": 1, "gpus_per_node": 4},
        {"name": "old", "gpu": "a100-80gb", "nodes": 2, "gpus_per_node": 2, "network": "ethernet-100g"},
    ],
    "network": "infiniband-hdr",
}


def written(tmp_path, values) -> str:
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def pair(fast: str, slow: str, gpus: int = 8, network: str = "infiniband-hdr") -> MixedCluster:
    groups = Group("new", make_cluster(fast, gpus)), Group("old", make_cluster(slow, gpus))
    return MixedCluster(groups, find_link(network))


# ---- what the page says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["a100-80gb", "v100-32gb"])
def test_the_tables_of_the_page(slow, tmp_path, capsys):
    """The page's command on its file: for Llama-3.1-8B on 8 H100 beside 8 others, in order; V100s are left out."""
    LlamaConfig(**EIGHT_B, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    text = PAGE.read_text()
    groups = text[text.index("    groups:\n") :].partition("<!--")[0].replace("a100-80gb", slow)
    (tmp_path / "mixed.yaml").write_text(groups)
    (line,) = re.findall(r"    hf-parallel (plan \S+ --cluster mixed.yaml .*)", text)
    line = line.replace("meta-llama/Llama-3.1-8B", str(tmp_path)).replace("mixed.yaml", str(tmp_path / "mixed.yaml"))
    assert cli.main([*line.split(), "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    shown = text.partition(f"8 h100-80gb + 8 {slow}")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in shown.splitlines()[2:]]
    bests = {(one["kind"], frozenset(one["groups"])): one for one in reversed(layouts)}
    kept = sorted((one for one in bests.values() if one["groups"] != ["old"]), key=layouts.index)
    expected = [
        [
            f"`{one['spec']}`",
            one["where"],
            f"{one['step_time_s']:.2f}",
            ", ".join(f"{n:.0f}" for n in one["needed_gib"].values()),
        ]
        for one in kept
    ]
    assert rows == expected
    assert (layouts[0]["kind"] == ALONE) == (slow == "v100-32gb")


# ---- a search -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    numbers = {"layers": 12, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn_hidden": 5504, "vocab": 32000}
    return search_groups(model=numbers, mixed=pair("h100-80gb", "a100-80gb", 2), seq=2048, global_batch=64)


def test_every_way_is_compared(found):
    kinds = [choice.kind for choice in found.choices]
    assert {SHARES, STAGES, EVEN, ALONE} == set(kinds)
    assert kinds.count(ALONE) == 2
    ranked = [choice.ranked_seconds for choice in found.choices]
    assert ranked == sorted(ranked)
    shares, even = found.fastest_of(SHARES), found.fastest_of(EVEN)
    assert shares.step_time_s < even.step_time_s
    assert re.search(r"new waits [1-9]\d%", even.where())


def test_shares_keep_the_batch(found):
    for choice in found.choices:
        config, loads = choice.config, choice.loads
        assert choice.rows * choice.accumulation * config.data_parallel_size == 64
        if choice.kind == SHARES:
            micro_steps = choice.accumulation if config.pp_size == 1 else config.pipeline_microbatches
            assert sum(sum(load.examples) for load in loads) * micro_steps == 64
            counts = list(itertools.chain(*(load.examples for load in loads)))
            assert len(config.shares) == config.data_parallel_size
            assert {Fraction(own) / share for own, share in zip(counts, config.shares, strict=True)} == {
                counts[0] / config.shares[0]
            }
        if choice.kind == STAGES:
            assert sum(map(sum, (load.layers for load in loads))) == 12
            assert config.pipeline_split == tuple(itertools.chain(*(load.layers for load in loads)))
        assert config == ParallelConfig.parse(config.to_spec()).resolve(config.world_size)


def test_no_split_is_faster():
    """Stages of unlike speeds and memories, against every split."""
    draw = random.Random(7)
    for _ in range(100):
        layers, stages = draw.randint(2, 9), draw.randint(1, 4)
        stages = min(stages, layers)
        speeds = [draw.choice((1.0, 2.0, 3.1)) for _ in range(stages)]
        most = [draw.randint(1, layers) for _ in range(stages)]

        def cost(at, first, last, speeds=speeds, most=most):
            return (last - first) / speeds[at] if last - first <= most[at] else float("inf")

        slowest, split = find_best_split(layers, stages, cost, max)
        cuts = itertools.combinations(range(1, layers), stages - 1)
        every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]
        ends = [max(cost(at, 0, own) for at, own in enumerate(one)) for one in every]
        assert (slowest, sum(split)) == (min(ends), layers)


def test_dealing_is_the_best_cut():
    draw = random.Random(8)
    for _ in range(60):
        ranks = [draw.randint(1, 2) for _ in range(2)]
        speeds, most = [draw.choice((1, 2, 5)) for _ in ranks], [draw.randint(1, 6) for _ in ranks]

        def seconds(group, examples, speeds=speeds, most=most):
            return examples / speeds[group] if examples <= most[group] else float("inf")

        examples, of = draw.randint(sum(ranks), 10), [group for group, own in enumerate(ranks) for _ in range(own)]
        every = (one for one in itertools.product(range(1, 8), repeat=len(of)) if sum(one) == examples)
        least = min(max(seconds(group, own) for group, own in zip(of, one, strict=True)) for one in every)
        counts = deal_examples(examples, ranks, seconds)
        if counts is None:
            assert least == float("inf")
        else:
            assert max(seconds(group, max(own)) for group, own in enumerate(counts)) == least


def test_slow_links_leave_a_group_out():
    numbers = {"layers": 12, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn_hidden": 5504, "vocab": 32000}
    mixed = pair("h100-80gb", "v100-32gb", 2, "ethernet-10g")
    found = search_groups(model=numbers, mixed=mixed, seq=2048, global_batch=64)
    assert found.best.groups == ("new",)
    assert any(reason.startswith("leave old out: over all groups the best takes") for reason in found.reasons())


# ---- memory of one group --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unlike_memory():
    """A group of 79 GiB beside one of 39 GiB, whose small GPUs must save memory."""
    model = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}
    mixed = pair("a100-80gb", "a100-40gb", 4)
    return search_groups(model=model, mixed=mixed, seq=2048, global_batch=64, rows=2, top=12)


def test_small_gpus_alone_save_memory(unlike_memory):
    """The first layout of data ranks recomputes on ranks 4 to 7 alone: less than on all, which takes longer."""
    best = next(choice for choice in unlike_memory.choices if choice.kind != "stages")
    assert best.config.recompute_ranks == frozenset(range(4, 8))
    assert best.config.recompute_way_on(0) == "none"
    for choice in unlike_memory.choices:
        config = choice.config
        assert config == ParallelConfig.parse(config.to_spec()).resolve(config.world_size)
        for load in choice.loads:
            assert load.needed_gib <= 0.92 * load.group.cluster.gpu.memory_gib
    assert "activation_checkpointing=selective@4-7 train.py" in " ".join(list_commands(unlike_memory, best))


def test_ranks_of_levers_follow_the_order_of_groups():
    new, old = pair("a100-80gb", "a100-40gb", 4).groups
    levers = Levers({"offload": "optimizer", "activation_checkpointing": "full"}, frozenset(["old"]))
    spelled = levers.spelled(ParallelConfig(dp_shard_size=8), [old, new])
    assert (spelled.offload, spelled.activation_checkpointing) == ("optimizer@0-3", "full@0-3")
    everywhere = dataclasses.replace(levers, names=frozenset(["new", "old"]))
    assert everywhere.spelled(ParallelConfig(dp_shard_size=8), [old, new]).offload == "optimizer"


@pytest.mark.parametrize(("size", "alike"), [("dp_shard_size", False), ("dp_replicate_size", True)])
def test_copies_step_in_one_place(unlike_memory, size, alike):
    """Replicas in both groups hold the same parameters, so that a host steps for all or for none."""
    looking = _Search(unlike_memory.mixed, dict.fromkeys(("new", "old"), unlike_memory.goal))
    way = {"offload": "optimizer", "activation_checkpointing": "none"}
    sets = [levers.names for levers in looking._levers(ParallelConfig(**{size: 8}), way)]
    assert sets == [{"new", "old"}] if alike else sets == [{"new"}, {"old"}, {"new", "old"}]
    (everywhere,) = looking._levers(ParallelConfig(**{size: 8}), {**way, "offload": "none", "tiled_mlp": True})
    assert everywhere.names == {"new", "old"}  # a key without ranks


@pytest.mark.parametrize("host_gib", [1900.0, 10.0])
def test_long_sequences_in_pieces_and_on_the_host(host_gib):
    """MLPs in pieces, and what layers keep on the host of all groups, where it has the room."""
    model = {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 32000}
    kinds = (find_gpu(name) for name in ("h100-80gb", "a100-80gb"))
    small = (dataclasses.replace(gpu, host=dataclasses.replace(gpu.host, memory_gib=host_gib)) for gpu in kinds)
    found = search_groups(model=model, mixed=pair(*small, 1), seq=3 << 17, global_batch=2)
    configs = [choice.config for choice in found.choices if len(choice.groups) == 2]
    assert bool(configs) == (host_gib > 10)
    for config in configs:
        assert config.tiled_mlp
        assert config.activation_offload
        assert config == ParallelConfig.parse(config.to_spec()).resolve(2)


def test_the_engine_takes_levers_of_a_group():
    """As `plan` and `auto` ask for a model, on few ranks; and a dry run of each group's ranks."""
    config = models.llama(**SMALL, architectures=["LlamaForCausalLM"])
    spec = ParallelConfig.parse(
        "dp_shard=4,batch_shares=3x2:1x2,activation_checkpointing=full@2-3,offload=optimizer@2-3"
    )
    assert make_acceptance_test(config)(spec.resolve(4))
    saving, other = (dry_run(config, spec.resolve(4), rank=rank, rows=4, seq=512) for rank in (2, 0))
    assert saving.peak_bytes < 0.8 * other.peak_bytes


# ---- what to paste --------------------------------------------------------------------------------------------------


def test_lines_name_nodes_in_the_order_of_stages(found):
    staged = next(choice for choice in found.choices if choice.kind == STAGES)
    assert f"R = 0 on {staged.groups[0]}, 1 on {staged.groups[1]}:" in next(list_commands(found, staged))
    more = dataclasses.replace(staged.loads[1], group=Group("more", make_cluster("l40s", 5, 2)))
    unlike = dataclasses.replace(staged, loads=(staged.loads[0], more))
    assert f"R = 0 on {staged.groups[0]}, 1-3 on more, K = its number" in next(list_commands(found, unlike))
    together = dataclasses.replace(found, mixed=dataclasses.replace(found.mixed, one_node=True))
    turned = dataclasses.replace(staged, loads=staged.loads[::-1])
    lines = [next(list_commands(together, choice)) for choice in (staged, turned)]
    assert sorted("CUDA_VISIBLE_DEVICES=2,3,0,1 hf-parallel launch" in line for line in lines) == [False, True]
    old = next(choice for choice in found.choices if choice.groups == ("old",))
    assert "CUDA_VISIBLE_DEVICES=2,3 hf-parallel launch --num_processes 2" in next(list_commands(together, old))


def test_the_command(tmp_path, capsys):
    models.llama(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    where = ["plan", str(tmp_path), "--cluster", written(tmp_path, FILE), "--seq", "256", "--global-batch", "32"]
    assert cli.main([*where, "--json", "--specs", str(tmp_path / "specs")]) == 0
    table = json.loads(capsys.readouterr().out)
    specs = [ParallelConfig.parse(str(file)) for file in sorted((tmp_path / "specs").iterdir())]
    assert specs == [ParallelConfig.parse(layout["spec"]) for layout in table["layouts"]]
    assert table["cluster"]["groups"]["old"]["gpus"] == 4
    assert cli.main([*where, "--memory", "40"]) == 2
    assert re.search(r"--memory: .*\bnew, old\b", capsys.readouterr().err)
    assert cli.main([*where, "--gpus", "8"]) == 2
    assert "--gpus 8" in capsys.readouterr().err


def test_what_is_printed(found, capsys):
    show_mixed(found)
    out = capsys.readouterr().out
    assert "on 2 x h100-80gb (new) + 2 x a100-80gb (old), infiniband-hdr between them" in out
    assert "new alone" in out
    assert "Run the first" in out


# ---- files and devices ----------------------------------------------------------------------------------------------


def test_groups_of_a_file(tmp_path):
    mixed = read_machines(written(tmp_path, FILE))
    new, old = mixed.groups
    assert (new.cluster.gpus, old.cluster.gpus, old.cluster.nodes, mixed.gpus) == (4, 4, 2, 8)
    assert mixed.between.name == "infiniband-hdr"
    assert [mixed.seen_from(group).between.name for group in mixed.groups] == ["ethernet-100g"] * 2


def test_one_group_is_todays_cluster(tmp_path):
    alone = {"gpu": "h100-80gb", "gpus": 16, "gpus_per_node": 8, "network": "ethernet-25g"}
    one = {"groups": [{"gpu": "h100-80gb", "nodes": 2, "gpus_per_node": 8, "network": "ethernet-25g"}]}
    assert read_machines(written(tmp_path, one)) == read_machines(written(tmp_path, alone))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": []}, r"groups=\[\]: is not a list of groups"),
        ({"gpu": "h100-80gb"}, "gpu is no key"),
        ({"network": 3}, "network=3"),
        ({"one_node": "yes"}, "one_node=yes: is not true or false"),
        ({"groups": [{"nodes": 1}]}, "group 0: needs the key gpu"),
        ({"groups": [{"gpu": "h100-80gb"}]}, "how many GPUs.*nodes: 1"),
        ({"groups": [{"gpu": "h100-80gb", "nodes": 3, "gpus": 8}]}, "nodes=3: gpus=8 fill 1 nodes of 8; nodes: 1"),
        ({"groups": [{"gpu": "h100-80gb", "nodes": 1}] * 2}, "name=h100-80gb: two groups.*name: h100-80gb-2"),
        ({"groups": [{"gpu": "x100", "nodes": 1}]}, "gpu=x100"),
        (
            {"groups": [{"gpu": "h100-80gb", "nodes": 1}, {"gpu": "mi300x", "nodes": 1}]},
            "mi300x-192gb beside h100-80gb: NCCL and RCCL have no process group in common; h100-80gb alone works",
        ),
    ],
    ids=str,
)
def test_files_that_are_wrong(tmp_path, change, words):
    with pytest.raises(SpecError, match=words):
        read_machines(written(tmp_path, FILE | change))


H100, A100 = ("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA A100-SXM4-40GB", 39.4)


def test_devices_that_differ_are_groups():
    here = make_cluster("h100-80gb", 6, 4)
    devices = [Device("a", *H100)] * 4 + [Device("b", *A100)] * 2
    mixed = group_devices(here, devices)
    assert [(group.name, group.cluster.gpus, group.cluster.per_node) for group in mixed.groups] == [
        ("h100-80gb", 4, 4),
        ("a100-40gb", 2, 2),
    ]
    assert not mixed.one_node
    assert mixed.groups[1].cluster.gpu.memory_gib == 39.4
    assert group_devices(here, [Device("a", *H100)] * 6) is here
    box = group_devices(here, [Device("a", *H100), Device("a", *A100)])
    assert (box.one_node, box.between) == (True, find_link(find_gpu("a100-40gb").scale_up))


def test_devices_in_turns_are_refused():
    here = make_cluster("h100-80gb", 3)
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES=0,2,1 works"):
        group_devices(here, [Device("a", *H100), Device("a", *A100), Device("a", *H100)])
    with pytest.raises(SpecError, match="nodes of a kind .* works"):
        group_devices(here, [Device("a", *H100), Device("b", *A100), Device("c", *H100)])
