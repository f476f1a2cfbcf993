"""Our own kernels on the emulator and on the GPU: the same compiled code, the same inputs, the same bits.

Kernels that use the approximate functions (ex2, rcp, …) or the tensor cores' floating-point sums may differ in the last digits:
the hardware's tables, and the order in which a tensor core adds, are not published. Their bounds stand at the case.
"""

import numpy as np
import pytest
from compare import relative_error
from kernel_cases import CASES

import nbkernels as nbk


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_emulator_gives_what_the_gpu_gives(name):
    case = CASES[name]
    with nbk.device("cuda") as gpu:
        wanted = case.call()
    with nbk.device("emulator", arch=gpu.arch):
        found = case.call()
    for got, want in zip(found, wanted, strict=True):
        if case.gpu_bound == 0:
            np.testing.assert_array_equal(got, want)
        else:
            assert relative_error(got, want.astype(np.float64)) < case.gpu_bound
