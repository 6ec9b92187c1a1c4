// The gated delta rule of many tokens, in chunks of 64. What a token teaches the state, delta_t = beta_t (v_t - e^{g_t} S_{t-1} k_t), depends on
// the state before the chunk in a linear way: delta = U - W S, where (I + A) U = beta V, (I + A) W = beta e^G K, A_ts = beta_t e^{G_t - G_s} k_t k_s
// for s < t, and G are the gates added up from the start of the chunk. `prepare` makes U, W and P_ts = e^{G_t - G_s} q_t k_s (s <= t) of all
// chunks at once; `chunks` goes through them one after the other.
#include "state.cuh"

const int CHUNK = 64, THREADS = 256, COLUMNS = 16;                        // columns of a state that a block of `chunks` has

struct Sizes { int d, n_head, n_tokens, n_chunks, hk, t0, n; };           // of a block: its key head, first token, tokens of the chunk
__device__ __forceinline__ Sizes sizes(const Tensor & q, const Tensor & v, int head, int chunk) {
    const int n_tokens = (int) v.ne[2];
    Sizes z = {(int) v.ne[0], (int) v.ne[1], n_tokens, (n_tokens + CHUNK - 1) / CHUNK, head % (int) q.ne[1], chunk * CHUNK, min(CHUNK, n_tokens - chunk * CHUNK)};
    return z;
}
// Rows of a chunk of x to shared memory, stride d + 1; rows beyond its end become 0.
__device__ __forceinline__ void load_rows(const Tensor & x, int head, int seq, const Sizes & z, float * to) {
    for (int e = threadIdx.x; e < CHUNK * z.d; e += THREADS) {
        const int t = e / z.d, i = e % z.d;
        to[t * (z.d + 1) + i] = t < z.n ? f32(at(x, i, head, z.t0 + t, seq)) : 0.0f;
    }
}
__device__ __forceinline__ float dot_rows(const float * a, const float * b, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// u and w [seq][head][token][d], p [seq][head][token][64], gates [seq][head][token]; sources as of gated_delta_net in delta.cu, g [1, ..].
// grid: (chunks, n_head, n_seqs); block: 256; shared: 2 * 64 (d + 1) + 64 * 65 floats
KERNEL prepare(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float * u, float * w, float * p, float * gates) {
    DYNAMIC_SHARED(float, keys);
    __shared__ float sum[CHUNK], b[CHUNK];
    const int head = blockIdx.y, seq = blockIdx.z;
    const Sizes z = sizes(q, v, head, blockIdx.x);
    const int stride = z.d + 1;
    float * queries = keys + CHUNK * stride, * a = queries + CHUNK * stride;
    const int64_t first = ((int64_t) seq * z.n_head + head) * z.n_tokens + z.t0;
    load_rows(k, z.hk, seq, z, keys);
    load_rows(q, z.hk, seq, z, queries);
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int t = 0; t < z.n; t++) { total += f32(at(g, 0, head, z.t0 + t, seq)); sum[t] = total; }
    }
    if (threadIdx.x < z.n) b[threadIdx.x] = f32(at(beta, 0, head, z.t0 + threadIdx.x, seq));
    __syncthreads();
    for (int e = threadIdx.x; e < z.n * CHUNK; e += THREADS) {
        const int t = e / CHUNK, s = e % CHUNK;
        const float fade = s <= t ? expf(sum[t] - sum[s]) : 0.0f;
        a[t * (CHUNK + 1) + s] = s < t ? b[t] * fade * dot_rows(keys + t * stride, keys + s * stride, z.d) : 0.0f;
        p[(first + t) * CHUNK + s] = s <= t ? fade * dot_rows(queries + t * stride, keys + s * stride, z.d) : 0.0f;
    }
    if (threadIdx.x < z.n) gates[first + threadIdx.x] = sum[threadIdx.x];
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * z.d; c += THREADS) {                // forward substitution: a thread has a column of U or of W
        const int i = c % z.d;
        const bool is_w = c >= z.d;
        float * x = (is_w ? w : u) + first * z.d + i;
        for (int t = 0; t < z.n; t++) {
            float y = is_w ? b[t] * expf(sum[t]) * keys[t * stride + i] : b[t] * f32(at(v, i, head, z.t0 + t, seq));
            for (int s = 0; s < t; s++) y -= a[t * (CHUNK + 1) + s] * x[(int64_t) s * z.d];
            x[(int64_t) t * z.d] = y;
        }
    }
}

// dst is y, then the state after the last token. grid: (d / 16, n_head, n_seqs); block: 256; shared: (64 + 16) (d + 1) + 64 * 17 floats
KERNEL chunks(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor state, const float * u, const float * w, const float * p, const float * gates) {
    DYNAMIC_SHARED(float, rows);
    const int head = blockIdx.y, seq = blockIdx.z, j0 = blockIdx.x * COLUMNS, j = threadIdx.x % COLUMNS, y = threadIdx.x / COLUMNS;
    Sizes z = sizes(q, v, head, 0);
    const int d = z.d, stride = d + 1;
    float * s = rows + CHUNK * stride, * delta = s + COLUMNS * stride, * out = (float *) dst.data, * after = out + numel(v);
    const float scale = 1.0f / sqrtf((float) d);
    for (int e = threadIdx.x; e < COLUMNS * d; e += THREADS)
        s[e / d * stride + e % d] = j0 + e / d < d ? f32(at(state, e % d, j0 + e / d, head, seq)) : 0.0f;
    for (int c = 0; c < z.n_chunks; c++) {
        z = sizes(q, v, head, c);
        const int64_t first = ((int64_t) seq * z.n_head + head) * z.n_tokens + z.t0;
        __syncthreads();
        for (int e = threadIdx.x; e < CHUNK * d; e += THREADS) rows[e / d * stride + e % d] = e / d < z.n ? w[first * d + e] : 0.0f;
        __syncthreads();
        for (int t = y; t < CHUNK; t += THREADS / COLUMNS)
            delta[t * (COLUMNS + 1) + j] = t < z.n && j0 + j < d ? u[(first + t) * d + j0 + j] - dot_rows(rows + t * stride, s + j * stride, d) : 0.0f;
        __syncthreads();
        load_rows(q, z.hk, seq, z, rows);
        __syncthreads();
        for (int t = y; t < z.n; t += THREADS / COLUMNS) {
            float sum = expf(gates[first + t]) * dot_rows(rows + t * stride, s + j * stride, d);
            for (int r = 0; r <= t; r++) sum += p[(first + t) * CHUNK + r] * delta[r * (COLUMNS + 1) + j];
            if (j0 + j < d) out[((int64_t) (seq * z.n_tokens + z.t0 + t) * z.n_head + head) * d + j0 + j] = sum * scale;
        }
        __syncthreads();
        const float last = gates[first + z.n - 1];
        for (int e = threadIdx.x; e < z.n * d; e += THREADS)              // keys as they have faded at the end of the chunk
            rows[e / d * stride + e % d] = f32(at(k, e % d, z.hk, z.t0 + e / d, seq)) * expf(last - gates[first + e / d]);
        __syncthreads();
        for (int e = threadIdx.x; e < COLUMNS * d; e += THREADS) {
            const int column = e / d, i = e % d;
            float sum = expf(last) * s[column * stride + i];
            for (int t = 0; t < z.n; t++) sum += delta[t * (COLUMNS + 1) + column] * rows[t * stride + i];
            s[column * stride + i] = sum;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < COLUMNS * d; e += THREADS)
        if (j0 + e / d < d) after[(((int64_t) seq * z.n_head + head) * d + j0 + e / d) * d + e % d] = s[e / d * stride + e % d];
}
