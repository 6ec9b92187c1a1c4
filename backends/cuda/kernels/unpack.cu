// Rows of the quantized type TYPE to float. One thread per group of 32, blocks of 64.
#include "quants.cuh"

// x in the shape of dst, contiguous F32. grid: groups / 64
KERNEL unpack(Tensor dst, Tensor x) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int groups = (int) (x.ne[0] / 32);
    if (i >= numel(x) / 32) return;
    const Index r = row_index(x, i / groups);
    Group g;
    unpack_group<TYPE>(at(x, r), (int) (i % groups), g);
    float * to = (float *) dst.data + i * 32;
    for (int k = 0; k < 32; k++) to[k] = value(g, k);
}

// A whole matrix, contiguous, to bfloat16 at `to`. grid: groups / 64
KERNEL unpack_bf16(Tensor x, uint16_t * to) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int groups = (int) (x.ne[0] / 32);
    if (i >= numel(x) / 32) return;
    Group g;
    unpack_group<TYPE>(at(x, row_index(x, i / groups)), (int) (i % groups), g);
    for (int k = 0; k < 32; k++) to[i * 32 + k] = float_to_bf16(value(g, k));
}

// dst [n, r, b2, b3] = rows [r, b2, b3] of x. grid: (groups of a row / 64, rows)
KERNEL get_rows(Tensor dst, Tensor x, Tensor rows) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= x.ne[0] / 32) return;
    const Index r = row_index(dst, blockIdx.y);
    const int row = max(0, *(const int *) at(rows, r.i1, r.i2, r.i3, 0));       // -1 is a token that could not be drawn
    Group g;
    unpack_group<TYPE>(x.data + row * x.nb[1] + r.i2 * x.nb[2] + r.i3 * x.nb[3], group, g);
    for (int k = 0; k < 32; k++) *(float *) at(dst, group * 32 + k, r.i1, r.i2, r.i3) = value(g, k);
}
