"""How DTensor shards the operators: tokens, batch and heads as they come; lanes of a head are gathered first.

Registered by :func:`register`, or by the first call of :func:`rope_ops.ops.rotate` or :func:`rope_ops.ops.rotate_` in
a process that has imported ``torch.distributed.tensor``. Every tensor argument must then be a DTensor, replicated
where it is not sharded (``torch.distributed.tensor.experimental.implicit_replication`` does that for plain ones).
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def register() -> None:
    """Give DTensor the sharding rules of ``rotate``, ``rotate_`` and ``build_cos_sin_cache``, once."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    import rope_ops.ops  # noqa: F401 - defines the operators

    ops = torch.ops.rope_ops

    @register_sharding(ops.rotate.default)
    def _rotate(query, key, *rest):
        return [([out[0], out[1] or Replicate()], inputs) for out, inputs in _shardings(query, key, *rest)]

    @register_sharding(ops.rotate_.default)
    def _rotate_(query, key, positions, inv_freq, cos_sin_cache, head_size, *rest):
        _check_in_place(query, key, head_size)
        rest = (positions, inv_freq, cos_sin_cache, head_size, *rest)
        return [([], inputs) for _, inputs in _shardings(query, key, *rest)]

    @register_sharding(ops.build_cos_sin_cache.default)
    def _build_cos_sin_cache(inv_freq, *rest):
        return [([Replicate()], [Replicate(), *_nothing(rest)])]


def _nothing(arguments) -> list[None]:
    return [None] * len(arguments)


def _shardings(query, key, positions, inv_freq, cos_sin_cache, head_size, *rest):
    """Pairs of (query's and key's placement, placements of all arguments) that need no communication."""
    from torch.distributed.tensor import Replicate, Shard

    token_dims = max(1, query.ndim - 2)
    everything = [None if x is None else Replicate() for x in (inv_freq, cos_sin_cache)]

    def pair(of_query, of_key, of_positions):
        of_key = None if key is None else of_key
        return (of_query, of_key), [of_query, of_key, of_positions, *everything, None, *_nothing(rest)]

    replicated = Replicate()
    shardings = [pair(replicated, replicated, replicated)]
    for dim in range(token_dims):
        shardings.append(pair(Shard(dim), Shard(dim), Shard(dim + positions.ndim - token_dims)))
    # Heads: each of query and key may be split or whole, as key heads may be fewer than ranks.
    query_heads, key_heads = (_head_placement(x, head_size) for x in (query, key))
    if query_heads:
        shardings.append(pair(query_heads, replicated, replicated))
    if key_heads:
        shardings.append(pair(replicated, key_heads, replicated))
    if query_heads and key_heads:
        shardings.append(pair(query_heads, key_heads, replicated))
    return shardings


def _head_placement(x, head_size: int):
    """Sharded over heads; None where a shard of ``[num_tokens, heads * head_size]`` would split a head."""
    from torch.distributed.tensor import Shard

    if x is None:
        return None
    if x.ndim == 2:
        return Shard(1) if (x.shape[1] // head_size) % x.mesh.size() == 0 else None
    return Shard(x.ndim - 2)


def _check_in_place(query, key, head_size: int) -> None:
    """What is written must be where it is: a redistributed copy would be turned and thrown away."""
    from torch.distributed.tensor import Replicate, Shard

    for which, x in (("query", query), ("key", key)):
        if x is None:
            continue
        token_dims = max(1, x.ndim - 2)
        for mesh_dim, placement in enumerate(x.placements):
            on_heads = type(placement) is Shard and placement == _head_placement(x, head_size)
            on_tokens = type(placement) is Shard and placement.dim < token_dims
            if not (placement == Replicate() or on_heads or on_tokens):
                raise ValueError(
                    f"rotate_: {which} must be replicated or sharded over tokens or whole heads, got placement "
                    f"{placement}; redistribute it first, or use rotate"
                )
            if on_tokens and key is not None and query.placements[mesh_dim] != key.placements[mesh_dim]:
                raise ValueError(
                    f"rotate_: query and key must be sharded over the same tokens, got placements "
                    f"{query.placements} and {key.placements}"
                )
