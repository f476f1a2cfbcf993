"""wgmma (sm_90a): products of four warps, with operands in shared memory described by 64-bit descriptors.

A product is computed when it is issued. That its operands may still be read until wgmma.wait_group is kept for the race
check: until then a write to them is reported.

A descriptor: bits 0-13 start address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 62-63 swizzle (0 none, 1 of
128, 2 of 64, 3 of 32 bytes). Chunks are 16 bytes, s = swizzle bytes (16 without one); for a matrix stored along k:

    row r, chunk c of k:    (r % 8)·s + (r // 8)·stride + c·16          (without swizzle c·leading)

and for one stored along its rows (transposed; 16-bit types), chunk c of rows, k:

    c % (s/16)·16 + c // (s/16)·leading + (k % 8)·s + k // 8·stride      (without swizzle c·stride, k // 8·leading)

The swizzle xors bits 4 and up of the address with bits 7 and up.
"""

import numpy as np

from nbkernels.emulator import parser, rounding
from nbkernels.emulator.errors import LaunchError
from nbkernels.emulator.instructions_matrix import element_reader, fragment_matrix
from nbkernels.emulator.machine import SHARED_START
from nbkernels.emulator.registry import instruction, warpgroup_instruction
from nbkernels.emulator.tensor_map import swizzled

U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)
WARPGROUP, WARP = 128, 32
_SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}


@instruction("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def bind_order(m, i):
    if i.opcode[1] == "fence":
        return None
    if i.opcode[1] == "commit_group":

        def commit(group):
            m.product_group[group.sel] += 1

        return commit
    pending = int(i.operands[0].value)

    def wait(group):
        if m.checks is None or not m.pending_products:
            return
        kept = []
        for product in m.pending_products:
            lane, number = product[0], product[1]
            if group.mask[lane] and number < m.product_group[lane] - pending:
                m.checks.settle_reads(*product[2:], lane)
            else:
                kept.append(product)
        m.pending_products = kept

    return wait


class _Operand:
    """Where a matrix [rows, k] in shared memory lies: chunk offsets before the descriptor's strides are known."""

    def __init__(self, rows, depth, itemsize, along_rows):
        self.rows, self.depth, self.itemsize, self.along_rows = rows, depth, itemsize, along_rows
        if along_rows:
            self.chunk, self.line = np.meshgrid(np.arange(rows * itemsize // 16), np.arange(depth), indexing="ij")
        else:
            self.line, self.chunk = np.meshgrid(np.arange(rows), np.arange(depth * itemsize // 16), indexing="ij")

    def addresses(self, descriptor):
        """Shared addresses of the 16-byte chunks: [rows, chunks of k], or [chunks of rows, k] along rows."""
        start = (descriptor & 0x3FFF) << 4
        leading = (descriptor >> 16 & 0x3FFF) << 4
        stride = (descriptor >> 32 & 0x3FFF) << 4
        bits = _SWIZZLE_BITS[descriptor >> 62 & 3]
        width = 16 << bits
        line = self.line % 8 * width
        if self.along_rows:
            across = width // 16
            if bits:
                offset = self.chunk % across * 16 + self.chunk // across * leading + line + self.line // 8 * stride
            else:
                offset = self.chunk * stride + line + self.line // 8 * leading
        elif bits:
            offset = line + self.line // 8 * stride + self.chunk * 16
        else:
            offset = line + self.line // 8 * stride + self.chunk * leading
        return swizzled(start + offset, bits)

    def matrix(self, chunks, read):
        """Chunks as uint8 [..., 16] -> float64 [rows, k]."""
        values = read(np.ascontiguousarray(chunks).view(np.uint32))
        if self.along_rows:
            return values.swapaxes(1, 2).reshape(self.rows, self.depth)
        return values.reshape(self.rows, self.depth)


@warpgroup_instruction("wgmma.mma_async")
def bind_product(m, i):
    words = i.opcode
    shape = next(w for w in words if w.startswith("m64n"))
    columns, depth = (int(n) for n in shape[4:].split("k"))
    if "sp" in words:
        raise m.unknown(i, "sparse wgmma")
    if m.padded % WARPGROUP:
        raise LaunchError(f"{m.name}: wgmma needs blocks of a multiple of 128 threads, not {m.threads}")
    result, kind_a, kind_b = [w for w in words if w in ("f32", "f16", "bf16", "tf32", "s32", "s8", "u8")][:3]
    elements, read_a = element_reader(kind_a)
    read_b = element_reader(kind_b)[1]
    itemsize = 4 // elements
    if depth * itemsize != 32 or result not in ("f32", "f16", "s32"):
        raise m.unknown(i, f"shape {shape} of wgmma with these types")
    operands = i.operands
    places = [m.destination(i, r, U32) for r in operands[0].items]
    in_registers = isinstance(operands[1], parser.Vector)
    rest = operands[3:]
    scale_d = m.source(i, rest[0], np.dtype(bool))
    signs = [int(o.value) for o in rest[1:3]] or [1, 1]
    turned = [int(o.value) for o in rest[3:]]
    if in_registers:
        a_words = [m.source(i, r, U32) for r in operands[1].items]
        a_where, b_turned = None, bool(turned[0]) if turned else False
    else:
        a_where = _Operand(64, depth, itemsize, bool(turned[0]) if turned else False)
        a_descriptor = m.source(i, operands[1], U64)
        b_turned = bool(turned[1]) if len(turned) > 1 else False
    b_where = _Operand(columns, depth, itemsize, b_turned)
    b_descriptor = m.source(i, operands[2], U64)
    expected = columns // 2 if result != "f16" else columns // 4
    if len(places) != expected:
        raise m.unknown(i, f"{len(places)} result registers of wgmma {shape}")

    def fetch(lane, where, descriptor, read):
        at = where.addresses(int(descriptor[lane]))
        if at.min() < SHARED_START or at.max() + 16 > m.shared_end:
            raise m.fault(
                i, lane, f"wgmma reads shared addresses {at.min():#x} to {at.max() + 16:#x}, outside the block's"
            )
        offsets = (at + int(m.lane_shared[lane])).reshape(-1)
        chunks = m.shared.view(np.uint8, 16)[offsets >> 4].reshape(*at.shape, 16)
        if m.checks is not None:
            stamp = m.checks.pending_read(i, lane, offsets)
            m.pending_products.append((lane, int(m.product_group[lane]), i, offsets, stamp))
        return where.matrix(chunks, read)

    def step(group):
        lanes = group.lanes.reshape(-1, WARPGROUP)
        for mine in lanes:
            _one(mine)

    def _one(mine):
        lane = int(mine[0])
        if in_registers:
            words_of = [w[mine].reshape(4, WARP) for w in a_words]
            a = fragment_matrix(words_of, elements, read_a, 2).reshape(64, depth)
        else:
            a = fetch(lane, a_where, a_descriptor, read_a)
        b = fetch(lane, b_where, b_descriptor, read_b)
        total = (signs[0] * signs[1]) * (a @ b.T)  # [64, columns]
        # [warp, half, row, tile, t, 2] -> registers
        total = total.reshape(4, 2, 8, columns // 8, 4, 2)
        keep = bool(scale_d[lane])
        for tile in range(columns // 8):
            for half in range(2):
                pair = total[:, half, :, tile].reshape(WARPGROUP, 2)
                _accumulate(mine, tile, half, pair, keep)

    def _accumulate(mine, tile, half, pair, keep):
        if result == "f16":
            place = places[2 * tile + half]
            before = np.ascontiguousarray(place[mine]).view(np.float16).reshape(-1, 2) if keep else 0
            place[mine] = rounding.to_f16(pair + before).view(np.uint32)[:, 0]
            return
        for number in range(2):
            place = places[4 * tile + 2 * half + number]
            value = pair[:, number]
            if result == "s32":
                before = place[mine].view(np.int32) if keep else 0
                place[mine] = (value.astype(np.int64) + before).astype(np.uint32)
            else:
                before = place[mine].view(np.float32) if keep else 0
                place[mine] = (value + before).astype(np.float32).view(np.uint32)

    return step
