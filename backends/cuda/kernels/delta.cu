// The gated delta rule, token by token. A warp has one column of a head's state in registers: d values, those of k.
#include "glu.cuh"
#include "state.cuh"

// One token: the state fades, learns what it does not know yet of v for k, and answers q. Lane l has elements l, l + 32, ..
__device__ __forceinline__ float step(float (&state)[LANES], const float (&q)[LANES], const float (&k)[LANES], const float (&decay)[LANES], float v,
                                      float beta) {
    float known = 0.0f, sum = 0.0f;
    for (int l = 0; l < LANES; l++) { state[l] *= decay[l]; known += state[l] * k[l]; }
    const float delta = (v - warp_sum(known)) * beta;
    for (int l = 0; l < LANES; l++) { state[l] += delta * k[l]; sum += state[l] * q[l]; }
    return warp_sum(sum);
}
__device__ __forceinline__ void load_head(const Tensor & x, int h, int t, int seq, int d, float (&y)[LANES]) {
    for (int l = 0; l < LANES; l++) { const int i = threadIdx.x % 32 + 32 * l; y[l] = i < d ? f32(at(x, i, h, t, seq)) : 0.0f; }
}

// v [d, n_head, n_tokens, n_seqs], q and k with fewer heads, g [1 or d, ..], beta [1, ..], state [d, d, n_head, n_seqs]; dst is y, then
// snapshots of the state. grid: (d / 4, n_head, n_seqs); block: 128
KERNEL gated_delta_net(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor s, int n_snapshots) {
    const int d = (int) v.ne[0], n_head = (int) v.ne[1], n_tokens = (int) v.ne[2], n_seqs = (int) v.ne[3], lane = threadIdx.x % 32;
    const int j = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, h = blockIdx.y, seq = blockIdx.z, hk = h % (int) q.ne[1];
    if (j >= d) return;
    float * y = (float *) dst.data, * states = y + numel(v);
    const float scale = 1.0f / sqrtf((float) d);
    float state[LANES], q_t[LANES], k_t[LANES], decay[LANES];
    for (int l = 0; l < LANES; l++) state[l] = lane + 32 * l < d ? f32(at(s, lane + 32 * l, j, h, seq)) : 0.0f;
    for (int t = -1; t < n_tokens; t++) {
        if (t >= 0) {
            load_head(q, hk, t, seq, d, q_t);
            load_head(k, hk, t, seq, d, k_t);
            for (int l = 0; l < LANES; l++) decay[l] = expf(f32(at(g, g.ne[0] > 1 ? min(lane + 32 * l, d - 1) : 0, h, t, seq)));
            const float sum = step(state, q_t, k_t, decay, f32(at(v, j, h, t, seq)), f32(at(beta, 0, h, t, seq)));
            if (lane == 0) y[((int64_t) (seq * n_tokens + t) * n_head + h) * d + j] = sum * scale;
        }
        for (int n = t < 0 ? n_tokens : snapshot(t, n_tokens, n_snapshots); n >= 0 && n < n_snapshots; n++) {
            for (int l = 0; l < LANES; l++) {
                const int i = lane + 32 * l;
                if (i < d) states[((((int64_t) n * n_seqs + seq) * n_head + h) * d + j) * d + i] = state[l];
            }
            if (t >= 0) break;                              // the state that came in fills all that is left
        }
    }
}

// The same for few tokens with what stands around it: q and k are normed (RMS, times a factor), beta is the sigmoid of its input, g is
// softplus(g + dt) a; the state is read in row from[seq] of `cells` and left in row to[seq, n] of `new_cells`, n counting snapshots.
struct Around { float q_eps, pad0, q_factor, pad1, k_eps, pad2, k_factor, pad3; int64_t gate, sigmoid; };

__device__ __forceinline__ void norm_head(float (&x)[LANES], int d, float eps, float factor) {
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += x[l] * x[l];
    const float scale = 1.0f / sqrtf(warp_sum(sum) / d + eps);
    for (int l = 0; l < LANES; l++) x[l] = __fadd_rn(__fmul_rn(__fmul_rn(x[l], scale), factor), 0.0f);
}
KERNEL delta_going_on(Tensor dst, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor dt, Tensor a, Around p, Tensor cells, Tensor from,
                      Tensor new_cells, Tensor to) {
    const int d = (int) v.ne[0], n_head = (int) v.ne[1], n_tokens = (int) v.ne[2], lane = threadIdx.x % 32, n_snapshots = (int) to.ne[1];
    const int j = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, h = blockIdx.y, seq = blockIdx.z, hk = h % (int) q.ne[1];
    if (j >= d) return;
    const int64_t column = ((int64_t) h * d + j) * d;
    const float * before = (const float *) at(cells, 0, *(const int *) at(from, seq, 0, 0, 0), 0, 0) + column;
    float * y = (float *) dst.data;
    const float scale = 1.0f / sqrtf((float) d);
    float state[LANES], q_t[LANES], k_t[LANES], decay[LANES];
    for (int l = 0; l < LANES; l++) state[l] = lane + 32 * l < d ? before[lane + 32 * l] : 0.0f;
    for (int t = -1; t < n_tokens; t++) {
        if (t >= 0) {
            load_head(q, hk, t, seq, d, q_t);
            load_head(k, hk, t, seq, d, k_t);
            if (p.q_eps > 0.0f) norm_head(q_t, d, p.q_eps, p.q_factor);
            if (p.k_eps > 0.0f) norm_head(k_t, d, p.k_eps, p.k_factor);
            float b = f32(at(beta, 0, h, t, seq));
            if (p.sigmoid) b = sigmoid(b);
            for (int l = 0; l < LANES; l++) {
                float w = f32(at(g, g.ne[0] > 1 ? min(lane + 32 * l, d - 1) : 0, h, t, seq));
                if (p.gate) {
                    w = __fadd_rn(w, f32(dt.data + h * dt.nb[0]));
                    w = __fmul_rn(w > 20.0f ? w : log1pf(expf(w)), f32(a.data + h * a.nb[0]));
                }
                decay[l] = expf(w);
            }
            const float sum = step(state, q_t, k_t, decay, f32(at(v, j, h, t, seq)), b);
            if (lane == 0) y[((int64_t) (seq * n_tokens + t) * n_head + h) * d + j] = sum * scale;
        }
        for (int n = t < 0 ? n_tokens : snapshot(t, n_tokens, n_snapshots); n >= 0 && n < n_snapshots; n++) {
            float * after = (float *) at(new_cells, 0, *(const int *) at(to, seq, n, 0, 0), 0, 0) + column;
            for (int l = 0; l < LANES; l++) if (lane + 32 * l < d) after[lane + 32 * l] = state[l];
            if (t >= 0) break;
        }
    }
}
