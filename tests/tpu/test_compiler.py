"""The compiler's process: what it is asked, what its failures become, what is kept. No libtpu is needed here."""

import os
import pathlib
import stat
import sys
import time

import pytest

from vit_tpu.errors import UserError
from vit_tpu.tpu import compiler, pjrt, topologies

V3 = topologies.chip("v3")
OOM = (
    "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (41.89G) "
    "exceeds available HBM (15.48G). HLO module: step."
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Returns a function that puts a shell script in the compiler's place; $1 is -m, $3 the request."""

    def install(script):
        path = tmp_path / "fake"
        path.write_text("#!/bin/bash\nd=$(dirname $3); mkdir -p $d/dump\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(compiler, "library", lambda: "libtpu.so")
        return lambda **more: compiler.compile_hlo(b"hlo", V3, cache=tmp_path / "cache", **more)

    return install


DUMP = """
echo 'BufferAssignment:' > $d/dump/m.after_optimizations-buffer-assignment.txt
echo 'ranges' > $d/dump/m.after_optimizations-live-range.txt
echo 'ENTRY %e () -> f32[] {' > $d/dump/m.after_optimizations.txt
touch $d/dump/m.after_optimizations_after_buffer_assignment.txt $d/dump/m.debug_options
"""


def test_memory_stage_ends_the_compiler_once_buffers_are_assigned(fake):
    compile_ = fake(DUMP + "sleep 60\n")
    began = time.monotonic()
    found = compile_()
    assert time.monotonic() - began < 20
    assert found.fits and found.assignment == "BufferAssignment:\n" and not found.finished and not found.stats


def test_answers_are_kept_and_reused(fake, tmp_path):
    compile_ = fake(DUMP + f"echo run >> {tmp_path}/runs; sleep 60\n")
    assert compile_() == compile_()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_cycles_are_not_answered_from_a_kept_memory_stage(fake, tmp_path):
    compile_ = fake(DUMP + f"echo run >> {tmp_path}/runs\n" + """echo '{"stats": {"temp": 1}}' > $d/step.answer\n""")
    compile_()
    compile_(stage="cycles")
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_out_of_memory_is_an_answer_with_its_numbers(fake):
    found = fake(DUMP.replace("touch", ": ") + f"""echo '{{"error": "{OOM}"}}' > $d/step.answer\n""")()
    assert not found.fits
    assert found.stated == {"needed": int(41.89 * 2**30), "available": int(15.48 * 2**30)}


def test_crash_keeps_the_compilers_own_message(fake):
    compile_ = fake("echo 'F0000 00:00 allocator.cc:12] Check failed: size > 0' >&2; kill -ABRT $$\n")
    with pytest.raises(compiler.CompilerError, match="stopped with code -6: F0000 .*Check failed: size > 0"):
        compile_()


def test_time_limit_ends_the_compiler(fake):
    with pytest.raises(compiler.CompilerError, match="ended after 1 s.*--limit"):
        fake("sleep 60\n")(limit=1.0)


def test_other_errors_of_the_compiler_are_shown(fake):
    compile_ = fake("""echo '{"error": "Invalid TPU external name: TPU v9"}' > $d/step.answer\n""")
    with pytest.raises(compiler.CompilerError, match="does not know v3:2x2 .*Invalid TPU external name"):
        compile_()


def test_compiler_that_dumps_nothing_names_the_tested_version(fake):
    with pytest.raises(compiler.CompilerError, match=f"{compiler.TESTED_LIBTPU} is the version that was tested"):
        fake("""echo '{"stats": {}}' > $d/step.answer\n""")()


def test_missing_libtpu_gives_the_pip_line(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "vit_tpu\[plan\]"'):
        compiler.library()


def test_more_cores_than_the_slice_has_are_refused(fake):
    with pytest.raises(UserError, match="9 cores asked for.*has 8"):
        fake("exit 1\n")(replicas=9)


def test_unknown_chip_lists_the_known_ones():
    with pytest.raises(UserError, match=r'chip "v33" \(did you mean "v3"\?\) is not one of v2, v3, v4'):
        topologies.chip("v33")


def test_compile_options_are_the_bytes_protobuf_would_write():
    # CompileOptionsProto{executable_build_options{num_replicas: 2, num_partitions: 1, device_assignment{
    # replica_count: 2, computation_count: 1, computation_devices{replica_device_ids: [0, 1]}}}}, by hand.
    assignment = bytes([8, 2, 16, 1, 26, 4, 10, 2, 0, 1])
    build = bytes([32, 2, 40, 1, 74, len(assignment)]) + assignment
    assert pjrt.compile_options(2) == bytes([26, len(build)]) + build
    assert b"xla_dump_to" in pjrt.compile_options(dump="/tmp/x") and b"/tmp/x" in pjrt.compile_options(dump="/tmp/x")


def test_the_compiler_gets_no_lock_and_no_logs_of_others(tmp_path):
    found = compiler._environment(tmp_path)
    assert found["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and found["TMPDIR"] == str(tmp_path)
    assert str(os.path.dirname(os.path.dirname(compiler.__file__))).rpartition("/")[0] in found["PYTHONPATH"]


def test_the_version_that_was_tested_is_the_version_that_is_installed_for_users():
    root = pathlib.Path(__file__).parents[2]
    assert f"libtpu=={compiler.TESTED_LIBTPU}; " in (root / "setup.cfg").read_text()
    assert f"libtpu=={compiler.TESTED_LIBTPU}\n" in (root / "constraints.txt").read_text()
