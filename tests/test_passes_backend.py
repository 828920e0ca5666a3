"""The backend: options, hooks, caches, threads. R03, R34."""

import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
import torch
from passes_helpers import BOUND, POSITIONS, ROWS, certified, outcomes, table

import rope_ops
from rope_ops.certify import bind
from rope_ops.passes import BoundedRopePass, explain, inductor, rope_bounded
from rope_ops.passes.backend import settings

ROOT = pathlib.Path(__file__).parents[1]


def gather(self, positions):
    return table(self)[positions]


# Options


def test_own_options_are_checked_and_the_rest_goes_to_inductor():
    chosen = settings({"max_model_len": 8, "form": "bounded", "max-autotune": True})
    assert (chosen.max_model_len, chosen.form, chosen.inner) == (8, "bounded", "inductor")
    assert chosen.inductor == {"max_autotune": True}
    assert settings(None, "reduce-overhead").inductor["triton.cudagraphs"] is True
    assert settings(None, "default").inductor == {} == settings({}).inductor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "option max_model_len must be a positive integer, got 0"),
        ({"max_model_len": 8.5}, "option max_model_len must be a positive integer, got 8.5"),
        ({"form": "rows"}, 'option form must be "auto" or "bounded", got \'rows\''),
        ({"inner": "eager"}, 'option inner must be "inductor" or "aot_eager", got \'eager\''),
        ({"opaque_readers": 1}, "option opaque_readers must be a bool, got 1"),
        ({"multimodal_pruning": None}, "option multimodal_pruning must be a bool, got None"),
        ({"max_len": 8, "inner": "aot_eager"}, "unknown option max_len; its options are max_model_len, "),
    ],
)
def test_a_bad_option_is_one_clear_error(options, message):
    with pytest.raises(ValueError, match=r"^rope_bounded: " + re.escape(message)):
        settings(options)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(message)):
        torch.compile(certified(gather), backend=rope_bounded, options=options)(POSITIONS)


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_options_through_torch_compile(dynamic):
    torch._dynamo.reset()
    options = {"max_model_len": BOUND, "inner": "aot_eager"}
    model = certified(gather)
    function = torch.compile(model, backend=rope_bounded, fullgraph=True, dynamic=dynamic, options=options)
    for positions in (POSITIONS, POSITIONS[:2]):
        assert torch.equal(function(positions), model(positions))
    assert set(options) == {"max_model_len", "inner"}


def test_the_installed_name_needs_no_import(tmp_path):
    """A distribution with the entry point of pyproject.toml, in a process that never imports the package."""
    entry = re.search(r"\[project.entry-points.(\w+)\]\n(\w+) = \"([\w.:]+)\"", (ROOT / "pyproject.toml").read_text())
    info = tmp_path / "rope_ops-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rope-ops\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]} = {entry[3]}\n")
    program = (
        "import torch; f = torch.compile(lambda x: x + 1, backend='rope_bounded', options={'inner': 'aot_eager'});"
        "print('rope_ops' in __import__('sys').modules, f(torch.zeros(2)).tolist())"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.stdout.split("\n")[0] == "True [1.0, 1.0]", run.stderr[-2000:]


# Keys


def test_the_key_holds_bound_options_version_and_sources(monkeypatch, tmp_path):
    keys = {
        BoundedRopePass(bound, form=form, opaque_readers=opaque).uuid()
        for bound in (None, 8, 9)
        for form in ("auto", "bounded")
        for opaque in (False, True)
    }
    assert len(keys) == 12
    key = BoundedRopePass(8).uuid()
    monkeypatch.setattr(rope_ops, "__version__", "another")
    assert BoundedRopePass(8).uuid() not in (key, *keys)
    monkeypatch.undo()

    copied = tmp_path / "rope_ops"
    copied.mkdir()
    (copied / "__init__.py").write_text("")
    monkeypatch.setattr(rope_ops, "__file__", str(copied / "__init__.py"))
    hashes = []
    for text in ("", "x = 1"):
        (copied / "ops.py").write_text(text)
        inductor.source_hash.cache_clear()
        hashes.append(inductor.source_hash())
    monkeypatch.undo()
    inductor.source_hash.cache_clear()
    assert len({*hashes, inductor.source_hash()}) == 3


class Counting(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self):
        return "counting"


def test_other_passes_of_the_hook_are_kept_and_keyed():
    own, other = BoundedRopePass(8), Counting()
    assert inductor.composed(own, None) is own
    assert inductor.composed(own, other).uuid() == (own.uuid(), "counting")
    assert inductor.composed(own, [other, other]).uuid() == (own.uuid(), "counting", "counting")
    assert inductor.composed(own, lambda graph: None).uuid() is None


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """An empty cache folder, so that each compile runs the passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.compiles
def test_a_users_pass_in_the_hook_runs_and_stays_and_threads_do_not_mix(own_cache):
    import torch._inductor.config as config

    other = Counting()
    before = config.joint_custom_pre_pass
    try:
        results, kept, models = {}, {}, {bound: certified(gather) for bound in (BOUND, BOUND // 2)}

        def work(bound):
            options = {"max_model_len": bound}
            # Inductor's configuration is a thread's own in some versions.
            config.joint_custom_pre_pass = other
            results[bound] = torch.compile(models[bound], backend=rope_bounded, options=options)(POSITIONS)
            kept[bound] = config.joint_custom_pre_pass is other

        threads = [threading.Thread(target=work, args=(bound,)) for bound in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for bound, model in models.items():
            torch.testing.assert_close(results[bound], model(POSITIONS))
        assert all(kept.values()) and len(other.seen) == len(kept) == 2
        # It saw the graph that our pass left.
        assert not any("position_range" in target for seen in other.seen for target in seen)

        class Failing(Counting):
            def __call__(self, graph):
                raise RuntimeError("the user's pass fails")

            def uuid(self):
                return "failing"

        failing = Failing()
        torch._dynamo.reset()
        config.joint_custom_pre_pass = failing
        with pytest.raises(Exception, match="the user's pass fails"):
            torch.compile(certified(gather), backend=rope_bounded, options={"max_model_len": BOUND})(POSITIONS)
        assert config.joint_custom_pre_pass is failing
    finally:
        config.joint_custom_pre_pass = before


@pytest.mark.compiles
def test_generated_code_builds_no_table_and_equals_plain_inductors_where_one_is_left(own_cache):
    from torch._inductor.utils import run_and_get_code

    def code(backend, options, positions):
        torch._dynamo.reset()
        model = certified(gather)
        function = torch.compile(model, backend=backend, options=options)
        result, (text,) = run_and_get_code(function, positions)
        torch.testing.assert_close(result, model(positions))
        return re.sub(r"# (Topologically|Original|Source|AOT|%).*", "", text)

    bounded = {"max_model_len": BOUND}
    assert f"empty_strided_cpu(({ROWS}, " not in code(rope_bounded, bounded, POSITIONS)
    many = torch.arange(ROWS + 1) % BOUND
    assert f"empty_strided_cpu(({ROWS}, " in code("inductor", {}, many)

    def body(text):
        return re.sub(r"c[a-z0-9]{20,}|cpp_fused\w*|/tmp\S*", "", text[text.index("def call") :])

    assert body(code(rope_bounded, bounded, many)) == body(code("inductor", {}, many))


PROCESS = """
import sys, torch, rope_ops
from torch import nn
from torch._dynamo.utils import counters
from rope_ops.passes import rope_bounded

def forward(self, p):
    f = torch.outer(torch.arange(64, dtype=torch.float32), torch.tensor([1.0, 0.1]))
    return torch.cat((f, f.sin()), -1)[p]

for job in sys.argv[1:]:
    bound, position, version, certificate = job.split(",")
    rope_ops.__version__ = version
    cls = type("Model", (nn.Module,), {"forward": forward})
    if certificate == "certified":
        rope_ops.sequence_bounded_mrope(cls)
    torch._dynamo.reset()
    counters.clear()
    f = torch.compile(cls(), backend=rope_bounded, options={"max_model_len": int(bound)})
    row = round(f(torch.tensor([int(position)]))[0, 0].item())
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print("RESULT", row, "hit" if hits and not counters["inductor"]["fxgraph_cache_miss"] else "miss")
"""


@pytest.mark.compiles
def test_r03_processes_that_share_a_cache_share_equal_code_only(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(*jobs):
        done = subprocess.run([sys.executable, "-c", PROCESS, *jobs], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return re.findall(r"RESULT (\d+) (\w+)", done.stdout)

    assert run("8,3,1,certified") == [("3", "miss")]
    jobs = ("32,20,1,certified", "8,4,1,certified", "32,20,2,certified", "32,20,1,plain")
    assert run(*jobs) == [("20", "miss"), ("4", "hit"), ("20", "miss"), ("20", "miss")]


# The report


def test_explain_returns_and_prints(capsys):
    torch._dynamo.reset()
    model = bind(certified(gather), BOUND)
    report = explain(model, POSITIONS)
    assert outcomes(report) == [("rows", None)]
    (found,) = report.tables
    assert (found.rows_before, found.rows_after, found.bytes_before, found.bytes_after) == (64, 5, 2048, 160)
    assert re.fullmatch(r".*passes_helpers.py:\d+ in angles", found.location) and found.formula == "cos_sin_cache"
    ((before, after),) = report.graphs
    assert "float32[64, 8]" in before and "float32[64, 8]" not in after
    printed = capsys.readouterr().out
    assert "cos_sin_cache: rows, rows 64 -> 5, bytes 2,048 -> 160" in printed
    assert "rope_ops: 1 tables, 1 rewritten, 0 left" in printed
    left = explain(torch.compile(model, backend=rope_bounded), POSITIONS, max_model_len=ROWS)
    assert "left (within_bound), rows 64, bytes ?" in str(left)
    empty = explain(torch.nn.Linear(2, 2), torch.zeros(1, 2), max_model_len=8)
    assert "no table found" in str(empty) and "no certified class traced this graph" in str(empty)


def test_counters_and_log(caplog):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with caplog.at_level("INFO", logger="rope_ops"):
        explain(certified(gather), POSITIONS, max_model_len=BOUND)
        explain(certified(gather), POSITIONS, max_model_len=ROWS)
    assert counters["rope_ops"] == {"rows": 1, "left": 1, "left: within_bound": 1}
    assert any("cos_sin_cache: rows, rows 64 -> 5" in record.message for record in caplog.records)


def test_torch_logs_shows_the_report():
    program = (
        "import sys; sys.path[:0] = ['tests']; import torch, passes_helpers as h;"
        "from rope_ops.passes import rope_bounded;"
        "torch.compile(h.certified(lambda m, p: h.table(m)[p]), backend=rope_bounded,"
        "options={'max_model_len': 16, 'inner': 'aot_eager'})(h.POSITIONS)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "+rope_ops"}
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "cos_sin_cache: rows, rows 64 -> 5, bytes 2,048 -> 160" in run.stderr, run.stderr[-2000:]
