"""Each fault that the executor of PTX must see, and what is allowed."""

import re
import sys

import pytest
import torch
from places import ROOT
from processes import ran

from benchmarks.ptx import Fault, Unknown
from benchmarks.ptx.driver import RUN_BY
from benchmarks.ptx.probe import THREADS, launch, numbers

parametrize = pytest.mark.parametrize

# What is found in the fault, and what must not be done.
FAULTS = {
    "read behind a tensor": (
        "outside of argument 0",
        "ld.global.b32 %r9, [%rd4+4];",
    ),
    "read of nothing": (
        "outside of every argument",
        """
        mov.b64 %rd9, 0;
        ld.global.b32 %r9, [%rd9];
        """,
    ),
    "write behind a tensor": (
        "outside of argument 1",
        """
        ld.global.b32 %r9, [%rd4];
        st.global.b32 [%rd5+4], %r9;
        """,
    ),
    "misaligned read": (
        "misaligned",
        "ld.global.b32 %r9, [%rd4+2];",
    ),
    "misaligned vector": (
        "misaligned",
        "ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%rd4];",
    ),
    "an element left out": (
        "48 elements of argument 1 are not written",
        """
        ld.global.b32 %r9, [%rd4];
        @%p1 st.global.b32 [%rd5], %r9;
        """,
    ),
    "an element twice": (
        "written twice",
        """
        ld.global.b32 %r9, [%rd4];
        st.global.b32 [%rd5], %r9;
        st.global.b32 [%rd5], %r9;
        """,
    ),
    "read of what is written": (
        "written and, as argument 1, read",
        """
        ld.global.b32 %r9, [%rd4];
        st.global.b32 [%rd5], %r9;
        ld.global.b32 %r9, [%rd5];
        """,
    ),
    "uninitialised register": (
        "an uninitialised value is stored",
        "st.global.b32 [%rd5], %r9;",
    ),
    "uninitialised shared memory": (
        "an uninitialised value is stored",
        """
        ld.shared.b32 %r9, [%r2];
        st.global.b32 [%rd5], %r9;
        """,
    ),
    "uninitialised by way of shared memory": (
        "an uninitialised value is stored",
        """
        st.shared.b32 [%r2], %r8;
        ld.shared.b32 %r9, [%r2];
        st.global.b32 [%rd5], %r9;
        """,
    ),
    "uninitialised half of two joined registers": (
        "an uninitialised value is stored",
        """
        mov.b64 %rd9, {%r1, %r8};
        mov.b64 {_, %r9}, %rd9;
        st.global.b32 [%rd5], %r9;
        """,
    ),
    "uninitialised address": (
        "an uninitialised address",
        "ld.global.b32 %r9, [%rd9];",
    ),
    "uninitialised branch": (
        "an uninitialised value decides",
        """
        @%p2 bra $L1;
        $L1:
        """,
    ),
    "shuffle of nothing": (
        "an uninitialised value is stored",
        """
        shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1;
        st.global.b32 [%rd5], %r9;
        """,
    ),
    "read without a barrier": (
        "race on shared memory",
        """
        st.shared.b32 [%r2], %r1;
        ld.shared.b32 %r9, [%r3];
        """,
    ),
    "written while read": (
        "race on shared memory",
        """
        st.shared.b32 [%r2], %r1;
        bar.sync 0;
        ld.shared.b32 %r9, [%r4];
        st.shared.b32 [%r2], %r9;
        """,
    ),
    "unlike values to one place": (
        "race on shared memory",
        """
        mov.b32 %r9, 0;
        st.shared.b32 [%r9], %r1;
        """,
    ),
    "shared memory outside": (
        "outside of shared memory",
        "st.shared.b32 [%r2+4], %r1;",
    ),
    "copy read at once": (
        "before an asynchronous copy",
        """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.commit_group;
        ld.shared.b32 %r9, [%r2];
        """,
    ),
    "copy waited for in vain": (
        "before an asynchronous copy",
        """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.b32 %r9, [%r2];
        """,
    ),
    "copy not committed": (
        "before an asynchronous copy",
        """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.wait_group 0;
        ld.shared.b32 %r9, [%r2];
        """,
    ),
    "copy over a copy": (
        "before an asynchronous copy",
        """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        """,
    ),
    "copy over what is read": (
        "race on shared memory",
        """
        st.shared.b32 [%r2], %r1;
        bar.sync 0;
        ld.shared.b32 %r9, [%r4];
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.commit_group;
        """,
    ),
    "copy from outside": (
        "outside of argument 0",
        "cp.async.ca.shared.global [%r2], [%rd4+4], 0x4;",
    ),
    "barrier of some": (
        "some threads of a program are elsewhere",
        """
        @%p1 bra $L1;
        bar.sync 0;
        $L1:
        """,
    ),
    "shuffle of some": (
        "some threads of a warp are elsewhere",
        """
        @%p1 bra $L1;
        shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;
        $L1:
        """,
    ),
    "division by zero": (
        "division by zero",
        """
        mov.b32 %r8, 0;
        div.u32 %r9, %r1, %r8;
        """,
    ),
    "endless loop": (
        "endless loop",
        """
        $L1:
        bra $L1;
        """,
    ),
}


@parametrize("name", FAULTS)
def test_every_fault_is_seen(name):
    message, body = FAULTS[name]
    with pytest.raises(Fault, match=f"^probe: .*{re.escape(message)}"):
        launch(body)


def test_a_fault_names_the_statement():
    with pytest.raises(Fault, match=r"\[ld.global.b32 %r9, \[%rd4\+4\]\]"):
        launch("ld.global.b32 %r9, [%rd4+4];")


FINE = {
    "what a thread wrote itself": """
        st.shared.b32 [%r2], %r1;
        ld.shared.b32 %r9, [%r2];
        st.global.b32 [%rd5], %r9;
        """,
    "a barrier between": """
        st.shared.b32 [%r2], %r1;
        bar.sync 0;
        ld.shared.b32 %r8, [%r4];
        xor.b32 %r9, %r8, 32;
        st.global.b32 [%rd5], %r9;
        """,
    "equal values to one place": """
        mov.b32 %r8, 0;
        st.shared.b32 [%r8], %r8;
        mov.b32 %r9, %r1;
        st.global.b32 [%rd5], %r9;
        """,
    "a copy": """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.b32 %r9, [%r2];
        st.global.b32 [%rd5], %r9;
        """,
    "a copy of another thread": """
        cp.async.ca.shared.global [%r2], [%rd4], 0x4;
        cp.async.wait_all;
        bar.sync 0;
        ld.shared.b32 %r8, [%r4];
        xor.b32 %r9, %r8, 32;
        st.global.b32 [%rd5], %r9;
        """,
    "uninitialised lanes that nothing uses": """
        @%p1 mov.b32 %r8, %r1;
        add.s32 %r9, %r8, 1;
        mov.b32 %r9, %r1;
        st.global.b32 [%rd5], %r9;
        """,
    "uninitialised half that nothing uses": """
        mov.b64 %rd9, {%r1, %r8};
        mov.b64 {%r9, _}, %rd9;
        st.global.b32 [%rd5], %r9;
        """,
    "a branch": """
        mov.b32 %r9, %r1;
        @%p1 bra $L1;
        add.s32 %r9, %r9, 0;
        $L1:
        bar.sync 0;
        st.global.b32 [%rd5], %r9;
        """,
}


@parametrize("name", FINE)
def test_what_is_allowed_is_done(name):
    target = launch(FINE[name])
    assert torch.equal(target, numbers())


COPY = """
    ld.global.b32 %r9, [%rd4];
    st.global.b32 [%rd5], %r9;
    """


def test_programs_that_write_to_one_place_are_a_race():
    with pytest.raises(Fault, match="written twice"):
        launch(COPY, grid=(2, 1, 1))


def test_the_gaps_of_a_view_are_none_of_it():
    both = numbers(4 * THREADS).view(2, -1)
    view = both[:, :THREADS]
    assert torch.equal(launch(COPY, view), view[0])
    with pytest.raises(Fault, match="between the rows of argument 0"):
        launch("ld.global.b32 %r9, [%rd4+4];", view)


def test_a_tensor_that_is_read_and_written_by_two_names_is_refused():
    x = numbers()
    with pytest.raises(Fault, match="argument 1 is written and, as argument 0, read"):
        launch(COPY, x, x)


UNKNOWN = [
    "tex.1d.v4 %r9;",
    "bar.sync 1;",
    "add.sat.s32 %r9, %r1, %r1;",
    "fma.rz.f32 %r9, %r1, %r1, %r1;",
    "mov.u32 %r9, %laneid;",
    "ld.volatile.global.b32 %r9, [%rd4];",
]


@parametrize("statement", UNKNOWN)
def test_what_is_not_known_is_an_error(statement):
    with pytest.raises(Unknown):
        launch(statement)


BARRIER_OF_A_WARP = """
    st.shared.b32 [%r2], %r1;
    bar.warp.sync -1;
    ld.shared.b32 %r9, [%r3];
    st.global.b32 [%rd5], %r9;
    """


def test_a_program_of_one_warp_meets_where_its_warp_does():
    target = launch(BARRIER_OF_A_WARP, target=numbers(32), threads=32)
    assert target.tolist() == [t ^ 1 for t in range(32)]
    without = BARRIER_OF_A_WARP.replace("bar.warp.sync -1;", "")
    with pytest.raises(Fault, match="race on shared memory"):
        launch(without, target=numbers(32), threads=32)


def test_no_barrier_of_one_warp_among_several_is_known():
    with pytest.raises(Unknown):
        launch(BARRIER_OF_A_WARP)


def test_the_kernel_of_the_page_runs_and_is_refused_as_shown(tmp_path, monkeypatch):
    page = (ROOT / "benchmarks/ptx/README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    *printed, fault = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines()
    file = tmp_path / "shown.py"  # Triton reads the source of a kernel
    file.write_text(code)
    monkeypatch.delenv(RUN_BY, raising=False)
    done = ran(sys.executable, file)
    assert done.stdout.splitlines() == printed
    assert done.stderr.splitlines()[-1] == fault
