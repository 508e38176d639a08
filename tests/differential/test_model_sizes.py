"""Sizes of the zoo's models: published counts of parameters, layers, optimizer state, names of sizes."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from zoo_models import (
    KEY,
    MODELS,
    TINY_CLASSES,
    abstract_params,
    import_model,
    load,
    num_elements,
    sub_jaxprs,
)

from capture.model.workload import Workload, WorkloadSpec

NUM_PARAMETERS = {
    ("gpt", "tiny"): 434_304,
    ("gpt", "125M"): 164_476_416,
    ("gpt", "350M"): 408_193_024,
    ("gpt", "760M"): 838_781_952,
    ("gpt", "1.3B"): 1_420_365_824,
    ("gpt", "2.6B"): 2_782_336_000,
    ("gpt", "6.7B"): 6_867_656_704,
    ("gpt", "15B"): 15_631_984_640,
    ("gpt", "39B"): 39_506_690_048,
    ("moe", "tiny"): 759_296,
    ("moe", "380M"): 408_648_192,
    ("moe", "690M"): 710_662_656,
    ("moe", "1.3B"): 1_371_385_344,
    ("moe", "2.4B"): 2_415_716_352,
    ("moe", "7.1B"): 7_109_255_680,
    ("moe", "10B"): 10_217_217_024,
    ("moe", "27B"): 26_709_446_656,
    ("wide_resnet", "tiny"): 60_456,
    ("wide_resnet", "250M"): 254_123_104,
    ("wide_resnet", "500M"): 495_046_176,
    ("wide_resnet", "1B"): 1_005_653_184,
    ("wide_resnet", "2B"): 1_965_011_008,
    ("wide_resnet", "4B"): 4_000_937_344,
    ("wide_resnet", "6.8B"): 6_727_679_424,
    ("llama", "tiny"): 427_072,
    ("llama", "8B"): 8_030_261_248,
    ("llama", "70B"): 70_553_706_496,
    ("mingpt", "tiny"): 307_712,
    ("bert", "tiny"): 222_658,
    ("bert", "base"): 109_474_562,
    ("bert", "large"): 335_119_362,
    ("gpt2", "tiny"): 234_624,
    ("gpt2", "small"): 124_430_592,
    ("gpt2", "medium"): 406_261_760,
    ("gpt2", "xl"): 1_637_945_600,
    ("vgg", "tiny"): 67_176,
    ("vgg", "16L"): 138_357_544,
    ("vgg", "416L"): 577_894_184,
    ("resnet", "tiny"): 83_504,
    ("resnet", "34L"): 21_797_672,
    ("resnet", "101L"): 44_549_160,
    ("unet", "tiny"): 29_688,
    ("unet", "31M"): 31_037_698,
    ("vit", "tiny"): 57_768,
    ("vit", "60M"): 60_335_720,
    ("vit", "86M"): 86_558_440,
    ("mobilenet", "tiny"): 10_392,
    ("mobilenet", "5.4M"): 5_483_032,
    ("deep_recommender", "tiny"): 19_856,
    ("deep_recommender", "40M"): 39_556_968,
}


def count_marks(jaxpr: Any) -> int:
    here = sum(
        e.primitive.name == "name" and e.params["name"] == "layer_boundary" for e in jaxpr.eqns
    )
    return here + sum(count_marks(sub) for e in jaxpr.eqns for sub in sub_jaxprs(e))


def marks(workload: Workload, batch_size: int = 2) -> int:
    batch = jax.eval_shape(lambda key: workload.batch(key, batch_size), KEY)
    return count_marks(jax.make_jaxpr(workload.loss_fn)(abstract_params(workload), batch).jaxpr)


def _marks_of(number: int) -> tuple[pytest.MarkDecorator, ...]:
    """Large models have many layers, and tracing each takes a while."""
    if number > 4.2e7:
        return (pytest.mark.exhaustive,)
    return (pytest.mark.slow,) if number > 2e7 else ()


@pytest.mark.parametrize(
    ("model", "size"),
    [pytest.param(*case, marks=_marks_of(number)) for case, number in NUM_PARAMETERS.items()],
)
def test_parameter_count_is_that_of_the_table(model, size):
    params = abstract_params(load(model, f"size={size}"))
    count = num_elements(params)
    assert count == NUM_PARAMETERS[model, size]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.float32.dtype}
    rows = [
        line.split()
        for line in ast.get_docstring(ast.parse((MODELS / f"{model}.py").read_text())).splitlines()
    ]
    assert any(row and row[0] == size and f"{count:,}" in row for row in rows), (
        f"the docstring's table has no row {size} with {count:,}"
    )


@pytest.mark.parametrize(
    ("size", "base", "adapters"), [("tiny", 427_072, 57_344), ("1B", 1_498_482_688, 3_407_872)]
)
def test_adapters_and_their_base_are_those_of_the_table(size, base, adapters):
    workload = WorkloadSpec.parse(f"{MODELS}/llama_lora.py:lora?size={size}&dtype=bfloat16").load()
    params = abstract_params(workload)
    assert [num_elements(params[part]) for part in ("base", "adapters")] == [base, adapters]
    assert {leaf.dtype for leaf in jax.tree.leaves(params["base"])} == {jnp.bfloat16.dtype}
    assert {leaf.dtype for leaf in jax.tree.leaves(params["adapters"])} == {jnp.float32.dtype}
    assert f"{base:,}" in (MODELS / "llama_lora.py").read_text()
    assert f"{adapters:,}" in (MODELS / "llama_lora.py").read_text()
    if size == "tiny":
        assert marks(workload) == 7


def test_parameter_counts_of_the_families_follow_from_their_widths(monkeypatch):
    mingpt = import_model("mingpt", monkeypatch)
    rows = [line.split() for line in mingpt.__doc__.splitlines()]
    for size, config in mingpt.SIZES.items():
        widths = [block.width for block in config.blocks]
        count = sum(12 * h * h + 12 * h for h in widths) + sum(
            a * b for a, b in pairwise(widths) if a != b
        )
        count += (config.vocab_size + config.seq_len) * widths[0] + (
            config.vocab_size + 2
        ) * widths[-1]
        assert any(row and row[0] == size and row[-1] == f"{count:,}" for row in rows), (
            size,
            count,
        )
        assert size == "tiny" or size == "+".join(
            f"{count}x{width}" for count, width in config.layers
        )
        if size == "tiny":
            assert count == NUM_PARAMETERS["mingpt", "tiny"]


def test_widths_that_are_no_whole_heads_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^size='6x1000' has heads of 64 features.*\[workload-option\]$"
    ):
        import_model("mingpt", monkeypatch).mingpt(size="6x1000")


def test_published_parameter_counts():
    """Alpa's suites, as traced with Alpa itself (GPT and MoE to two decimals, Wide-ResNet to
    three)."""
    billions = {key: count / 1e9 for key, count in NUM_PARAMETERS.items()}
    assert round(billions["gpt", "2.6B"], 2) == 2.78
    assert round(billions["gpt", "6.7B"], 2) == 6.87
    assert round(billions["moe", "2.4B"], 2) == 2.42
    assert round(billions["moe", "7.1B"], 2) == 7.11
    assert round(billions["wide_resnet", "2B"], 3) == 1.965


@pytest.mark.parametrize(
    ("model", "query", "num_layers"),
    [
        ("gpt", "size=tiny", 8),
        ("gpt", "size=6.7B&num_layers=2&tied=true", 2),
        pytest.param("llama", "size=70B", 80, marks=pytest.mark.exhaustive),
        ("mingpt", "size=2x64+1x128", 3),
        ("moe", "size=tiny", 4),
        ("wide_resnet", "size=tiny", 4),
        ("wide_resnet", "size=tiny&layers=8", 8),
        pytest.param("wide_resnet", "size=2B&layers=32", 32, marks=pytest.mark.exhaustive),
        ("bert", "size=tiny&num_layers=2", 6),
        ("gpt2", "size=xl&num_layers=1", 5),
        ("vgg", "size=tiny", 10),
        ("vgg", "size=16L", 17),
        ("resnet", "size=tiny", 8),
        ("resnet", "size=34L", 19),
        pytest.param("resnet", "size=101L", 33, marks=pytest.mark.exhaustive),
        ("vit", "size=tiny", 7),
        ("mobilenet", "size=tiny", 8),
        ("mobilenet", "size=5.4M", 19),
        ("deep_recommender", "size=tiny", 7),
        ("unet", "size=tiny", 5),
        ("unet", "size=31M", 9),
    ],
)
def test_marks_cut_the_model_into_its_layers(model, query, num_layers):
    assert marks(load(model, query)) == num_layers - 1


def test_optimizer_state_has_the_published_size():
    def state_elements(model: str, query: str) -> tuple[int, int]:
        workload = load(model, query)
        params = abstract_params(workload)
        return num_elements(jax.eval_shape(workload.optimizer.init, params)), num_elements(params)

    adam, gpt_params = state_elements("gpt", "size=6.7B&num_layers=2")
    assert adam == 2 * gpt_params + 1  # two moments and a step count
    adafactor, moe_params = state_elements("moe", "size=7.1B&num_layers=2")
    # A row and a column of each matrix; in full only for attention, whose head_dim is below 128.
    assert adafactor < moe_params / 50
    momentum, resnet_params = state_elements("wide_resnet", "size=tiny")
    assert momentum == resnet_params


@pytest.mark.parametrize("model", TINY_CLASSES)
def test_unknown_size_names_the_sizes(model, monkeypatch):
    sizes = import_model(model, monkeypatch).SIZES
    with pytest.raises(ValueError) as error:
        load(model, "size=3B")
    assert (
        str(error.value)
        == f"size='3B' is no size of {model}; choose one of {', '.join(sizes)}. [workload-size]"
    )


def test_bad_options_are_all_named():
    with pytest.raises(ValueError) as error:
        load("gpt", "dtype=float8&num_layers=0&seq_len=1.5&dropout=1")
    assert str(error.value).splitlines() == [
        "dtype='float8' is no dtype to compute in; choose float32, bfloat16 or float16. "
        "[workload-option]",
        "num_layers=0 is no count; give a whole number, 1 or more. [workload-option]",
        "seq_len=1.5 is no count; give a whole number, 1 or more. [workload-option]",
        "dropout=1 is no probability below 1; give 0 <= dropout < 1. [workload-option]",
    ]
    with pytest.raises(ValueError) as error:
        load("wide_resnet", "size=2B&layers=20")
    assert (
        str(error.value)
        == "layers=20 does not cut the 16 blocks of size='2B'; give 16 or 32. [workload-option]"
    )


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.py")), ids=lambda path: path.stem)
def test_the_zoo_imports_nothing_of_the_library(path):
    imports = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
    }
    neighbours = {neighbour.stem for neighbour in MODELS.glob("*.py")}
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "flax",
        "functools",
        "jax",
        "math",
        "optax",
        "re",
        "types",
        "typing",
    } | neighbours
    assert {module.partition(".")[0] for module in modules} <= allowed
