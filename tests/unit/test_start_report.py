"""What a run prints: few lines at the start, Trainer's own keys at each log, and nothing from other ranks."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_parallel.hooks import after_import, monitoring, report
from hf_parallel.planner.batch import StepBatch
from tests.refusals import find_line

FACTS = {
    "spec": "dp_shard=1,tp=2",
    "axes": {"dp_shard": {"size": 1, "ranks": [[0], [1]]}, "tp": {"size": 2, "ranks": [[0, 1]]}},
    "plan": {"facts": {"vocabulary": "515 rows, per rank 258"}},
    "model": "LlamaForCausalLM",
    "parameters_per_rank": [3016960, 3016961],
    "global_batch": 11,
    "batch": "11 per device x 1 accumulation x 1 data rank",
    "batch_of_one_process": "",
    "examples_per_data_rank": None,
    "tokens_per_step": 363,
    "attention": "sdpa",
    "loss": "whole logits",
    "estimated_state_bytes_per_rank": [1 << 20, 1 << 21],
    "notes": [f"note {number}" for number in range(5)],
    "auto": [],
    "proof": None,
}


def test_a_start_takes_eight_lines():
    """The weightiest notes come first; the last line names the file that has the others."""
    lines = report.format_short_lines(FACTS, "out/hf_parallel.json")
    assert len(lines) <= 8
    text = "\n".join(lines)
    for fact in ("LlamaForCausalLM under dp_shard=1,tp=2", "3,016,960 to 3,016,961", "2.00 MiB", "11 seq", "363 tok"):
        assert fact in text
    assert [number for number in range(5) if f"note {number}" in text] == [0, 1]
    assert "out/hf_parallel.json (3 more notes); monitor=full" in lines[-1]
    assert "more notes" not in "\n".join(report.format_short_lines(FACTS | {"notes": ["one"]}, "out/hf_parallel.json"))


def test_the_sentence_of_auto_and_a_proof_are_among_the_eight():
    facts = FACTS | {"auto": ["a reason"], "proof": "proved on 2026-11-26 for this layout"}
    lines = report.format_short_lines(facts, "out/hf_parallel.json")
    assert len(lines) <= 7
    assert "  prove         proved on 2026-11-26 for this layout" in lines


def test_a_batch_that_is_not_one_processs():
    """The line says what keeps the script's batch, or the learning rate; eight lines still hold all."""
    batch = StepBatch(4, 2, 8)
    said = {"batch": batch.product, "batch_of_one_process": batch.advice("adamw_torch")}
    for auto, proof in itertools.product(([], ["a reason"]), (None, "proved")):
        facts = FACTS | said | {"auto": auto, "proof": proof}
        text = "\n".join(lines := report.format_short_lines(facts, "out/hf_parallel.json"))
        assert len(lines) + len(auto) <= 8  # the sentence of auto stands before them
        assert "(4 per device x 2 accumulation x 8 data ranks)" in text
        assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 keep that" in text
        assert "learning_rate x 2.83 (square-root rule, adamw_torch)" in text
        assert "attention     sdpa" in text
        assert "whole logits" in text
    assert any(batch.advice("adamw_torch") in line for line in report.format_all_lines(FACTS | said))


def test_all_lines_leave_nothing_out():
    text = "\n".join(report.format_all_lines(FACTS))
    assert "ranks (0, 1)" in text
    assert "515 rows" in text
    assert [number for number in range(5) if f"note {number}" in text] == [*range(5)]


@pytest.mark.parametrize("kind", [ProgressCallback, PrinterCallback])
def test_a_log_line_has_two_figures_of_ours(kind, capsys):
    """Trackers are given the same dictionary afterwards, with every key in it."""
    logs = {
        "loss": 6.25,
        "perf/step_time_s": 0.5,
        "perf/tokens_per_second": 726.0,
        "perf/memory_peak_gib": 1.5,
        "perf/bubble_share": 0.1,
    }
    given, callback = dict(logs), kind()
    callback.training_bar = SimpleNamespace(write=print)
    state = SimpleNamespace(is_world_process_zero=True, is_local_process_zero=True)
    monitoring.print_log(kind.on_log, callback, None, state, None, logs=given)
    printed = capsys.readouterr().out.strip()
    assert printed == str({"loss": "6.25", "tokens/s": "726", "GiB": "1.5"})
    assert given == logs


def test_a_folder_that_takes_no_file(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    report._write_facts({"spec": "tp=2"}, str(tmp_path / "taken"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "cannot write" in lines[0]
    assert "training goes on without it" in lines[0]


def test_a_script_that_counts_processes(tmp_path, monkeypatch):
    """Under tp=2,dp_shard=2 two of four processes read batches of their own."""
    path = tmp_path / "finetune.py"
    path.write_text("world_size = int(os.environ.get('WORLD_SIZE', 1))\nsteps = steps // world_size")
    monkeypatch.setattr(sys, "argv", [str(path)])
    (line,) = after_import.list_process_warnings(4, 2)
    assert find_line(line, "finetune.py", "WORLD_SIZE", 4, 2)
    assert after_import.list_process_warnings(2, 2) == []
    path.write_text("args = TrainingArguments()")
    assert after_import.list_process_warnings(4, 2) == []
