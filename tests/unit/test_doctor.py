"""`hf-parallel doctor`: what it claims is compared with what `parallelize` does on forked ranks."""

import json
import os
import re

import pytest
import torch

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.axes.tensor import tensor_parallel
from hf_parallel.plans import build_source_on_meta, examine
from hf_parallel.plans.resolve import CUTS
from tests import models
from tests.refusals import pattern_of_refusal


def on_meta(name, **changes):
    config = models.CONFIGS[name](**changes)
    with torch.device("meta"):
        return models.auto_class(config).from_config(config)


def claims(name, spec, world):
    return examine(on_meta(name), ParallelConfig.parse(spec), world)


def test_a_scalar_is_kept_whole_but_in_a_pipeline_of_several_data_ranks():
    model = on_meta("llama")
    model.scale = torch.nn.Parameter(torch.ones((), device="meta"))
    (problem,) = examine(model, ParallelConfig.parse("pp=2,dp_shard=2")).problems
    assert problem.startswith("pp_size=2: ")
    assert problem.endswith("the scalar scale; pp_size=1 works")
    for works in ("tp=2", "pp=2", "dp_shard=2", "dp_replicate=2,cp=2"):
        assert examine(model, ParallelConfig.parse(works)).problems == []


def test_layers_with_unlike_numbers_of_key_heads_share_none():
    """As of MiMo V2, whose sliding layers have twice as many: four ranks would share some heads of the others."""
    model = on_meta("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(64, 64, bias=False, device="meta") for _ in range(2))
    attention.num_key_value_groups = 1
    (problem,) = examine(model, ParallelConfig.parse("tp=4")).problems
    assert re.match(pattern_of_refusal("tp_size=4", 4, "2 or 4", works="tp_size=2 works"), problem)
    assert examine(model, ParallelConfig.parse("tp=2")).problems == []
    assert examine(on_meta("llama"), ParallelConfig.parse("tp=4")).problems == []


def test_every_style_is_known():
    assert set(CUTS) == {*tensor_parallel._STYLES, "embedding_rowwise", "colwise_gather_output"}


def test_every_axis_is_asked():
    problems = claims("bert", "tp=3,pp=2", 4).problems
    assert [problem.partition(":")[0].split(" ")[0] for problem in problems] == ["pp=2", "tp_size=3", "pp_size=2"]


def test_the_model_is_not_changed():
    model = on_meta("llama")
    before = {key: (id(p), p.shape) for key, p in model.named_parameters()}
    spec = ParallelConfig.parse("tp=2,pp=2,attention=eager,activation_checkpointing=full")
    assert examine(model, spec).problems == []
    assert {key: (id(p), p.shape) for key, p in model.named_parameters()} == before
    assert model.config._attn_implementation == "sdpa"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_layers_that_differ_are_named():
    report = examine(
        on_meta("deepseek_v3", first_k_dense_replace=2, n_routed_experts=4),
        ParallelConfig.parse("pp=2,pipeline_split=[2,2]"),
    )
    assert report.problems == []
    assert report.pipeline[1].layers == ["model.layers.2-3"]
    report = examine(on_meta("t5"), ParallelConfig.parse("tp=2"))
    bias = [split for split in report.splits if split.style == "embedding_heads"]
    assert [split.pattern for split in bias] == [split.modules[0] for split in bias]
    assert len(bias) == 2


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(tmp_path, capsys, monkeypatch):
    """Run the command on a family's config.json: exit code and output."""
    monkeypatch.delenv("HF_PARALLEL", raising=False)

    def call(name, *argv, **changes):
        model = on_meta(name, **changes)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        code = cli.main(["doctor", str(tmp_path), *argv])
        return code, *capsys.readouterr()

    return call


def test_what_people_read(doctor):
    code, out, err = doctor("llama", "--parallel", "tp=4,pp=2", "--nproc", "8", vocab_size=257)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == ("LlamaForCausalLM (float32) on 8 processes: dp_replicate=1 x pp=2 x dp_shard=1 x cp=1 x tp=4")
    shown = [re.sub(r" {2,}", " | ", line) for line in lines]
    assert "model.layers.*.self_attn.q_proj ×4 | colwise | model's plan | [64, 64] -> [16, 64]" in shown
    assert "model.layers.*.self_attn.k_proj ×4 | colwise_shared_heads | model's plan | [32, 64] | weight" in shown
    assert "vocabulary | 257 rows, per rank 65, 65, 65, 62" in shown
    assert "attention heads | 4 query, 2 key/value; per rank 1 query, 1 key/value shared by 2 ranks" in shown
    assert "stage 1 | model.layers.2-3, model.norm, lm_head" in shown
    assert lines[-1].startswith("works")


@pytest.mark.parametrize(
    ("name", "argv", "words"),
    [
        ("mamba", ["--parallel", "tp=2"], [["tp_size=2", "no attention heads", "tp_size=1 works"]]),
        ("llama", ["--parallel", "tp=3"], [["tp_size=3", "4 attention heads", "tp_size=2 or 4 works"]]),
        ("bert", ["--parallel", "pp=2"], [["pp_size=2", "BertForSequenceClassification", "pp_size=1"]]),
        ("bert", ["--parallel", "tp=3,pp=2"], [["tp_size=3", "tp_size=2 or 4"], ["pp_size=2", "pp_size=1"]]),
        ("llama", ["--parallel", "tp=2", "--nproc", "3"], [["tp=2", "3 processes", "start 2 processes"]]),
        ("llama", ["--parallel", "tp=1", "--nproc", "0"], [["--nproc 0", "--nproc 1 works"]]),
        ("llama", ["--parallel", "tp=-1"], [["tp_size=-1", "--nproc 8"]]),
    ],
)
def test_what_stops_it(doctor, name, argv, words):
    code, out, err = doctor(name, *argv)
    assert (code, err) == (2, "")
    stops = [line for line in out.splitlines() if line.startswith("stops it")]
    assert len(stops) == len(words)
    for line, expected in zip(stops, words, strict=True):
        assert [word for word in expected if word not in line] == [], line


def test_json(doctor):
    code, out, _ = doctor("bert", "--parallel", "tp=2,pp=2", "--json")
    report = json.loads(out)
    assert (code, report["works"], len(report["problems"])) == (2, False, 1)
    assert report["axes"]["pp"] == 2
    code, out, _ = doctor("llama", "--parallel", "tp=2", "--json", dtype="bfloat16")
    report = json.loads(out)
    assert (code, report["works"], report["dtype"]) == (0, True, "bfloat16")
    assert report["pipeline"][0]["bytes"] == 2 * report["pipeline"][0]["parameters"]


def test_sizes_that_are_left(doctor):
    code, out, _ = doctor("llama", "--parallel", "tp=2")
    assert code == 0
    assert "dp_shard_size=-1 counts as 1" in out
    code, out, _ = doctor("llama", "--parallel", "tp=-1,pp=2", "--nproc", "4")
    assert "tp=2" in out.splitlines()[0]
    assert "counts as 1" not in out


def test_the_spec_may_come_from_the_environment(doctor, monkeypatch):
    assert "doctor: needs a spec" in doctor("llama")[2]
    monkeypatch.setenv("HF_PARALLEL", "tp=2")
    assert doctor("llama")[0] == 0


def test_no_such_model_and_no_such_key(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_HUB_OFFLINE": "1"})
    for model, spec, word in ((str(tmp_path / "none"), "tp=2", "none"), (str(tmp_path), "tpp=2", "tpp")):
        assert cli.main(["doctor", model, "--parallel", spec]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert err.startswith("hf_parallel: ")
        assert word in err


def test_a_file_or_its_folder_and_the_class_it_names(tmp_path):
    config = models.bert()
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        model = build_source_on_meta(str(source))
        assert type(model).__name__ == "BertForSequenceClassification"
        assert {p.device.type for p in model.parameters()} == {"meta"}
    models.llama().save_pretrained(tmp_path)
    assert type(build_source_on_meta(str(tmp_path))).__name__ == "LlamaForCausalLM"
