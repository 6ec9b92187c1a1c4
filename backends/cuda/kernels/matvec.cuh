// A row of quantized weights times a few columns of 8-bit activations, by one warp: its lanes take groups of 32 in turn, unpack each once
// and multiply it with all columns.
#pragma once
#include "activation.cuh"
#include "parts.cuh"
#include "quants.cuh"

__device__ __forceinline__ float dot(const Group & g, const int4 * q, const Scale & s) {
    const int4 a = q[0], b = q[1];
    int low = __dp4a(g.q[0], a.x, 0), high = __dp4a(g.q[4], b.x, 0);
    low = __dp4a(g.q[1], a.y, low); low = __dp4a(g.q[2], a.z, low); low = __dp4a(g.q[3], a.w, low);
    high = __dp4a(g.q[5], b.y, high); high = __dp4a(g.q[6], b.z, high); high = __dp4a(g.q[7], b.w, high);
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
            sum[c] += dot(g, (const int4 *) (q + (int64_t) c * k) + 2 * i, s[c * (k / 32) + i]);
        }
    }
    for (int c = 0; c < COLUMNS; c++) sum[c] = warp_sum(sum[c]);
}
