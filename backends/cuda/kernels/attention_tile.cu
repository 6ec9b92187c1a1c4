// Attention of many tokens: tiles of 64 query rows times 64 cells, online softmax. Query rows are tokens with all heads that share a KV head,
// heads fastest. K and V of types K_TYPE and V_TYPE: a quantized type of quants.cuh, or a Plain<number>. Tiles that nobody sees are skipped.
#include "attention.cuh"

const int ROWS = 64, CELLS = 64, SLICE = 32, THREADS = 256;
const int K_STRIDE = SLICE + 1, S_STRIDE = CELLS + 1;                     // odd: rows spread over the banks

// Cells [c0, c0 + 64) x elements [i0, i0 + 32) of rows of K or V to to[cell][32 or more]: what is outside becomes 0.
template <class T> __device__ __forceinline__ void load_slice(const Tensor & x, const char * x0, int c0, int n_cells, int i0, float * to, int stride) {
    const int n = (int) x.ne[0];
    if constexpr (T::BLOCK == 1) {
        for (int e = threadIdx.x; e < CELLS * SLICE; e += THREADS) {
            const int i = e % SLICE, c = e / SLICE;
            to[c * stride + i] = c < n_cells && i0 + i < n ? T::element(x0 + (c0 + c) * x.nb[1] + (i0 + i) * T::BYTES, 0) : 0.0f;
        }
    } else {
        for (int e = threadIdx.x; e < CELLS * 4; e += THREADS) {          // a quarter of a group
            const int c = e / 4, part = e % 4 * 8;
            Group g = {};
            if (c < n_cells && i0 < n) unpack_group<T>(x0 + (c0 + c) * x.nb[1], i0 / 32, g);
            for (int i = part; i < part + 8; i++) to[c * stride + i] = value(g, i);
        }
    }
}

// Scores become weights, four neighbouring threads have a row: the maximum and the sum so far follow, `rescale` is what sums so far shrink by.
struct State { float top[ROWS], total[ROWS], rescale[ROWS]; };
__device__ __forceinline__ void weigh(float * s, State & state) {
    const int r = threadIdx.x / 4, first = threadIdx.x % 4;
    float * row = s + r * S_STRIDE, m = state.top[r], sum = 0.0f;
    for (int c = first; c < CELLS; c += 4) m = fmaxf(m, row[c]);
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1)); m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float base = m == -INFINITY ? 0.0f : m;
    for (int c = first; c < CELLS; c += 4) { const float e = expf(row[c] - base); row[c] = e; sum += e; }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1); sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (first == 0) { state.rescale[r] = expf(state.top[r] - base); state.total[r] = state.total[r] * state.rescale[r] + sum; state.top[r] = m; }
}

// q F32 [dk, n_tokens, n_head, n_stream], k [dk, n_kv, n_head_kv, n_stream], v [dv, ..]; dst [dv, n_head, n_tokens, n_stream]. A thread has
// query rows y + 16 i, and cells or elements of V x + 16 j. A block has `tokens` tokens, up to 64 heads and 64 WIDTH elements of V.
// grid: (n_tokens / tokens, n_head_kv * groups of heads * chunks of V, n_stream); block: 256; shared: 64 (dk + 1) + 64 * 33 + 2 * 64 * 65 floats
KERNEL __launch_bounds__(256) tile(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, int tokens, Out out) {
    DYNAMIC_SHARED(float, queries);
    __shared__ State state;
    __shared__ int seen_by_any;
    const int dk = (int) q.ne[0], dv = (int) v.ne[0], n_head = (int) q.ne[2], n_kv = (int) k.ne[1], n_head_kv = (int) k.ne[2], n_tokens = (int) q.ne[1];
    const int shared_heads = n_head / n_head_kv, heads = min(shared_heads, ROWS), groups = (shared_heads + heads - 1) / heads;
    const int chunks = (dv + 64 * WIDTH - 1) / (64 * WIDTH), q_stride = dk + 1, tid = threadIdx.x, x = tid % 16, y = tid / 16, stream = blockIdx.z;
    const int v0 = (int) (blockIdx.y % chunks) * 64 * WIDTH, kv_head = blockIdx.y / chunks / groups, group = blockIdx.y / chunks % groups;
    const int t0 = blockIdx.x * tokens, head0 = kv_head * shared_heads + group * heads, n_heads = min(heads, shared_heads - group * heads);
    float * slice = queries + ROWS * q_stride, * s = slice + CELLS * K_STRIDE, * values = s + ROWS * S_STRIDE;
    for (int e = tid; e < ROWS * dk; e += THREADS) {
        const int r = e / dk, i = e % dk, t = t0 + r / heads, h = r % heads;
        queries[r * q_stride + i] = r < tokens * heads && t < n_tokens && h < n_heads ? *(const float *) at(q, i, t, head0 + h, stream) : 0.0f;
    }
    if (tid < ROWS) { state.top[tid] = -INFINITY; state.total[tid] = 0.0f; }
    float acc[4][4 * WIDTH] = {};
    const char * k0 = at(k, 0, 0, kv_head, stream), * vp = at(v, 0, 0, (int) (kv_head * v.ne[2] / n_head_kv), stream);
    for (int c0 = 0; c0 < n_kv; c0 += CELLS) {
        const int n_cells = min(CELLS, n_kv - c0);
        float bias[4][4];
        bool any = false;
        for (int i = 0; i < 4; i++) {
            const int r = y + 16 * i, t = t0 + r / heads, h = r % heads;
            const bool there = r < tokens * heads && t < n_tokens && h < n_heads;
            const float factor = there ? slope(head0 + h, n_head, p.max_bias) : 0.0f;
            const char * row = there && mask.data ? at(mask, c0, t, 0, stream % (int) mask.ne[3]) : nullptr;
            for (int j = 0; j < 4; j++) {
                const int c = x + 16 * j;
                bias[i][j] = !there || c >= n_cells ? -INFINITY : row ? load(mask_type, row + c * mask.nb[0]) : 0.0f;
                any |= bias[i][j] > -INFINITY;
                if (bias[i][j] > -INFINITY) bias[i][j] *= factor;
            }
        }
        __syncthreads();
        if (tid == 0) seen_by_any = 0;
        __syncthreads();
        if (any) seen_by_any = 1;
        __syncthreads();
        if (!seen_by_any) continue;
        float product[4][4] = {};
        for (int i0 = 0; i0 < dk; i0 += SLICE) {
            load_slice<K_TYPE>(k, k0, c0, n_cells, i0, slice, K_STRIDE);
            __syncthreads();
            for (int l = 0; l < min(SLICE, dk - i0); l++) for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++)
                product[i][j] += queries[(y + 16 * i) * q_stride + i0 + l] * slice[(x + 16 * j) * K_STRIDE + l];
            __syncthreads();
        }
        for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++)
            s[(y + 16 * i) * S_STRIDE + x + 16 * j] = bias[i][j] > -INFINITY ? score(product[i][j], p, bias[i][j]) : -INFINITY;
        __syncthreads();
        weigh(s, state);
        __syncthreads();
        for (int i = 0; i < 4; i++) { const float f = state.rescale[y + 16 * i]; for (int j = 0; j < 4 * WIDTH; j++) acc[i][j] *= f; }
        for (int w = 0; w < WIDTH; w++) {
            load_slice<V_TYPE>(v, vp, c0, n_cells, v0 + 64 * w, values, S_STRIDE);
            load_slice<V_TYPE>(v, vp, c0, n_cells, v0 + 64 * w + SLICE, values + SLICE, S_STRIDE);
            __syncthreads();
            for (int c = 0; c < n_cells; c++) for (int i = 0; i < 4; i++) {
                const float e = s[(y + 16 * i) * S_STRIDE + c];
                if (e == 0.0f) continue;                                  // a cell that is not seen may hold anything
                for (int j = 0; j < 4; j++) acc[i][4 * w + j] += e * values[c * S_STRIDE + x + 16 * j];
            }
            __syncthreads();
        }
    }
    __syncthreads();
    if (tid < ROWS) {                                                     // rescale becomes what a row is multiplied with
        const int h = tid % heads;
        float m = state.top[tid], sum = state.total[tid], f = 1.0f;
        if (sinks.data && h < n_heads) {
            const float sink = *(const float *) (sinks.data + (head0 + h) * sinks.nb[0]), both = fmaxf(m, sink);
            f = expf(m - both); sum = sum * f + expf(sink - both);
        }
        state.rescale[tid] = sum > 0.0f ? f / sum : 0.0f;
    }
    __syncthreads();
    for (int w = 0; w < WIDTH; w++) {
        for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) values[(y + 16 * i) * S_STRIDE + x + 16 * j] = acc[i][4 * w + j] * state.rescale[y + 16 * i];
        __syncthreads();
        for (int e = tid / 32; e < ROWS * 2; e += THREADS / 32) {         // a warp has 32 elements of a row
            const int r = e / 2, lane = tid % 32, i = v0 + 64 * w + e % 2 * 32 + lane, t = t0 + r / heads, h = r % heads;
            if (r >= tokens * heads || t >= n_tokens || h >= n_heads || i - lane >= dv) continue;
            const float z = values[r * S_STRIDE + e % 2 * 32 + lane];
            if (out.floats && i < dv) *(float *) at(dst, i, head0 + h, t, stream) = z;
            const int64_t to = (((int64_t) stream * n_tokens + t) * n_head + head0 + h) * dv + i - lane;
            if (out.q) quantize32(z, out.q + to, out.s + to / 32);
        }
        __syncthreads();
    }
}
