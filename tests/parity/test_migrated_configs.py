"""Configurations in the form of public projects: the spec that `migrate` prints trains to the numbers of one process.

Those of TRL are the files that it installs. The others are written here with the keys that a project publishes, and
sizes for four ranks. docs/reference/migrated_configs.md has the table.
"""

import importlib.util
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli import main
from hf_parallel.hooks import activation
from tests.distributed import run
from tests.training import Script, Tolerance, differences, none, train

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migrated_configs.md"
#: Where TRL has its files.
OF_TRL = Path((importlib.util.find_spec("trl") or importlib.util.find_spec("tests")).origin).parent
_AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
_HALF = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}}
_TUNED = {"overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
_LOADED = {f"stage3_{key}": "auto" for key in ("prefetch_bucket_size", "param_persistence_threshold")}


def accelerate(kind: str, **more) -> dict:
    """What `accelerate config` writes on one machine."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": 1,
        "use_cpu": False,
        **more,
    }


def fsdp(**changes) -> dict:
    """FSDP 2 as accelerate's examples have it."""
    values = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "offload_params": False,
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        **changes,
    }
    return {f"fsdp_{key}": value for key, value in values.items()}


def sizes(**axes) -> dict:
    """The grid of accelerate's ParallelismConfig."""
    every = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, **axes}
    return {f"parallelism_config_{axis}_size": size for axis, size in every.items()}


#: Whose it is -> processes, file, its values (None: TRL's own file).
CONFIGS = {
    "TRL `fsdp1.yaml`": (2, "fsdp1.yaml", None),
    "TRL `fsdp2.yaml`": (4, "fsdp2.yaml", None),
    "TRL `zero1.yaml`": (2, "zero1.yaml", None),
    "TRL `zero2.yaml`": (4, "zero2.yaml", None),
    "TRL `zero3.yaml`": (2, "zero3.yaml", None),
    "TRL `multi_gpu.yaml`": (2, "multi_gpu.yaml", None),
    "accelerate, FSDP and tensor parallelism": (
        4,
        "nd.yaml",
        accelerate("FSDP", fsdp_config=fsdp(), parallelism_config=sizes(dp_shard=2, tp=2)),
    ),
    "accelerate, context parallelism": (
        2,
        "cp.yaml",
        accelerate("FSDP", fsdp_config=fsdp(activation_checkpointing=True), parallelism_config=sizes(cp=2)),
    ),
    "accelerate, Megatron-LM": (
        4,
        "megatron.yaml",
        accelerate(
            "MEGATRON_LM",
            megatron_lm_config={
                "megatron_lm_gradient_clipping": 1.0,
                "megatron_lm_num_micro_batches": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_tp_degree": 2,
                "megatron_lm_use_distributed_optimizer": True,
            },
        ),
    ),
    "LLaMA-Factory, ZeRO-2 with AutoTP": (
        4,
        "autotp.json",
        {
            **_AUTO,
            **_HALF,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "allgather_partitions": True, "round_robin_gradients": True, **_TUNED},
            "tensor_parallel": {"autotp_size": 2},
        },
    ),
    "LLaMA-Factory, ZeRO-3 with offloading": (
        2,
        "offload.json",
        {
            **_AUTO,
            **_HALF,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "stage3_gather_16bit_weights_on_model_save": True,
                **_TUNED,
                **_LOADED,
            },
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor"},
        },
    ),
    "axolotl, DeepSpeed ZeRO-2 with an optimizer on the CPU": (
        2,
        "zero2.json",
        {
            **_AUTO,
            **_HALF,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **_TUNED},
            "wall_clock_breakdown": False,
        },
    ),
    "axolotl, tensor and context parallelism": (
        4,
        "qwen3.yaml",
        {
            "base_model": "Qwen/Qwen3-8B",
            "tensor_parallel_size": 2,
            "context_parallel_size": 2,
            "sequence_len": 4096,
            "gradient_checkpointing": True,
            "fsdp_version": 2,
            "fsdp_config": {
                "offload_params": False,
                "state_dict_type": "FULL_STATE_DICT",
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
                "reshard_after_forward": True,
            },
        },
    ),
    "torchtune, a full fine-tuning": (
        2,
        "full.yaml",
        {
            "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
            "batch_size": 2,
            "enable_activation_checkpointing": True,
            "custom_sharded_layers": ["tok_embeddings", "output"],
            "fsdp_cpu_offload": True,
            "dtype": "bf16",
        },
    ),
}


def migrated(capsys, folder: Path, name: str) -> dict:
    """What `migrate --json` prints for a configuration."""
    processes, file, values = CONFIGS[name]
    if values is None:
        pytest.importorskip("trl")
        values = yaml.safe_load((OF_TRL / "accelerate_configs" / file).read_text())
    if "distributed_type" in values:
        values = {**values, "num_processes": processes}
    path = folder / file
    path.write_text(json.dumps(values) if file.endswith("json") else yaml.safe_dump(values, sort_keys=False))
    assert main(["migrate", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_known(capsys, tmp_path, name):
    found = migrated(capsys, tmp_path, name)
    assert [key for key in found["keys"] if "not known" in key["why"]] == []
    assert ParallelConfig.parse(found["spec"]).resolve(CONFIGS[name][0]).world_size == CONFIGS[name][0]


def test_the_table_of_the_page(capsys, tmp_path):
    """Its rows are these configurations, with the specs that `migrate` prints."""
    rows = re.findall(r"^\| (.+?) \| (\d) \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(name, str(CONFIGS[name][0]), migrated(capsys, tmp_path, name)["spec"]) for name in CONFIGS]


def train_under(spec: str, script: Script, initial: str, out: str):
    """`train` under a spec as it is printed."""
    activation.activate(spec, source="test")
    data_ranks = ParallelConfig.parse(spec).resolve(int(os.environ["WORLD_SIZE"])).data_parallel_size
    return train(script, initial, out, data_ranks, int(os.environ["RANK"]))


def check_training(runs, capsys, folder: Path, name: str) -> None:
    """Fail unless the printed spec trains to the numbers of one process."""
    spec, script = migrated(capsys, folder, name)["spec"], Script()
    call = partial(train_under, spec, script, runs.initial(script.model), str(folder / "out"))
    ranks = run(call, CONFIGS[name][0], init=False)
    none(differences(ranks, runs.reference(script), Tolerance()))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "Megatron" not in name])
def test_trains_as_one_process(runs, capsys, tmp_path, name):
    check_training(runs, capsys, tmp_path, name)


def test_megatron_trains_as_one_process(runs, capsys, tmp_path):
    check_training(runs, capsys, tmp_path, "accelerate, Megatron-LM")
