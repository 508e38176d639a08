"""capture.environment: flags are added, never replaced, and what belongs in a profile key is
normalised."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import TIMEOUT_SECONDS

from capture import environment
from capture.errors import ExecutionError, TargetError

SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"
COUNT = "--xla_force_host_platform_device_count"


@pytest.fixture
def jax_010(monkeypatch):
    """A process that has jax 0.10.2 installed, has not imported it, has no flags, and asks XLA for
    none."""
    monkeypatch.setattr(environment, "check_flags", lambda platform: None)
    monkeypatch.setattr(environment, "_version", lambda package: {"jax": "0.10.2"}.get(package))
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.parametrize(
    ("version", "flags"),
    [("0.10.0", 1), ("0.10.2", 1), ("0.12.0.1", 0), ("0.1.0", 0), ("1.10.0", 0), ("0.100.0", 0)],
)
def test_flags_are_named_only_for_the_versions_that_need_them(version, flags):
    assert len(environment.required_xla_flags(version)) == flags


def test_prepare_adds_what_is_missing_once(jax_010):
    assert environment.prepare(num_devices=4) == []
    assert os.environ["XLA_FLAGS"] == f"{SCHEDULER}=false {COUNT}=4"
    assert environment.prepare(num_devices=8) == []
    assert os.environ["XLA_FLAGS"] == f"{SCHEDULER}=false {COUNT}=4"


def test_prepare_keeps_what_the_user_set_and_says_what_is_wrong_with_it(jax_010, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{SCHEDULER}=true --xla_dump_to=/tmp/x")
    (violation,) = environment.prepare()
    assert os.environ["XLA_FLAGS"] == f"{SCHEDULER}=true --xla_dump_to=/tmp/x"
    assert str(violation) == (
        f"XLA_FLAGS has {SCHEDULER}=true, but jax 0.10.2 needs {SCHEDULER}=false for "
        "jax.checkpoint to save memory on CPU; "
        "set it, or call capture.environment.prepare(), before jax is imported. "
        "[environment-xla-flags]"
    )


def test_prepare_only_checks_once_jax_is_imported(jax_010, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", object())
    (violation,) = environment.prepare(num_devices=4)
    assert violation.code == "environment-xla-flags"
    assert f"{SCHEDULER}=unset" in violation.message
    assert os.environ["XLA_FLAGS"] == ""


def test_a_process_that_was_not_prepared_is_warned(jax_010):
    with pytest.warns(
        UserWarning, match=r"unset, but jax 0.10.2 needs .* \[environment-xla-flags\]$"
    ):
        environment.warn()


def test_prepare_keeps_flags_that_are_given_in_a_file(jax_010, monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    environment.prepare()
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 --xla_b {SCHEDULER}=false"


def test_active_flags_are_sorted_the_last_of_each_and_without_the_device_count(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_b --xla_a=1 {COUNT}=8 --xla_c='x y' --xla_a=2")
    assert environment.active_flags() == ("--xla_a=2", "--xla_b=true", "--xla_c=x y")


def test_flags_of_libtpu_count_for_tpus_alone_and_reach_workers(monkeypatch):
    monkeypatch.setattr(environment, "check_flags", lambda platform: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_b --xla_tpu_a=2")
    flags = environment.active_flags("tpu")
    named = [f"LIBTPU_INIT_ARGS --xla_tpu_{each}" for each in ("a=2", "b=true")]
    assert flags == ("--xla_a=1", *named)
    assert environment.active_flags("cuda") == ("--xla_a=1",)
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    environment.prepare_worker(None, "tpu", flags)
    assert environment.active_flags("tpu")[-2:] == tuple(named)


XLA, LIBTPU = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


@pytest.mark.parametrize(
    ("variable", "flags", "says"),
    [
        (XLA, "--xla_no=1 --xla_never", r"has --xla_no=1 --xla_never, which jaxlib .* know"),
        (XLA, "--xla_dump_hlo_as_text=maybe", r"has the value 'maybe' of xla_dump_hlo_as_text"),
        (XLA, "xla_cpu", r"has 'xla_cpu', which begins with no dashes and is no file of flags"),
        (LIBTPU, "--xla_tpu_no=1", r"has xla_tpu_no, which libtpu .* does not know"),
        (LIBTPU, "--xla_tpu_scoped_vmem_limit_kib=hi", r"has the value 'hi' of xla_tpu_scoped_"),
    ],
)
def test_flags_that_would_end_the_process_are_refused(monkeypatch, variable, flags, says):
    monkeypatch.setenv(XLA, "")
    monkeypatch.setenv(variable, flags)
    with pytest.raises(
        TargetError, match=rf"{variable} {says}.* out of {variable}\. \[target-flags"
    ):
        environment.check_flags("tpu")
    if variable == LIBTPU:
        environment.check_flags("cuda")  # which does not read it


def test_xla_is_asked_about_flags_once_and_only_about_those_of_the_user(monkeypatch):
    asked = []
    monkeypatch.setattr(
        environment.subprocess,
        "run",
        lambda *args, **kwargs: asked.append(args) or subprocess.CompletedProcess([], 0, b"", b""),
    )
    monkeypatch.delenv("CAPTURE_KNOWN_FLAGS", raising=False)
    monkeypatch.setenv(XLA, f"{' '.join(environment.required_xla_flags('0.10.2'))} {COUNT}=4")
    environment.check_flags()
    assert not asked
    monkeypatch.setenv(XLA, f"--xla_b --xla_a=1 {COUNT}=4")
    environment.check_flags()
    monkeypatch.setenv(XLA, "--xla_a=1 --xla_b=true")
    environment.check_flags()  # as a worker of it would
    assert len(asked) == 1


def test_libtpu_gets_the_options_of_a_plan_behind_those_of_the_user(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    environment.prepare_tpu({"xla_tpu_b": True, "xla_c": 7})
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_tpu_a=1 --xla_tpu_b=true --xla_c=7"
    assert {"xla_tpu_a", "xla_tpu_b", "xla_c"} <= environment.flag_names()


def test_a_plan_without_options_sets_no_variable(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    environment.prepare_tpu({})
    assert "LIBTPU_INIT_ARGS" not in os.environ


def test_versions_leaves_out_what_is_not_installed(jax_010):
    assert set(environment.versions()) == {"python", "jax"}


def test_a_prepared_process_has_the_devices():
    code = (
        "from capture import environment; environment.prepare(num_devices=3); import jax, json;"
        "print(json.dumps([jax.device_count('cpu'), environment.check() == [], "
        "list(environment.active_flags())]))"
    )
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    ).stdout
    required = environment.required_xla_flags(environment.versions()["jax"])
    assert json.loads(output) == [3, True, list(required)]


@pytest.mark.parametrize(
    ("installed", "there", "given", "expected"),
    [
        (True, False, None, "cpu"),
        (True, True, None, None),
        (False, False, None, None),
        (True, False, "cuda", "cuda"),
    ],
)
def test_compilers_of_absent_accelerators_are_not_asked_for_devices(
    monkeypatch, installed, there, given, expected
):
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", given or "none")  # so that it is put back
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(environment, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(
        Path,
        "glob",
        lambda self, pattern: iter(
            [self / "nvidia0"] if there and pattern.startswith("nvidia") else []
        ),
    )
    environment.prepare()
    assert os.environ.get("JAX_PLATFORMS") == expected


def test_the_date_of_a_result_can_be_fixed(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert environment.now() == "1970-01-01T00:00:00+00:00"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert environment.now() > "2026"


def test_ray_reports_to_nobody_unless_the_user_says_so(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    environment.prepare_ray(local=True)
    assert (os.environ["RAY_USAGE_STATS_ENABLED"], os.environ["RAY_AUTH_MODE"]) == ("0", "token")


def test_patience_grows_with_the_load_alone(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, allowed in ((0.1, 10), (2, 10), (20, 100)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 99, 99))
        assert environment.patience(10) == allowed


def test_the_host_of_a_run_is_said_in_whole_or_refused(monkeypatch):
    assert environment.host_of_run() is None
    monkeypatch.setenv("CAPTURE_COORDINATOR", "10.0.0.1:4321")
    monkeypatch.setenv("CAPTURE_NUM_HOSTS", "2")
    with pytest.raises(ExecutionError) as refused:
        environment.host_of_run()
    assert str(refused.value) == (
        "CAPTURE_COORDINATOR=10.0.0.1:4321, CAPTURE_NUM_HOSTS=2, CAPTURE_HOST=None: set the "
        "address and port of host 0, the number of hosts, and which this is, from 0. "
        "[run-hosts-environment]"
    )
    monkeypatch.setenv("CAPTURE_HOST", "1")
    assert environment.host_of_run() == ("10.0.0.1:4321", 2, 1)


def test_garbage_is_looked_for_again():
    with environment.without_collecting():
        with environment.without_collecting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
