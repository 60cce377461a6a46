"""Reading the compiler's programs: names, cycles, loops."""

import pytest

from vit_tpu.tpu import program

LOOP = """HloModule step, is_scheduled=true

%body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[]{:T(256)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %inner = f32[8,128]{1,0:T(8,128)} fusion(%arg), kind=kLoop, calls=%fused, metadata={op_name="blocks/0/mlp/MatMul"}, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %out = (s32[]{:T(256)}, f32[8,128]{1,0:T(8,128)}) tuple(%arg, %inner)
}

%condition (arg.1: (s32[], f32[8,128])) -> pred[] {
  %arg.1 = (s32[]{:T(256)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(256)} get-tuple-element(%arg.1), index=0
  %limit = s32[]{:T(256)} constant(24)
  ROOT %less = pred[]{:T(1024)} compare(%counter, %limit), direction=LT
}

%fused (p: f32[8,128]) -> f32[8,128] {
  ROOT %p = f32[8,128]{1,0:T(8,128)} parameter(0)
}

ENTRY %step (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %before = f32[8,128]{1,0:T(8,128)} copy(%x), metadata={op_name="embedding/Cast"}, \
backend_config={"window_config":{"estimated_cycles":"7"}}
  %start = (s32[]{:T(256)}, f32[8,128]{1,0:T(8,128)}) tuple(%before)
  %loop = (s32[]{:T(256)}, f32[8,128]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  ROOT %end = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_loop_bodies_count_by_their_trip_count():
    assert program.parse(LOOP).cycles() == 7 + 24 * 1000


def test_instruction_has_layer_shape_operands_and_called_computations():
    inner = program.parse(LOOP).by_name()["inner"]
    assert (inner.opcode, inner.op_name, inner.cycles) == ("fusion", "blocks/0/mlp/MatMul", 1000)
    assert inner.shape == "f32[8,128]{1,0:T(8,128)}"
    assert inner.operands == ("arg",) and inner.called == {"calls": ("fused",)}


def test_loop_without_a_trip_count_is_an_error_not_a_guess():
    unknown = LOOP.replace("constant(24)", "get-tuple-element(%arg.1), index=1")
    with pytest.raises(ValueError, match="trip count of the loop loop"):
        program.parse(unknown).cycles()


def test_text_without_a_program_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        program.parse("HloModule empty\n")
