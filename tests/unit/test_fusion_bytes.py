"""The bytes that fusions read and write, of programs written by hand: ``stack`` is eight rows of 256
bytes, ``i`` an index of 4."""

import pytest

from capture.compiler.kernels import HloModule

STACK, ROW, INDEX = 8 * 256, 256, 4
WHOLE = "f32[8,8,8]"
PARAMETERS = """
  %stack = f32[8,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)"""
SLICED = """
  %row = f32[1,8,8]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}"""
VIEWED = """
  %view = f32[8,64]{1,0} bitcast(%stack)
  %row = f32[1,64]{1,0} dynamic-slice(%view, %i, %zero), dynamic_slice_sizes={1,64}"""
ONES = """
  %one = f32[] constant(1)
  %ones = f32[1,8,8]{2,1,0} broadcast(%one), dimensions={}"""
UPDATED = f"""{ONES}
  %new = f32[8,8,8]{{2,1,0}} dynamic-update-slice(%stack, %ones, %i, %zero, %zero)"""


NOTHING = "\n  ROOT %none = s32[] add(%i, %i)"


def nbytes(
    body: str, result: str = "f32[8,8]", inner: str = NOTHING, inner_result: str = "s32[]"
) -> int:
    """Return the bytes that a fusion with this computation moves; ``%inner`` is another one."""

    def computation(name: str, body: str, result: str) -> str:
        head = f"%{name} (stack: f32[8,8,8], i: s32[]) -> {result}"
        return f"{head} {{{PARAMETERS}{body}\n}}\n\n"

    module = HloModule(
        "HloModule m\n\n"
        + computation("inner", inner, inner_result)
        + computation("outer", body, result)
        + f"ENTRY %main (a: f32[8,8,8], b: s32[]) -> {result} {{\n"
        "  %a = f32[8,8,8]{2,1,0} parameter(0)\n  %b = s32[] parameter(1)\n"
        f"  ROOT %found = {result} fusion(%a, %b), kind=kLoop, calls=%outer\n}}\n"
    )
    (fusion,) = module.instructions
    return module.nbytes(fusion)


@pytest.mark.parametrize("slicing", [SLICED, VIEWED], ids=["array", "view"])
def test_of_an_array_that_is_sliced_the_slice_is_read(slicing):
    assert nbytes(f"{slicing}\n  ROOT %out = f32[8,8]{{1,0}} bitcast(%row)") == ROW + INDEX + ROW


def test_a_gather_reads_as_much_as_it_returns():
    body = """
  %at = s32[1]{0} reshape(%i)
  ROOT %rows = f32[1,8,8]{2,1,0} gather(%stack, %at), offset_dims={0,1,2}, """
    body += "collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=0, slice_sizes={1,8,8}"
    assert nbytes(body, "f32[1,8,8]") == ROW + INDEX + ROW


@pytest.mark.parametrize("slicing", [SLICED, VIEWED], ids=["array", "view"])
def test_a_slice_that_an_inner_fusion_takes_is_one(slicing):
    body = """
  %again = f32[8,8,8]{2,1,0} reshape(%stack)
  %found = f32[8,8]{1,0} fusion(%again, %i), kind=kLoop, calls=%inner
  ROOT %out = f32[8,8]{1,0} negate(%found)"""
    inner = f"{slicing}\n  ROOT %found = f32[8,8]{{1,0}} bitcast(%row)"
    assert nbytes(body, inner=inner, inner_result="f32[8,8]") == ROW + INDEX + ROW


def test_two_slices_of_an_array_are_both_read():
    body = f"""{VIEWED}
  %first = f32[1,64]{{1,0}} slice(%view), slice={{[0:1], [0:64]}}
  ROOT %sum = f32[1,64]{{1,0}} add(%row, %first)"""
    assert nbytes(body, "f32[1,64]") == 2 * ROW + INDEX + ROW


def test_slices_of_an_array_are_at_most_the_array():
    slices = "".join(
        f"\n  %part.{i} = f32[5,8,8]{{2,1,0}} slice(%stack), slice={{[{i}:{i + 5}], [0:8], [0:8]}}"
        for i in range(3)
    )
    parts = ", ".join(f"%part.{i}" for i in range(3))
    body = f"{slices}\n  ROOT %out = f32[15,8,8]{{2,1,0}} concatenate({parts}), dimensions={{0}}"
    assert nbytes(body, "f32[15,8,8]") == STACK + 15 * ROW


@pytest.mark.parametrize("slicing", [SLICED, VIEWED], ids=["array", "view"])
def test_an_array_that_is_also_read_whole_is_read_once(slicing):
    body = f"""{slicing}
  %row.1 = f32[8,8]{{1,0}} bitcast(%row)
  %rows = f32[8,8,8]{{2,1,0}} broadcast(%row.1), dimensions={{1,2}}
  ROOT %sum = f32[8,8,8]{{2,1,0}} add(%rows, %stack)"""
    assert nbytes(body, WHOLE) == STACK + INDEX + STACK


UPDATE_OF_VIEW = """
  %view = f32[8,64]{1,0} bitcast(%stack)
  %one = f32[] constant(1)
  %ones = f32[1,64]{1,0} broadcast(%one), dimensions={}
  %updated = f32[8,64]{1,0} dynamic-update-slice(%view, %ones, %i, %zero)
  %new = f32[8,8,8]{2,1,0} bitcast(%updated)"""


def rooted(body: str, name: str) -> str:
    return body.replace(f"  %{name} =", f"  ROOT %{name} =")


@pytest.mark.parametrize("update", [UPDATED, UPDATE_OF_VIEW], ids=["array", "view"])
def test_an_update_in_place_writes_the_part(update):
    assert nbytes(rooted(update, "new"), WHOLE) == INDEX + ROW


@pytest.mark.parametrize("update", [UPDATED, UPDATE_OF_VIEW], ids=["array", "view"])
def test_an_update_in_place_inside_an_inner_fusion_writes_the_part(update):
    body = "\n  ROOT %out = f32[8,8,8]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%inner"
    assert nbytes(body, WHOLE, rooted(update, "new"), WHOLE) == INDEX + ROW


def test_an_update_from_the_part_that_it_replaces_reads_and_writes_the_part():
    body = f"""{VIEWED}
  %less = f32[1,64]{{1,0}} negate(%row)
  %new = f32[8,64]{{1,0}} dynamic-update-slice(%view, %less, %i, %zero)
  ROOT %out = f32[8,8,8]{{2,1,0}} bitcast(%new)"""
    assert nbytes(body, WHOLE) == ROW + INDEX + ROW


def test_two_updates_of_a_buffer_write_two_parts():
    body = f"""{UPDATED}
  ROOT %newer = f32[8,8,8]{{2,1,0}} dynamic-update-slice(%new, %ones, %zero, %i, %zero)"""
    assert nbytes(body, WHOLE) == INDEX + 2 * ROW


def test_an_updated_array_that_the_fusion_reads_on_is_read_whole():
    """As the norm of gradients reads a stack whose last row is put into it."""
    body = f"{UPDATED}\n  ROOT %out = f32[8,8,8]{{2,1,0}} negate(%new)"
    assert nbytes(body, WHOLE) == STACK + INDEX + STACK


def test_an_update_of_an_array_that_the_fusion_makes_writes_it_whole():
    body = f"""{ONES}
  %blank = f32[8,8,8]{{2,1,0}} broadcast(%one), dimensions={{}}
  ROOT %out = f32[8,8,8]{{2,1,0}} dynamic-update-slice(%blank, %ones, %i, %zero, %zero)"""
    assert nbytes(body, WHOLE) == INDEX + STACK


def test_each_result_of_a_tuple_is_written_by_its_own_rule():
    body = f"{UPDATE_OF_VIEW}\n  ROOT %out = ({WHOLE}, f32[1,64]) tuple(%new, %ones)"
    assert nbytes(body, f"({WHOLE}, f32[1,64])") == INDEX + ROW + ROW


@pytest.mark.parametrize(
    "taken",
    [
        "%new = f32[8,8,8]{2,1,0} get-tuple-element(%both), index=1",
        "%new = f32[8,8,8] bitcast(%both#1)",
    ],
    ids=["get-tuple-element", "index"],
)
def test_an_inner_fusion_may_have_several_results(taken):
    both = f"(f32[1,8,8], {WHOLE})"
    body = f"""
  %both = {both} fusion(%stack, %i), kind=kLoop, calls=%inner
  ROOT {taken}"""
    inner = f"{UPDATED}\n  ROOT %out = {both} tuple(%ones, %new)"
    assert nbytes(body, WHOLE, inner, both) == INDEX + ROW


def test_a_parameter_that_nothing_uses_is_not_read():
    assert nbytes("\n  ROOT %out = f32[8,8]{1,0} broadcast(%zero), dimensions={}") == 8 * 8 * 4
