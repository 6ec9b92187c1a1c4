// Attention as one op. K and V of types K_TYPE and V_TYPE: a quantized type of quants.cuh, or a Plain<number>.
// A block has one token, up to 8 query heads that share a KV head, and a run of cells (split KV): the block that comes last joins the runs.
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

template <class K> __device__ __forceinline__ float dot(const char * k, const float * q, int d) {
    float sum = 0.0f;
    if constexpr (K::BLOCK == 1) {
        for (int i = 0; i < d; i++) sum += K::element(k + i * K::BYTES, 0) * q[i];
    } else {
        for (int i = 0; i < d / 32; i++) {
            Group g;
            unpack_group<K>(k, i, g);
            for (int j = 0; j < 32; j++) sum += value(g, j) * q[32 * i + j];
        }
    }
    return sum;
}

// q F32 [dk, n_tokens, n_head, n_stream], k [dk, n_kv, n_head_kv, n_stream], v [dv, ..]; dst [dv, n_head, n_tokens, n_stream].
// The result is written as Out says. Runs that are to be joined leave their sums in `part` [stream][token][head][run][dv + 2], maximum and
// total behind each, and draw a ticket.
// grid: (runs, n_tokens, n_stream * n_head_kv * groups of up to 8 heads); block: 128; shared: 8 * (dk + 128) floats
template <int WIDTH> __device__ __forceinline__ void attend(const Tensor & dst, const Tensor & q, const Tensor & k, const Tensor & v,
                                                            const Tensor & mask, const Tensor & sinks, int mask_type, const Attention & p,
                                                            float * part, int * tickets, const Out & out) {
    DYNAMIC_SHARED(float, queries);
    const int dk = (int) q.ne[0], dv = (int) v.ne[0], n_head = (int) q.ne[2], n_kv = (int) k.ne[1], n_head_kv = (int) k.ne[2];
    const int shared_heads = n_head / n_head_kv, groups = (shared_heads + HEADS - 1) / HEADS, tid = threadIdx.x;
    const int token = blockIdx.y, group = blockIdx.z % groups, kv_head = blockIdx.z / groups % n_head_kv, stream = blockIdx.z / groups / n_head_kv;
    const int head0 = kv_head * shared_heads + group * HEADS, n = min(HEADS, shared_heads - group * HEADS);
    float * scores = queries + HEADS * dk;
    __shared__ float top[HEADS], total[HEADS], rescale[HEADS];
    for (int i = tid; i < n * dk; i += THREADS) queries[i] = *(const float *) at(q, i % dk, token, head0 + i / dk, stream);
    if (tid < HEADS) { top[tid] = -INFINITY; total[tid] = 0.0f; }
    float acc[HEADS][WIDTH] = {};
    const int first = (int) (blockIdx.x * p.cells_each), last = min(first + (int) p.cells_each, n_kv);
    const char * seen = mask.data ? at(mask, 0, token, 0, stream % (int) mask.ne[3]) : nullptr;
    const char * k0 = at(k, 0, 0, kv_head, stream), * v0 = at(v, 0, 0, (int) (kv_head * v.ne[2] / n_head_kv), stream);
    for (int start = first; start < last; start += CELLS) {
        const int cell = start + tid, n_cells = min(CELLS, last - start);
        const float bias = cell >= last ? -INFINITY : seen ? load(mask_type, seen + cell * mask.nb[0]) : 0.0f;
        __syncthreads();
        for (int h = 0; h < n; h++) {
            float s = -INFINITY;
            if (bias > -INFINITY) {
                s = score(dot<K_TYPE>(k0 + cell * k.nb[1], queries + h * dk, dk), p, slope(head0 + h, n_head, p.max_bias) * bias);
            }
            scores[h * CELLS + tid] = s;
        }
        __syncthreads();
        for (int h = tid / 32; h < n; h += THREADS / 32) {                  // a warp has a head: new maximum, weights, sum
            float m = -INFINITY, sum = 0.0f;
            for (int c = tid % 32; c < CELLS; c += 32) m = fmaxf(m, scores[h * CELLS + c]);
            m = fmaxf(warp_max(m), top[h]);
            const float base = m == -INFINITY ? 0.0f : m;
            for (int c = tid % 32; c < CELLS; c += 32) { const float e = expf(scores[h * CELLS + c] - base); scores[h * CELLS + c] = e; sum += e; }
            sum = warp_sum(sum);
            if (tid % 32 == 0) { rescale[h] = expf(top[h] - base); total[h] = total[h] * rescale[h] + sum; top[h] = m; }
        }
        __syncthreads();
        for (int h = 0; h < n; h++) for (int w = 0; w < WIDTH; w++) acc[h][w] *= rescale[h];
        for (int c = 0; c < n_cells; c++) for (int w = 0; w < WIDTH; w++) {
            const int i = tid + w * THREADS;
            if (i >= dv) break;
            bool any = false;
            for (int h = 0; h < n; h++) any |= scores[h * CELLS + c] != 0.0f;
            if (!any) break;                                              // a masked cell may hold anything
            const float x = element<V_TYPE>(v0 + (start + c) * v.nb[1], i);
            for (int h = 0; h < n; h++) acc[h][w] += scores[h * CELLS + c] * x;
        }
    }
    __syncthreads();
    const int64_t row = ((int64_t) stream * dst.ne[2] + token) * n_head + head0;             // of head0 in the result
    const int n_runs = gridDim.x;
    if (n_runs > 1) {
        for (int h = 0; h < n; h++) {
            float * to = part + ((row + h) * n_runs + blockIdx.x) * (dv + 2);
            for (int w = 0, i = tid; i < dv; w++, i += THREADS) to[i] = acc[h][w];
            if (tid == 0) { to[dv] = top[h]; to[dv + 1] = total[h]; }
        }
        if (!last_of(n_runs, tickets + (int64_t) blockIdx.y * gridDim.z + blockIdx.z)) return;
    }
    for (int h = 0; h < n; h++) {
        const int head = head0 + h;
        const volatile float * runs = part + (row + h) * n_runs * (dv + 2);
        const float sink = sinks.data ? *(const float *) (sinks.data + head * sinks.nb[0]) : -INFINITY;
        float m = fmaxf(top[h], sink), sum = 0.0f;
        if (n_runs > 1) for (int r = 0; r < n_runs; r++) m = fmaxf(m, runs[r * (dv + 2) + dv]);
        if (m == -INFINITY) m = 0.0f;
        if (n_runs == 1) sum = total[h] * expf(top[h] - m);
        else for (int r = 0; r < n_runs; r++) sum += runs[r * (dv + 2) + dv + 1] * expf(runs[r * (dv + 2) + dv] - m);
        sum += expf(sink - m);
        for (int w = 0, i = tid; i < dv; w++, i += THREADS) {
            float v = 0.0f;
            if (n_runs == 1) v = acc[h][w] * expf(top[h] - m);
            else for (int r = 0; r < n_runs; r++) v += runs[r * (dv + 2) + i] * expf(runs[r * (dv + 2) + dv] - m);
            v = sum > 0.0f ? v / sum : 0.0f;
            if (out.floats) *(float *) at(dst, i, head, token, stream) = v;
            if (out.q) quantize32(v, out.q + (row + h) * dv + i / 32 * 32, out.s + ((row + h) * dv + i) / 32);
        }
    }
}
KERNEL attend_1(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, float * part, int * tickets, Out out) {
    attend<1>(dst, q, k, v, mask, sinks, mask_type, p, part, tickets, out);
}
KERNEL attend_2(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, float * part, int * tickets, Out out) {
    attend<2>(dst, q, k, v, mask, sinks, mask_type, p, part, tickets, out);
}
KERNEL attend_4(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, float * part, int * tickets, Out out) {
    attend<4>(dst, q, k, v, mask, sinks, mask_type, p, part, tickets, out);
}
KERNEL attend_8(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks, int mask_type, Attention p, float * part, int * tickets, Out out) {
    attend<8>(dst, q, k, v, mask, sinks, mask_type, p, part, tickets, out);
}
