"""``rope-ops certify pkg.mod:Class [config.json]``: what is known of a class's certificate, and the bound it gives."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rope_ops.config import ModelConfig
from rope_ops.inspection import inspect_model_cls


def run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Print the state of a certificate; returns 0 where the class is certified and 1 where it is not.

    ``parser.error`` is called with one line for input that cannot be used.
    """
    parser.description = __doc__
    parser.add_argument("model_class", metavar="PKG.MOD:CLASS", help="the class that is served")
    parser.add_argument("config", nargs="?", help="a Hugging Face config.json, or its folder: shows the bound")
    parser.add_argument("--max-model-len", type=int, help="longest sequence served, draft tokens included")
    parser.add_argument("--layer-type", help="whose rope, for a config with one for each layer type")
    parser.add_argument("--cache-dir", help="folder of the records; $ROPE_OPS_CACHE_DIR or the user's cache folder")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    options = parser.parse_args(arguments)
    try:
        data = _state(options)
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(str(error))
    print(json.dumps(data, indent=2) if options.json else _as_text(data))
    return 0 if data["supports_sequence_bounded_mrope"] else 1


def _state(options: argparse.Namespace) -> dict[str, Any]:
    info = inspect_model_cls(options.model_class, cache_dir=options.cache_dir)
    data = dataclasses.asdict(info)
    if options.config is None:
        if options.max_model_len is not None or options.layer_type is not None:
            raise ValueError("--max-model-len and --layer-type need a config")
        return data
    config = ModelConfig.from_hf(
        options.config, model_cls=info, max_model_len=options.max_model_len, layer_type=options.layer_type
    )
    data["bound"] = {
        "config": options.config,
        "max_model_len": config.max_model_len,
        "legacy_rows": config.legacy_rows,
        "mrope_cache_max_position": config.mrope_cache_max_position,
        "no_bound_reason": config.no_bound_reason,
    }
    return data


def _as_text(data: dict[str, Any]) -> str:
    certified = "certified" if data["supports_sequence_bounded_mrope"] else "not certified"
    lines = [
        f"class:    {data['model_class']} is {certified}",
        f"declared: {data['declared']}",
        f"record:   {data['record']}" + (f" | {data['record_path']}" if data["record_path"] else ""),
    ]
    bound = data.get("bound")
    if bound is None:
        lines.append("bound:    give a config.json to see it")
    elif bound["no_bound_reason"] is None:
        lines.append(f"bound:    {bound['mrope_cache_max_position']:,} rows of {bound['legacy_rows']:,} (legacy)")
    else:
        lines.append(f"bound:    none, {bound['legacy_rows']:,} rows (legacy) are kept: {bound['no_bound_reason']}")
    return "\n".join(lines)
