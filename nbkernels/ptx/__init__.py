"""One Python function a machine instruction: what the kernels are written with.

Each is usable inside a ``numba.cuda`` kernel only; its docstring says what it does, how operands are laid out over the lanes
and since which architecture it exists. The source of all of it is NVIDIA's PTX ISA reference.
"""

from nbkernels.ptx.arithmetic import (
    dp4a,
    ex2,
    fma,
    fma_bf16x2,
    fmax,
    fmax_nan,
    lg2,
    mulhi,
    prmt,
    rcp,
    rsqrt,
    sub_f16x2,
    tanh_approx,
)
from nbkernels.ptx.asm import absent, instruction, pointer, storage
from nbkernels.ptx.convert import (
    bf16_from_float,
    bf16x2_from_floats,
    bits_from_float,
    f16_from_float,
    f16x2_from_floats,
    float_from_bf16,
    float_from_bits,
    float_from_f16,
    floats_from_bf16x2,
    floats_from_f16x2,
)
from nbkernels.ptx.dependent import griddep_wait, launch_dependents
from nbkernels.ptx.memory import (
    address,
    atomic_add,
    atomic_add_relaxed,
    cp_async_4_zfill,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    ld_global,
    ld_global_acquire,
    ld_global_nc,
    ld_global_nc_f32,
    ld_global_nc_v2,
    ld_global_nc_v4,
    ld_global_nc_v4_f32,
    ld_global_relaxed_f32,
    ld_global_stream_v2,
    ld_global_stream_v4,
    ld_global_v2,
    ld_global_v4,
    ld_global_v4_f32,
    ld_shared,
    ld_shared_f32,
    ld_shared_u16,
    ld_shared_v2,
    ld_shared_v4,
    ld_shared_v4_f32,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    movmatrix_trans,
    pointer_at,
    prefetch_l2,
    shared_address,
    st_global,
    st_global_stream_v4,
    st_global_v2,
    st_global_v4,
    st_global_v4_f32,
    st_shared,
    st_shared_f32,
    st_shared_u16,
    st_shared_v2,
    st_shared_v4,
    st_shared_v4_f32,
)
from nbkernels.ptx.mma import mma_m16n8k16_bf16, mma_m16n8k16_f16, mma_m16n8k32_s8, mma_update
from nbkernels.ptx.registers import hold
from nbkernels.ptx.warp import (
    WARP,
    block_reductions,
    lane_id,
    shfl_bfly,
    shfl_bfly_u32,
    shfl_idx,
    shfl_idx_u32,
    warp_any,
    warp_max,
    warp_sum,
    warp_sync,
)

__all__ = [name for name in dir() if not name.startswith("_")]
