"""Configurations of other programs become specs that hold, and no key of theirs is passed over in silence."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
import yaml

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.cli import main

WRAP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
FSDP = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
STAGE_3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
CASES = {
    "fsdp 1": (
        "a.yaml",
        {**FSDP, "num_processes": 8, "fsdp_config": {**WRAP, "fsdp_sharding_strategy": "FULL_SHARD"}},
        "dp_shard=-1",
    ),
    "fsdp 1, gradients": (
        "a.yaml",
        {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_offload_params": True, **WRAP}},
        "dp_shard=-1,zero_stage=2,offload=cpu",
    ),
    "hybrid": (
        "a.yaml",
        {
            **FSDP,
            "num_processes": 16,
            "num_machines": 2,
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        },
        "dp_shard=-1,dp_replicate=2",
    ),
    "fsdp 2": (
        "a.yaml",
        {
            **FSDP,
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": False,
                "fsdp_activation_checkpointing": True,
            },
        },
        "dp_shard=-1,zero_stage=2,activation_checkpointing=full",
    ),
    "parallelism_config": (
        "a.yaml",
        {
            **FSDP,
            "num_processes": 8,
            "parallelism_config": {
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 2,
                "parallelism_config_cp_comm_strategy": "allgather",
            },
        },
        "dp_shard=2,tp=2,cp=2,context_parallel=allgather",
    ),
    "megatron": (
        "a.yaml",
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MEGATRON_LM",
            "num_processes": 4,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_num_micro_batches": 4,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_recompute_activations": True,
            },
        },
        "dp_shard=-1,tp=2,pp=2,pipeline_microbatches=4,activation_checkpointing=selective",
    ),
    "deepspeed of accelerate": (
        "a.yaml",
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": 2,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "zero3_init_flag": False,
                "gradient_clipping": 1.0,
            },
        },
        "dp_shard=-1,zero_stage=2,offload=optimizer",
    ),
    "deepspeed 3": ("ds.json", STAGE_3, "dp_shard=-1"),
    "infinity": (
        "ds.json",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
            }
        },
        "dp_shard=-1,offload=nvme_all:/scratch",
    ),
    "zero++": (
        "ds.json",
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            }
        },
        "dp_shard=-1,quantize_weights=int8,hierarchical_shard=8,quantize_gradients=int4",
    ),
    "torchtune": (
        "full.yaml",
        {
            "tensor_parallel_dim": 2,
            "data_parallel_shard_dim": -1,
            "enable_activation_checkpointing": True,
            "epochs": 1,
        },
        "dp_shard=-1,tp=2,activation_checkpointing=full",
    ),
    "axolotl": (
        "axolotl.yaml",
        {
            "base_model": "Qwen/Qwen3-8B",
            "dp_shard_size": 4,
            "tensor_parallel_size": 2,
            "fsdp_version": 2,
            "fsdp_config": {"reshard_after_forward": True, "offload_params": False},
        },
        "dp_shard=4,tp=2",
    ),
}


def shown(tmp_path, capsys, name, values):
    """(exit code, what `migrate --json` prints, errors)"""
    file = tmp_path / name
    text = json.dumps(values) if name.endswith("json") else yaml.safe_dump(values, sort_keys=False)
    file.write_text(values if isinstance(values, str) else text)
    code = main(["migrate", str(file), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else None, said.err


@pytest.mark.parametrize("case", CASES)
def test_specs(tmp_path, capsys, case):
    """They parse, and each key has a spec or a reason."""
    name, values, spec = CASES[case]
    code, found, _ = shown(tmp_path, capsys, name, values)
    assert code == 0
    assert found["spec"] == spec
    ParallelConfig.parse(spec)
    assert all(row["spec"] or row["why"] for row in found["keys"])
    assert not [row for row in found["keys"] if "not known" in row["why"]]


def test_scripts(tmp_path, capsys):
    """`fsdp` as words, a mapping beside it, DeepSpeed's file beside the script."""
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    source = 'args = TrainingArguments("out", fsdp="shard_grad_op auto_wrap offload", fsdp_config={"version": 2})\n'
    assert shown(tmp_path, capsys, "a.py", source)[1]["spec"] == "dp_shard=-1,zero_stage=2,offload=cpu"
    assert shown(tmp_path, capsys, "b.py", 'SFTConfig(deepspeed="ds.json")\n')[1]["spec"] == "dp_shard=-1"
    words = 'TrainingArguments(fsdp=["shard_grad_op", "offload"], fsdp_config=None, deepspeed=None)\n'
    assert shown(tmp_path, capsys, "d.py", words)[1]["spec"] == "dp_shard=-1,zero_stage=2,offload=cpu"
    code, _, said = shown(tmp_path, capsys, "c.py", "TrainingArguments(deepspeed=chosen())\n")
    assert code == 2
    assert said == "hf_parallel: deepspeed: line 1 computes it; give migrate the file it reads\n"


def test_a_key_that_nobody_knows_is_named(tmp_path, capsys):
    values = {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_new_switch": 7}}
    found = shown(tmp_path, capsys, "a.yaml", values)[1]
    assert {"key": "fsdp_config.fsdp_new_switch: 7", "spec": "", "why": "not known here: nothing stands for it"} in (
        found["keys"]
    )


def test_what_cannot_hold_together(tmp_path, capsys):
    sizes = {"parallelism_config_tp_size": 3, "parallelism_config_dp_shard_size": 2}
    values = {**FSDP, "num_processes": 8, "parallelism_config": sizes}
    code, _, said = shown(tmp_path, capsys, "a.yaml", values)
    assert code == 2
    assert "8 processes" in said
    two = {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": False}}
    assert "keep one" in shown(tmp_path, capsys, "a.yaml", two)[2]
    assert "is no configuration of" in shown(tmp_path, capsys, "a.yaml", {"lr": 1})[2]


def test_the_table_for_people(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(CASES["fsdp 1"][1]))
    assert main(["migrate", str(file)]) == 0
    said = capsys.readouterr().out
    assert "    hf-parallel launch --num_processes 8 --parallel dp_shard=-1 train.py\n" in said
    assert re.search(r"^fsdp_config.fsdp_sharding_strategy: FULL_SHARD +->  zero_stage=3$", said, re.MULTILINE)


def test_the_launcher_offers_it(tmp_path, capsys):
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump({**CASES["fsdp 1"][1], "use_cpu": True}))
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--config_file", str(file), "--parallel", "dp_shard=8", str(script)]) == 2
    assert capsys.readouterr().err.endswith(
        "distributed_type: FSDP in the config file: not together with a spec; "
        f"drop it; `hf-parallel migrate {file}` prints the spec for it\n"
    )


BESIDE_A_SPEC = {
    "words": ({"fsdp": "shard_grad_op auto_wrap offload"}, "dp_shard=-1,zero_stage=2,offload=cpu"),
    "list": ({"fsdp": ["full_shard"]}, "dp_shard=-1"),
    "true": ({"fsdp": True}, "dp_shard=-1"),
    "with settings": (
        {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "fsdp_cpu_offload": True}},
        "dp_shard=-1,zero_stage=2,offload=cpu",
    ),
    "mapping": ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "dp_shard=-1,zero_stage=1"),
    "file": ({"deepspeed": "ds.json"}, "dp_shard=-1"),
}


def refused_line(given) -> str:
    """The command that a refusal names."""
    from hf_parallel.hooks.trainer.engines import check_engines

    with pytest.raises(SpecError) as refused:
        check_engines(SimpleNamespace(**{"fsdp": None, "fsdp_config": None, "deepspeed": None, **given}))
    return re.search("`(hf-parallel migrate .*)` prints", str(refused.value))[1]


@pytest.mark.parametrize("case", BESIDE_A_SPEC)
def test_trainer_names_the_line(tmp_path, capsys, monkeypatch, case):
    """`fsdp` and `deepspeed` beside --parallel: the command of the refusal prints a spec for these very values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    given, spec = BESIDE_A_SPEC[case]
    assert main([*shlex.split(refused_line(given))[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"] == spec


def test_a_long_mapping_is_left_in_its_script(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/" + "d" * 400}}}
    (tmp_path / "train.py").write_text(f"TrainingArguments(deepspeed={long})")
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert refused_line({"deepspeed": long}) == "hf-parallel migrate train.py"
    assert main(["migrate", "train.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"].startswith("dp_shard=-1,zero_stage=2,offload=nvme:/d")


def test_a_file_or_arguments(capsys):
    for words in ([], ["fsdp.yaml", "--fsdp"], ["--fsdp_config", "{}"], ["--deepspeed", "{no"]):
        assert main(["migrate", *words]) == 2
    assert "hf-parallel migrate fsdp.yaml works" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "a.yaml",
            {"base_model": "m", "micro_batch_size": 2, "gradient_accumulation_steps": 4, "tensor_parallel_size": 2},
            "A step has 2 per device x 4 accumulation x processes / (tp x pp x cp) data ranks sequences, as before",
        ),
        (
            "b.yaml",
            {**FSDP, "num_processes": 8, "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 3}},
            "A step has per_device_train_batch_size per device x 3 accumulation x 8 data ranks sequences, as before",
        ),
        (
            "c.json",
            {**STAGE_3, "num_processes": 4, "train_batch_size": 24, "gradient_accumulation_steps": 3}
            | {"train_micro_batch_size_per_gpu": "auto"},
            "A step has 24 sequences (2 per device x 3 accumulation x 4 data ranks), as before: "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 3",
        ),
        (
            "d.json",
            {**STAGE_3, "num_processes": 4, "train_batch_size": 25, "train_micro_batch_size_per_gpu": 2},
            "A step would have 8 sequences (2 per device x 1 accumulation x 4 data ranks), but train_batch_size is "
            "25: change one of them",
        ),
    ],
)
def test_the_batch_of_a_step(tmp_path, capsys, name, values, said):
    """As far as the file says it, with the numbers of data ranks that the spec has."""
    _, found, _ = shown(tmp_path, capsys, name, values)
    assert found["batch"] == said
    assert main(["migrate", str(tmp_path / name)]) == 0
    assert said in capsys.readouterr().out
