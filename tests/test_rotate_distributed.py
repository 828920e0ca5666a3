"""DTensor: two processes, the operators sharded as tensor, sequence and data parallelism do it (R49)."""

import socket
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
from rope_ops.ops import build_cos_sin_cache, rotate, rotate_

rank = int(sys.argv[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
INV_FREQ = torch.tensor([1.0, 0.3, 0.1])
FORM = dict(head_size=8, axis_map="012")


def sharded(x, placement):
    return distribute_tensor(x, mesh, [placement])


def check(query, key, positions, placements, expected_placement, function=rotate):
    tensors = (query, key, positions, INV_FREQ)
    dtensors = [sharded(x, p) for x, p in zip(tensors, (*placements, Replicate()))]
    want = rotate(*tensors, **FORM)
    got = function(*dtensors, **FORM)
    if got is None:
        got = dtensors[:2]
    assert [x.placements[0] for x in got] == list(expected_placement), [x.placements for x in got]
    for g, w in zip(got, want):
        assert torch.equal(g.full_tensor(), w)


R, S = Replicate(), Shard
query, key = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
positions = torch.randint(0, 99, (3, 6))
for function in (rotate, rotate_):
    check(query, key, positions, (S(1), S(1), R), (S(1), S(1)), function)      # heads
    check(query, key[:, :1], positions, (S(1), R, R), (S(1), R), function)     # heads, one key head
    check(query, key, positions, (S(0), S(0), S(1)), (S(0), S(0)), function)   # tokens
    check(query, key, positions, (S(0), S(0), R), (S(0), S(0)), function)      # tokens, whole positions
    check(query.flatten(1), key.flatten(1), positions, (S(1), S(1), R), (S(1), S(1)), function)
    batch = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randint(0, 99, (3, 2, 6))
    check(*batch, (S(0), S(0), S(1)), (S(0), S(0)), function)                  # batch
    check(*batch, (S(1), S(1), S(2)), (S(1), S(1)), function)                  # sequence
    check(*batch, (S(2), S(2), R), (S(2), S(2)), function)                     # heads
check(query, key, positions, (S(2), S(2), R), (R, R))                          # lanes are gathered
check(torch.randn(6, 3 * 8), key.flatten(1), positions, (S(1), S(1), R), (R, S(1)))  # half a head is gathered

for placements, message in (((S(2), S(2)), "whole heads"), ((S(0), S(1)), "same tokens")):
    try:
        dtensors = [sharded(x, p) for x, p in zip((query, key, positions, INV_FREQ), (*placements, R, R))]
        rotate_(*dtensors, **FORM)
    except Exception as error:
        assert message in str(error), error
    else:
        raise AssertionError(placements)
try:
    rotate(sharded(query, S(1)), None, positions, INV_FREQ, **FORM)
except RuntimeError as error:
    assert "mixed torch.Tensor and DTensor" in str(error), error
else:
    raise AssertionError("a plain tensor was mixed with a DTensor")

# A layer with heads sharded: forward, gradient, and the same under torch.compile.
def loss(query, key, positions, inv_freq):
    turned = rotate(query * 2, key * 2, positions, inv_freq, **FORM)
    return turned[0], turned[1]

want = [x.clone().requires_grad_() for x in (query, key)]
outputs = loss(*want, positions, INV_FREQ)
torch.autograd.backward([x.sum() for x in outputs])
for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
    leaves = [sharded(x, S(1)).requires_grad_() for x in (query, key)]
    got = function(*leaves, sharded(positions, R), sharded(INV_FREQ, R))
    torch.autograd.backward([x.sum() for x in got])
    assert all(g.placements[0] == S(1) for g in got)
    for g, w in zip((*got, *(x.grad for x in leaves)), (*outputs, *(x.grad for x in want))):
        assert torch.equal(g.full_tensor(), w)

table = build_cos_sin_cache(sharded(INV_FREQ, S(0)), 5)
assert table.placements[0] == R and torch.equal(table.to_local(), build_cos_sin_cache(INV_FREQ, 5))
dist.destroy_process_group()
print("done")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        try:
            output, errors = rank.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            raise
        assert output == "done\n", errors
