// Attention of few tokens. K and V of types K_TYPE and V_TYPE: a quantized type of quants.cuh, or a Plain<number>.
// A block has one token, up to 8 query heads that share a KV head, and a run of cells (split KV): the block that comes last joins the runs.
// A thread has WIDTH elements of V, 128 apart.
#include "attention.cuh"

const int THREADS = 128, HEADS = 8, CELLS = 128;                         // cells that a block takes at a time, one per thread

// Whether this is the last of n blocks that draw at a ticket: then it sees what the others wrote. The ticket is as before again.
__device__ __forceinline__ bool last_of(int n, int * ticket) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == n - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Whether any thread of the block says so.
__device__ __forceinline__ bool any_of_block(bool mine) {
    __shared__ int any;
    __syncthreads();
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (mine) any = 1;
    __syncthreads();
    return any;
}

// Whether any of n heads, whose scores are CELLS apart, gives a cell weight.
__device__ __forceinline__ bool any_weight(const float * scores, int n) {
    bool any = false;
    for (int h = 0; h < n; h++) any |= scores[h * CELLS] != 0.0f;
    return any;
}

// N values of a row of K, from i on.
template <class K> struct Piece {                                        // a group of a quantized type
    static const int N = 32;
    __device__ static void load(const char * row, int i, float (&x)[N]) {
        Group g;
        unpack_group<K>(row, i / 32, g);
        for (int j = 0; j < 32; j++) x[j] = value(g, j);
    }
};
template <int T> struct Piece<Plain<T>> {                                // 16 bytes of a 16-bit type, where the row is aligned to that
    static const int N = 8;
    __device__ static void load(const char * row, int i, float (&x)[N]) {
        const char * p = row + i * Plain<T>::BYTES;
        if (Plain<T>::BYTES == 2 && ((uint64_t) p & 15) == 0) {
            const int4 raw = *(const int4 *) p;
            const int words[4] = {raw.x, raw.y, raw.z, raw.w};
            for (int j = 0; j < 8; j++) { const uint16_t h = (uint16_t) (words[j / 2] >> j % 2 * 16); x[j] = T == F16 ? half_to_float(h) : bf16_to_float(h); }
        } else for (int j = 0; j < 8; j++) x[j] = Plain<T>::element(p + j * Plain<T>::BYTES, 0);
    }
};

// A row of K times n queries, which stand one behind the other in shared memory.
template <class K> __device__ __forceinline__ void dots(const char * row, const float * queries, int d, int n, float (&sum)[HEADS]) {
    const int N = Piece<K>::N;
    for (int h = 0; h < HEADS; h++) sum[h] = 0.0f;
    int i = 0;
    for (; i + N <= d; i += N) {
        float x[N];
        Piece<K>::load(row, i, x);
        #pragma unroll
        for (int h = 0; h < HEADS; h++) if (h < n) for (int j = 0; j < N; j++) sum[h] += x[j] * queries[h * d + i + j];
    }
    if constexpr (K::BLOCK == 1)
        for (; i < d; i++) for (int h = 0; h < HEADS; h++) if (h < n) sum[h] += K::element(row + i * K::BYTES, 0) * queries[h * d + i];
}

// The token of a block, and its n heads from head0 on, which share a KV head.
struct Place { int token, stream, kv_head, head0, n; };
__device__ __forceinline__ Place place_of_block(int n_head, int n_head_kv) {
    const int shared_heads = n_head / n_head_kv, groups = (shared_heads + HEADS - 1) / HEADS, group = blockIdx.z % groups;
    const int kv_head = blockIdx.z / groups % n_head_kv;
    return {(int) blockIdx.y, (int) blockIdx.z / groups / n_head_kv, kv_head, kv_head * shared_heads + group * HEADS,
            min(HEADS, shared_heads - group * HEADS)};
}

// Scores of n heads become weights, a warp has a head: the maximum and the sum so far follow, `rescale` is what sums so far shrink by.
struct State { float top[HEADS], total[HEADS], rescale[HEADS]; };
__device__ __forceinline__ void weigh(float * scores, int n, State & s) {
    const int lane = threadIdx.x % 32;
    for (int h = threadIdx.x / 32; h < n; h += THREADS / 32) {
        float * row = scores + h * CELLS, m = -INFINITY, sum = 0.0f;
        for (int c = lane; c < CELLS; c += 32) m = fmaxf(m, row[c]);
        m = fmaxf(warp_max(m), s.top[h]);
        const float base = m == -INFINITY ? 0.0f : m;
        for (int c = lane; c < CELLS; c += 32) { const float e = expf(row[c] - base); row[c] = e; sum += e; }
        sum = warp_sum(sum);
        if (lane == 0) { s.rescale[h] = expf(s.top[h] - base); s.total[h] = s.total[h] * s.rescale[h] + sum; s.top[h] = m; }
    }
}

// Rows of V from `v` on, times their weights.
__device__ __forceinline__ void add_values(float (&acc)[HEADS][WIDTH], const float * scores, int n, const char * v, int64_t stride, int dv, int n_cells) {
    for (int c = 0; c < n_cells; c++) {
        if (scores[c] == 0.0f && (n == 1 || !any_weight(scores + c, n))) continue;          // a masked cell may hold anything
        for (int w = 0; w < WIDTH; w++) {
            const int i = threadIdx.x + w * THREADS;
            const float x = i < dv ? element<V_TYPE>(v + c * stride, i) : 0.0f;
            #pragma unroll
            for (int h = 0; h < HEADS; h++) if (h < n) acc[h][w] += scores[h * CELLS + c] * x;
        }
    }
}

// One of n_runs, of dv + 2 floats each.
__device__ __forceinline__ void leave_run(const float (&acc)[HEADS][WIDTH], const State & s, int n, int dv, float * part, int64_t row, int n_runs) {
    #pragma unroll
    for (int h = 0; h < HEADS; h++) if (h < n) {
        float * to = part + ((row + h) * n_runs + blockIdx.x) * (dv + 2);
        for (int w = 0; w < WIDTH; w++) if (threadIdx.x + w * THREADS < dv) to[threadIdx.x + w * THREADS] = acc[h][w];
        if (threadIdx.x == 0) { to[dv] = s.top[h]; to[dv + 1] = s.total[h]; }
    }
}

// What the runs of a head give together, and the sink: where element i of their sum is, how it is scaled.
struct Joined {
    const volatile float * runs; int n_runs, dv; float top, sum;
    __device__ float share(int r) const { return expf(runs[r * (dv + 2) + dv] - top); }
    __device__ float element(int i) const {
        float x = 0.0f;
        for (int r = 0; r < n_runs; r++) x += runs[r * (dv + 2) + i] * share(r);
        return x;
    }
};
__device__ __forceinline__ Joined join(const float * runs, int n_runs, int dv, float sink) {
    Joined j = {runs, n_runs, dv, sink, 0.0f};
    for (int r = 0; r < n_runs; r++) j.top = fmaxf(j.top, j.runs[r * (dv + 2) + dv]);
    if (j.top == -INFINITY) j.top = 0.0f;
    for (int r = 0; r < n_runs; r++) j.sum += j.runs[r * (dv + 2) + dv + 1] * j.share(r);
    j.sum += expf(sink - j.top);
    return j;
}

// q F32 [dk, n_tokens, n_head, n_stream], k [dk, n_kv, n_head_kv, n_stream], v [dv, ..]; dst [dv, n_head, n_tokens, n_stream].
// The result is written as Out says. Runs that are to be joined leave their sums in `part` [stream][token][head][run][dv + 2], maximum and
// total behind each, and draw a ticket.
// grid: (runs, n_tokens, n_stream * n_head_kv * groups of up to 8 heads); block: 128; shared: 8 * (dk + 128) floats
KERNEL attend(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, float * part, int * tickets, Out out) {
    DYNAMIC_SHARED(float, queries);
    __shared__ State state;
    const int dk = (int) q.ne[0], dv = (int) v.ne[0], n_head = (int) q.ne[2], n_kv = (int) k.ne[1], tid = threadIdx.x;
    const Place at_block = place_of_block(n_head, (int) k.ne[2]);
    const int token = at_block.token, stream = at_block.stream, head0 = at_block.head0, n = at_block.n;
    float * scores = queries + HEADS * dk;
    for (int i = tid; i < n * dk; i += THREADS) queries[i] = *(const float *) at(q, i % dk, token, head0 + i / dk, stream);
    if (tid < HEADS) { state.top[tid] = -INFINITY; state.total[tid] = 0.0f; }
    float acc[HEADS][WIDTH] = {};
    const int first = (int) (blockIdx.x * p.cells_each), last = min(first + (int) p.cells_each, n_kv);
    const char * seen = mask.data ? at(mask, 0, token, 0, stream % (int) mask.ne[3]) : nullptr;
    const char * k0 = at(k, 0, 0, at_block.kv_head, stream), * v0 = at(v, 0, 0, (int) (at_block.kv_head * v.ne[2] / k.ne[2]), stream);
    for (int start = first; start < last; start += CELLS) {
        const int cell = start + tid;
        const float bias = cell >= last ? -INFINITY : seen ? load(mask_type, seen + cell * mask.nb[0]) : 0.0f;
        if (!any_of_block(bias > -INFINITY)) continue;
        float sum[HEADS];
        if (bias > -INFINITY) dots<K_TYPE>(k0 + cell * k.nb[1], queries, dk, n, sum);
        #pragma unroll
        for (int h = 0; h < HEADS; h++) if (h < n)
            scores[h * CELLS + tid] = bias > -INFINITY ? score(sum[h], p, slope(head0 + h, n_head, p.max_bias) * bias) : -INFINITY;
        __syncthreads();
        weigh(scores, n, state);
        __syncthreads();
        #pragma unroll
        for (int h = 0; h < HEADS; h++) if (h < n) for (int w = 0; w < WIDTH; w++) acc[h][w] *= state.rescale[h];
        add_values(acc, scores, n, v0 + start * v.nb[1], v.nb[1], dv, min(CELLS, last - start));
    }
    __syncthreads();
    const int64_t row = ((int64_t) stream * dst.ne[2] + token) * n_head + head0;             // of head0 in the result
    const int n_runs = gridDim.x;
    if (n_runs > 1) {
        leave_run(acc, state, n, dv, part, row, n_runs);
        if (!last_of(n_runs, tickets + (int64_t) blockIdx.y * gridDim.z + blockIdx.z)) return;
    }
    #pragma unroll
    for (int h = 0; h < HEADS; h++) if (h < n) {
        const float sink = sinks.data ? *(const float *) (sinks.data + (head0 + h) * sinks.nb[0]) : -INFINITY;
        Joined j = join(part + (row + h) * n_runs * (dv + 2), n_runs > 1 ? n_runs : 0, dv, n_runs > 1 ? sink : fmaxf(sink, state.top[h]));
        const float alone = n_runs > 1 ? 0.0f : expf(state.top[h] - j.top);
        if (n_runs == 1) j.sum = state.total[h] * alone + expf(sink - j.top);
        for (int w = 0; w < WIDTH; w++) {
            const int i = tid + w * THREADS;
            if (i >= dv) break;
            const float sum = n_runs > 1 ? j.element(i) : acc[h][w] * alone, x = j.sum > 0.0f ? sum / j.sum : 0.0f;
            if (out.floats) *(float *) at(dst, i, head0 + h, token, stream) = x;
            if (out.q) quantize32(x, out.q + (row + h) * dv + i / 32 * 32, out.s + ((row + h) * dv + i) / 32);
        }
    }
}
