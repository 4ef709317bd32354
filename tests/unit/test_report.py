"""The page about a training: what is on it, what it advises, that no file can harm it, and how it looks."""

import dataclasses
import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.monitor import expected, session
from hf_parallel.monitor.expected import calibrated
from hf_parallel.monitor.meter import GIB, RankRow
from hf_parallel.monitor.report import write
from hf_parallel.monitor.report_facts import read_facts
from hf_parallel.planner.hardware import make_cluster
from hf_parallel.planner.search import search
from hf_parallel.planner.shape import shape_of

pytest.importorskip("matplotlib")

SPEC = "tp=4,pp=2,dp_shard=1"
CONFIG = ParallelConfig.parse(SPEC)
MODEL = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=14,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32003,
    architectures=["LlamaForCausalLM"],
)
BATCH = expected.Batch(rows=8, calls=2, seq=1024)
SAID = {"global_batch": 32, "batch": "8 per device x 2 accumulation x 2 data ranks"}
SAID |= {"batch_of_one_process": "one process has 16: a rule"}
ZERO = dict.fromkeys(field.name for field in dataclasses.fields(RankRow))
FIGURES = {"layout", "loss", "grad-norm", "throughput", "step-time", "time", "memory"}
HOSTILE = '<script>alert(1)</script><img src="http://x.invalid/a.png" onerror="alert(2)">&$x_1$'


def row(**seconds):
    parts = {**dict.fromkeys(ZERO, 0.0), **seconds}
    return {
        **parts,
        "steps": 5.0,
        "step": sum(seconds.values()),
        "memory_peak": 21.5 * GIB,
        "memory_reserved": 25.0 * GIB,
    }


def training(folder, device="cuda", name="perf", kind=None, said="rank 3 (node1) is slow at reading its data"):
    """What a run of 8 GPUs over PCIe leaves behind; `kind`: of memory, in the plan."""
    folder.mkdir(exist_ok=True)
    MODEL.save_pretrained(folder / "checkpoint-20")
    (folder / "checkpoint-20" / "manifest.json").write_text("{}")
    (folder / "checkpoint-10").mkdir()
    prediction = expected.expect(shape_of(MODEL), CONFIG, make_cluster("a100-pcie-80gb", 8), BATCH)
    plan = expected.describe_prediction(prediction, CONFIG, BATCH)
    plan["memory"] |= {kind: 3.0} if kind else {}
    kept = session.Record(str(folder))
    run = {"spec": SPEC, "world_size": 8, "model": "LlamaForCausalLM", "device": device}
    kept.write("run", **run, plan=plan, why_no_plan="")
    log = []
    for step in range(2, 22, 2):
        ranks = [row(compute=0.8, tp=0.82, pp=0.3, data=0.06, rest=0.02)] * 8
        perf = {"perf/step_time_s": 2.0, "perf/tokens_per_second": 16e3 + 50 * step, "perf/memory_peak_gib": 21.5}
        kept.write("metrics", step=step, perf=perf, ranks=ranks)
        log.append(
            {"step": step, "loss": 8 - step / 10, "grad_norm": 1.5 if step != 6 else float("nan"), name: 7, **perf}
        )
    log.append({"step": 20, "eval_loss": 6.1})
    kept.write("note", step=8, about="straggler", text=said)
    state = {"global_step": 20, "log_history": log}
    (folder / "checkpoint-20" / "trainer_state.json").write_text(json.dumps(state))
    (folder / "hf_parallel.json").write_text(json.dumps({"spec": SPEC, "versions": {"torch": "2.13.0"}, **SAID}))
    (folder / "hangs").mkdir()
    waits = {"operation": "reduce_scatter", "number": 4711, "axis": "dp_shard", "module": "layers.7.mlp"}
    told = {"0": {"place": "in training", "pending": [waits]}, "1": {"absent": f"is gone {said}"}, "3": {"place": "?"}}
    (folder / "hangs" / "report.json").write_text(json.dumps({"sentence": f"ranks 0-2 wait: {said}", "ranks": told}))
    own = {"rank": 3, "place": f"in the data loader (`my_dataset.py:41`) {said}", "pending": [], "stacks": {}}
    (folder / "hangs" / "rank_3.json").write_text(json.dumps(own))
    (folder / "profile_step_5.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>'
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run whose folder nobody changes."""
    return training(tmp_path_factory.mktemp("report") / "run")


class Page(HTMLParser):
    """Tags that are open, ids, figures, addresses, text."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.addresses, self.text = [], [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")]
        assert not [name for name in values if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page_of(folder):
    text = Path(write(str(folder))).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert not page.tags & {"script", "link", "iframe", "object", "base", "form"}
    assert [a for a in page.addresses if not a.startswith(("#", "data:image/svg+xml;base64,"))] == []
    assert re.findall(r"url\((?!#)", text) == []
    return page, " ".join(" ".join(page.text).split())


def test_what_is_on_the_page(folder):
    page, text = page_of(folder)
    assert {f"figure-{name}" for name in FIGURES} <= set(page.ids)
    for told in (
        "LlamaForCausalLM",
        "step 8",
        "rank 3 (node1) is slow",
        "ranks 0-2 wait: rank 3",
        "rank 0 in training; reduce_scatter number 4711 (dp_shard, layers.7.mlp)",
        "rank 1 is gone",
        "rank 3 in the data loader (`my_dataset.py:41`)",
        "checkpoint-10",
        "no manifest",
        "planned",
        "evaluation",
        "not finite at 1 logs, first at step 6",
        "torch 2.13.0",
        "21.5 GiB",
        "32 sequences per step (8 per device x 2 accumulation x 2 data ranks)",
        "one process has 16: a rule",
    ):
        assert told.replace("step 8", "8") in text, told


def test_advice_with_numbers(folder):
    _, text = page_of(folder)
    said = re.search(
        r"41% of the step waits in tp over (\S+); (\S+) is predicted ([\d.]+) x faster: .*? instead of ([\d.]+) s",
        text,
    )
    assert said[1] == "pcie4"
    assert "tp=1," in said[2]
    shape = shape_of(MODEL)
    cluster, _ = calibrated(str(folder), shape)
    here = expected.expect(shape, CONFIG, cluster, BATCH).step_time_s
    best = search(model=shape, cluster=cluster, seq=1024, global_batch=16, top=1).best
    # As measured but for the bubble, which follows from the compute; batches of a step are one run of the schedule.
    assert here == pytest.approx(2.0, rel=0.2)
    assert (float(said[3]), float(said[4])) == pytest.approx((here / best.step_time_s, here), rel=0.05)
    assert "15% of the step waits for other stages" in text
    assert "Tensors take 21.5 of 79 GiB" in text


def test_a_cpu_predicts_nothing(tmp_path):
    page, text = page_of(training(tmp_path / "run", device="cpu"))
    assert {f"figure-{name}" for name in FIGURES} <= set(page.ids)
    assert "41% of the step waits in tp." in text
    assert "predicted" not in text
    assert "the whole process" in text


def test_hostile_content_stays_text(tmp_path):
    place = training(tmp_path / '<img src=x onerror="alert(1)">', name=HOSTILE, kind=HOSTILE, said=HOSTILE)
    page, text = page_of(place)
    assert text.count("<script>alert(1)</script>") >= 5  # a note, a hang, where two ranks were, a metric's name
    assert '<img src=x onerror="alert(1)">' in text


RECORD = (
    '{"kind": "run", "spec": "tp=2", "plan": {"memory": [1], "batch": 3}}\n{"kind": "metrics", "ranks": [3]}\n'
    '{"kind": "metrics", "step": 2, "ranks": [], "perf": 1}\n{"kind": "note", "step": [], "text": 5}'
)
OTHER_TYPES = (
    '{"spec": 7, "global_step": "x", "log_history": 5, "versions": [], "plan": 3, "sentence": {}, "place": []}'
)
HANGS = ("hangs/rank_3.json", "hangs/report.json")
SAVED = ("checkpoint-20/trainer_state.json", "checkpoint-20/config.json")


@pytest.mark.parametrize("damage", ["", "{", "[]", OTHER_TYPES, RECORD])
def test_damaged_files(folder, tmp_path, damage):
    for place, names in (("a", ("hf_parallel.json", *SAVED, *HANGS)), ("b", (session.FILE, HANGS[0]))):
        shutil.copytree(folder, tmp_path / place)
        for name in names:
            (tmp_path / place / name).write_text(damage)
        page_of(tmp_path / place)


def test_only_a_layout(tmp_path):
    """Of a run that has not logged yet."""
    (tmp_path / "hf_parallel.json").write_text(json.dumps({"spec": "tp=2,dp_shard=2", "model": "BertModel"}))
    page, text = page_of(tmp_path)
    assert "figure-layout" in page.ids
    assert "BertModel" in text
    assert read_facts(str(tmp_path)).config.world_size == 4


def test_the_command(folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["report", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "<figure" in out.read_text()
    for place, missing in ((tmp_path, "_hf_parallel_metrics.jsonl"), (tmp_path / "none", "is no folder")):
        assert cli.main(["report", str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert missing in line
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "none" / "page.html")]) == 2


def test_without_matplotlib(folder, monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'hf-parallel[plots]'" in line


# ---- in a browser ---------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOOK = """() => {
  const texts = [...document.querySelectorAll('svg text')];
  const small = texts.map(t => t.getBoundingClientRect().height).filter(h => h < 8);
  const boxes = [...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect());
  const cut = [...document.querySelectorAll('svg.plot')].filter(s => { const b = s.getBoundingClientRect();
    return [...s.querySelectorAll('text')].some(t => { const r = t.getBoundingClientRect();
      return r.left < b.left - 1 || r.right > b.right + 1 || r.top < b.top - 1 || r.bottom > b.bottom + 1; }); });
  const light = c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 765;
  const style = getComputedStyle(document.querySelector('svg text'));
  return { wide: document.documentElement.scrollWidth, small: small.length, cut: cut.map(s => s.parentNode.id),
    empty: boxes.filter(b => b.width < 100 || b.height < 40).length, figures: boxes.length,
    ink: light(style.fill), page: light(getComputedStyle(document.body).backgroundColor) };
}"""


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_in_a_browser(tmp_path):
    """A phone and a desk, light and dark: nothing is cut off, too small, or logged as an error; nothing is fetched."""
    api = pytest.importorskip("playwright.sync_api")
    path = write(str(training(tmp_path / "run", name=HOSTILE, kind=HOSTILE, said=HOSTILE)))
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for width, scheme in ((390, "dark"), (1280, "light")):
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            said, fetched = [], []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("dialog", lambda dialog, said=said: said.append(dialog.message))
            page.on("request", lambda request, fetched=fetched: fetched.append(request.url[:40]))
            page.goto(f"file://{path}")
            look = page.evaluate(LOOK)
            assert (said, [url for url in fetched if not url.startswith(("file:", "data:"))]) == ([], [])
            assert look["figures"] == len(FIGURES) + 1
            assert (look["wide"], look["small"], look["cut"], look["empty"]) == (width, 0, [], 0)
            assert (
                (look["ink"] > 0.7 and look["page"] < 0.3)
                if scheme == "dark"
                else (look["ink"] < 0.3 < 0.7 < look["page"])
            )
        browser.close()


def test_hangs_of_an_older_run_are_not_shown(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    assert read_facts(str(tmp_path / "run")).hangs
    for name in HANGS:
        os.utime(tmp_path / "run" / name, (1.0, 1.0))
    assert read_facts(str(tmp_path / "run")).hangs == []
