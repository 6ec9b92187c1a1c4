// Products of plain types, with any strides, in float32. TYPE is the type of a; that of b is an argument.
#include "glu.cuh"
#include "parts.cuh"

// A row of `a` times a few columns of b, by a warp: lanes have eight neighbours each where the row has 16-bit elements side by side, else one.
template <int COLUMNS> __device__ __forceinline__ void row_times(const char * w, int64_t step, const Tensor & b, int b_type, const char * x, int k,
                                                                 float (&sum)[COLUMNS]) {
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < COLUMNS; c++) sum[c] = 0.0f;
    if (TYPE != F32 && step == 2 && k % 8 == 0 && ((uint64_t) w & 15) == 0) {
        for (int i = 8 * lane; i < k; i += 256) {
            const int4 raw = *(const int4 *) (w + 2 * i);
            const int words[4] = {raw.x, raw.y, raw.z, raw.w};
            for (int j = 0; j < 8; j++) {
                const uint16_t bits = (uint16_t) (words[j / 2] >> j % 2 * 16);
                const float v = TYPE == F16 ? half_to_float(bits) : bf16_to_float(bits);
                for (int c = 0; c < COLUMNS; c++) if (c < b.ne[1]) sum[c] += v * load(b_type, x + (i + j) * b.nb[0] + c * b.nb[1]);
            }
        }
    } else {
        for (int i = lane; i < k; i += 32) {
            const float v = load(TYPE, w + i * step);
            for (int c = 0; c < COLUMNS; c++) if (c < b.ne[1]) sum[c] += v * load(b_type, x + i * b.nb[0] + c * b.nb[1]);
        }
    }
    for (int c = 0; c < COLUMNS; c++) sum[c] = warp_sum(sum[c]);
}

// Parts a [k, n, a2, a3] times b [k, m, b2, b3], m up to COLUMNS; a warp has a row. grid: (sum of the parts' ceil(n / 4), b2, b3); block: 128
template <int COLUMNS> __device__ __forceinline__ void matvec(const Parts & parts, const Tensor & b, int b_type) {
    int block;
    const Part & p = parts.part[part_of(parts, block)];
    const Tensor & a = p.a;
    const int row = block * (blockDim.x / 32) + threadIdx.x / 32, i2 = blockIdx.y, i3 = blockIdx.z, lane = threadIdx.x % 32;
    if (row >= a.ne[1]) return;
    float sum[COLUMNS];
    row_times<COLUMNS>(at(a, 0, row, (int) (i2 * a.ne[2] / b.ne[2]), (int) (i3 * a.ne[3] / b.ne[3])), a.nb[0], b, b_type, at(b, 0, 0, i2, i3),
                       (int) a.ne[0], sum);
    for (int c = 0; c < COLUMNS; c++) if (lane == c && c < b.ne[1]) put(p.to, sum[c], row, c, i2, i3);
}
KERNEL matvec_1(Parts parts, Tensor b, int b_type) { matvec<1>(parts, b, b_type); }
KERNEL matvec_2(Parts parts, Tensor b, int b_type) { matvec<2>(parts, b, b_type); }
KERNEL matvec_4(Parts parts, Tensor b, int b_type) { matvec<4>(parts, b, b_type); }
KERNEL matvec_8(Parts parts, Tensor b, int b_type) { matvec<8>(parts, b, b_type); }

// Gate and up [k, n] times b [k, m, b2, b3], and their activation; a warp has a row of both. grid: (n / 4, b2, b3); block: 128
template <int COLUMNS> __device__ __forceinline__ void gated(const Tensor & dst, const Tensor & gate, const Tensor & up, const Tensor & gate_bias,
                                                             const Tensor & up_bias, const Glu & p, const Tensor & b, int b_type) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, i2 = blockIdx.y, i3 = blockIdx.z, k = (int) gate.ne[0], lane = threadIdx.x % 32;
    if (row >= gate.ne[1]) return;
    float g[COLUMNS], u[COLUMNS];
    row_times<COLUMNS>(at(gate, 0, row, 0, 0), gate.nb[0], b, b_type, at(b, 0, 0, i2, i3), k, g);
    row_times<COLUMNS>(at(up, 0, row, 0, 0), up.nb[0], b, b_type, at(b, 0, 0, i2, i3), k, u);
    for (int c = 0; c < COLUMNS; c++) if (lane == c && c < b.ne[1]) {
        const Index at_c = {row, c, i2, i3};
        *(float *) at(dst, at_c) = activated(p, added(g[c], gate_bias, at_c), added(u[c], up_bias, at_c));
    }
}
KERNEL gated_1(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, Tensor b, int b_type) {
    gated<1>(dst, gate, up, gate_bias, up_bias, p, b, b_type);
}
KERNEL gated_2(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, Tensor b, int b_type) {
    gated<2>(dst, gate, up, gate_bias, up_bias, p, b, b_type);
}
KERNEL gated_4(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, Tensor b, int b_type) {
    gated<4>(dst, gate, up, gate_bias, up_bias, p, b, b_type);
}
KERNEL gated_8(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, Tensor b, int b_type) {
    gated<8>(dst, gate, up, gate_bias, up_bias, p, b, b_type);
}

// Tiles of 64 rows x 64 columns, 16 of k at a time in shared memory; thread (x, y) of 16 x 16 has rows x + 16 i and columns y + 16 j.
// grid: (n / 64, m / 64, b2 * b3); block: 256
KERNEL matmul(Tensor a, Sum to, Tensor b, int b_type) {
    const Tensor & dst = to.dst;
    __shared__ float w[16][65], x[16][65];
    const int i2 = blockIdx.z % (int) b.ne[2], i3 = blockIdx.z / (int) b.ne[2], t = threadIdx.x, k = (int) a.ne[0];
    const int row0 = blockIdx.x * 64, column0 = blockIdx.y * 64;
    const char * pa = at(a, 0, 0, (int) (i2 * a.ne[2] / b.ne[2]), (int) (i3 * a.ne[3] / b.ne[3])), * pb = at(b, 0, 0, i2, i3);
    float sum[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += 16) {
        for (int e = t; e < 64 * 16; e += 256) {
            const int i = k0 + e % 16, r = e / 16;
            w[e % 16][r] = i < k && row0 + r < a.ne[1] ? load(TYPE, pa + i * a.nb[0] + (row0 + r) * a.nb[1]) : 0.0f;
            x[e % 16][r] = i < k && column0 + r < b.ne[1] ? load(b_type, pb + i * b.nb[0] + (column0 + r) * b.nb[1]) : 0.0f;
        }
        __syncthreads();
        for (int l = 0; l < 16; l++) for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++)
            sum[i][j] += w[l][t % 16 + 16 * i] * x[l][t / 16 + 16 * j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
        const int r = row0 + t % 16 + 16 * i, c = column0 + t / 16 + 16 * j;
        if (r < dst.ne[0] && c < dst.ne[1]) put(to, sum[i][j], r, c, i2, i3);
    }
}

// An expert for each column: a [k, n, n_expert], b [k, n_used or 1, n_tokens], ids [n_used, n_tokens]. grid: (n / 4, n_used, n_tokens)
KERNEL matvec_id(Tensor dst, Tensor a, Tensor b, Tensor ids, int b_type) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, slot = blockIdx.y, t = blockIdx.z, lane = threadIdx.x % 32;
    if (row >= a.ne[1]) return;
    const char * w = at(a, 0, row, *(const int *) at(ids, slot, t, 0, 0), 0), * x = at(b, 0, slot % (int) b.ne[1], t, 0);
    float sum = 0.0f;
    for (int i = lane; i < a.ne[0]; i += 32) sum += load(TYPE, w + i * a.nb[0]) * load(b_type, x + i * b.nb[0]);
    sum = warp_sum(sum);
    if (lane == 0) *(float *) at(dst, row, slot, t, 0) = sum;
}

// a [n, k, ..], b [m, k, ..] -> the sum over k of outer products. grid: elements / 256
KERNEL out_prod(Tensor dst, Tensor a, Tensor b, int b_type) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index o = unravel(dst, i);
    const int a2 = (int) (o.i2 * a.ne[2] / b.ne[2]), a3 = (int) (o.i3 * a.ne[3] / b.ne[3]);
    float sum = 0.0f;
    for (int k = 0; k < a.ne[1]; k++) sum += load(TYPE, at(a, o.i0, k, a2, a3)) * load(b_type, at(b, o.i1, k, o.i2, o.i3));
    *(float *) at(dst, o) = sum;
}

// x with a x = b: a [n, n, ..] lower triangular, b [m, n, ..]. A thread has a column. grid: (m / 64, axis 2, axis 3); block: 64
KERNEL solve_tri(Tensor dst, Tensor a, Tensor b) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, i2 = blockIdx.y, i3 = blockIdx.z;
    if (c >= dst.ne[0]) return;
    for (int i = 0; i < a.ne[1]; i++) {
        float known = 0.0f;
        for (int j = 0; j < i; j++) known += *(const float *) at(a, j, i, i2, i3) * *(const float *) at(dst, c, j, i2, i3);
        *(float *) at(dst, c, i, i2, i3) = (*(const float *) at(b, c, i, i2, i3) - known) / *(const float *) at(a, i, i, i2, i3);
    }
}
