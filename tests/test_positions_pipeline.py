"""Model inputs of pipeline ranks: the rules one by one, then two processes that run a model in two stages."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rope_ops.positions import RopeState, Text, model_inputs, rules
from rope_ops.positions.rules import Image

KEYS = {"input_ids", "positions", "inputs_embeds", "intermediate_tensors"}
POSITIONS = torch.arange(3)[None]


def test_the_first_rank():
    ids = torch.arange(3)
    inputs = model_inputs(is_first_rank=True, input_ids=ids, positions=POSITIONS)
    assert inputs.keys() == KEYS
    assert inputs["input_ids"] is ids and inputs["positions"] is POSITIONS
    assert inputs["inputs_embeds"] is None and inputs["intermediate_tensors"] is None
    embeds = torch.zeros(3, 8)
    assert (
        model_inputs(is_first_rank=True, input_ids=None, positions=POSITIONS, inputs_embeds=embeds)["inputs_embeds"]
        is embeds
    )
    with pytest.raises(ValueError, match="first pipeline rank must get no intermediate_tensors"):
        model_inputs(is_first_rank=True, input_ids=ids, positions=POSITIONS, intermediate_tensors={})
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds, got neither"):
        model_inputs(is_first_rank=True, input_ids=None, positions=POSITIONS)


def test_a_later_rank():
    sent = {"hidden_states": torch.zeros(3, 8)}
    inputs = model_inputs(
        is_first_rank=False,
        input_ids=torch.arange(3),
        positions=POSITIONS,
        inputs_embeds=torch.zeros(3, 8),
        intermediate_tensors=sent,
    )
    assert inputs.keys() == KEYS
    assert inputs["intermediate_tensors"] is sent and inputs["positions"] is POSITIONS
    assert inputs["input_ids"] is None and inputs["inputs_embeds"] is None
    with pytest.raises(ValueError, match="after the first needs the intermediate_tensors .*got None"):
        model_inputs(is_first_rank=False, input_ids=torch.arange(3), positions=POSITIONS)


class Stage(torch.nn.Module):
    """One pipeline stage: embeds or continues, then mixes in the positions."""

    def __init__(self, rank):
        super().__init__()
        self.scale = rank + 2

    def forward(self, input_ids, positions, inputs_embeds, intermediate_tensors):
        if intermediate_tensors is not None:
            hidden = intermediate_tensors["hidden_states"]
        else:
            hidden = inputs_embeds if inputs_embeds is not None else input_ids[:, None] + torch.arange(4.0)
        return hidden * self.scale + positions.sum(0)[:, None]


def _positions():
    state = RopeState(3, 2, 16, 32, "cpu")
    state.set_prefill_positions(1, *rules.qwen2_vl([Text(2), Image(2, 2), Text(4)]))
    one = torch.tensor
    state.prepare_positions(one([1, 0]), one([0, 10, 11]), one([0, 10]), one([5, 0]), num_tokens_padded=12)
    return state.get_positions(12)


def _rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    positions, ids, received = _positions(), torch.arange(12.0), None
    stage = Stage(rank)
    keys, refused = [], 0
    # As the capture of a graph and two steps: the stage is called with one and the same set of keys.
    for _ in range(3):
        if rank == 1:
            try:
                model_inputs(is_first_rank=False, input_ids=ids, positions=positions)
            except ValueError:
                refused += 1
            received = {"hidden_states": torch.empty(12, 4)}
            dist.recv(received["hidden_states"], src=0)
        inputs = model_inputs(
            is_first_rank=rank == 0, input_ids=ids, positions=positions, intermediate_tensors=received
        )
        keys.append(sorted(inputs))
        hidden = stage(**inputs)
        if rank == 0:
            dist.send(hidden, dst=1)
    torch.save((hidden, refused, keys), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path):
    """Two processes give what one process gives, and the second refuses a step without its tensors."""
    mp.spawn(_rank, (tmp_path,), nprocs=2)
    (_, first_refused, first_keys), (got, refused, keys) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    ids, positions = torch.arange(12.0), _positions()
    whole = Stage(1)(None, positions, None, {"hidden_states": Stage(0)(ids, positions, None, None)})
    assert torch.equal(got, whole)
    assert (first_refused, refused) == (0, 3)
    assert first_keys == keys == [sorted(KEYS)] * 3
