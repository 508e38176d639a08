"""The authors' own numbers: the answers of their released search are found again, and their layers
follow the fitted constants."""

from __future__ import annotations

import pytest

from benchmarks.papers.osdp import measured_layers, settings


def test_the_released_search_has_the_same_answers():
    answers = measured_layers.measured()["answers"]
    assert len(answers) == 52 and sum(answer["seconds"] is None for answer in answers) == 7
    for answer in answers:
        found = measured_layers.released_row(answer)
        assert found["ours"] == (
            None if answer["seconds"] is None else pytest.approx(answer["seconds"], rel=1e-12)
        )


def test_measured_layers_follow_the_fitted_constants():
    """Rings explain an all-reduce of 12 h^2 parameters at every width; activations are those of
    four examples of 128 tokens per row."""
    link = settings.fitted_link()
    assert link.mean_error_fraction < 0.02 and 4e9 < link.link.bytes_per_second.value < 5e9
    assert 0 < settings.fitted_overlap() < 1
    for h, megabytes in zip(
        settings.measured()["hidden_sizes"], settings.measured()["megabytes"], strict=True
    ):
        layer = settings.transformer(
            "", [(1, h)], seq_len=settings.SEQ_LEN, vocab_size=1
        ).operators[1:3]
        described = (
            settings.EXAMPLES_PER_ROW * sum(operator.activation_bytes for operator in layer) / 1e6
        )
        per_row = (megabytes[3][3] - megabytes[1][3]) / 2 * settings.MIB / 1e6
        assert described == pytest.approx(per_row, rel=0.12)
