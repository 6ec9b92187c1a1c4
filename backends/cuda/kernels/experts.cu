// Quantized weights of TYPE times 8-bit activations, with an expert for each column.
#include "matvec.cuh"

// a [k, n, n_expert], activations of b [k, n_used or 1, n_tokens], ids [n_used, n_tokens]. A warp has a row.
// grid: (n / 4, n_used, n_tokens); block: 128
KERNEL matvec_id(Tensor dst, Tensor a, Tensor ids, const char * q, const Scale * s, int64_t b_used) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, slot = blockIdx.y, t = blockIdx.z, k = (int) a.ne[0];
    if (row >= a.ne[1]) return;
    const int expert = *(const int *) at(ids, slot, t, 0, 0);
    const int64_t column = t * b_used + slot % b_used;
    float sum[1];
    row_times<TYPE, 1>(at(a, 0, row, expert, 0), q + column * k, s + column * (k / 32), k, 1, sum);
    if (threadIdx.x % 32 == 0) *(float *) at(dst, row, slot, t, 0) = sum[0];
}
