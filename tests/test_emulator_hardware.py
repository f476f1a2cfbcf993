"""The emulator against an H200: the same small programs with the same inputs give the same bits.

The results in data/emulator_hardware.npz were recorded by emulator_programs.py (see there); approximate functions and the
tensor core's floating-point sums are compared within a bound that stands at the program.
"""

import emulator_programs
import numpy as np
import pytest

from nbkernels import emulator


def is_float(program, number):
    """Whether a result is a float32."""
    return program.results[number] == "f32"


@pytest.mark.parametrize("program", emulator_programs.PROGRAMS, ids=lambda program: program.name)
def test_a_program_gives_what_the_hardware_gave(program):
    dtypes = [np.dtype(f"u{emulator_programs.BYTES[kind]}") for kind in program.results]
    outputs = [np.zeros(emulator_programs.LANES, dtype) for dtype in dtypes]
    inputs = emulator_programs.inputs_of(program)
    text = emulator_programs.text_of(program)
    emulator.run_ptx(text, None, emulator_programs.LANES // 64, 64, [*outputs, *inputs])
    if not emulator_programs.DATA.exists():
        pytest.skip("nothing was recorded on hardware yet: python tests/emulator_programs.py")
    with np.load(emulator_programs.DATA) as recorded:
        for number, got in enumerate(outputs):
            want = recorded[f"{program.name}/{number}"]
            if not program.bound:
                # a NaN is a NaN: hardware gives its own one out of arithmetic, a CPU hands on that of an operand
                nan = (
                    np.isnan(got.view(np.float32)) & np.isnan(want.view(np.float32))
                    if is_float(program, number)
                    else False
                )
                np.testing.assert_array_equal(np.where(nan, 0, got), np.where(nan, 0, want))
                continue
            got, want = got.view(np.float32).astype(np.float64), want.view(np.float32).astype(np.float64)
            close = np.abs(got - want) <= np.maximum(program.bound * np.abs(want), program.floor)
            assert (close | (got == want) | (np.isnan(got) & np.isnan(want))).all()
