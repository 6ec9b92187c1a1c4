// The gate and up matrices of a feed-forward block times the same 8-bit activations, for few columns, and what the activation makes of
// both: as floats, or as the 8-bit activations of the next product. Gates are of TYPE_0, ups of TYPE_1.
#include "glu.cuh"
#include "matvec.cuh"

#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
const int ROWS = 32;                                                      // of a block: one group of 8-bit activations

// 32 values of each column, one for each row of the block: floats to dst if `write`, bytes to q2 and s2 if there is such a place.
template <int COLUMNS> __device__ __forceinline__ void finish(const float (&value)[COLUMNS][ROWS], const Tensor & dst, int n_columns, int i2,
                                                              int i3, int write, char * q2, Scale * s2) {
    const int row0 = blockIdx.x * ROWS, lane = threadIdx.x % 32, n = (int) dst.ne[0];
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    __syncthreads();
    for (int c = threadIdx.x / 32; c < n_columns; c += blockDim.x / 32) {
        if (write && row0 + lane < n) *(float *) at(dst, row0 + lane, c, i2, i3) = value[c][lane];
        if (q2) quantize32(value[c][lane], q2 + (first + c) * n + row0, s2 + ((first + c) * n + row0) / 32);
    }
}

// gate and up [k, n], dst [n, m], m up to COLUMNS. grid: (n / 32, b2, b3); block: 512
template <int COLUMNS> __device__ __forceinline__ void gated(const Tensor & dst, const Tensor & gate, const Tensor & up, const Tensor & gate_bias,
                                                             const Tensor & up_bias, const Glu & p, const char * q, const Scale * s, int write,
                                                             char * q2, Scale * s2) {
    __shared__ float value[COLUMNS][ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i2 = blockIdx.y, i3 = blockIdx.z, k = (int) gate.ne[0], m = (int) dst.ne[1];
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    for (int r = warp; r < ROWS; r += blockDim.x / 32) {
        const int row = blockIdx.x * ROWS + r;
        if (row >= gate.ne[1]) break;
        float g[COLUMNS], u[COLUMNS];
        row_times<TYPE_0, COLUMNS>(at(gate, 0, row, 0, 0), q + first * k, s + first * (k / 32), k, m, g);
        row_times<TYPE_1, COLUMNS>(at(up, 0, row, 0, 0), q + first * k, s + first * (k / 32), k, m, u);
        for (int c = 0; c < COLUMNS; c++) if (lane == c && c < m) {
            const Index at_c = {row, c, i2, i3};
            value[c][r] = activated(p, added(g[c], gate_bias, at_c), added(u[c], up_bias, at_c));
        }
    }
    finish(value, dst, m, i2, i3, write, q2, s2);
}
KERNEL __launch_bounds__(512) gated_1(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, const char * q, const Scale * s, int write, char * q2,
               Scale * s2) {
    gated<1>(dst, gate, up, gate_bias, up_bias, p, q, s, write, q2, s2);
}
KERNEL __launch_bounds__(512) gated_2(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, const char * q, const Scale * s, int write, char * q2,
               Scale * s2) {
    gated<2>(dst, gate, up, gate_bias, up_bias, p, q, s, write, q2, s2);
}
KERNEL __launch_bounds__(512) gated_4(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, const char * q, const Scale * s, int write, char * q2,
               Scale * s2) {
    gated<4>(dst, gate, up, gate_bias, up_bias, p, q, s, write, q2, s2);
}
KERNEL __launch_bounds__(512) gated_8(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, const char * q, const Scale * s, int write, char * q2,
               Scale * s2) {
    gated<8>(dst, gate, up, gate_bias, up_bias, p, q, s, write, q2, s2);
}
