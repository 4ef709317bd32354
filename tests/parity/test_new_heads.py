"""Weights that a checkpoint lacks or has in another size, and weights stored in another order, on every layout."""

import io
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaPreTrainedModel

from tests import models
from tests.distributed import run, run_alone, run_alone_once
from tests.training import activate, axes

SPECS = ("dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "tp=2,pp=2", "dp_shard=2,tp=2")
CLASSES = 5


def in_order(model: torch.nn.Module) -> torch.nn.Module:
    """Pretend that some weights are packed: MLPs as [gate | up] would be, and the rows of a head reversed."""
    from hf_parallel.model.anatomy import StoredOrder, make_packed_order

    for name, module in model.named_modules():
        if name.endswith("gate_proj"):
            module.stored_orders = {"weight": make_packed_order([module.out_features // 2] * 2, 2, 0)}
        if name.endswith("score"):
            module.stored_orders = {"weight": StoredOrder(0, torch.arange(CLASSES).flip(0))}
    return model


def load(
    spec: str | None, folder: str, task: type, packed: bool = False, unequal: bool = False, **kwargs
) -> dict[str, torch.Tensor]:
    """Load under a seed; returns all weights on rank 0, the keys of another size, and what comes after at random.

    Args:
        unequal: seed each data rank in its own way, as some scripts do.
    """
    torch.manual_seed(3)
    if spec is None:
        model, info = task.from_pretrained(folder, output_loading_info=True, **kwargs)
        return {"weights": dict(model.state_dict()), "sizes": info["mismatched_keys"], "next": torch.rand(2)}
    from hf_parallel.checkpoint import gather_state_dict
    from hf_parallel.hooks import loading, runtime

    activate(spec)
    if unequal:
        Accelerator(cpu=True)
        set_seed(3, device_specific=True)
    if packed:
        original = loading.parallelize_model
        loading.parallelize_model = lambda model, **mesh: in_order(original(model, **mesh))
    model, info = task.from_pretrained(folder, output_loading_info=True, **kwargs)
    after = torch.rand(2)
    whole = gather_state_dict(model, runtime.mesh())
    return {"weights": whole, "sizes": info["mismatched_keys"], "next": after}


def check(spec: str, folder: str, task: type, packed: bool = False, **kwargs) -> set:
    """Every rank is as one process; returns the keys of another size."""
    alone = run_alone_once(load, None, folder, task, **kwargs)
    ranks = run(load, axes(spec)["world"], spec, folder, task, packed, init=False, **kwargs)
    assert ranks[0]["weights"].keys() == alone["weights"].keys()
    unequal = [key for key, tensor in alone["weights"].items() if not torch.equal(ranks[0]["weights"][key], tensor)]
    assert unequal == []
    for rank in ranks:
        assert rank["sizes"] == alone["sizes"]
        assert torch.equal(rank["next"], alone["next"])
    return alone["sizes"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A Llama classifier with three classes."""
    folder = str(tmp_path_factory.mktemp("classifier"))
    task = AutoModelForSequenceClassification
    run_alone(lambda: task.from_config(models.llama(num_labels=3)).save_pretrained(folder))
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["own", "packed"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_missing_head(spec, packed, runs):
    sizes = check(spec, runs.initial("llama"), AutoModelForSequenceClassification, packed, num_labels=CLASSES)
    assert not sizes


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "pp=2,dp_shard=2", "tp=2,dp_shard=2"])
def test_a_head_of_data_ranks_with_seeds_of_their_own(spec, runs):
    """The first one's is that of all, as one process has it; then each goes on with its own numbers."""
    folder, task = runs.initial("llama"), AutoModelForSequenceClassification
    alone = run_alone_once(load, None, folder, task, num_labels=CLASSES)
    ranks = run(load, axes(spec)["world"], spec, folder, task, unequal=True, init=False, num_labels=CLASSES)
    torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=0, atol=0)
    following = {tuple(rank["next"].tolist()) for rank in ranks}
    assert len(following) == 2
    assert tuple(alone["next"].tolist()) in following


@pytest.mark.parametrize("packed", [False, True], ids=["own", "packed"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_head_of_another_size(spec, packed, classifier):
    kwargs = {"num_labels": CLASSES, "ignore_mismatched_sizes": True}
    sizes = check(spec, classifier, AutoModelForSequenceClassification, packed, **kwargs)
    assert {(key, tuple(theirs), tuple(ours)) for key, theirs, ours in sizes} == {("score.weight", (3, 64), (5, 64))}


@pytest.mark.parametrize("model", ["llama", "qwen3"], ids=["untied", "tied"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_vocabulary_of_another_size(spec, model, runs):
    """The embedding too, which another stage of a pipeline draws than the head."""
    kwargs = {"vocab_size": models.VOCABULARY + 7, "ignore_mismatched_sizes": True}
    sizes = check(spec, runs.initial(model), AutoModelForCausalLM, **kwargs)
    assert len(sizes) == {"llama": 2, "qwen3": 1}[model]


@pytest.mark.parametrize(
    ("spec", "model"), [*((spec, "llama") for spec in SPECS), *((spec, "gpt2") for spec in ("tp=2", "pp=2"))]
)
def test_many_missing_weights(spec, model, runs):
    """Whole layers; GPT-2 draws its output projections again with the layer around them."""
    more = {"num_hidden_layers": 7} if model == "llama" else {"n_layer": 7}
    assert not check(spec, runs.initial(model), AutoModelForCausalLM, **more)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,tp=2"])
def test_new_weights_are_whole_one_at_a_time(spec, runs):
    """Four layers are new: of 150,000 numbers no more than the largest module's are whole while one is drawn."""
    folder = runs.initial("llama")

    def most():
        activate(spec)
        kind, seen = LlamaPreTrainedModel, []
        own = kind._init_weights

        def counted(self, module):
            own(self, module)
            seen.append(sum(p.numel() for p in self.parameters() if not isinstance(p, DTensor)))

        kind._init_weights = counted
        model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=8)
        largest = max(
            sum(p.numel() for p in module.parameters(recurse=False)) for module in model.model.layers.modules()
        )
        return max(seen), largest

    for whole, largest in run(most, axes(spec)["world"], init=False):
        assert 0 < whole <= largest


def refused(spec: str, folder: str) -> tuple[str, str]:
    """The error and the report of a checkpoint that does not fit."""
    report = io.StringIO()
    logging.getLogger("transformers").addHandler(logging.StreamHandler(report))
    with pytest.raises(RuntimeError) as error:
        load(spec, folder, AutoModelForSequenceClassification, num_labels=CLASSES)
    return str(error.value), report.getvalue()


@pytest.mark.parametrize("spec", SPECS)
def test_another_size_unasked(spec, classifier):
    """transformers' own error on every rank, and its report with the sizes of whole tensors on the first."""
    ranks = run(refused, axes(spec)["world"], spec, classifier, init=False)
    assert all("`ignore_mismatched_sizes`" in error for error, _ in ranks)
    report = ranks[0][1]
    assert report.count("MISMATCH") == 2  # the row and its footnote
    assert "score.weight" in report
    assert "ckpt: torch.Size([3, 64]) vs model:torch.Size([5, 64])" in report
