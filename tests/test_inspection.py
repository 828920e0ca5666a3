"""The record of a class's certificate: written once, believed only when whole, never fatal, never stale."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest

from rope_ops import ModelConfig, inspection, sequence_bounded_mrope
from rope_ops.inspection import inspect_model_cls

CERTIFIED = """
from rope_ops import sequence_bounded_mrope

class Base: ...

@sequence_bounded_mrope(exclude=("visual",))
class Dense(Base):
    def forward(self, x):
        return x

class Moe(Dense): ...

class OptedOut(Dense):
    supports_sequence_bounded_mrope = False

class Plain:
    supports_sequence_bounded_mrope: bool = True
    class Inner:
        supports_sequence_bounded_mrope = True
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``record_pkg`` whose modules note each import of theirs; and a counter of imports by inspection."""

    class Package:
        cache = tmp_path / "cache"
        folder = tmp_path / "site" / "record_pkg"
        log = tmp_path / "imports.log"
        inspections: list = []

        def write(self, text: str = CERTIFIED, module: str = "model") -> None:
            note = f"open({str(self.log)!r}, 'a').write('{module} ')\n"
            (self.folder / f"{module}.py").write_text(note + textwrap.dedent(text))

        def forget(self) -> None:
            for name in [name for name in sys.modules if name.split(".")[0] == "record_pkg"]:
                del sys.modules[name]
            importlib.invalidate_caches()

        def inspect(self, name: str = "Dense", module: str = "model"):
            """As a process that has imported nothing yet."""
            self.forget()
            return inspect_model_cls(f"record_pkg.{module}:{name}", cache_dir=self.cache)

        def imports(self) -> int:
            return len(self.log.read_text().split()) if self.log.exists() else 0

        def record(self, name: str = "Dense"):
            return self.cache / "model_classes" / f"record_pkg.model-{name}.json"

    one = Package()
    one.inspections = []
    one.folder.mkdir(parents=True)
    one.write("", "__init__")
    one.write()
    monkeypatch.syspath_prepend(str(one.folder.parent))
    # Otherwise an edit within a second of the last one would run the old bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    real = inspection._import
    monkeypatch.setattr(inspection, "_import", lambda *names: one.inspections.append(names) or real(*names))
    yield one
    one.forget()


def test_the_second_call_imports_and_inspects_nothing(package):
    first = package.inspect()
    assert (first.supports_sequence_bounded_mrope, first.record) == (True, "written")
    assert package.imports() == 2 and len(package.inspections) == 1
    second = package.inspect()
    assert (second.supports_sequence_bounded_mrope, second.record) == (True, "hit")
    assert package.imports() == 2 and len(package.inspections) == 1
    assert not any(name.startswith("record_pkg") for name in sys.modules)
    assert second.declared == first.declared == f"{package.folder / 'model.py'}:7"


def test_the_record_is_data_under_the_hash_of_the_source(package):
    package.inspect()
    stored = json.loads(package.record().read_text())
    assert stored.keys() == {"format", "model_class", "source_sha256", "supports_sequence_bounded_mrope"}
    assert stored["supports_sequence_bounded_mrope"] is True and len(stored["source_sha256"]) == 64


def test_each_class_speaks_for_itself_and_is_remembered(package):
    expected = {"Dense": True, "Moe": False, "OptedOut": False, "Base": False, "Plain": True, "Plain.Inner": True}
    for state in ("written", "hit"):
        for name, certified in expected.items():
            info = package.inspect(name)
            assert (name, info.supports_sequence_bounded_mrope, info.record) == (name, certified, state)
    assert package.inspect("OptedOut").declared.endswith("model.py:15, opted out")
    assert "nowhere in the class itself" in package.inspect("Moe").declared


def test_an_edit_of_the_class_is_inspected_once_and_of_another_class_not_at_all(package):
    package.inspect()
    package.write(CERTIFIED.replace("class Moe(Dense): ...", "class Moe(Dense):\n    extra = 1\n"))
    assert package.inspect().record == "hit"
    package.write(CERTIFIED.replace("return x", "return x + 1"))
    assert package.inspect().record == "rewritten (the old one was of another source)"
    assert package.inspect().record == "hit"
    package.write(CERTIFIED.replace('@sequence_bounded_mrope(exclude=("visual",))\n', ""))
    info = package.inspect()
    assert not info.supports_sequence_bounded_mrope and info.record.startswith("rewritten")
    assert len(package.inspections) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "unreadable, JSONDecodeError"),
        (b'{"format": 1, "model_class": "record_pkg.mo', "unreadable, JSONDecodeError"),
        (b"\x80\x81 not text", "unreadable, UnicodeDecodeError"),
        (b"[" * 60000, "unreadable, RecursionError"),
        (b" " * 70000, "too long"),
        (b"[1, 2]", "of another form or class"),
        (b'{"format": 0}', "of another form or class"),
        (b"cos\nsystem\n(S'false'\ntR.", "unreadable, JSONDecodeError"),
    ],
)
def test_a_broken_record_is_inspected_again_once(package, content, why):
    package.inspect()
    package.record().write_bytes(content)
    info = package.inspect()
    assert (info.supports_sequence_bounded_mrope, info.record) == (True, f"rewritten (the old one was {why})")
    assert package.inspect().record == "hit" and len(package.inspections) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        # Written before the capability existed: absent is not False.
        ({"supports_sequence_bounded_mrope": None}, "incomplete"),
        ({"supports_sequence_bounded_mrope": 1}, "incomplete"),
        ({"supports_sequence_bounded_mrope": "true"}, "incomplete"),
        ({"source_sha256": None}, "incomplete"),
        ({"source_sha256": "0" * 64}, "of another source"),
        ({"model_class": "other.mod:Dense"}, "of another form or class"),
        ({"format": 2}, "of another form or class"),
    ],
)
def test_a_record_has_no_defaults(package, change, why):
    package.inspect("Moe")
    stored = {**json.loads(package.record("Moe").read_text()), **change}
    package.record("Moe").write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))
    info = package.inspect("Moe")
    assert (info.supports_sequence_bounded_mrope, info.record) == (False, f"rewritten (the old one was {why})")
    assert package.inspect("Moe").record == "hit" and len(package.inspections) == 2


def test_a_forged_certificate_is_not_believed(package):
    package.inspect("Moe")
    forged = {**json.loads(package.record("Moe").read_text()), "supports_sequence_bounded_mrope": True}
    package.record("Moe").write_text(json.dumps(forged))
    info = package.inspect("Moe")
    assert not info.supports_sequence_bounded_mrope
    assert info.record == "rewritten (the old one was contradicted by the text of the class)"


def test_what_the_text_does_not_say_is_never_recorded(package):
    package.write(CERTIFIED + "\nsequence_bounded_mrope(Moe)\n")
    for _ in range(2):
        info = package.inspect("Moe")
        assert info.supports_sequence_bounded_mrope and info.declared == "set from outside the text of the class"
        assert info.record == "not kept (set from outside the text of the class)"
    assert not package.record("Moe").exists()


@pytest.mark.parametrize("later", ["Dense.supports_sequence_bounded_mrope = False", "if True:\n    {}"])
def test_a_statement_beside_the_class_outdates_its_record(package, later):
    assert package.inspect().supports_sequence_bounded_mrope
    statement = "Dense.supports_sequence_bounded_mrope = False"
    package.write(CERTIFIED + later.format(statement) + "\n")
    info = package.inspect()
    assert not info.supports_sequence_bounded_mrope and info.record.startswith("not kept")
    assert not package.inspect().supports_sequence_bounded_mrope


def test_an_imported_class_has_the_last_word(package):
    assert package.inspect("Moe").record == "written"
    package.forget()
    live = importlib.import_module("record_pkg.model")
    assert inspect_model_cls("record_pkg.model:Moe", cache_dir=package.cache).record == "hit"
    sequence_bounded_mrope(live.Moe)
    for named in (live.Moe, "record_pkg.model:Moe"):
        info = inspect_model_cls(named, cache_dir=package.cache)
        assert info.supports_sequence_bounded_mrope and info.record.startswith("not kept")
    assert package.inspect("Dense").supports_sequence_bounded_mrope
    live = importlib.import_module("record_pkg.model")
    live.Dense.supports_sequence_bounded_mrope = False
    info = inspect_model_cls("record_pkg.model:Dense", cache_dir=package.cache)
    assert not info.supports_sequence_bounded_mrope and "opted out" in info.declared


def test_a_class_written_in_branches_counts_only_where_they_agree(package):
    text = """
    from rope_ops import sequence_bounded_mrope
    try:
        import no_such_module
        class Model: ...
    except ImportError:
        @sequence_bounded_mrope
        class Model: ...
    """
    package.write(text)
    info = package.inspect("Model")
    assert info.supports_sequence_bounded_mrope and info.record.startswith("not kept")
    package.write(text.replace("import no_such_module", "import json"))
    info = package.inspect("Model")
    assert not info.supports_sequence_bounded_mrope and info.record == "written"
    # Certified in the branch that runs here: another process may run the other one.
    text = text.replace("class Model: ...", "class Model: extra = 1", 1).replace("    @sequence_bounded_mrope\n", "")
    text = text.replace("    class Model: extra", "    @sequence_bounded_mrope\n        class Model: extra")
    package.write(text.replace("import no_such_module", "import json"))
    info = package.inspect("Model")
    assert info.supports_sequence_bounded_mrope and info.record.startswith("not kept")


def test_a_name_that_another_module_defines_is_inspected_each_time(package):
    package.write("from record_pkg.model import Dense\nAlias = Dense\n", "again")
    for name in ("Dense", "Alias"):
        info = package.inspect(name, "again")
        assert info.supports_sequence_bounded_mrope and info.record.startswith("not kept (the source")
    assert not package.cache.exists()


def test_a_folder_that_cannot_be_written_is_not_an_error(package, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    for _ in range(2):
        package.forget()
        info = inspect_model_cls("record_pkg.model:Dense", cache_dir=blocker / "cache")
        assert info.supports_sequence_bounded_mrope and info.record == "not kept (Not a directory)"
    # A folder where the file should be.
    package.record().mkdir(parents=True)
    info = package.inspect()
    assert info.supports_sequence_bounded_mrope and info.record == "not kept (Is a directory)"


def test_an_interrupted_write_leaves_the_old_record_and_nothing_else(package, monkeypatch):
    package.inspect()
    before = package.record().read_text()
    package.write(CERTIFIED.replace("return x", "return -x"))

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    info = package.inspect()
    assert info.supports_sequence_bounded_mrope and info.record == "not kept (No space left on device)"
    assert package.record().read_text() == before
    assert [path.name for path in package.record().parent.iterdir()] == [package.record().name]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_processes_at_the_same_time_agree_and_leave_one_whole_record(package):
    def work(seed: int) -> None:
        for turn in range(60):
            info = package.inspect()
            assert info.supports_sequence_bounded_mrope
            assert info.record in ("hit", "written") or info.record.startswith("rewritten"), info.record
            if turn % 3 == seed:
                package.record().write_text("torn")

    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=work, args=(seed,)) for seed in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    package.inspect()
    assert package.inspect().record == "hit"
    assert [path.name for path in package.record().parent.iterdir()] == [package.record().name]


def test_the_folder_is_the_argument_then_the_variable_then_the_users(package, monkeypatch, tmp_path):
    monkeypatch.setenv("ROPE_OPS_CACHE_DIR", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert package.inspect().record_path.startswith(str(package.cache))
    package.forget()
    assert inspect_model_cls("record_pkg.model:Dense").record_path.startswith(str(tmp_path / "variable"))
    monkeypatch.delenv("ROPE_OPS_CACHE_DIR")
    package.forget()
    path = inspect_model_cls("record_pkg.model:Dense").record_path
    assert "rope-ops" in path and os.path.exists(path)
    if sys.platform == "linux":
        assert path.startswith(str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    package.forget()
    info = inspect_model_cls("record_pkg.model:Dense")
    assert info.supports_sequence_bounded_mrope and "platformdirs" in info.record


def test_a_config_takes_a_name_and_imports_nothing_on_a_hit(package, monkeypatch):
    monkeypatch.setenv("ROPE_OPS_CACHE_DIR", str(package.cache))
    package.inspect()
    package.forget()
    fields = {"head_dim": 64, "max_position_embeddings": 256, "rope_theta": 1e4}
    config = ModelConfig.from_hf(fields, model_cls="record_pkg.model:Dense", max_model_len=32)
    assert config.mrope_cache_max_position == 32 and config.model_class == "record_pkg.model:Dense"
    assert len(package.inspections) == 1 and "record_pkg.model" not in sys.modules
    live = importlib.import_module("record_pkg.model").Dense
    assert ModelConfig.from_hf(fields, model_cls=live, max_model_len=32).compute_hash() == config.compute_hash()


def test_a_namespace_package_is_found_without_an_import(package):
    nested = package.folder.parent / "record_pkg_space" / "deep"
    nested.mkdir(parents=True)
    (nested / "model.py").write_text(CERTIFIED)
    name = "record_pkg_space.deep.model"
    for state in ("written", "hit"):
        for loaded in (name, name.rpartition(".")[0], "record_pkg_space"):
            sys.modules.pop(loaded, None)
        assert inspect_model_cls(f"{name}:Dense", cache_dir=package.cache).record == state
    assert "record_pkg_space" not in sys.modules


def test_a_class_without_a_name_is_read_and_not_kept():
    @sequence_bounded_mrope
    class Local: ...

    info = inspect_model_cls(Local)
    assert info.supports_sequence_bounded_mrope and info.record == "not kept (the class has no importable name)"
    assert info.record_path is None


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("record_pkg.model.Dense", ValueError, "must be named pkg.mod:Class, got 'record_pkg.model.Dense'"),
        ("../../etc/passwd:X", ValueError, "must be named pkg.mod:Class"),
        ("record_pkg.model:../X", ValueError, "must be named pkg.mod:Class"),
        ("record_pkg.none:Dense", ImportError, "record_pkg.none"),
        ("record_pkg.model:None_", AttributeError, "None_"),
        ("record_pkg.model:Dense.forward", TypeError, "must name a class, got <function"),
    ],
)
def test_a_name_of_no_class_is_one_clear_error(package, name, error, message):
    with pytest.raises(error, match=message):
        inspect_model_cls(name, cache_dir=package.cache)


def test_reading_a_config_costs_no_import_of_anything_large():
    script = """
    import sys
    from rope_ops import ModelConfig, inspection
    ModelConfig.from_hf({"head_dim": 64, "max_position_embeddings": 256, "rope_theta": 1e4}).mrope_cache_max_position
    large = {"platformdirs", "sympy", "torch._dynamo", "triton", "transformers"} & sys.modules.keys()
    sys.exit(f"imported: {large}" if large else 0)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
