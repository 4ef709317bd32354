"""Every refusal of a spec names a value that works: values of each key, alone and on layouts of up to three axes."""

import dataclasses
import itertools

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import read_spec, refuse_with
from tests.refusals import AXES, follow_ways_out

FIELDS = {field.name: field for field in dataclasses.fields(ParallelConfig)}
#: Values of keys whose choices are not listed: some work, some only on some layouts, some never.
VALUES = {
    "dp_replicate_size": ("0", "-2", "3"),
    "dp_shard_size": ("0", "3"),
    "pp_size": ("0", "3"),
    "cp_size": ("0", "3"),
    "tp_size": ("0", "3"),
    "ep_size": ("-1", "0", "3", "4"),
    "pack_tokens": ("-1", "64"),
    "batch_shares": ("auto", "2:1", "2:0", "1", "3x2:1x2", "2:x", "1:1:1:0"),
    "hierarchical_shard": ("0", "1", "2"),
    "offload": ("disk", "optimizer", "optimizer@0", "optimizer@x", "cpu", "cpu@0", "cpu@x", "none@0", "disk@0"),
    "expert_capacity_factor": ("0", "-1", "nan", "1.25"),
    "kfac_damping": ("0", "-1", "inf", "nan", "0.1"),
    "kfac_interval": ("0", "-1", "2"),
    "context_parallel": ("rings", "ring", "ulysses", "allgather", "hybrid:0", "hybrid:1", "hybrid:2", "hybrid:3"),
    "pipeline_virtual_stages": ("0", "1", "2", "3"),
    "pipeline_microbatches": ("-1", "0", "1", "2", "3", "5"),
    "pipeline_split": ("[4]", "[2,2]", "[2,1,1]", "[0,4]", "[-1,5]", "auto", "1:0", "3:1", "3:1:1", "3", "x:y", "5:"),
    "attention": ("eager", "torch_flash"),
    "activation_checkpointing": (
        *("full", "selective", "every:0", "every:2", "some", "full@0", "full@x", "full@3-2", "none@1", "some@1"),
        *("selective@x", "every:0@1"),
    ),
    "hang_timeout_s": ("0", "-1", "nan", "soon", "60", "off"),
    "monitor": ("off", "full", "loud", "trace:0", "trace:2", "noise", "full+noise", "off+noise", "trace:2+noise"),
    "profile_steps": ("[0]", "[5,6]", "[x]", "[]"),
    "reference": ("there", "http://127.0.0.1:1"),
    "reference_timeout_s": ("0", "60"),
    "tp_mesh": ("2x2", "1x2", "2x1", "1x1", "2", "2x2x2", "0x2", "x"),
    "sequence_parallel": ("true", "false", "maybe"),
}
#: Layouts and processes: axes of 2 that fit, or that are one axis too many.
LAYOUTS = [
    (dict.fromkeys(axes, "2"), world)
    for world in (4, 8)
    for count in range(4 if world == 8 else 3)
    for axes in itertools.combinations(AXES, count)
]


def list_values(name: str) -> tuple[str, ...]:
    """Return values of a key: those above, or all that it knows and a word that it does not."""
    if name in VALUES:
        return VALUES[name]
    choices = FIELDS[name].metadata["choices"]
    assert choices or "bool" in str(FIELDS[name].type), f"{name} is a new key: give it values above"
    return (*map(str, choices or ("true", "false")), "word")


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_on_every_layout(name):
    """Suggestions lead to a spec that starts, in four steps at most."""
    for value, (layout, world) in itertools.product(list_values(name), LAYOUTS):
        follow_ways_out({**layout, name.removesuffix("_size"): value}, world)


@pytest.mark.parametrize(
    "spec", ["pack_tokens=64,pipeline_schedule=gpipe", "partition_activations=true,compile=regional"]
)
def test_settings_against_each_other(spec):
    """A suggestion for one key does not lead back to it by the suggestion for another."""
    for axes in ((), ("pp",), ("tp",), ("pp", "tp")):
        follow_ways_out({**dict.fromkeys(axes, "2"), **dict(read_spec(spec))}, 4)


@pytest.mark.parametrize(
    "message", ["tp_size=2: is too many; tp_size=4 works", "tp_size=2: is too many", "tp_size=2: no; 2 for now works"]
)
def test_a_suggestion_that_leads_nowhere(message, monkeypatch):
    """A suggestion that is refused again, or is none, is an error."""
    monkeypatch.setattr("tests.refusals.start", lambda *_: refuse_with(message))
    with pytest.raises((AssertionError, SpecError)):
        follow_ways_out({"tp": "2"})
