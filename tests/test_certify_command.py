"""``rope-ops certify``: the state of a class's certificate and the bound that it gives a config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rope_ops.__main__ import main

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
CERTIFIED = "rope_ops.examples:ExampleModel"
PLAIN = "torch.nn.modules.linear:Linear"


@pytest.fixture
def certify(capsys, tmp_path):
    """Run the command; status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["certify", *map(str, arguments), "--cache-dir", str(tmp_path / "cache")])
        return stop.value.code or 0, *capsys.readouterr()

    return run


def test_a_certified_class_and_the_bound_of_a_config(certify, tmp_path):
    status, out, _ = certify(CERTIFIED, FIXTURES / "qwen2-vl-7b.json", "--max-model-len", "4096")
    cls, declared, record, bound = out.splitlines()
    assert status == 0
    assert cls == f"class:    {CERTIFIED} is certified"
    file, line = declared.removeprefix("declared: ").rsplit(":", 1)
    assert "@sequence_bounded_mrope" in Path(file).read_text().splitlines()[int(line) - 1]
    assert record.startswith(f"record:   written | {tmp_path}")
    assert bound == "bound:    4,096 rows of 131,072 (legacy)"
    assert "record:   hit | " in certify(CERTIFIED)[1]


def test_a_class_without_a_certificate_keeps_the_legacy_rows(certify):
    status, out, _ = certify(PLAIN, FIXTURES / "qwen2-vl-7b.json")
    assert status == 1
    assert f"class:    {PLAIN} is not certified" in out
    assert "declared: nowhere in the class itself" in out
    assert f"bound:    none, 131,072 rows (legacy) are kept: {PLAIN} is not certified" in out


def test_a_certified_class_without_a_bound_says_why(certify, tmp_path):
    config = tmp_path / "config.json"
    fields = {"head_dim": 64, "max_position_embeddings": 64, "rope_theta": 1e4}
    config.write_text(json.dumps({**fields, "rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    status, out, _ = certify(CERTIFIED, config)
    assert status == 0
    assert "bound:    none, 128 rows (legacy) are kept: rope_type 'dynamic' chooses its values by the length" in out


def test_the_same_as_data(certify, tmp_path):
    status, out, _ = certify(CERTIFIED, FIXTURES / "qwen3.5-35b-a3b.json", "--json")
    data = json.loads(out)
    assert status == 0 and data["supports_sequence_bounded_mrope"] is True and data["record"] == "written"
    assert Path(data["record_path"]).is_relative_to(tmp_path)
    assert data["bound"]["mrope_cache_max_position"] == 262144 and data["bound"]["legacy_rows"] == 1048576
    assert data["bound"]["no_bound_reason"] is None
    assert "bound" not in json.loads(certify(PLAIN, "--json")[1])


@pytest.mark.parametrize("checkpoint", sorted(path.name for path in FIXTURES.glob("*.json")))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_checkpoint_has_a_bound(certify, checkpoint):
    status, out, _ = certify(CERTIFIED, FIXTURES / checkpoint, "--max-model-len", "8192")
    assert status == 0 and "bound:    8,192 rows of " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:X"], "No module named 'no_such_module'"),
        ([f"{CERTIFIED}Two"], "has no attribute 'ExampleModelTwo'"),
        (["rope_ops.examples"], "a model class must be named pkg.mod:Class, got 'rope_ops.examples'"),
        (["json:dumps"], "json:dumps must name a class, got <function dumps"),
        ([CERTIFIED, "no/such/config.json"], "No such file or directory: 'no/such/config.json'"),
        ([CERTIFIED, "--max-model-len", "5"], "--max-model-len and --layer-type need a config"),
        (
            [CERTIFIED, str(FIXTURES / "qwen2-vl-7b.json"), "--max-model-len", "0"],
            "max_model_len must be a positive integer, got 0",
        ),
        (
            [CERTIFIED, str(FIXTURES / "qwen2-vl-7b.json"), "--layer-type", "full"],
            "the config has one rope for all layers, got layer_type 'full'",
        ),
        ([], "the following arguments are required: PKG.MOD:CLASS"),
    ],
)
def test_input_that_cannot_be_used_is_one_line_and_status_2(certify, arguments, message):
    status, out, err = certify(*arguments)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("rope-ops certify: error: ") and message in err


def test_the_command_finds_a_class_in_the_working_folder(tmp_path):
    (tmp_path / "served_here.py").write_text(
        "from rope_ops import sequence_bounded_mrope\n\n@sequence_bounded_mrope\nclass Model: ...\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        "ROPE_OPS_CACHE_DIR": str(tmp_path / "cache"),
    }
    # As the console script calls it: nothing of the working folder on the path, and its own sys.argv.
    script = "import sys; sys.argv[1:] = ['certify', 'served_here:Model']; from rope_ops.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "served_here:Model is certified" in done.stdout and "served_here.py:3" in done.stdout
