// A row of quantized weights times a few columns of 8-bit activations, by one warp: its lanes take groups of 32 in turn, unpack each once
// and multiply it with all columns.
#pragma once
#include "activation.cuh"
#include "parts.cuh"
#include "quants.cuh"

__device__ __forceinline__ float dot(const Group & g, const int * q, const Scale & s) {
    int low = 0, high = 0;
    for (int j = 0; j < 4; j++) { low = __dp4a(g.q[j], q[j], low); high = __dp4a(g.q[j + 4], q[j + 4], high); }
    return s.d * (g.d[0] * low + g.d[1] * high + g.m[0] * s.sum[0] + g.m[1] * s.sum[1]);
}

// Every lane gets the sums of all columns.
template <class T, int COLUMNS> __device__ __forceinline__ void row_times(const char * row, const char * q, const Scale * s, int k,
                                                                          int n_columns, float (&sum)[COLUMNS]) {
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < COLUMNS; c++) sum[c] = 0.0f;
    for (int i = lane; i < k / 32; i += 32) {
        Group g;
        unpack_group<T>(row, i, g);
        for (int c = 0; c < COLUMNS; c++) {
            if (c >= n_columns) break;
            sum[c] += dot(g, (const int *) (q + (int64_t) c * k) + 8 * i, s[c * (k / 32) + i]);
        }
    }
    for (int c = 0; c < COLUMNS; c++) sum[c] = warp_sum(sum[c]);
}
