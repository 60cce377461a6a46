"""Reading the buffer assignment: sizes, padding, the fullest moment."""

import pytest

from vit_tpu.tpu import buffers, program

ASSIGNMENT = """BufferAssignment:
allocation 0: size 524288, page 0, parameter 0, shape |f32[512,256]| at ShapeIndex {}:
 value: <110 arg0.1 @0> (size=524288,offset=0): f32[512,256]{1,0:T(8,128)}
allocation 1: size 262144, page 0, parameter 1, shape |f32[256,256]| at ShapeIndex {}, maybe-live-out:
 value: <109 arg1.2 @0> (size=262144,offset=0): f32[256,256]{1,0:T(8,128)}
 value: <117 new @0> (size=262144,offset=0): f32[256,256]{1,0:T(8,128)}
allocation 2: size 1024, page 0, thread-local:
 value: <11 add.1 @0> (size=1024,offset=0): bf16[]{:T(512)}
allocation 3: size 1024, page 0, maybe-live-out:
 value: <115 loss @0> (size=1024,offset=0): f32[]{:T(256)}
allocation 4: size 2048, color 6, page 0, preallocated-temp:
 value: <8 scalar @6> (size=4,offset=0): s32[]{:S(6)}
allocation 5: size 12000, page 0, preallocated-temp:
 value: <111 a @0> (size=4000,offset=0): f32[1000]{0:T(1000)}
 value: <112 b{1} @0> (size=4000,offset=4000): f32[1000]{0:T(1000)}
 value: <113 c @0> (size=8000,offset=4000): f32[2000]{0:T(2000)}
 value: <114 d @0> (size=4000,offset=4000): f32[1000]{0:T(1000)}
"""
RANGES = """HloLiveRange (max 10):
  InstructionSequence:
    0:arg0.1
  BufferLiveRange:
    a{}:1-5
    b{1}:2-3
    d{}:3-3
    c{}:4-6
  Live ranges at 4 (peak):
    c{}: 8000 bytes
"""


def test_allocations_say_what_they_are_for_and_where_they_lie():
    found = buffers.parse_assignment(ASSIGNMENT)
    kinds = [(a.kind, a.size, a.parameter, a.hbm) for a in found]
    assert kinds == [
        ("argument", 524288, 0, True),
        ("argument", 262144, 1, True),
        ("local", 1024, None, True),
        ("output", 1024, None, True),
        ("temporary", 2048, None, False),
        ("temporary", 12000, None, True),
    ]


def test_fullest_moment_counts_each_place_once():
    temporary = buffers.parse_assignment(ASSIGNMENT)[-1]
    live = buffers.fullest(temporary, buffers.parse_ranges(RANGES))
    # At 3 there are a, and b and d at the same place: 8000; at 4 and 5 a and c: 12000.
    assert [(v.name, v.size) for v in live] == [("a{}", 4000), ("c{}", 8000)]


# Sizes as libtpu 0.0.52 allocated these arrays for v3.
@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[512,256]{1,0:T(8,128)}", 524288),
        ("bf16[64,6,196,196]{2,3,1,0:T(8,128)(2,1)}", 39321600),
        ("bf16[64,196,6,64]{1,3,2,0:T(8,128)(2,1)}", 12582912),
        ("bf16[64,224,224,3]{0,3,2,1:T(4,128)(2,1)}", 51380224),
        ("f32[64,6,196]{2,1,0:T(8,128)}", 524288),
        ("bf16[12544,1536]{1,0:T(8,128)(2,1)}", 38535168),
    ],
)
def test_padded_bytes_are_what_the_compiler_allocates(shape, size):
    assert buffers.padded_bytes(shape) == size


def test_raw_bytes_are_elements_times_width():
    assert buffers.raw_bytes("bf16[64,6,196,196]{2,3,1,0:T(8,128)(2,1)}") == 2 * 64 * 6 * 196 * 196
    assert buffers.raw_bytes("(f32[8], f32[8])") == 0
    assert buffers.raw_bytes("pred[]") == 1


def test_what_a_loop_holds_is_alive_through_the_loop():
    text = """ENTRY %e (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %stack = f32[8]{0} broadcast(%zero)
  %fixed = f32[8]{0} copy(%x)
  %start = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %stack, %fixed)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%start), condition=%c, body=%b
  ROOT %end = f32[8]{0} get-tuple-element(%loop), index=1
}

%b (a: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %a = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %same = f32[8]{0} get-tuple-element(%a), index=2
  %write = f32[8]{0} fusion(%same), kind=kLoop
  ROOT %out = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero.1, %write, %same)
}

%c (a.1: (s32[], f32[8], f32[8])) -> pred[] {
  ROOT %a.1 = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
}
"""
    ranges = {"stack{}": (2, 5), "write{}": (17, 20), "fixed{}": (3, 5), "loop{1}": (20, 40), "loop{2}": (20, 20)}
    found = buffers.with_loops(ranges, program.parse(text))
    # The stack lies where each round writes it: from before the loop to the last use of the loop's result.
    assert found["write{}"] == (2, 40)
