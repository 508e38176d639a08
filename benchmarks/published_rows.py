"""Rows of published training runs, and which of them a plan of this library expresses.

A row is a JSON object: ``id``, ``source``, ``framework``, ``hardware``, ``model``,
``sequence_length``, ``global_batch``, ``micro_batch_per_device``, ``dtype``, ``optimizer``,
``parallelism``, ``remat``, ``flags``, ``measured`` and ``complete``. ``express`` turns one into a
``Configuration``, or says all reasons why it cannot: nothing depends on which row it is, only on
what the row says.

What MaxText's policies of recomputation keep is from its configuration (AI-Hypercomputer/maxtext,
``MaxText/configs/base.yml``, ``remat_policy``) and its decoder layers; torchtitan's selective
policy ``op`` keeps every second matrix product and attention (pytorch/torchtitan,
``parallelize_llama.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.recipe_options import Options, recipe_options
from capture.machine.target import target_names
from capture.plan.choices import StageChoice

Row = Mapping[str, Any]

#: Targets whose name is not that of the hardware's kind.
TARGETS = {"h100-96": "h100-96g", "a100": "a100-80g"}
#: What a policy keeps besides the input of a layer, by the names of ``models/llama.py``.
_QKV = ("query_proj", "key_proj", "value_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwo")
KEPT = {
    "save_qkv_proj": _QKV,
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "minimal": (*_QKV, "out_proj", *_MLP),
    "minimal_with_context": (*_QKV, "context", "out_proj", *_MLP),
    "selective, per op": ("query_proj", "value_proj", "context", "mlpwi_0", "mlpwo"),
}
#: Names that list the same tensors as others do.
_SAME = {"qkv_proj": _QKV, "mlpwi": ("mlpwi_0", "mlpwi_1")}
#: Parts of the loss where a kernel fuses the head with it, and the row gives no number.
FUSED_LOSS_PARTS = 8


@dataclass(frozen=True)
class Configuration:
    """A published run as a plan of this library: one stage that all devices share.

    Attributes:
        workload: Of the model without the number of its layers.
        num_layers: Of the model.
        nodes: Devices per node.
        target: Name of the target.
        choice: How the devices share the stage.
        global_batch: Sequences of a step.
        num_microbatches: Of a step.
        differs: What is not as it was published, in words.
        options: Of XLA, as the run set them.
    """

    workload: str
    num_layers: int
    nodes: tuple[int, ...]
    target: str
    choice: StageChoice
    global_batch: int
    num_microbatches: int
    differs: tuple[str, ...]
    options: Options


def options_of(workload: str) -> dict[str, str]:
    """Return the options of a workload's text."""
    return dict(part.split("=") for part in workload.split("?")[1].split("&"))


def is_of_jax(row: Row) -> bool:
    """Return whether XLA scheduled the program of the run."""
    return "JAX" in row["framework"]


def family_of(row: Row) -> str:
    """Return the family of a run: its rows are not independent of each other."""
    return f"{row['hardware']['kind']}, {row['framework']}, {row['model']['name']}"


def express(row: Row) -> Configuration | tuple[str, ...]:
    """Return a run as a plan, or every reason why there is none."""
    reasons = tuple(_reasons(row))
    return reasons if reasons else _configuration(row)


def _degree(row: Row, *names: str) -> int:
    """Return the product of some degrees of parallelism, of which an absent one is 1."""
    product = 1
    for name in names:
        product *= row["parallelism"].get(name) or 1
    return product


def _reasons(row: Row) -> Iterator[str]:
    model, dtype = row["model"], row["dtype"] or {}
    if not row["complete"]:
        yield "the row is not complete: simulating it needs guesses"
    if row.get("task") not in (None, "pretrain", "pretraining"):
        yield f"the task is {row['task']}"
    if model.get("experts"):
        yield f"{model['experts']} experts: no plan has expert parallelism"
    if dtype.get("quantization"):
        yield f"products are quantised ({dtype['quantization']})"
    if dtype.get("compute") != "bf16":
        yield f"computes in {dtype.get('compute')}"
    for name, what in (("cp", "context parallelism"), ("vpp", "virtual pipeline stages")):
        if _degree(row, name) > 1:
            yield f"{what} of degree {_degree(row, name)}"
    if _degree(row, "pp") > 1:
        yield f"a pipeline of {_degree(row, 'pp')} stages: windows of layers tell of one stage"
    if model.get("sliding_window"):
        yield f"attention in windows of {model['sliding_window']}: the model has none"
    if model.get("glu_mats") == 2 or model.get("gated_mlp") is False or model.get("mla"):
        yield "its layers are not those of models/llama.py (no gated feed-forward)"
    if any(model.get(k) is None for k in ("layers", "d_model", "heads", "ffn", "vocab")):
        yield "its shape is not all known"
    kind = row["hardware"]["kind"]
    if TARGETS.get(kind, kind) not in target_names():
        yield f"no target describes {kind}"
    if isinstance(kept := _kept(row), str):
        yield kept
    if not isinstance(row["global_batch"], int):
        yield f"the global batch is {row['global_batch']}"
    elif row["global_batch"] % _replicas(row):
        yield f"{_replicas(row)} replicas do not divide a batch of {row['global_batch']}"


def _replicas(row: Row) -> int:
    return _degree(row, "dp", "fsdp", "fsdp_transpose")


def _kept(row: Row) -> tuple[str, ...] | str | None:
    """Return what each layer keeps besides its input; None for everything; a reason, in words,
    for a policy that is not known."""
    remat = row["remat"] or {}
    policy, tensors = str(remat.get("policy")), remat.get("tensors") or {}
    if policy == "none":
        return None
    if policy.startswith(("nothing_saveable", "full")) and remat.get("method") != "block":
        return ()
    for name, kept in KEPT.items():
        if policy == name or policy.startswith(f"{name} "):
            return kept
    listed = [name for name, where in tensors.items() if where != "remat"]
    if policy.startswith("custom: "):
        listed = re.findall(r"\b(?:\w+_proj|context|mlpw[io]\w*)\b", policy)
    if policy.startswith("custom"):
        names = [same for name in listed for same in _SAME.get(name, (name,))]
        known = {*_QKV, *_MLP, "out_proj", "context"}
        return tuple(dict.fromkeys(name for name in names if name in known))
    return f"its policy of recomputation is not known: {policy}"


def _loss_parts(row: Row) -> int:
    flags = row["flags"] or {}
    if tiles := flags.get("num_vocab_tiling"):
        return int(tiles)
    return FUSED_LOSS_PARTS if "fused" in str(flags.get("loss")) else 1


def _workload(row: Row, kept: tuple[str, ...] | None) -> str:
    model = row["model"]
    options: dict[str, str | int] = {
        "width": model["d_model"],
        "num_heads": model["heads"],
        "num_key_value_heads": model.get("kv_heads") or model["heads"],
        "head_dim": model["head_dim"],
        "hidden": model["ffn"],
        "vocab_size": model["vocab"],
        "seq_len": row["sequence_length"],
        "dtype": "bfloat16",
        "attention": "flash",
    }
    if str(model["name"]).startswith("qwen3"):
        options["qk_norm"] = "true"
    if str((row["dtype"] or {}).get("weights")) == "bfloat16":
        options["param_dtype"] = "bfloat16"
    if _loss_parts(row) > 1:
        options["loss_chunks"] = _loss_parts(row)
    if kept:
        options["saved"] = "+".join(kept)
    return "models/llama.py:llama?" + "&".join(f"{k}={v}" for k, v in options.items())


def _configuration(row: Row) -> Configuration:
    hardware, kept = row["hardware"], _kept(row)
    assert not isinstance(kept, str), "a policy that is not known is a reason"
    replicas, tensor = _replicas(row), _degree(row, "tp")
    sharded = _degree(row, "fsdp", "fsdp_transpose") > 1
    splits_state = sharded or "optimizer" in str(row["parallelism"].get("zero"))
    choice = StageChoice(
        replicas,
        tensor,
        "full" if kept == () else "none",
        splits_state and replicas > 1,
        sharded,
        tensor > 1 and bool(row["parallelism"].get("sp")),
    )
    num_microbatches = 1
    if not is_of_jax(row) and row["micro_batch_per_device"]:
        num_microbatches = int(row["global_batch"] / (row["micro_batch_per_device"] * replicas))
    return Configuration(
        _workload(row, kept),
        row["model"]["layers"],
        (hardware["devices_per_node"],) * hardware["nodes"],
        TARGETS.get(hardware["kind"], hardware["kind"]),
        choice,
        row["global_batch"],
        row.get("grad_accum") or num_microbatches,
        tuple(_differences(row)),
        recipe_options(row["flags"] or {})[0],
    )


def _differences(row: Row) -> Iterator[str]:
    """Yield what the plan does otherwise than the run."""
    remat, optimizer = row["remat"] or {}, row["optimizer"] or {}
    tensors = remat.get("tensors") or {}
    if _degree(row, "dp") > 1 and _degree(row, "fsdp", "fsdp_transpose") > 1:
        yield "parameters are split over all replicas, not within groups of them"
    if _degree(row, "fsdp_transpose") > 1:
        yield "parameters are split along one dimension, not along two"
    if _degree(row, "slices") > 1:
        yield "all devices are in one slice"
    if "offload" in tensors.values() or "to host" in str(remat.get("policy")):
        yield "what the run offloads to the host stays on the device: no copies, a higher peak"
    if str(remat.get("policy")).startswith("selective"):
        yield "results of reduce-scatters are made again"
    if _degree(row, "tp") > 1 and row["parallelism"].get("sp") is None:
        yield "whether activations are split along the sequence is not published: they are not"
    weights = str((row["dtype"] or {}).get("weights"))
    if weights == "bfloat16" and not str(optimizer.get("mu_dtype")).startswith("bfloat16"):
        yield "the optimizer's state is bfloat16 as the weights are, not float32"
    if weights != "bfloat16" and str(optimizer.get("mu_dtype")).startswith("bfloat16"):
        yield "the optimizer's first moment is float32, not bfloat16"
    if "fused" in str((row["flags"] or {}).get("loss")):
        yield f"the fused loss is computed in {FUSED_LOSS_PARTS} parts by ordinary operations"
    for flag in recipe_options(row["flags"] or {})[1]:
        yield f"without the option {flag!r}"
    if not is_of_jax(row):
        yield "scheduled by XLA, which the run was not"
