"""A run that stops and goes on, under the same or another layout, does what an uninterrupted one does."""

import json
import os
import shutil
import signal
from fnmatch import fnmatch

import pytest
import torch
from transformers import TrainerCallback, default_data_collator

from hf_parallel import __main__ as runner
from hf_parallel import cli
from hf_parallel.hooks.trainer import checkpoints, flag
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.resuming import (
    ONE,
    STEPS,
    STOP,
    Ended,
    checkpoint_differences,
    log_differences,
    train,
    train_rank,
    trained,
)
from tests.training import activate, axes, none, spec_id

TOLERANCE = 2e-5
REST = range(STOP + 1, STEPS + 1)
LAYOUTS = [ONE, "tp=2", "pp=2,dp_shard=2", "tp=2,dp_shard=2"]


def layout_id(spec: str) -> str:
    return spec_id(spec) or "one"


class Stopped:
    """Uninterrupted runs, one per model and layout, whose checkpoints the tests resume from."""

    def __init__(self, root, runs):
        self.root, self.runs, self.made = root, runs, {}

    def __call__(self, model: str, spec: str, optim: str = "adamw_torch") -> Ended:
        if (model, spec, optim) not in self.made:
            job = {"folder": self.runs.initial(model), "out": f"{self.root}/{model}-{layout_id(spec)}-{optim}"}
            self.made[model, spec, optim] = trained(spec, {**job, "optim": optim})[0]
        return self.made[model, spec, optim]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, runs):
    return Stopped(tmp_path_factory.mktemp("stopped"), runs)


def check_resumed(stopped, runs, out, model: str, sources: list[str], spec: str, optim: str = "adamw_torch") -> None:
    """Resume under `spec` what each of the sources has saved, and compare with one process that never stopped."""
    jobs = [
        {
            "folder": runs.initial(model),
            "out": str(out / layout_id(source)),
            "resume": f"{stopped(model, source, optim).folder}/checkpoint-{STOP}",
            "optim": optim,
        }
        for source in sources
    ]
    built, found = models.build(model), []
    for source, ended in zip(sources, trained(spec, *jobs), strict=True):
        former, same = stopped(model, source, optim), source == spec
        texts = log_differences(ended, former if same else stopped(model, ONE, optim), REST, 0 if same else TOLERANCE)
        for step in (STOP, STEPS) if same else (STOP,):  # what was read, and where it led
            texts += checkpoint_differences(*(f"{run.folder}/checkpoint-{step}" for run in (ended, former)), built)
        found += [f"from {layout_id(source)}: {text}" for text in texts]
    none(found)


@pytest.mark.parametrize("spec", LAYOUTS, ids=layout_id)
def test_from_every_layout_to_every_layout(stopped, runs, tmp_path, spec):
    """Qwen3, whose tied embedding is on two stages; to the same layout bit for bit."""
    check_resumed(stopped, runs, tmp_path, "qwen3", LAYOUTS, spec)


@pytest.mark.parametrize(
    ("model", "source", "spec"),
    [
        ("gpt2", "tp=2", "tp=4"),  # q, k and v in one weight, cut into other parts
        ("gpt2", "tp=4", "pp=2,tp=2"),
        ("phi3", "tp=2", ONE),
        ("phi3", ONE, "tp=2"),
        ("llama", "pp=2,pipeline_schedule=interleaved_1f1b", "dp_replicate=2"),
        ("llama", ONE, "pp=2,pipeline_schedule=interleaved_1f1b"),  # parameters by number, stages 0 and 2 on rank 0
    ],
)
def test_packed_weights_and_looped_stages(stopped, runs, tmp_path, model, source, spec):
    """Weights that are stored in another order of rows; stages that are not in the order of ranks."""
    check_resumed(stopped, runs, tmp_path, model, [source], spec)


@pytest.mark.parametrize(
    ("model", "source", "spec"),
    [
        ("qwen3", ONE, "tp=2,dp_shard=2"),
        ("qwen3", "dp_shard=2", "pp=2"),
        ("gpt2", "pp=2", "dp_shard=2"),
        ("gpt2", "tp=2", ONE),
    ],
)
def test_means_of_rows_and_columns(stopped, runs, tmp_path, model, source, spec):
    """Adafactor's states are whole on every rank; under tp the rows of q, k and v in one weight are stored apart."""
    check_resumed(stopped, runs, tmp_path, model, [source], spec, "adafactor")


def by_depth(trainer) -> None:
    """A group for each layer that the script finds, with a rate that falls towards the first."""

    def create_optimizer(model=None):
        groups: dict[str, list] = {}
        for name, parameter in trainer.model.named_parameters():
            groups.setdefault(next((part for part in name.split(".") if part.isdigit()), "ends"), []).append(parameter)
        made = [
            {"params": own, "lr": 1e-2 * 0.6 ** int(f"0{key}".replace("0ends", "9"))} for key, own in groups.items()
        ]
        trainer.optimizer = torch.optim.AdamW(made, weight_decay=0.1)
        return trainer.optimizer

    trainer.create_optimizer = create_optimizer


def rates(folder: str) -> dict[str, float]:
    """The learning rate of every parameter, as a checkpoint has it."""
    with open(f"{folder}/checkpoint-{STEPS}/optimizer/index.json", encoding="utf-8") as file:
        groups = json.load(file)["groups"]
    return {name: group["options"]["lr"] for group in groups for name in group["parameters"]}


@pytest.mark.parametrize(("source", "spec"), [("pp=2", "tp=2"), ("tp=2", "pp=2"), ("pp=2", "pp=2")])
def test_a_group_per_layer(runs, tmp_path, source, spec):
    """Stages find unlike layers, and so make unlike groups."""
    job = {"folder": runs.initial("qwen3"), "change": by_depth, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1}
    reference = trained("tp=2", {**job, "out": f"{tmp_path}/whole"})[0]
    former = trained(source, {**job, "out": f"{tmp_path}/former"})[0]
    stopped_at = f"{former.folder}/checkpoint-{STOP}"
    ended = trained(spec, {**job, "out": f"{tmp_path}/ended", "resume": stopped_at})[0]
    none(log_differences(ended, reference, REST, TOLERANCE))
    expected = rates(reference.folder)
    assert len(set(expected.values())) > 3
    assert rates(ended.folder) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("source", "spec"), [("dp_shard=2", "dp_shard=2"), ("dp_shard=2", "tp=2"), (ONE, "dp_shard=2")]
)
def test_a_stream_goes_on_at_the_next_row(streamed, runs, tmp_path, source, spec):
    """Before, at and after the end of the stream, which is read twice; the last step of a pass is short."""
    former, same, stops = streamed(source), source == spec, (2, 3, 4)
    job = {"folder": runs.initial("llama"), **STREAM, "save_steps": 100}
    jobs = [{**job, "out": f"{tmp_path}/{s}", "resume": f"{former.folder}/checkpoint-{s}"} for s in stops]
    reference, tolerance = (former, 0) if same else (streamed(ONE), TOLERANCE)
    found = []
    for stop, on in zip(stops, trained(spec, *jobs), strict=True):
        found += log_differences(on, reference, range(stop + 1, STEPS + 1), tolerance)
    none(found)


STREAM = {"stream": True, "max_steps": STEPS, "save_steps": 1}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, runs):
    root, made = tmp_path_factory.mktemp("streamed"), {}

    def make(spec: str) -> Ended:
        if spec not in made:
            made[spec] = trained(
                spec, {"folder": runs.initial("llama"), "out": f"{root}/{layout_id(spec)}", **STREAM}
            )[0]
        return made[spec]

    return make


def by_pieces(trainer) -> None:
    """A `_save_checkpoint` of the script's own, which calls Trainer's pieces, as trainers of LLaVA's kind have."""

    def _save_checkpoint(model, trial):
        folder = f"{trainer._get_output_dir(trial=trial)}/checkpoint-{trainer.state.global_step}"
        trainer.save_model(folder, _internal_call=True)
        trainer._save_optimizer_and_scheduler(folder)
        trainer._save_rng_state(folder)
        if trainer.args.should_save:
            trainer.state.save_to_json(f"{folder}/trainer_state.json")

    trainer._save_checkpoint = _save_checkpoint


@pytest.mark.parametrize(("source", "spec"), [("tp=2", "dp_shard=2"), ("dp_shard=2", "tp=2"), ("pp=2", "pp=2")])
def test_checkpoints_that_a_script_saves_by_pieces(stopped, runs, tmp_path, source, spec):
    job = {"folder": runs.initial("qwen3"), "change": by_pieces}
    former = trained(source, {**job, "out": f"{tmp_path}/former"})[0]
    resume = f"{former.folder}/checkpoint-{STOP}"
    ended = trained(spec, {**job, "out": f"{tmp_path}/ended", "resume": resume})[0]
    none(log_differences(ended, stopped("qwen3", ONE), REST, TOLERANCE))


def momentum(spec: str, folder: str, out: str) -> list[Ended]:
    """SGD with momentum, with dropout, under a schedule of the script's own; once through and once with a stop."""
    activate(spec)

    def change(trainer):
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05, momentum=0.9)
        trainer.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=9)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1

    job = {"folder": folder, "data_ranks": axes(spec)["data_ranks"], "change": change}
    through, _ = train(out=out, **job)
    return [through, train(out=f"{out}-on", resume=f"{out}/checkpoint-{STOP}", **job)[0]]


def test_momentum_a_schedule_and_dropout_go_on_bit_for_bit(runs, tmp_path):
    through, on = run(momentum, 2, "tp=2", runs.initial("gpt2"), str(tmp_path / "out"), init=False)[0]
    none(log_differences(on, through, REST, 0))


def masks(rows):
    """A collator that draws: other labels are left out in every epoch."""
    batch = default_data_collator(rows)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
    return batch


@pytest.mark.parametrize("spec", ["tp=2", "pp=2"])
def test_what_a_collator_draws_goes_on_after_an_epoch(runs, tmp_path, spec):
    """Data draws from a stream of its own on these layouts."""
    job = {"folder": runs.initial("llama"), "change": lambda trainer: setattr(trainer, "data_collator", masks)}
    out, after = str(tmp_path / "out"), STEPS // 2
    again = {**job, "out": f"{out}-on", "resume": f"{out}/checkpoint-{after}"}
    through, on = trained(spec, {**job, "out": out, "save_steps": after}, again)
    none(log_differences(on, through, range(after + 1, STEPS + 1), 0))


class Accident(TrainerCallback):
    """Kills a rank in the middle of the second save."""

    def __init__(self, trainer):
        self.trainer, self.save = trainer, checkpoints.save_rng_state
        checkpoints.save_rng_state = self

    def __call__(self, folder: str) -> None:
        if self.trainer.state.global_step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        self.save(folder)


def test_a_rank_killed_during_a_save_leaves_the_previous_checkpoint(runs, tmp_path):
    job = {"folder": runs.initial("qwen3"), "out": str(tmp_path / "out"), "save_steps": 2, "save_total_limit": 1}
    through = trained("tp=2", {**job, "out": str(tmp_path / "through")})[0]
    with pytest.raises(RankFailure):
        run(train_rank, 2, "tp=2", [{**job, "change": Accident}], init=False)
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*")) == [
        "_tmp-checkpoint-4",
        "checkpoint-2",
    ]
    (tmp_path / "out" / "checkpoint-9").mkdir()  # as plain Trainer leaves one that it did not finish
    on = trained("tp=2", {**job, "resume": True})[0]
    none(log_differences(on, through, range(3, STEPS + 1), 0))
    assert not list((tmp_path / "out").glob("_tmp-*"))
    assert (tmp_path / "out" / f"checkpoint-{STEPS}").exists()


def kept(spec: str, folder: str, out: str) -> tuple[str, list[str], set[str]]:
    """The best step, the folders that are left of three saves, and what is in the last one."""

    activate(spec)
    chosen = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    chosen |= {"load_best_model_at_end": True, "greater_is_better": True, "save_only_model": True}
    _, trainer = train(folder, out, axes(spec)["data_ranks"], learning_rate=1e-3, **chosen)
    left = sorted(name for name in os.listdir(out) if "checkpoint" in name)
    return trainer.state.best_model_checkpoint, left, set(os.listdir(f"{out}/checkpoint-{STEPS}"))


def test_limits_and_the_best_model_as_in_one_process(runs, tmp_path):
    best, left, files = run_alone(kept, ONE, runs.initial("llama"), str(tmp_path / "out"))
    os.rename(tmp_path / "out", tmp_path / "one")
    found = run(kept, 2, "tp=2", runs.initial("llama"), str(tmp_path / "out"), init=False)[0]
    assert found == (best, left, files | {"hf_parallel.json", "manifest.json"})


def uploads(spec: str, folder: str, out: str) -> list:
    """What would go to the Hub: names, messages, and the files of the folders at that time."""
    import transformers.trainer as module

    activate(spec)
    calls: list = []

    class Job:
        def done(self) -> bool:
            return True

        is_done, result, wait_until_done = done, done, done

    class Hub:
        def create_repo(self, name, **kwargs):
            return type("Url", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, folder_path, commit_message, path_in_repo=None, ignore_patterns=(), **kwargs):
            seen = sorted(
                name for name in os.listdir(folder_path) if not any(fnmatch(name, p) for p in ignore_patterns)
            )
            calls.append((os.path.relpath(folder_path, out), commit_message, path_in_repo, seen))
            return Job()

    module.hf_api = Hub
    hub = {"push_to_hub": True, "hub_model_id": "x", "hub_strategy": "all_checkpoints", "hub_token": "none"}
    _, trainer = train(folder, out, axes(spec)["data_ranks"], **hub, max_steps=2, save_steps=1, save_only_model=True)
    trainer.save_model()
    return calls


@pytest.mark.parametrize("key", ["", ",async_save=true"])
def test_uploads_as_in_one_process(runs, tmp_path, key):
    expected = run_alone(uploads, ONE, runs.initial("llama"), str(tmp_path / "one"))
    ranks = run(uploads, 2, "dp_shard=2" + key, runs.initial("llama"), str(tmp_path / "out"), init=False)
    assert ranks[1] == []
    own = {"hf_parallel.json", "manifest.json"}
    assert [(*call[:3], [n for n in call[3] if n not in own]) for call in ranks[0]] == expected
    assert len(expected) == 5  # the model and the checkpoint of each step, and the end


def without_the_plugin(folder: str, out: str, checkpoint: str) -> Ended:
    flag.uninstall_flag()
    return train(folder, out, resume=checkpoint)[0]


def test_plain_trainer_does_not_go_on_with_fresh_moments(stopped, runs, tmp_path):
    checkpoint = f"{stopped('qwen3', 'tp=2').folder}/checkpoint-{STOP}"
    with pytest.raises(RankFailure, match="ResumeUnderHfParallel"):
        run_alone(without_the_plugin, runs.initial("qwen3"), str(tmp_path), checkpoint)


SCRIPT = """
import json, sys
from tests.resuming import train
ended = train(*sys.argv[1:3], resume=sys.argv[3])[0]
json.dump(ended.logs, open(sys.argv[2] + "/logs.json", "w"))
"""


def test_the_runner_without_a_layout(stopped, runs, tmp_path):
    """`python -m hf_parallel script.py` goes on from a layout's checkpoint, and refuses one that is damaged."""

    def resumed(out: str, checkpoint: str) -> Ended:
        flag.uninstall_flag()
        (tmp_path / "script.py").write_text(SCRIPT)
        os.makedirs(out)
        runner.main([str(tmp_path / "script.py"), runs.initial("qwen3"), out, checkpoint])
        with open(f"{out}/logs.json") as file:
            return Ended({int(step): numbers for step, numbers in json.load(file).items()}, out)

    ran = stopped("qwen3", "tp=2")
    whole, damaged = f"{ran.folder}/checkpoint-{STOP}", tmp_path / f"checkpoint-{STOP}"
    ours = run_alone(resumed, str(tmp_path / "out"), whole)
    assert log_differences(ours, ran, REST, 1e-5) == []
    shutil.copytree(whole, damaged)
    (damaged / "scheduler.pt").write_bytes(b"")
    with pytest.raises(RankFailure, match="scheduler.pt"):
        run_alone(resumed, str(tmp_path / "refused"), str(damaged))


@pytest.mark.parametrize("spec", ["tp=2", "pp=2,dp_shard=2"])
def test_exported_for_plain_trainer(stopped, runs, tmp_path, spec):
    """Moments, schedule, random states and order of rows: the losses are those of the run that never stopped."""
    ran, out = stopped("qwen3", spec), str(tmp_path / f"checkpoint-{STOP}")
    assert run_alone(cli.main, ["export", f"{ran.folder}/checkpoint-{STOP}", out, "--trainer"]) == 0
    assert "hf_parallel.json" not in os.listdir(out)
    ours = run_alone(without_the_plugin, runs.initial("qwen3"), str(tmp_path), out)
    assert log_differences(ours, ran, REST, 1e-5) == []


def test_a_run_that_had_ended(stopped, runs, tmp_path):
    """In the middle of an epoch Trainer looks only after the next step, and so takes one more: here, too."""
    ended = {}
    for spec in (ONE, "tp=2"):
        checkpoint = f"{stopped('qwen3', spec).folder}/checkpoint-{STOP}"
        job = {"out": f"{tmp_path}/{layout_id(spec)}", "resume": checkpoint, "max_steps": STOP}
        ended[spec] = trained(spec, {"folder": runs.initial("qwen3"), **job})[0]
    none(log_differences(ended["tp=2"], ended[ONE], range(STOP + 1, STOP + 2), TOLERANCE))
