"""The main job: ``python -m rope_ops`` on real input, and its one-line errors."""

import json
import sys

import pytest

from rope_ops.__main__ import main

SMALL = {
    "model_type": "qwen2_vl",
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def report(capsys, *arguments):
    main(arguments)
    return capsys.readouterr().out


def test_certified_model(capsys, config):
    model = ["--model-class", "rope_ops.examples:ExampleModel", "--max-model-len", "128"]
    data = json.loads(report(capsys, config, *model, "--json", "--device", "cpu"))
    legacy, bounded, ours = data["constructions"]
    assert [c["name"] for c in data["constructions"]] == ["legacy", "bounded_eager", "rope_ops"]
    assert [c["rows"] for c in data["constructions"]] == [2048, 128, 128]
    assert [c["resident_bytes"] for c in data["constructions"]] == [2048 * 32, 128 * 32, 128 * 32]
    assert all(c["bitwise_prefix"] and c["milliseconds"] > 0 for c in data["constructions"])
    assert legacy["peak_bytes"] > bounded["peak_bytes"] > bounded["resident_bytes"]
    # Two scratch blocks of float32 [128, 8], the positions and the frequencies.
    assert ours["resident_bytes"] < ours["peak_bytes"] < 128 * 32 + 3 * 128 * 8 * 4
    assert data["config"]["mrope_cache_max_position"] == 128 and data["config"]["legacy_rows"] == 2048
    assert "torch" in data["machine"] and data["skipped"]


def test_fail_closed_is_visible(capsys, config):
    text = report(capsys, config, "--max-model-len", "128", "--device", "cpu")
    assert "no model class given (--model-class): the legacy rows are kept; certified, 128 would do" in text
    rows = [line.split("  ")[0] for line in text.splitlines() if "2,048" in line]
    assert rows == ["legacy, eager", "rope_ops"]
    assert "bounded, eager (no bound without a certified class)" in text
    text = report(capsys, config, "--model-class", "torch.nn:Linear", "--device", "cpu")
    assert "torch.nn.modules.linear:Linear is not certified" in text


def test_text_names_the_legacy_it_models_and_the_machine(capsys):
    lines = report(capsys, "--example", "qwen2-vl", "--max-model-len", "256", "--device", "cpu").splitlines()
    assert any("4 x max_position_embeddings, as serving engines allocate" in line for line in lines)
    assert lines[-2].startswith("skipped: Triton kernels (")
    assert lines[-1].startswith("machine: ") and lines[-1].endswith("device cpu")


def test_plot(tmp_path, config, capsys):
    picture = tmp_path / "out.png"
    report(capsys, config, "--plot", str(picture), "--device", "cpu")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.json"], "No such file or directory: 'nosuch.json'"),
        (["{bad}"], "must hold JSON"),
        (["{empty}"], "must hold rope fields"),
        (["--max-model-len", "0"], "max_model_len must be a positive integer, got 0"),
        (["--max-model-len", "-3"], "max_model_len must be a positive integer, got -3"),
        (["--max-model-len", "many"], "invalid int value: 'many'"),
        (["--model-class", "nosuchpackage:Model"], "nosuchpackage"),
        (["--model-class", "torch.nn:NoSuch"], "NoSuch"),
        (["--model-class", "math:pi"], "--model-class must name a class, got 3.14"),
        (["--device", "abacus"], "abacus"),
        (["--plot", "/nosuchfolder/x.png"], "/nosuchfolder/x.png"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, message, tmp_path, config, capsys):
    for name, text in (("bad", "{"), ("empty", "{}")):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        arguments = [str(path) if a == f"{{{name}}}" else a for a in arguments]
    if arguments[0].startswith("--") and arguments[0] != "--max-model-len":
        arguments = [config, *arguments]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and not captured.out
    assert captured.err.count("\n") == 1 and captured.err.startswith("rope_ops: error: ") and message in captured.err


def test_plot_without_matplotlib_says_what_to_install(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as exit_:
        main([config, "--plot", "x.png"])
    assert exit_.value.code == 2 and "pip install 'rope-ops[plot]'" in capsys.readouterr().err
