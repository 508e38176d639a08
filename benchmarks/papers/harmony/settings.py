"""What the scripts of Harmony's evaluation share: the authors' profiles, problems on the paper's
servers, and results as documents with figures. All is estimated; nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.drawing import COLORS, draw, grouped_bars
from capture.machine.server import Server
from capture.measured.layer_passes import PassProfile
from capture.measured.layer_profile import Casts, LayerProfile
from capture.plan.task_graph import Configuration, Mode, Packs, Switches
from recommender.harmony.packing import of_length
from recommender.harmony.problem import PacksProblem

PROFILES = Path(__file__).parent / "profiles"
#: Of the transformers and of the CNNs: the limits under which Table 1 comes out.
TRANSFORMERS_BYTES, CNNS_BYTES = 9 * 10**9, 10 * 2**30
#: Name in the paper -> profile and limit.
MODELS = {
    "BERT96": ("bert_96", TRANSFORMERS_BYTES),
    "GPT2": ("gpt2_xl", TRANSFORMERS_BYTES),
    "VGG416": ("vgg416", CNNS_BYTES),
    "ResNet1K": ("resnet1026", CNNS_BYTES),
}
#: Writes the document of a script.
finish = partial(documents.finish, estimated=True)


@cache
def profile_of(name: str) -> LayerProfile:
    """A shipped profile; that of 80 billion is derived."""
    if name == "gpt2_80b":
        return deeper(profile_of("gpt2_40b"), 100, 200)
    return LayerProfile.load(PROFILES / f"{name}.json")


def deeper(profile: LayerProfile, layer: int, more: int) -> LayerProfile:
    """The same with so many more of a layer, which is as deep as a model of equal blocks can be
    made from a profile: its ``source`` says that it is derived."""

    def row(values: Sequence[Any]) -> tuple[Any, ...]:
        return (*values[: layer + 1], *[values[layer]] * more, *values[layer + 1 :])

    def rows(measured: PassProfile) -> PassProfile:
        times, memory = (tuple(map(row, of)) for of in (measured.time, measured.memory))
        return PassProfile(measured.u, times, memory)

    def cast(of: Casts) -> Casts:
        names = ("w_bytes", "b_bytes", "cast_bytes", "gradient_bytes")
        return replace(of, **{name: row(getattr(of, name)) for name in names})

    read = {i for _, *layers in profile.shared for i in layers}
    assert layer not in read, "equal blocks share no parameters with others"
    return replace(
        profile,
        name=f"{profile.name}, {more} more of layer {layer}",
        num_layers=profile.num_layers + more,
        fwd=rows(profile.fwd),
        bwd=rows(profile.bwd),
        x_bytes_per_sample=row(profile.x_bytes_per_sample),
        w_bytes=row(profile.w_bytes),
        b_bytes=row(profile.b_bytes),
        k_bytes=row(profile.k_bytes),
        update_cpu_time=row(profile.update_cpu_time),
        shared=tuple(
            (nbytes, *(i + more if i > layer else i for i in layers))
            for nbytes, *layers in profile.shared
        ),
        casts={dtype: cast(of) for dtype, of in profile.casts.items()},
        source=f"derived: {profile.name} with {more} more of layer {layer}. {profile.source}",
    )


def problem_of(
    model: str,
    mode: Mode = "pp",
    minibatch_size: int = 64,
    *,
    without: Sequence[str] = (),
    server: Server | None = None,
    **more: Any,
) -> PacksProblem:
    """A model of the paper on four GTX-1080Ti, or on another server."""
    name, limit = MODELS.get(model, (model, TRANSFORMERS_BYTES))
    server = server or Server.load("gtx1080ti-x4").with_(usable_bytes=limit)
    switches = Switches.without(without)
    return PacksProblem(profile_of(name), server, mode, minibatch_size, switches=switches, **more)


def by_hand(num_layers: int, u_f: int, u_b: int, length: int) -> Configuration:
    """Packs of so many layers, the same both ways."""
    packs = of_length(num_layers, length)
    return Configuration(Packs(u_f, packs[:-1]), Packs(u_b, packs))


def bars(
    title: str, note: str, panels: Mapping[str, tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]]
) -> str:
    """Panels of grouped bars: title -> (label of the axis, groups)."""
    series = dict.fromkeys(name for _, groups in panels.values() for _, of in groups for name in of)
    colors = dict(zip(series, COLORS, strict=False))
    drawn = [
        grouped_bars(name, label, groups, 1000, 310, colors=colors)
        for name, (label, groups) in panels.items()
    ]
    return draw(title, note, drawn, 1, [(color, name) for name, color in colors.items()])
