// Quantized weights of TYPE times 8-bit activations, for many columns: tiles of 64 rows x 32 or 128 columns, 128 of k at a time in shared
// memory, by tensor cores from sm_80 on, with dp4a before (or where DP4A is defined).
#include "matvec.cuh"
#include "mma.cuh"

const int ROWS = 64, GROUPS = 4, STRIDE = 8 * GROUPS + 4;         // of k at a time: 4 groups of 32; the stride spreads fragments over the banks
#if !defined(DP4A) && !defined(GGRAPH_EMULATOR)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define DP4A
#endif
#endif
// Types whose scales are those of 16 values, not of 32.
template <class T> struct Narrow { static const bool yes = false; };
template <> struct Narrow<Q2_K> { static const bool yes = true; };
template <> struct Narrow<Q3_K> { static const bool yes = true; };
template <> struct Narrow<Q6_K> { static const bool yes = true; };
template <> struct Narrow<NVFP4> { static const bool yes = true; };
template <> struct Narrow<IQ2_XS> { static const bool yes = true; };
template <> struct Narrow<IQ2_S> { static const bool yes = true; };
template <> struct Narrow<IQ1_M> { static const bool yes = true; };

template <int COLUMNS> struct Tile {
    int w[ROWS * STRIDE], x[COLUMNS * STRIDE];
    float d[ROWS * GROUPS * 2], m[ROWS * GROUPS * 2];
    Scale s[COLUMNS * GROUPS];
};

// 64 rows from row0 on of a matrix times COLUMNS columns. `column(c)`: where in the activations column c of the tile is, -1 for nowhere;
// `put_at(r, c, sum)` takes the results of rows and columns of the tile. 256 threads.
template <int COLUMNS, class Column, class Put> __device__ __forceinline__ void multiply(const char * matrix, int64_t row_bytes, int row0, int n_rows, int k,
                                                                                         const char * q, const Scale * scales, Column column, Put put_at) {
    __shared__ __align__(16) Tile<COLUMNS> tile;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, r0 = 16 * (warp % 4) + lane / 4, c0 = COLUMNS / 2 * (warp / 4);
    const int N = COLUMNS / 16;                                     // of a warp: tiles of 8 columns
    float sum[N][4] = {};
    for (int k0 = 0; k0 < k / 32; k0 += GROUPS) {
        {                                                           // each thread unpacks one group of weights
            const int r = t / GROUPS, g = t % GROUPS, row = row0 + r;
            Group group = {};
            if (row < n_rows && k0 + g < k / 32) unpack_group<TYPE>(matrix + row * row_bytes, k0 + g, group);
            for (int j = 0; j < 8; j++) tile.w[r * STRIDE + 8 * g + j] = group.q[j];
            for (int h = 0; h < 2; h++) { tile.d[2 * t + h] = group.d[h]; tile.m[2 * t + h] = group.m[h]; }
        }
        for (int e = t; e < COLUMNS * GROUPS; e += 256) {           // and copies groups of activations
            const int c = e / GROUPS, g = e % GROUPS;
            const int64_t from = column(c), at_k = from * (k / 32) + k0 + g;
            const bool inside = from >= 0 && k0 + g < k / 32;
            const int4 none = {0, 0, 0, 0};
            int4 * to = (int4 *) (tile.x + c * STRIDE + 8 * g);
            to[0] = inside ? ((const int4 *) q)[2 * at_k] : none; to[1] = inside ? ((const int4 *) q)[2 * at_k + 1] : none;
            const Scale zero = {};
            tile.s[e] = inside ? scales[at_k] : zero;
        }
        __syncthreads();
#ifdef DP4A
        for (int g = 0; g < GROUPS; g++) for (int j = 0; j < N; j++) for (int i = 0; i < 4; i++) {
            const int r = r0 + i / 2 * 8, c = c0 + 8 * j + lane % 4 * 2 + i % 2, at_r = (r * GROUPS + g) * 2;
            const int * wq = tile.w + r * STRIDE + 8 * g, * xq = tile.x + c * STRIDE + 8 * g;
            const Scale & sc = tile.s[c * GROUPS + g];
            int low = 0, high = 0;
            for (int l = 0; l < 4; l++) { low = __dp4a(wq[l], xq[l], low); high = __dp4a(wq[l + 4], xq[l + 4], high); }
            sum[j][i] += sc.d * (tile.d[at_r] * low + tile.d[at_r + 1] * high + tile.m[at_r] * sc.sum[0] + tile.m[at_r + 1] * sc.sum[1]);
        }
#else
        for (int g = 0; g < GROUPS; g++) {
            const int * wq = tile.w + r0 * STRIDE + 8 * g + lane % 4;
            const int a0 = wq[0], a1 = wq[8 * STRIDE], a2 = wq[4], a3 = wq[8 * STRIDE + 4];
            for (int j = 0; j < N; j++) {
                const int * xq = tile.x + (c0 + 8 * j + lane / 4) * STRIDE + 8 * g + lane % 4;
                int low[4] = {}, high[4] = {};
                if (Narrow<TYPE>::yes) { mma_16(low, a0, a1, xq[0]); mma_16(high, a2, a3, xq[4]); }
                else mma_32(low, a0, a1, a2, a3, xq[0], xq[4]);
                for (int i = 0; i < 4; i++) {
                    const int at_r = ((r0 + i / 2 * 8) * GROUPS + g) * 2;
                    const Scale & sc = tile.s[(c0 + 8 * j + lane % 4 * 2 + i % 2) * GROUPS + g];
                    const float both = Narrow<TYPE>::yes ? tile.d[at_r] * low[i] + tile.d[at_r + 1] * high[i] + tile.m[at_r] * sc.sum[0] + tile.m[at_r + 1] * sc.sum[1]
                                                         : tile.d[at_r] * low[i] + tile.m[at_r] * (sc.sum[0] + sc.sum[1]);
                    sum[j][i] += sc.d * both;
                }
            }
        }
#endif
        __syncthreads();
    }
    for (int j = 0; j < N; j++) for (int i = 0; i < 4; i++) {
        const int r = r0 + i / 2 * 8, c = c0 + 8 * j + lane % 4 * 2 + i % 2;
        if (row0 + r < n_rows) put_at(r, c, sum[j][i]);
    }
}

// a [k, n, ..], activations of b [k, m, b2, b3]. grid: (n / 64, m / COLUMNS, b2 * b3); block: 256
template <int COLUMNS> __device__ __forceinline__ void matmul(const Tensor & a, const Sum & to, const char * q, const Scale * scales) {
    const Tensor & dst = to.dst;
    const int i2 = blockIdx.z % (int) dst.ne[2], i3 = blockIdx.z / (int) dst.ne[2], row0 = blockIdx.x * ROWS, column0 = blockIdx.y * COLUMNS;
    const int64_t first = (i3 * dst.ne[2] + i2) * dst.ne[1];
    const int n_columns = (int) dst.ne[1];
    multiply<COLUMNS>(at(a, 0, 0, (int) (i2 * a.ne[2] / dst.ne[2]), (int) (i3 * a.ne[3] / dst.ne[3])), a.nb[1], row0, (int) a.ne[1], (int) a.ne[0], q, scales,
        [&](int c) { return column0 + c < n_columns ? first + column0 + c : (int64_t) -1; },
        [&](int r, int c, float sum) { if (column0 + c < n_columns) put(to, sum, row0 + r, column0 + c, i2, i3); });
}
KERNEL __launch_bounds__(256) matmul_32(Tensor a, Sum to, const char * q, const Scale * scales) { matmul<32>(a, to, q, scales); }
KERNEL __launch_bounds__(256) matmul_128(Tensor a, Sum to, const char * q, const Scale * scales) { matmul<128>(a, to, q, scales); }

// With an expert for each column: a [k, n, n_expert], columns are slots of ids [n_used, n_tokens] grouped by expert (see group.cu); block y has
// tile y. grid: (n / 64, tiles at most); block: 256
struct Slots { int expert, first, count; };

template <int COLUMNS> __device__ __forceinline__ void matmul_id(const Tensor & dst, const Tensor & a, const Tensor & bias, const Slots * tiles,
                                                                 const int * order, const char * q, const Scale * scales, int b_used) {
    const Slots mine = tiles[blockIdx.y];
    if (mine.count == 0) return;
    const int n_used = (int) dst.ne[1], row0 = blockIdx.x * ROWS;
    const int * slots = order + mine.first;
    multiply<COLUMNS>(at(a, 0, 0, mine.expert, 0), a.nb[1], row0, (int) a.ne[1], (int) a.ne[0], q, scales,
        [&](int c) { return c < mine.count ? (int64_t) (slots[c] / n_used) * b_used + slots[c] % n_used % b_used : (int64_t) -1; },
        [&](int r, int c, float sum) {
            if (c >= mine.count) return;
            if (bias.data) sum = __fadd_rn(sum, *(const float *) at(bias, row0 + r, mine.expert, 0, 0));
            *(float *) at(dst, row0 + r, slots[c] % n_used, slots[c] / n_used, 0) = sum;
        });
}
KERNEL __launch_bounds__(256) matmul_id_32(Tensor dst, Tensor a, Tensor bias, const Slots * tiles, const int * order, const char * q, const Scale * scales, int b_used) {
    matmul_id<32>(dst, a, bias, tiles, order, q, scales, b_used);
}
KERNEL __launch_bounds__(256) matmul_id_128(Tensor dst, Tensor a, Tensor bias, const Slots * tiles, const int * order, const char * q, const Scale * scales, int b_used) {
    matmul_id<128>(dst, a, bias, tiles, order, q, scales, b_used);
}
