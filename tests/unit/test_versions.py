"""Libraries of another version: their functions' signatures decide, and only what uses a changed one is refused."""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types

import pytest
import torch

from hf_parallel import ParallelConfig, SpecError
from hf_parallel.axes.pipeline.axis import check_own_functions
from hf_parallel.hooks import front_ends
from hf_parallel.hooks.patching import (
    Patch,
    apply_patches,
    check_torch,
    find_mismatch,
    list_declared,
    list_newer_libraries,
    refuse_unpatched,
    undo,
)
from hf_parallel.hooks.trl import trainers as trl_trainers
from tests.refusals import pattern_of_refusal


@pytest.fixture
def versions(monkeypatch):
    """`versions(torch="2.10.0")`: what is installed, as far as anybody can tell."""
    real = importlib.metadata.version

    def pretend(**found):
        monkeypatch.setattr(importlib.metadata, "version", lambda package: found.get(package) or real(package))

    return pretend


@pytest.fixture
def library(monkeypatch, tmp_path, versions):
    """An installed trl 9.9, or of another version, whose module `extra` is `code`."""

    def make(code, name="trl", version="9.9"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "extra.py").write_text(code)
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.syspath_prepend(tmp_path)
        versions(**{name: version})

    yield make
    for module in ("trl.extra", "trl"):
        sys.modules.pop(module, None)


def doubled(original):
    return lambda value, *rest, **more: 2 * original(value, *rest, **more)


def test_the_signature_decides_and_only_use_is_refused(library):
    """An unknown version works where the target is the same; what has changed or is gone stops who uses it."""
    library(
        "def same(value, new=0): return value + new\ndef changed(other): return other\n"
        "class Thing:\n    def kept(self): return 1\n"
    )
    targets = ("same", "changed", "gone", "Thing.gone", "Gone.gone")
    patches = [Patch(f"trl.extra:{target}", doubled, "") for target in targets]
    patches += [Patch("trl.extra:before_this_version", doubled, "", "10.0"), Patch("trl.nowhere:gone", doubled, "")]
    done = apply_patches(patches)
    assert "trl" not in sys.modules
    import trl.extra as extra

    assert extra.same(2, new=1) == 6
    refused = r"trl 9.9: trl.extra:{}; trl 0.24 to 1.16 works"
    with pytest.raises(SpecError, match=refused.format(r"changed takes \(other\), without value .*")):
        extra.changed(3)
    with pytest.raises(SpecError, match=refused.format("Thing.gone does not exist")):
        extra.Thing()
    with pytest.raises(SpecError, match="does not exist"):
        refuse_unpatched("trl.extra")
    undo(done)
    assert (extra.same(2), extra.changed(3), extra.Thing().kept()) == (2, 3, 1)
    refuse_unpatched("trl.extra")


def test_a_subclass_that_makes_itself_is_refused_too(library):
    """LLaMA-Factory's trainers leave out the `__init__` of TRL's, which would refuse."""
    library("class Thing:\n    def kept(self): return 1\n", version="0.24.0")
    done = apply_patches([Patch("trl.extra:Thing.gone", doubled, "")])
    import trl.extra  # noqa: F401

    with pytest.raises(SpecError, match="trl 0.24.0: trl.extra:Thing.gone does not exist; trl 1.16 works"):
        refuse_unpatched("trl.extra")
    undo(done)
    refuse_unpatched("trl.extra")


@pytest.mark.parametrize(
    ("original", "replacement", "why"),
    [
        (lambda self, model, inputs, new=1: 0, lambda self, model, *args, **kwargs: 0, None),
        (lambda self, model, inputs: 0, lambda self, model, inputs: 0, None),
        (lambda *args, **kwargs: 0, lambda self, model: 0, None),
        (lambda self, model: 0, lambda self, *, also=None, **kwargs: 0, None),
        (lambda self, inputs, model: 0, lambda self, model, inputs: 0, "without model where"),
        (lambda self, other: 0, lambda self, model: 0, "without model where"),
        (lambda self, model, new: 0, lambda self, model: 0, "takes new, which is not known"),
    ],
)
def test_what_a_replacement_relies_on(original, replacement, why):
    found = find_mismatch(original, replacement)
    assert found is why or why in found


def test_copies_by_name_are_replaced_too(library, monkeypatch):
    """Of modules that came before; who comes later imports the replacement."""
    library("def same(value): return value\n")
    import trl.extra as extra

    before = types.ModuleType("before")
    before.same, before.other = extra.same, extra.same
    monkeypatch.setitem(sys.modules, "before", before)
    done = apply_patches([Patch("trl.extra:same", doubled, "", copies=True)])
    assert (extra.same(2), before.same(2), before.other(2)) == (4, 4, 4)
    undo(done)
    assert (extra.same(2), before.same(2)) == (2, 2)


def test_a_core_target_that_is_gone_undoes_the_rest(versions):
    versions(transformers="9.9")
    patches = [Patch("json:dumps", lambda original: lambda obj, **kw: "?", "")]
    patches.append(Patch("transformers.trainer:Trainer.no_such_thing", doubled, ""))
    with pytest.raises(
        SpecError, match=pattern_of_refusal("transformers 9.9", "no_such_thing", works="transformers 5.16 to 5.24")
    ):
        apply_patches(patches)
    assert json.dumps(1) == "1"
    assert list_newer_libraries() == [
        "transformers 9.9 is newer than those this version was checked on (5.16 to 5.24)"
    ]


def test_what_older_trainers_do_otherwise():
    """TRL's DPO before 0.29, and adapters on 4 bits before 0.26."""
    module = types.ModuleType("trl.old_trainer")
    pairs = type("DPOTrainer", (), {"concatenated_forward": None, "__module__": "trl.old_trainer"})
    packed = type("SFTTrainer", (), {"__module__": "trl.old_trainer"})
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(sys.modules, "trl.old_trainer", module)
        with pytest.raises(SpecError, match=pattern_of_refusal("DPOTrainer", works="trl 0.29 or newer works")):
            trl_trainers.check_trl_trainer(pairs(), None, None)
        with pytest.raises(SpecError, match=pattern_of_refusal("DPOTrainer", works="trl 0.29 or newer works")):
            trl_trainers.concatenated_forward(None, pairs(), None, {})
        with pytest.raises(SpecError, match=pattern_of_refusal("SFTTrainer", 4, works="trl 0.26 or newer works")):
            trl_trainers.check_trl_trainer(packed(), None, None, types.SimpleNamespace(is_loaded_in_4bit=True))


def test_a_trainer_of_sentences_before_its_modules_were_moved(monkeypatch, versions):
    """Its batches and losses are elsewhere, so that no replacement finds them: refused at use, by each kind."""
    kind = type(
        "SentenceTransformerTrainer", (), {"__init__": lambda self, model=None: vars(self).update(model=model)}
    )
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformerTrainer = kind
    monkeypatch.setitem(sys.modules, module.__name__, module)
    versions(sentence_transformers="5.3.0")
    done = apply_patches([patch for patch in list_declared() if patch.module == module.__name__])
    with pytest.raises(
        SpecError, match=pattern_of_refusal("sentence_transformers 5.3.0", works="sentence_transformers 6.2")
    ):
        type("CrossEncoderTrainer", (kind,), {})("model")
    moved = type("BaseTrainer", (kind,), {"__module__": "sentence_transformers.base.trainer"})
    assert moved("model").model == "model"
    undo(done)
    assert kind("model").model == "model"


def test_torch(versions, monkeypatch):
    for found in ("2.11.0", "2.11.0+cu130", "2.13.1", "2.15.0"):
        versions(torch=found)
        assert check_torch() == []
    versions(torch="2.16.0")
    assert check_torch() == ["torch 2.16.0 is newer than those this version was checked on (2.11 to 2.15)"]
    versions(torch="2.10.1")
    with pytest.raises(SpecError, match=pattern_of_refusal("torch 2.10.1", works="torch 2.11 to 2.15 work")):
        check_torch()


def test_an_nccl_backend_that_no_layout_ran_on_is_told(versions, monkeypatch):
    versions(torch="2.15.0")
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_register_builtin_nccl_as_legacy", None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    [said] = check_torch()
    assert "torch 2.15.0" in said
    assert "TORCH_DIST_USE_NCCL2=0" in said
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert check_torch() == []
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    monkeypatch.delattr(c10d, "_register_builtin_nccl_as_legacy")  # as before 2.15
    assert check_torch() == []


@pytest.mark.parametrize("key", ["tp_overlap", "lean_loss"])
def test_own_functions_before_torch_2_13(monkeypatch, key):
    split = "tp=2,pp=2,pipeline_schedule=zbv_zero_bubble"
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    check_own_functions(ParallelConfig.parse(f"{split},{key}=true"))
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    asked, works = (
        "pipeline_schedule=zbv_zero_bubble",
        {"tp_overlap": "tp_overlap=false", "lean_loss": "lean_loss=auto"}[key],
    )
    with pytest.raises(SpecError, match=pattern_of_refusal(f"{key}=true", asked, "2.13", works=f"{works} works")):
        check_own_functions(ParallelConfig.parse(f"{split},{key}=true"))
    check_own_functions(ParallelConfig.parse(f"{split},{works}"))
    check_own_functions(ParallelConfig.parse(f"tp=2,pp=2,{key}=true,pipeline_schedule=1f1b"))
    check_own_functions(ParallelConfig.parse(split))


#: Stand-ins: the classes of ms-swift 4.6 and Unsloth 2026.10 as far as a layout changes them.
FRONT_ENDS = {
    "swift/dataloader/shard.py": """
class BatchSamplerShard:
    rank, world_size = property(lambda self: "process"), property(lambda self: "processes")
""",
    "swift/dataloader/dispatcher.py": """
class DataLoaderDispatcher:
    group = property(lambda self: "all")
""",
    "opacus/privacy_engine.py": """
class PrivacyEngine:
    def make_private(self, *, module, noise_multiplier):
        return module
""",
    "unsloth/models/loader.py": """
class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name="", max_seq_length=2048, *args, **kwargs):
        return model_name
class FastModel(FastLanguageModel):
    from_pretrained = staticmethod(lambda model_name="", *args, **kwargs: model_name)
class FastVisionModel(FastModel):
    pass
""",
}


def test_front_ends_deal_to_data_ranks_or_are_refused(monkeypatch, tmp_path):
    """ms-swift's loaders ask for data ranks, and models of Unsloth are refused by name; until a layout ends."""
    for name, code in FRONT_ENDS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    mesh = types.SimpleNamespace(data_rank=1, data_size=3, data_group="data ranks")
    monkeypatch.setattr(front_ends.runtime, "mesh", lambda: mesh)
    done = apply_patches([patch for patch in list_declared() if patch.room == front_ends.__name__])
    try:
        opacus, dispatcher, shard, loader = (
            importlib.import_module(name.removesuffix(".py").replace("/", ".")) for name in sorted(FRONT_ENDS)
        )
        deals, sends = shard.BatchSamplerShard(), dispatcher.DataLoaderDispatcher()
        assert (deals.rank, deals.world_size, sends.group) == (1, 3, "data ranks")
        for kind in (loader.FastLanguageModel, loader.FastModel, loader.FastVisionModel):
            with pytest.raises(SpecError, match="FastLanguageModel: Unsloth .* get_peft_model work"):
                kind.from_pretrained("tiny", max_seq_length=64)
        private, model = opacus.PrivacyEngine().make_private, torch.nn.Sequential(torch.nn.Linear(2, 2))
        assert private(module=model, noise_multiplier=1.0) is model
        model[0]._hf_parallel = object()
        with pytest.raises(SpecError, match="make_private: Opacus .* one process works"):
            private(module=model, noise_multiplier=1.0)
        undo(done)
        assert (deals.rank, deals.world_size, sends.group) == ("process", "processes", "all")
        assert loader.FastVisionModel.from_pretrained("tiny") == "tiny"
    finally:
        undo(done)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("opacus", "swift", "unsloth")]:
            del sys.modules[name]
