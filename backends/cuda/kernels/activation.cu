#include "activation.cuh"

// x [k, ..] of a plain type, row after row, to bytes at q and scales. grid: (k / 128, rows); block: 128
KERNEL quantize(Tensor x, char * q, Scale * scale, int x_type) {
    const int64_t k = x.ne[0], row = blockIdx.y;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i - (int) threadIdx.x % 32 >= k) return;                          // whole warps: k is a multiple of 32
    const Index r = row_index(x, row);
    quantize32(load(x_type, at(x, r) + i * x.nb[0]), q + row * k + i / 32 * 32, scale + (row * k + i) / 32);
}

// n activations back to floats of 16 bits. grid: n / 256
KERNEL unpack_bf16(const char * q, const Scale * scale, uint16_t * to, int64_t n) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = float_to_bf16(scale[i / 32].d * q[i]);
}
