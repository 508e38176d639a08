"""What the rows of ``published_runs_2025.py`` say together: errors per family, the order of
configurations, the level that fits some families best, a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from benchmarks.drawing import COLORS, INK, Panel, draw
from benchmarks.published_rows import options_of

Document = Mapping[str, Any]

#: At which each row is simulated, so that a fit compiles nothing.
LEVELS = tuple(step / 50 for step in range(20, 56))
#: Two runs whose published seconds are nearer than this have no order that a model must know.
CLEARLY = 1.10


def compared(rows: Sequence[Document]) -> list[Document]:
    """Return the rows with a published time and one that was simulated from all collectives."""
    return [row for row in rows if row.get("error_fraction") is not None and not row.get("unread")]


def errors_of(rows: Sequence[Document], field: str = "error_fraction") -> dict[str, Any]:
    """Return the mean and the largest absolute error, and the mean with its sign."""
    errors = [row[field] for row in rows]
    if not errors:
        return {"num_rows": 0}
    return {
        "num_rows": len(errors),
        "mean_abs_error_fraction": mean(map(abs, errors)),
        "mean_error_fraction": mean(errors),
        "max_abs_error_fraction": max(map(abs, errors)),
    }


def right_order(rows: Sequence[Document]) -> dict[str, int]:
    """Count the pairs of runs of one model on one kind of device whose published times differ
    clearly per token and device, and those of them that are simulated in the right order."""
    pairs = right = 0
    for one, other in combinations(rows, 2):
        if one["family"].split(", ")[0::2] != other["family"].split(", ")[0::2]:
            continue
        truth, guess = (
            _per_token(one, key) / _per_token(other, key) for key in ("published", "simulated")
        )
        if max(truth, 1 / truth) > CLEARLY:
            pairs += 1
            right += (truth > 1) == (guess > 1)
    return {"num_pairs": pairs, "num_right": right}


def _per_token(row: Document, key: str) -> float:
    """Return device seconds per token of a row."""
    configuration = row["configuration"]
    seq_len = int(options_of(configuration["workload"])["seq_len"])
    tokens = configuration["global_batch"] * seq_len
    return row[key]["seconds"] * sum(configuration["nodes"]) / tokens


def families(rows: Sequence[Document]) -> list[dict[str, Any]]:
    """Return the errors per family, those of JAX first, and of all families of each kind."""
    known = compared(rows)
    groups = {row["family"]: row["is_of_jax"] for row in sorted(known, key=_order)}
    found = []
    for is_of_jax, name in ((True, "all whose program XLA scheduled"), (False, "all of PyTorch")):
        mine = [row for row in known if row["is_of_jax"] == is_of_jax]
        listed = [(family, [row for row in mine if row["family"] == family]) for family in groups]
        for family, its in [*((f, its) for f, its in listed if its), (name, mine)]:
            unfitted = errors_of(its, "unfitted_error_fraction")
            found.append(
                {"family": family, **errors_of(its), "unfitted": unfitted, **right_order(its)}
            )
    return found


def _order(row: Document) -> tuple[bool, str]:
    return not row["is_of_jax"], row["family"]


def fitted(rows: Sequence[Document], texts: Sequence[str]) -> dict[str, Any]:
    """Find the level that makes the mean absolute error least on the rows whose family contains one
    of the texts, and return its errors on these and on the other rows of the same targets."""
    known = [row for row in compared(rows) if row["is_of_jax"]]
    on = [row for row in known if any(text in row["family"] for text in texts)]
    targets = {row["configuration"]["target"] for row in on}
    others = [row for row in known if row not in on]
    if not on:
        return {"fitted_on": [], "because": f"no family in the result contains {texts}"}

    def at(level: str, chosen: Sequence[Document]) -> list[Document]:
        return [
            {**row, "at": row["seconds_by_level"][level] / row["published"]["seconds"] - 1}
            for row in chosen
        ]

    levels = list(on[0]["seconds_by_level"])
    best = min(levels, key=lambda level: errors_of(at(level, on), "at")["mean_abs_error_fraction"])
    left_out = {
        family: errors_of(at(best, [row for row in others if row["family"] == family]), "at")
        for family in sorted({row["family"] for row in others})
    }
    return {
        "level": float(best),
        "fitted_on": sorted({row["family"] for row in on}),
        "targets": sorted(targets),
        "errors": errors_of(at(best, on), "at"),
        "unfitted_errors": errors_of(at("1.00", on), "at"),
        "left_out": left_out,
        "all_left_out": errors_of(at(best, others), "at"),
    }


def as_text(rows: Sequence[Document]) -> str:
    """Return the table of rows, the errors per family, and the rows that are not expressed."""
    from capture.cli.output import table

    lines = [table(_HEAD, [list(_line(row)) for row in rows if "simulated" in row])]
    if any("whole" in row and row["whole"] for row in rows):
        lines += [_whole(row) for row in rows if row.get("whole")]
    for each in families(rows):
        if each["num_rows"]:
            lines.append(
                f"{each['family']}: mean |error| {each['mean_abs_error_fraction']:.1%} "
                f"(unfitted {each['unfitted']['mean_abs_error_fraction']:.1%}), "
                f"worst {each['max_abs_error_fraction']:.1%} of {each['num_rows']} rows; order "
                f"right in {each['num_right']} of {each['num_pairs']} pairs"
            )
    lines += [f"{row['id']}: {row['unread']}" for row in rows if row.get("unread")]
    refused = [row for row in rows if "reasons" in row]
    lines += [f"{row['id']}: {'; '.join(row['reasons'])}" for row in refused]
    return "\n".join(lines)


_HEAD = ["run", "published s", "simulated s", "off by", "unfitted", "link s", "exposed s", "GB"]


def _line(row: Document) -> Iterator[str]:
    said, found = row["published"], row["simulated"]
    yield row["id"]
    yield "-" if said["seconds"] is None else f"{said['seconds']:.4g}"
    yield f"{found['seconds']:.4g}"
    yield "-" if row["error_fraction"] is None else f"{row['error_fraction']:+.1%}"
    unfitted = row["unfitted_error_fraction"]
    yield "-" if unfitted is None else f"{unfitted:+.1%}"
    yield f"{found['link_seconds']:.3g}"
    yield f"{found['exposed_seconds']:.3g}"
    peak = f"{found['peak_bytes'] / 1e9:.1f}"
    yield peak if said["peak_bytes"] is None else f"{peak} ({said['peak_bytes'] / 1e9:.1f})"


def _whole(row: Document) -> str:
    layers = " and ".join(map(str, row["compiled_layers"]))
    by_windows, whole = row["simulated"], row["whole"]
    return (
        f"{row['id']}: compiled whole, {whole['seconds']:.4g} s and "
        f"{whole['peak_bytes'] / 1e9:.2f} GB; from {layers} layers "
        f"{by_windows['seconds'] / whole['seconds'] - 1:+.1%} and "
        f"{by_windows['peak_bytes'] / whole['peak_bytes'] - 1:+.1%}"
    )


def picture(rows: Sequence[Document]) -> str:
    """Draw simulated against published seconds, and the errors per run."""
    known = compared(rows)
    names = list(dict.fromkeys(row["family"] for row in sorted(known, key=_order)))
    color = dict(zip(names, [*COLORS, *COLORS, *COLORS], strict=False))
    top = 1.15 * max((row["published"]["seconds"] for row in known), default=1.0)
    both = Panel(
        "Step time", "published, s", "simulated, s", (0, top), (0, top), width=460, height=400
    )
    both.line([(0, 0), (top, top)], INK, "as published")
    widest = max((abs(row["error_fraction"]) for row in known), default=0.1) * 1.2
    errors = Panel(
        "Error of each run", "runs, by family", "error", (-1, len(known)), (-widest, widest),
        x_ticks=[(-1, "")], width=460, height=400,
    )  # fmt: skip
    errors.line([(-1, 0), (len(known), 0)], INK, "as published")
    for number, row in enumerate(sorted(known, key=_order)):
        about = f"{row['id']}: {row['error_fraction']:+.1%}"
        truth, guess = row["published"]["seconds"], row["simulated"]["seconds"]
        both.point(truth, guess, color[row["family"]], about)
        errors.point(number, row["error_fraction"], color[row["family"]], about)
    return draw(
        "Published training runs",
        "simulated from compiled programs of absent devices; nothing was executed",
        [both, errors],
        2,
        [(color[name], name) for name in names],
    )
