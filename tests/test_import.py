"""``import rope_ops`` costs torch and little else, and works where there is no Triton."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_no_heavy_module():
    """R47"""
    run(
        """
        import sys, torch
        before = set(sys.modules)
        import rope_ops
        heavy = {"triton", "torch._dynamo", "torch._inductor", "sympy", "matplotlib", "tabulate", "tqdm"}
        assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)
        """
    )


def test_import_is_quick():
    times = [
        float(
            run(
                """
                import time, torch
                start = time.perf_counter()
                import rope_ops
                print(time.perf_counter() - start)
                """
            )
        )
        for _ in range(3)
    ]
    assert min(times) < 0.1


def test_ops_work_without_triton():
    """R47"""
    run(
        """
        import sys
        sys.modules["triton"] = None
        import torch, rope_ops
        assert rope_ops.build_cos_sin_cache(torch.ones(4), 5).shape == (5, 8)
        rope = rope_ops.get_rope(8, 16, rope_parameters={"rope_theta": 1e4})
        rope(torch.arange(3), torch.randn(3, 8))
        """
    )


def test_a_cuda_call_without_triton_is_one_clear_error(monkeypatch):
    import rope_ops.ops.cache as cache

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rope_ops.kernels.cache", raising=False)
    with pytest.raises(RuntimeError, match="build_cos_sin_cache: a CUDA tensor needs Triton"):
        cache._kernels()


def test_reload_and_a_second_copy_keep_the_ops_alive(tmp_path):
    """R49"""
    run(
        """
        import gc, importlib, pathlib, shutil, sys, torch, rope_ops
        import rope_ops.ops, rope_ops.ops._library, rope_ops.ops.cache
        expected = rope_ops.build_cos_sin_cache(torch.ones(3), 4)
        for name in ("rope_ops.ops._library", "rope_ops.ops.cache", "rope_ops.ops", "rope_ops"):
            importlib.reload(sys.modules[name])
        gc.collect()
        assert torch.equal(rope_ops.build_cos_sin_cache(torch.ones(3), 4), expected)
        source = pathlib.Path(rope_ops.__file__).parent
        for name in [n for n in sys.modules if n == "rope_ops" or n.startswith("rope_ops.")]:
            del sys.modules[name]
        gc.collect()
        import os
        shutil.copytree(source, os.environ["COPY"] + "/rope_ops")
        sys.path.insert(0, os.environ["COPY"])
        import rope_ops as second
        assert second.__file__.startswith(os.environ["COPY"])
        assert torch.equal(second.build_cos_sin_cache(torch.ones(3), 4), expected)
        """,
        COPY=str(tmp_path),
    )
