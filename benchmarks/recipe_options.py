"""Options of XLA that published runs on TPUs were compiled with.

Recipes of MaxText name groups of flags; ``GROUPS`` has their values (AI-Hypercomputer/maxtext,
``benchmarks/xla_flags_library.py`` at e591f30), without flags that libtpu 0.0.42 does not know as
options of a compile. Other runs say in words what they turned on or off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Options = dict[str, Any]


def _on(*names: str) -> Options:
    return dict.fromkeys((f"xla_{name}" for name in names), True)


_FUSE = "tpu_enable_async_collective_fusion"
_SPARSE_CORE: Options = {
    **_on("tpu_use_tc_device_shape_on_sc", "sc_disable_megacore_partitioning"),
    "xla_sc_enable_instruction_fusion": False,
}


def _on_sparse_cores(kind: str) -> Options:
    """Return the options that give the sparse cores a kind of collective."""
    name = kind.replace("-", "_")
    offload = f"tpu_enable_sparse_core_collective_offload_{name}"
    tracing = f"tpu_enable_{name}_offload_tracing"
    return {**_on(offload, tracing), f"xla_{_FUSE}_fuse_{name}": False, **_SPARSE_CORE}


_VMEM = "xla_tpu_scoped_vmem_limit_kib"
GROUPS: Mapping[str, Options] = {
    "DENSE_VMEM_LIMIT_FLAG": {_VMEM: 98304},
    "MOE_VMEM_LIMIT_FLAG": {_VMEM: 81920},
    "CF_FOR_ALL_GATHER": _on(
        _FUSE,
        f"{_FUSE}_fuse_all_gather",
        f"{_FUSE}_multiple_steps",
        "tpu_overlap_compute_collective_tc",
        "enable_async_all_gather",
    ),
    "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE": _on_sparse_cores("all-reduce"),
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": {
        **_on("tpu_use_minor_sharding_for_major_trivial_input"),
        **_on("tpu_assign_all_reduce_scatter_layout"),
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    },
    "DATA_PARALLEL_OVERLAP": _on(
        "tpu_enable_data_parallel_all_reduce_opt", "tpu_data_parallel_opt_different_sized_ops"
    ),
    "HOST_OFFLOAD_FLAGS": {
        **_on(
            "tpu_enable_all_experimental_scheduler_features",
            "tpu_enable_scheduler_memory_pressure_tracking",
            "tpu_enable_ag_backward_pipelining",
        ),
        **dict.fromkeys(
            (
                "xla_tpu_aggressive_opt_barrier_removal",
                "xla_lhs_prioritize_async_depth_over_stall",
                "xla_should_allow_loop_variant_parameter_in_chain",
                "xla_should_add_loop_invariant_op_in_chain",
            ),
            "ENABLED",
        ),
        "xla_tpu_host_transfer_overlap_limit": 24,
        "xla_max_concurrent_host_send_recv": 100,
        "xla_tpu_scheduler_percent_shared_memory_limit": 100,
        "xla_latency_hiding_scheduler_rerun": 2,
    },
    "DISABLE_COLLECTIVE_MATMUL": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000},
}
#: What a row says in words, and the group that it means.
_WORDS = {
    "collective matmul off": "DISABLE_COLLECTIVE_MATMUL",
    "continuation fusion": "CF_FOR_ALL_GATHER",
    "host-offload scheduler": "HOST_OFFLOAD_FLAGS",
}


def recipe_options(flags: Mapping[str, Any]) -> tuple[Options, tuple[str, ...]]:
    """Return the options of a row's flags, and what of them is not known, in words."""
    found: Options = {}
    unknown = []
    for group in flags.get("xla_flag_groups", ()):
        found |= GROUPS.get(group, {})
        unknown += [group] * (group not in GROUPS)
    if kib := flags.get("scoped_vmem_kib"):
        found[_VMEM] = int(kib)
    for text in flags.get("xla_flags", ()):
        said = dict(_said(text))
        found |= said
        unknown += [text] * (not said)
    return found, tuple(unknown)


def _said(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a flag, or of a sentence about several."""
    if text.startswith("--"):
        name, _, value = text.lstrip("-").partition("=")
        yield name, {"true": True, "false": False}.get(value) if not value.isdigit() else int(value)
        return
    for words, group in _WORDS.items():
        if words in text:
            yield from GROUPS[group].items()
    if "SparseCore" in text:
        for kind in ("all-reduce", "reduce-scatter", "all-gather"):
            if kind in text:
                yield from _on_sparse_cores(kind).items()
