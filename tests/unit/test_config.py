"""ParallelConfig: every key, every way to write it, and what is refused with which words. No process group."""

import dataclasses
import re

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from tests.refusals import check_way_out, pattern_of_refusal, refused

AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep")

# key -> (text, value) for a value this version accepts and that is not the default where one exists
VALUES = {
    "zero_stage": ("2", 2),
    "gradient_reduction": ("step", "step"),
    "pack_tokens": ("4096", 4096),
    "padding_free": ("true", True),
    "batch_shares": ("3:2.5", "3:2.5"),
    "sequence_parallel": ("false", False),
    "tp_overlap": ("false", False),
    "precision": ("auto", "auto"),
    "precision_scaling": ("auto", "auto"),
    "pipeline_schedule": ("gpipe", "gpipe"),
    "pipeline_energy": ("none", "none"),
    "pipeline_fill": ("none", "none"),
    "pipeline_microbatches": ("4", 4),
    "pipeline_virtual_stages": ("1", 1),
    "context_parallel": ("ulysses", "ulysses"),
    "activation_checkpointing": ("full", "full"),
    "activation_offload": ("true", True),
    "tiled_mlp": ("true", True),
    "partition_activations": ("false", False),
    "compile": ("regional", "regional"),
    "lean_loss": ("true", "true"),
    "hierarchical_shard": ("2", 2),
    "quantize_weights": ("fp8", "fp8"),
    "quantize_gradients": ("int4", "int4"),
    "gradient_error_feedback": ("false", False),
    "offload": ("nvme:/scratch", "nvme:/scratch"),
    "attention": ("eager", "eager"),
    "async_save": ("true", True),
    "monitor": ("full", "full"),
    "rollouts": ("one_step_behind", "one_step_behind"),
    "reference": ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
    "reference_timeout_s": ("30", 30),
    "expert_capacity_factor": ("1.25", 1.25),
    "hang_timeout_s": ("2.5", "2.5"),
    "hang_action": ("report", "report"),
    "nan_action": ("skip", "skip"),
}


def understood(spec, world_size=None) -> ParallelConfig:
    config = ParallelConfig.parse(spec)
    return config if world_size is None else config.resolve(world_size)


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis != "ep"])
def test_long_and_short_axis_keys_mean_the_same(axis):
    short, long = ParallelConfig.parse(f"{axis}=2"), ParallelConfig.parse(f"{axis}_size=2")
    assert short == long
    assert getattr(short, f"{axis}_size") == 2


@pytest.mark.parametrize("key", VALUES)
def test_every_other_key(key):
    text, value = VALUES[key]
    of_axis = {"pipeline": "pp=2,", "context": "cp=2,", "reference": "reference=http://127.0.0.1:8001,"}.get(
        key.partition("_")[0], ""
    )
    read = getattr(ParallelConfig.parse(f"{of_axis * (key != 'reference')}{key}={text}"), key)
    assert read == value
    assert type(read) is type(value)


def test_every_key_of_the_config_is_tested_here():
    tested = {*VALUES, *(f"{axis}_size" for axis in AXES), "pipeline_split", "profile_steps", "tp_mesh"}
    tested |= {"kfac_damping", "kfac_interval"}  # by a round trip
    assert {field.name for field in dataclasses.fields(ParallelConfig)} == tested


def test_defaults():
    config = ParallelConfig.parse("tp=2")
    assert (config.dp_replicate_size, config.dp_shard_size, config.pp_size) == (1, -1, 1)
    assert (config.zero_stage, config.pipeline_schedule) == (3, "1f1b")


def test_settings_of_an_axis_that_is_off_may_be_defaults():
    """As files have them that write every key; an axis that takes the rest is known once the processes are."""
    written = ParallelConfig.parse("tp=2").to_dict()
    assert ParallelConfig.from_mapping(written) == ParallelConfig.parse("tp=2")
    assert ParallelConfig.parse("pipeline_schedule=auto,context_parallel=auto").pp_size == 1
    spec = "pp=-1,tp=2,pipeline_schedule=gpipe"
    assert ParallelConfig.parse(spec).resolve(4).pp_size == 2
    assert re.search(pattern_of_refusal("pipeline_schedule=gpipe", "pp_size=1", works="pp_size=2"), refused(spec, 2))
    assert ParallelConfig.parse("pp=2,tp=2,pipeline_schedule=gpipe").resolve(4).pp_size == 2


def test_spaces_are_allowed():
    assert ParallelConfig.parse(" tp = 2 , pp=2 ") == ParallelConfig.parse("tp=2,pp=2")


def test_pipeline_split_is_a_list():
    assert ParallelConfig.parse("pp=2,pipeline_split=[3,1],tp=2").pipeline_split == (3, 1)


def test_yaml_file_holds_the_same_keys(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("tp: 2\npp_size: 2\npipeline_split: [3, 1]\npipeline_schedule: gpipe\nsequence_parallel: false\n")
    expected = ParallelConfig.parse("tp=2,pp=2,pipeline_split=[3,1],pipeline_schedule=gpipe,sequence_parallel=false")
    assert ParallelConfig.parse(str(file)) == expected


@pytest.mark.parametrize("content", ["- tp: 2\n", "tp=2\n", "2\n", "", "{tp: 2\n"])
def test_yaml_that_is_no_mapping(tmp_path, content):
    file = tmp_path / "spec.yaml"
    file.write_text(content)
    message = refused(str(file))
    assert "spec.yaml" in message


def test_yaml_that_is_not_there(tmp_path):
    assert "nowhere.yaml" in refused(str(tmp_path / "nowhere.yaml"))


def test_unknown_key_in_yaml(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("tp_sise: 2\n")
    message = refused(str(file))
    assert "tp_sise" in message
    assert "tp_size" in message


@pytest.mark.parametrize(
    ("typed", "meant"), [("tp_sise", "tp_size"), ("zero_stadge", "zero_stage"), ("dp_shart", "dp_shard")]
)
def test_unknown_key_suggests_the_nearest(typed, meant):
    message = refused(f"tp=2,{typed}=2")
    assert typed in message
    assert meant in message.replace(typed, "")


def test_unknown_key_without_a_near_one_lists_the_keys():
    message = refused("gpus=2")
    assert "gpus" in message
    assert "tp_size" in message


@pytest.mark.parametrize("spec", ["tp=2,tp=4", "tp=2,tp_size=2", "pp_size=2,tp=2,pp=2"])
def test_key_given_twice(spec):
    assert "twice" in refused(spec)


@pytest.mark.parametrize("content", ["tp: 2\ntp: 4\n", "tp: 2\ntp_size: 2\n"])
def test_key_given_twice_in_yaml(tmp_path, content):
    file = tmp_path / "spec.yaml"
    file.write_text(content)
    assert "twice" in refused(str(file))


@pytest.mark.parametrize(
    "spec", ["tp=two", "tp=2.5", "tp=0", "tp=-2", "zero_stage=4", "pipeline_schedule=2f2b", "tp=none"]
)
def test_impossible_value_names_key_and_value(spec):
    key, value = spec.split("=")
    message = refused(spec)
    assert key in message
    assert value in message


@pytest.mark.parametrize("content", ["tp_size:\n", "tp_size: true\n", "tp_size: [2]\n", "tp_size: 2.0\n"])
def test_impossible_value_in_yaml_names_the_key(tmp_path, content):
    file = tmp_path / "spec.yaml"
    file.write_text(content)
    assert "tp_size" in refused(str(file))


@pytest.mark.parametrize("spec", ["tp", "tp=", "=2", "tp=2,pp"])
def test_what_is_no_pair_is_refused_with_an_example(spec):
    assert "=" in refused(spec)


@pytest.mark.parametrize(
    ("spec", "world", "words"),
    [
        ("tp=2,dp_shard=2", 8, ["tp=2", "dp_shard=2", "4", "8", "dp_shard=4"]),
        ("tp=2,pp=2,dp_replicate=1,dp_shard=1", 8, ["4", "8", "dp_shard=2"]),
        ("dp_replicate=2,dp_shard=3", 8, ["6", "8", "dp_shard=4"]),
        ("tp=3", 8, ["tp=3", "8", "6"]),
        ("tp=16", 8, ["tp=16", "8"]),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world(spec, world, words):
    message = refused(spec, world)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("spec", "world", "sizes"),
    [
        ("tp=2", 8, {"tp": 2, "dp_shard": 4}),
        ("tp=2,pp=2", 8, {"tp": 2, "pp": 2, "dp_shard": 2}),
        ("tp=2,pp=2", 4, {"tp": 2, "pp": 2}),
        ("dp_replicate=2", 4, {"dp_replicate": 2, "dp_shard": 2}),
        ("dp_replicate=-1", 4, {"dp_replicate": 4}),
        ("tp=-1,pp=2", 8, {"tp": 4, "pp": 2}),
        ("dp_shard=-1", 1, {}),
        ("", 4, {"dp_shard": 4}),
    ],
)
def test_the_one_free_axis_takes_the_remaining_processes(spec, world, sizes):
    config = ParallelConfig.parse(spec).resolve(world)
    assert {axis: getattr(config, f"{axis}_size") for axis in AXES} == {**dict.fromkeys(AXES, 1), **sizes}
    assert config.world_size == world


@pytest.mark.parametrize("spec", ["tp=-1,pp=-1", "tp=-1,dp_shard=-1", "dp_replicate=-1,dp_shard_size=-1"])
def test_only_one_axis_may_be_free(spec):
    message = refused(spec, 8)
    assert "-1" in message
    assert all(item.split("=")[0].removesuffix("_size") in message for item in spec.split(","))


def test_free_axis_that_nothing_is_left_for():
    message = refused("tp=3,pp=-1", 8)
    assert "tp=3" in message
    assert "8" in message


def test_data_parallel_size():
    assert ParallelConfig.parse("dp_replicate=2,tp=2").resolve(8).data_parallel_size == 4


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "tp=2",
        "tp=2,pp=2",
        "dp_replicate=2,dp_shard=4,zero_stage=2",
        "dp_shard=4,pp=2,pipeline_split=[3,1],pipeline_microbatches=4,pipeline_schedule=gpipe",
        "dp_replicate=4,dp_shard=1,pp=2,pipeline_fill=kfac,kfac_damping=0.5,kfac_interval=2",
        "tp=-1",
        "sequence_parallel=false,attention=sdpa,activation_checkpointing=full",
    ],
)
def test_round_trip_through_the_spec_string(spec):
    config = ParallelConfig.parse(spec)
    assert ParallelConfig.parse(config.to_spec()) == config
    resolved = config.resolve(8)
    assert ParallelConfig.parse(resolved.to_spec()) == resolved
    assert ParallelConfig.from_mapping(resolved.to_dict()) == resolved


def test_a_config_parses_to_itself():
    config = ParallelConfig(tp_size=2)
    assert ParallelConfig.parse(config) is config
    assert config == ParallelConfig.parse("tp=2")


@pytest.mark.parametrize("world", [2, 8])
def test_fewer_microbatches_than_stages(world):
    message = refused("pp=2,pipeline_microbatches=1", world)
    assert "pipeline_microbatches=1" in message
    assert "2" in message


@pytest.mark.parametrize(
    ("split", "numbers"), [("2:1:1", ["3 speeds", "pp_size=2"]), ("2:0", [0]), ("2:fast", ["auto"])]
)
def test_speeds_of_a_pipeline(split, numbers):
    line = pattern_of_refusal(f"pipeline_split={split}", *numbers, works="pipeline_split=2:1 works")
    with pytest.raises(SpecError, match=f"^{line}$"):
        ParallelConfig.parse(f"pp=2,pipeline_split={split}").resolve(2)
    config = ParallelConfig.parse("pp=2,pipeline_split=2:1,pipeline_schedule=auto").resolve(2)
    assert (config.split_speeds, config.split_layers) == ((2, 1), None)
    assert ParallelConfig.parse(config.to_spec()).resolve(2) == config
    assert "pp_size=1 has no stages" in refused("pipeline_split=auto", 2)


def test_pipeline_split_needs_one_number_per_stage():
    message = refused("pp=2,pipeline_split=[2,1,1]")
    assert "pipeline_split" in message
    assert "pp_size=2" in message


@pytest.mark.parametrize(
    "spec",
    [
        "pp=2,pipeline_virtual_stages=2",
        "pp=2,pipeline_schedule=zbv_zero_bubble,pipeline_virtual_stages=3",
        "pp=2,pipeline_schedule=looped_bfs,pipeline_virtual_stages=1",
        "pp=2,pipeline_schedule=dualpipe_v,pipeline_microbatches=3",
    ],
)
def test_stages_per_rank_follow_the_schedule(spec):
    check_way_out(spec)


@pytest.mark.parametrize(("schedule", "number"), [("looped_bfs", "4"), ("auto", "auto")])
def test_a_split_has_a_number_for_each_stage(schedule, number):
    message = refused(f"pp=2,pipeline_schedule={schedule},pipeline_split=[2,2]")
    assert message.startswith("pipeline_split")
    assert number in message


def test_where_stages_live():
    loop = ParallelConfig.parse("pp=2,pipeline_schedule=interleaved_1f1b,pipeline_virtual_stages=3")
    assert [loop.rank_of_stage(stage) for stage in range(loop.pipeline_stages)] == [0, 1, 0, 1, 0, 1]
    vee = ParallelConfig.parse("pp=3,pipeline_schedule=zbv_zero_bubble")
    assert [vee.rank_of_stage(stage) for stage in range(vee.pipeline_stages)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "spec",
    [
        "context_parallel=rings",
        "context_parallel=ring",
        "tp=2,pipeline_schedule=gpipe",
        "pipeline_microbatches=4",
        "pp=1,pipeline_virtual_stages=1",
        "cp=4,context_parallel=hybrid:3",
        "sequence_parallel=true",
        "zero_stage=1,gradient_reduction=micro_step",
        "pp=2,gradient_reduction=micro_step",
        "pp=2,pack_tokens=64",
        "pack_tokens=-1",
        "pp=2,padding_free=true",
        "pack_tokens=64,padding_free=true",
        "activation_checkpointing=every:0",
    ],
)
def test_what_this_version_lacks_is_refused_by_name(spec):
    check_way_out(spec)


@pytest.mark.parametrize(("spec", "command"), [("pipeline_split=[4]", "pp_size"), ("auto", "hf-parallel plan")])
def test_refusals_without_a_value(spec, command):
    assert command in refused(spec)


@pytest.mark.parametrize(
    ("spec", "works"),
    [
        ("tp=8,tp_mesh=2x2x2", "tp=4,tp_mesh=2x2,dp_shard=2"),
        ("tp=4,tp_mesh=1x4", "tp=4,tp_mesh=none"),
        ("tp=8,tp_mesh=2x2", "tp=4,tp_mesh=2x2"),
        ("tp_mesh=4x4", "tp=16,tp_mesh=4x4"),
        ("tp=4,tp_mesh=two", "tp=4,tp_mesh=2x2"),
        ("tp=4,tp_mesh=0x4", "tp=4,tp_mesh=2x2"),
    ],
)
def test_grids_that_are_none_of_the_ranks(spec, works):
    """What the refusal names can be asked for."""
    assert refused(spec).endswith(f"; {works} works")
    understood(works)


def test_a_grid_takes_the_ranks_that_are_left():
    config = ParallelConfig.parse("tp=-1,tp_mesh=4x2").resolve(8)
    assert (config.tp_row_size, config.tp_col_size) == (4, 2)
    said = refused("tp=-1,tp_mesh=4x2", 4)
    assert re.search(pattern_of_refusal("tp_mesh=4x2", 8, "tp_size=4", works="tp=8,tp_mesh=4x2 works"), said)
    ParallelConfig.parse("tp=8,tp_mesh=4x2").resolve(8)
    check_way_out("tp=4,tp_mesh=2x2,tp_overlap=true")
    assert ParallelConfig.parse("tp=4,tp_mesh=4x1,tp_overlap=true").tp_col_size == 1
