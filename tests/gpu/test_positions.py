"""The position kernel on a GPU: against the reference, under CUDA graphs, at large strides, from both stores."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from position_batches import POISON, arguments, prompt_segments, random_batch

from rope_ops import reference
from rope_ops.ops import prepare_positions
from rope_ops.positions import RopeState, SegmentBuilder

GB = 1 << 30


def on_gpu(batch):
    return {name: value.cuda() for name, value in batch.items()}


def expected(batch, **options):
    batch = arguments(batch)
    reference.prepare_positions(**batch, **options)
    return batch["positions"]


def filled(batch, **options):
    batch = on_gpu(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare_positions(**batch, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return batch["positions"].cpu()


def needs_memory(bytes_):
    free = torch.cuda.mem_get_info()[0]
    if free < bytes_ + 2 * GB:
        pytest.skip(f"needs {bytes_ / GB:.0f} GiB of free GPU memory, {free / GB:.0f} are free")


@pytest.mark.parametrize("num_dims", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_reference(num_dims, dtype):
    """Random batches, all that must not be read or written is poisoned; no call waits for the device."""
    for seed in range(25):
        longest = (1, 20, 600)[seed % 3]
        num_reqs = (0, 1, 5, 8)[seed % 4]
        batch = random_batch(
            seed, num_dims=num_dims, num_reqs=num_reqs, longest=longest, width=700, dtype=dtype, spare=40
        )
        assert torch.equal(filled(batch), expected(batch))
        padded = int(batch["query_start_loc"][-1]) + seed
        assert torch.equal(filled(batch, num_tokens_padded=padded), expected(batch, num_tokens_padded=padded))


def test_strided_tensors():
    batch = random_batch(5, num_reqs=6, longest=400, width=500)
    want = expected(batch)
    strided = on_gpu(batch)
    strided["prefill_positions"] = torch.stack((strided["prefill_positions"],) * 2, dim=-1)[..., 1]
    for name in ("idx_mapping", "query_start_loc", "prefill_lens", "num_computed_tokens", "prefill_delta"):
        strided[name] = torch.stack((strided[name], torch.full_like(strided[name], -7)), dim=-1)[:, 0]
    columns = want.shape[1]
    for out in (torch.full((columns, 3), POISON).cuda().t(), torch.full((3, 2 * columns), POISON).cuda()[:, ::2]):
        prepare_positions(**(strided | {"positions": out}))
        assert torch.equal(out.cpu(), want)


def test_seventy_thousand_requests():
    batch = random_batch(1, num_dims=3, num_reqs=70_000, num_slots=70_000, longest=2, width=4)
    # One long chunk in the middle: its tiles search among all requests.
    starts = batch["query_start_loc"].long()
    starts[35_001:] += 5_000
    batch["idx_mapping"][35_000] = 7
    batch |= {"query_start_loc": starts, "positions": torch.full((3, int(starts[-1]) + 5), POISON)}
    want = arguments(batch)
    prepare_positions(**want)  # the ATen path, compared with the reference in the CPU tests
    assert torch.equal(filled(batch), want["positions"])


def test_a_slot_that_does_not_exist():
    batch = random_batch(5, num_reqs=2, num_slots=4)
    batch |= {"query_start_loc": torch.tensor([0, 2, 3]), "idx_mapping": torch.tensor([3, 3])}
    batch["positions"] = torch.full((3, 3), POISON)
    want = expected(batch)
    want[:, :2] = -1
    for slot in (-1, 4, 2**31 - 1):
        batch["idx_mapping"] = torch.tensor([slot, 3])
        assert torch.equal(filled(batch), want)


def test_errors_are_the_same_as_on_cpu():
    batch = on_gpu(random_batch(5, num_reqs=2))
    with pytest.raises(ValueError, match="on the device of positions, cuda:0, got idx_mapping on cpu"):
        prepare_positions(**(batch | {"idx_mapping": batch["idx_mapping"].cpu()}))
    with pytest.raises(ValueError, match="num_tokens_padded must be at most"):
        prepare_positions(**batch, num_tokens_padded=10**6)


def test_rows_more_than_2_31_elements_apart():
    """Output rows, table rows and store offsets past 2**31 elements."""
    needs_memory(36 * GB)
    stride = 2**31 + 8
    out = torch.empty(2 * stride + 64, dtype=torch.int64, device="cuda").as_strided((3, 64), (stride, 1))
    out.fill_(POISON)
    batch = random_batch(3, num_reqs=5, spare=0, longest=10)
    want = torch.full((3, 64), POISON)
    want[:, : batch["positions"].shape[1]] = expected(batch)
    prepare_positions(**(on_gpu(batch) | {"positions": out}))
    assert torch.equal(out.cpu(), want)
    del out
    torch.cuda.empty_cache()

    # 3,000 slots of 3 x 262,144: the last one begins at element 2,358,509,568.
    slots, width = 3000, 262_144
    table = torch.empty((slots * 3, width), dtype=torch.int32, device="cuda")
    table[-3:] = torch.arange(3 * width, device="cuda", dtype=torch.int32).view(3, width)
    last = {
        "positions": torch.full((3, 1001), POISON, device="cuda"),
        "prefill_positions": table,
        "prefill_delta": torch.zeros(slots, dtype=torch.int32, device="cuda"),
        "idx_mapping": torch.tensor([slots - 1], device="cuda"),
        "query_start_loc": torch.tensor([0, 1000], device="cuda"),
        "prefill_lens": torch.full((slots,), width, device="cuda"),
        "num_computed_tokens": torch.full((slots,), width - 1000, device="cuda"),
    }
    prepare_positions(**last)
    assert torch.equal(last["positions"][:, :1000].int(), table[-3:, -1000:])
    assert (last["positions"][:, 1000] == POISON).all()
    del table, last
    torch.cuda.empty_cache()

    state = RopeState(3, slots, 1000, width, "cuda", store="dense")
    segments = prompt_segments(4, 3, blocks=12, largest=9)
    state.set_prefill_positions(slots - 1, segments, 0)
    tensor = lambda *values: torch.tensor(values, device="cuda")  # noqa: E731
    lens = torch.full((slots,), segments.length, device="cuda")
    count = min(1000, segments.length)
    state.prepare_positions(tensor(slots - 1), tensor(0, count), lens, torch.zeros_like(lens))
    assert torch.equal(state.get_positions(count).cpu(), torch.from_numpy(segments.to_dense()[:, :count]))


def life(state, seed, steps=6, slots=5):
    """Arrivals, removals and mixed steps of a state; yields the arguments of each step on CPU."""
    rng = np.random.default_rng(seed)
    lens = torch.zeros(slots, dtype=torch.int32)
    for event in range(steps):
        slot = int(rng.integers(slots))
        if rng.random() < 0.2:
            state.remove_request(slot)
            lens[slot] = 0
        else:
            segments = prompt_segments(seed + event, state.num_dims, blocks=10, largest=8)
            noise = rng.integers(0, 99, (state.num_dims, 40))
            prefill = segments if rng.random() < 0.7 else noise
            state.set_prefill_positions(slot, prefill, -1)
            lens[slot] = segments.length if prefill is segments else 40
        tokens = rng.integers(0, 300, slots) * (rng.random(slots) > 0.2)
        yield (
            torch.from_numpy(rng.permutation(slots)),
            torch.from_numpy(np.concatenate(([0], np.cumsum(tokens)))),
            lens.clone(),
            torch.from_numpy(rng.integers(0, 1 + lens.numpy())),
        )


@pytest.mark.parametrize("store", ["segments", "dense"])
@pytest.mark.parametrize("num_dims", [3, 4])
def test_both_stores_equal_the_cpu(store, num_dims):
    for seed in range(8):
        make = lambda device: RopeState(  # noqa: E731
            num_dims, 5, 1600, 8000, device, store=store, **({"store_words": 64} if store == "segments" else {})
        )
        cpu, gpu = make("cpu"), make("cuda")
        for on_cpu, on_device in zip(life(cpu, seed), life(gpu, seed), strict=True):
            cpu.prepare_positions(*on_cpu, num_tokens_padded=1590)
            gpu.positions.fill_(POISON)
            gpu.prepare_positions(*(tensor.cuda() for tensor in on_device), num_tokens_padded=1590)
            assert torch.equal(gpu.get_positions(1590).cpu(), cpu.get_positions(1590))
            assert (gpu.positions[:, 1590:] == POISON).all()
        for slot in range(5):
            length = int(on_cpu[2][slot])
            assert torch.equal(gpu.read_prefill_positions(slot, length), cpu.read_prefill_positions(slot, length))


@pytest.mark.parametrize("num_segments", [256, 257, 1000])
def test_more_segments_than_one_round_of_the_search(num_segments):
    """A chunk at the end and one in the middle, each through hundreds of segments."""
    builder = SegmentBuilder(3)
    for _ in range(num_segments):
        builder.grid((3, 3), (builder.length,) * 3, ((0, 0, 1), (0, 1, 0)))
    segments = builder.build()
    length = segments.length
    state = RopeState(3, 2, 2048, length, "cuda")
    for slot in range(2):
        state.set_prefill_positions(slot, segments, 0)
    tensor = lambda *values: torch.tensor(values, device="cuda")  # noqa: E731
    starts = (length - 1000, 500)
    state.prepare_positions(tensor(1, 0), tensor(0, 1000, 2000), tensor(length, length), tensor(*starts[::-1]))
    want = segments.to_dense()
    want = np.concatenate([want[:, start : start + 1000] for start in starts], axis=1)
    assert torch.equal(state.get_positions(2000).cpu(), torch.from_numpy(want))


@pytest.mark.parametrize("store", ["segments", "dense"])
def test_a_captured_graph_replays_other_batches(store):
    """R30: one capture at full capacity, then batches of other lengths, orders and sizes through the same memory."""
    slots, capacity = 5, 1600
    cpu, gpu = (RopeState(3, slots, capacity, 8000, device, store=store) for device in ("cpu", "cuda"))
    idx = torch.zeros(slots, dtype=torch.int64, device="cuda")
    starts = torch.zeros(slots + 1, dtype=torch.int64, device="cuda")
    lens = torch.zeros(slots, dtype=torch.int32, device="cuda")
    computed = torch.zeros(slots, dtype=torch.int64, device="cuda")
    gpu.prepare_positions(idx, starts, lens, computed, num_tokens_padded=capacity)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.prepare_positions(idx, starts, lens, computed, num_tokens_padded=capacity)

    for batch, _ in zip(life(cpu, 3, steps=12), life(gpu, 3, steps=12), strict=True):
        cpu.prepare_positions(*batch, num_tokens_padded=capacity)
        gpu.apply_staged_writes()
        for held, new in zip((idx, starts, lens, computed), batch, strict=True):
            held.copy_(new)
        gpu.positions.fill_(POISON)
        graph.replay()
        assert torch.equal(gpu.get_positions(capacity).cpu(), cpu.get_positions(capacity))
        assert (gpu.positions[:, capacity] == POISON).all()


def test_a_capture_is_protected():
    """What is staged must be applied before a capture, and the store may not move after it."""
    state = RopeState(3, 2, 64, 64, "cuda", store_words=30)
    one = lambda *values: torch.tensor(values, device="cuda")  # noqa: E731
    arguments_ = (one(0), one(0, 1), one(0, 0), one(0, 0))
    state.prepare_positions(*arguments_)
    state.set_prefill_positions(0, torch.arange(30).view(3, 10), 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="must be applied before a CUDA graph is captured"):
        with torch.cuda.graph(graph):
            state.prepare_positions(*arguments_)
    state.apply_staged_writes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.prepare_positions(*arguments_)
    # Slot 0 holds 15 of the 30 words. Slot 1 fits with 6, then not with 60.
    state.set_prefill_positions(1, torch.arange(6).view(3, 2) ** 2, 0)
    state.apply_staged_writes()
    state.set_prefill_positions(1, torch.arange(60).view(3, 20) ** 2 % 97, 0)
    with pytest.raises(RuntimeError, match="cannot grow, since a captured CUDA graph holds its address"):
        state.apply_staged_writes()


def test_staging_does_not_wait_for_the_device():
    state = RopeState(3, 4, 64, 4096, "cuda")
    segments = prompt_segments(2, 3)
    state.set_prefill_positions(0, segments, 0)
    state.apply_staged_writes()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot in range(4):
            state.set_prefill_positions(slot, segments, 0)
        state.apply_staged_writes()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slot in range(4):
        want = torch.from_numpy(segments.to_dense())
        assert torch.equal(state.read_prefill_positions(slot, segments.length), want)


def test_compiled():
    """Under Inductor the buffer itself is written, once, and read by the code after it."""
    from torch._inductor.utils import run_and_get_code

    def step(positions, *tensors):
        prepare_positions(positions, *tensors, num_tokens_padded=32)
        return positions[:, :32] * 2

    batch = random_batch(4, num_reqs=3, spare=40)
    want = expected(batch, num_tokens_padded=32)
    positions, *tensors = on_gpu(batch).values()
    got, code = run_and_get_code(torch.compile(step, fullgraph=True), positions, *tensors)
    assert torch.equal(positions.cpu(), want)
    assert torch.equal(got.cpu(), want[:, :32] * 2)
    assert "clone" not in code[0].split("def call(")[1].split("def benchmark_")[0]
