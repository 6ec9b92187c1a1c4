// Quantized weights of TYPE times 8-bit activations, for many columns: tiles of 64 rows x 64 columns, 128 of k at a time in shared memory.
// 256 threads; thread (x, y) of 16 x 16 has rows x + 16 i and columns y + 16 j.
#include "matvec.cuh"

const int TILE = 64, GROUPS = 4, STRIDE = 8 * GROUPS + 1;         // of k at a time: 4 groups of 32; the odd stride spreads over the banks

// grid: (n / 64, m / 64, b2 * b3); block: 256
KERNEL matmul(Tensor a, Sum to, const char * q, const Scale * scales) {
    const Tensor & dst = to.dst;
    __shared__ int w[TILE * STRIDE], x[TILE * STRIDE];
    __shared__ float d[TILE * GROUPS * 2], m[TILE * GROUPS * 2];
    __shared__ Scale s[TILE * GROUPS];
    const int i2 = blockIdx.z % (int) dst.ne[2], i3 = blockIdx.z / (int) dst.ne[2], k = (int) a.ne[0], t = threadIdx.x;
    const int row0 = blockIdx.x * TILE, column0 = blockIdx.y * TILE, n_rows = (int) a.ne[1], n_columns = (int) dst.ne[1];
    const char * matrix = at(a, 0, 0, (int) (i2 * a.ne[2] / dst.ne[2]), (int) (i3 * a.ne[3] / dst.ne[3]));
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    float sum[4][4] = {};
    for (int k0 = 0; k0 < k / 32; k0 += GROUPS) {
        {                                                           // each thread unpacks one group, and copies one of the activations
            const int r = t / GROUPS, g = t % GROUPS, row = row0 + r, column = column0 + r;
            Group group = {};
            if (row < n_rows && k0 + g < k / 32) unpack_group<TYPE>(matrix + row * a.nb[1], k0 + g, group);
            for (int j = 0; j < 8; j++) w[r * STRIDE + 8 * g + j] = group.q[j];
            for (int h = 0; h < 2; h++) { d[2 * t + h] = group.d[h]; m[2 * t + h] = group.m[h]; }
            const bool inside = column < n_columns && k0 + g < k / 32;
            const int64_t at_k = (first + column) * (k / 32) + k0 + g;
            for (int j = 0; j < 8; j++) x[r * STRIDE + 8 * g + j] = inside ? ((const int *) q)[at_k * 8 + j] : 0;
            const Scale none = {};
            s[t] = inside ? scales[at_k] : none;
        }
        __syncthreads();
        for (int g = 0; g < GROUPS; g++) for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
            const int r = t % 16 + 16 * i, c = t / 16 + 16 * j, at_r = (r * GROUPS + g) * 2;
            const int * wq = w + r * STRIDE + 8 * g, * xq = x + c * STRIDE + 8 * g;
            const Scale & sc = s[c * GROUPS + g];
            int low = 0, high = 0;
            for (int l = 0; l < 4; l++) { low = __dp4a(wq[l], xq[l], low); high = __dp4a(wq[l + 4], xq[l + 4], high); }
            sum[i][j] += sc.d * (d[at_r] * low + d[at_r + 1] * high + m[at_r] * sc.sum[0] + m[at_r + 1] * sc.sum[1]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
        const int r = row0 + t % 16 + 16 * i, c = column0 + t / 16 + 16 * j;
        if (r < n_rows && c < n_columns) put(to, sum[i][j], r, c, i2, i3);
    }
}
