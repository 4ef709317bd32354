"""Example scripts of other projects on a mixture of experts that has room for all tokens, against one process."""

import pytest

pytest.importorskip("datasets")

from tests.distributed import run_alone
from tests.outside import materials, watching
from tests.outside.cases import PAIRS, TRAINER, Case, files
from tests.outside.test_scripts import CASES, Desk
from tests.training import none, spec_id

SCRIPTS = {
    "run_clm, mixture": Case(
        "run_clm.py",
        f"--model_name_or_path ROOT/mixtral {files('texts')} --block_size 33 {TRAINER} --max_steps 3 "
        "--gradient_accumulation_steps 2 --max_eval_samples 11",
    ),
    "complete_nlp_example, mixture": Case(
        "complete_nlp_example.py", f"--model ROOT/mixtral {files('pairs', 'full')} {PAIRS} --with_tracking"
    ),
}
ROOM = "expert_capacity_factor=8"  # for every token, were all to go to one expert


def write_model(root):
    """A Mixtral of three layers, with its tokenizer."""
    small = {**materials.SMALL, "num_hidden_layers": 3}
    materials.model("mixtral", small).save_pretrained(f"{root}/mixtral")
    materials.tokenizer("ended").save_pretrained(f"{root}/mixtral")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    run_alone(write_model, str(root))
    return Desk(root)


@pytest.mark.parametrize("spec", ["dp_shard=2,ep=2", "tp=2,ep=2", "dp_shard=2,ep=2,pp=2"], ids=spec_id)
@pytest.mark.parametrize("name", SCRIPTS)
def test_room_for_all(desk, name, spec, monkeypatch):
    """Nothing is dropped, and nothing else changes but what the logs tell of experts."""
    monkeypatch.setitem(CASES, name, SCRIPTS[name])
    reference, ranks = desk.reference(name), desk.run(name, f"{spec},{ROOM}")
    for seen in ranks:
        assert not any(entry.get("expert_dropped") for entry in seen.logs)
        seen.logs[:] = [{k: v for k, v in entry.items() if not k.startswith("expert_")} for entry in seen.logs]
    none(watching.differences(ranks, reference, SCRIPTS[name].tolerance))
