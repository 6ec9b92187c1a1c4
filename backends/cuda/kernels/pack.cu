// Floats to rows of the quantized type TYPE. One thread per block of 32, blocks of 64.
#include "pack.cuh"

// x (any plain type) in the shape of dst. grid: blocks / 64
KERNEL pack(Tensor dst, Tensor x, int x_type) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int blocks = (int) (dst.ne[0] / 32);
    if (i >= numel(dst) / 32) return;
    float v[32];
    for (int k = 0; k < 32; k++) v[k] = load(x_type, at(x, unravel(x, i * 32 + k)));
    Pack<TYPE>::pack(v, at(dst, row_index(dst, i / blocks)) + i % blocks * TYPE::BYTES);
}

// Row rows[i] of dst = row i of x. grid: blocks of x / 64
KERNEL set_rows(Tensor dst, Tensor x, Tensor rows, int x_type) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int blocks = (int) (dst.ne[0] / 32);
    if (i >= numel(x) / 32) return;
    const Index r = row_index(x, i / blocks);
    const int block = (int) (i % blocks), row = *(const int *) at(rows, r.i1, r.i2 % (int) rows.ne[1], r.i3 % (int) rows.ne[2], 0);
    float v[32];
    for (int k = 0; k < 32; k++) v[k] = load(x_type, at(x, block * 32 + k, r.i1, r.i2, r.i3));
    Pack<TYPE>::pack(v, at(dst, 0, row, r.i2, r.i3) + block * TYPE::BYTES);
}
