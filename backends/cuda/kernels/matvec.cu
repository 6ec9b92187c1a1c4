// Quantized weights of TYPE times 8-bit activations, for few columns. A warp has a row: its lanes take groups of 32 in turn, unpack each
// once and multiply it with all columns.
#include "activation.cuh"
#include "quants.cuh"

__device__ __forceinline__ float dot(const Group & g, const int * q, const Scale & s) {
    int low = 0, high = 0;
    for (int j = 0; j < 4; j++) { low = __dp4a(g.q[j], q[j], low); high = __dp4a(g.q[j + 4], q[j + 4], high); }
    return s.d * (g.d[0] * low + g.d[1] * high + g.m[0] * s.sum[0] + g.m[1] * s.sum[1]);
}

template <int COLUMNS> __device__ __forceinline__ void row_times(const char * row, const char * q, const Scale * s, int k, int n_columns,
                                                                 float (&sum)[COLUMNS]) {
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < COLUMNS; c++) sum[c] = 0.0f;
    for (int i = lane; i < k / 32; i += 32) {
        Group g;
        unpack_group<TYPE>(row, i, g);
        for (int c = 0; c < COLUMNS; c++) {
            if (c >= n_columns) break;
            sum[c] += dot(g, (const int *) (q + (int64_t) c * k) + 8 * i, s[c * (k / 32) + i]);
        }
    }
    for (int c = 0; c < COLUMNS; c++) sum[c] = warp_sum(sum[c]);
}

// a [k, n, a2, a3], activations of b [k, m, b2, b3], m up to COLUMNS. grid: (n / 4, b2, b3); block: 128
template <int COLUMNS> __device__ __forceinline__ void matvec(const Tensor & dst, const Tensor & a, const char * q, const Scale * s) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, i2 = blockIdx.y, i3 = blockIdx.z, k = (int) a.ne[0];
    if (row >= a.ne[1]) return;
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    const char * w = at(a, 0, row, (int) (i2 * a.ne[2] / dst.ne[2]), (int) (i3 * a.ne[3] / dst.ne[3]));
    float sum[COLUMNS];
    row_times<COLUMNS>(w, q + first * k, s + first * (k / 32), k, (int) dst.ne[1], sum);
    if (threadIdx.x % 32 == 0)
        for (int c = 0; c < COLUMNS; c++) if (c < dst.ne[1]) *(float *) at(dst, row, c, i2, i3) = sum[c];
}
KERNEL matvec_1(Tensor dst, Tensor a, const char * q, const Scale * s) { matvec<1>(dst, a, q, s); }
KERNEL matvec_2(Tensor dst, Tensor a, const char * q, const Scale * s) { matvec<2>(dst, a, q, s); }
KERNEL matvec_4(Tensor dst, Tensor a, const char * q, const Scale * s) { matvec<4>(dst, a, q, s); }
KERNEL matvec_8(Tensor dst, Tensor a, const char * q, const Scale * s) { matvec<8>(dst, a, q, s); }

// The same with an expert for each column: a [k, n, n_expert], activations of b [k, n_used or 1, n_tokens], ids [n_used, n_tokens].
// grid: (n / 4, n_used, n_tokens); block: 128
KERNEL matvec_id(Tensor dst, Tensor a, Tensor ids, const char * q, const Scale * s, int64_t b_used) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, slot = blockIdx.y, t = blockIdx.z, k = (int) a.ne[0];
    if (row >= a.ne[1]) return;
    const int expert = *(const int *) at(ids, slot, t, 0, 0);
    const int64_t column = t * b_used + slot % b_used;
    float sum[1];
    row_times<1>(at(a, 0, row, expert, 0), q + column * k, s + column * (k / 32), k, 1, sum);
    if (threadIdx.x % 32 == 0) *(float *) at(dst, row, slot, t, 0) = sum[0];
}
