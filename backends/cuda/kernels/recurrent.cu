// Recurrences, token by token; the state of a thread or a warp stays in registers.
#include "state.cuh"

// The selective scan. A warp has one row of d_state values: one `dim` of a head. s [d_state, dim, n_head, rows], x [dim, n_head, n_tokens,
// n_seqs], dt [n_head, n_tokens, n_seqs] plus a bias if there is one, A [1 or d_state, n_head], B and C [d_state, n_group, n_tokens, n_seqs]; dst is y,
// then snapshots, unless these go to rows to[seq, n] of new_cells.
// grid: (dim * n_head / 4, n_seqs); block: 128
KERNEL ssm_scan(Tensor dst, Tensor s, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor ids, int n_snapshots, Tensor dt_bias,
                Tensor new_cells, Tensor to) {
    const int dim = (int) x.ne[0], n_head = (int) x.ne[1], n_tokens = (int) x.ne[2], n_seqs = (int) x.ne[3], d_state = (int) s.ne[0];
    const int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, seq = blockIdx.y;
    if (r >= dim * n_head) return;
    const int i = r % dim, h = r / dim, g = (int) (h / (n_head / B.ne[1])), row = *(const int *) (ids.data + seq * ids.nb[0]);
    float * y = (float *) dst.data, * states = y + numel(x);
    float state[LANES], a[LANES];
    for (int l = 0; l < LANES; l++) {
        const int k = lane + 32 * l;
        state[l] = k < d_state ? f32(at(s, k, i, h, row)) : 0.0f;
        a[l] = k < d_state ? f32(at(A, A.ne[0] > 1 ? k : 0, h, 0, 0)) : 0.0f;
    }
    for (int t = -1; t < n_tokens; t++) {
        if (t >= 0) {
            float step = f32(at(dt, h, t, seq, 0)), sum = 0.0f;
            if (dt_bias.data) step = __fadd_rn(step, f32(dt_bias.data + h * dt_bias.nb[0]));
            step = step > 20.0f ? step : log1pf(expf(step));
            const float v = step * f32(at(x, i, h, t, seq));
            for (int l = 0; l < LANES; l++) {
                const int k = lane + 32 * l;
                if (k >= d_state) break;
                state[l] = state[l] * expf(step * a[l]) + v * f32(at(B, k, g, t, seq));
                sum += state[l] * f32(at(C, k, g, t, seq));
            }
            sum = warp_sum(sum);
            if (lane == 0) y[((int64_t) (seq * n_tokens + t) * n_head + h) * dim + i] = sum;
        }
        for (int n = t < 0 ? n_tokens : snapshot(t, n_tokens, n_snapshots); n >= 0 && n < n_snapshots; n++) {
            float * after = states + (((int64_t) n * n_seqs + seq) * n_head * dim + (h * dim + i)) * d_state;
            if (new_cells.data) after = (float *) at(new_cells, 0, *(const int *) at(to, seq, n, 0, 0), 0, 0) + (int64_t) (h * dim + i) * d_state;
            for (int l = 0; l < LANES; l++) {
                const int k = lane + 32 * l;
                if (k < d_state) after[k] = state[l];
            }
            if (t >= 0) break;                              // the state that came in fills all that is left
        }
    }
}

// Linear attention: the state is kept in the result itself. A thread has one element of v. All [d, n_head, n_tokens of all sequences];
// state [d d n_head, n_seqs]; dst holds rows of y [d n_head, n_tokens], then states. grid: (n_head, n_seqs); block: d
#define LINEAR(first)                                                                                                       \
    const int d = (int) first.ne[0], n_head = (int) first.ne[1], n_seqs = (int) state.ne[1], n = (int) first.ne[2] / n_seqs; \
    const int h = blockIdx.x, seq = blockIdx.y, j = threadIdx.x;                                                             \
    float * y = (float *) dst.data, * s = y + (int64_t) first.ne[2] * n_head * d + ((int64_t) seq * n_head + h) * d * d;       \
    for (int i = j; i < d * d; i += d) s[i] = f32(state.data + (int64_t) seq * state.nb[1] + ((int64_t) h * d * d + i) * state.nb[0]); \
    __syncthreads();
#define OUT(t) y[((int64_t) (t) * n_head + h) * d + j]

KERNEL rwkv_wkv6(Tensor dst, Tensor k, Tensor v, Tensor r, Tensor tf, Tensor td, Tensor state) {
    LINEAR(k)                                               // s [k][v]
    for (int t = seq * n; t < seq * n + n; t++) {
        const float vj = f32(at(v, j, h, t, 0));
        float sum = 0.0f;
        for (int i = 0; i < d; i++) {
            const float kv = f32(at(k, i, h, t, 0)) * vj, old = s[i * d + j];
            sum += (old + f32(at(tf, i, h, 0, 0)) * kv) * f32(at(r, i, h, t, 0));
            s[i * d + j] = old * f32(at(td, i, h, t, 0)) + kv;
        }
        OUT(t) = sum;
    }
}

KERNEL rwkv_wkv7(Tensor dst, Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state) {
    LINEAR(r)                                               // s [v][k]
    for (int t = seq * n; t < seq * n + n; t++) {
        const float vj = f32(at(v, j, h, t, 0));
        float sa = 0.0f, sum = 0.0f;
        for (int i = 0; i < d; i++) sa += s[j * d + i] * f32(at(a, i, h, t, 0));
        for (int i = 0; i < d; i++) {
            const float new_s = s[j * d + i] * f32(at(w, i, h, t, 0)) + vj * f32(at(k, i, h, t, 0)) + sa * f32(at(b, i, h, t, 0));
            s[j * d + i] = new_s;
            sum += new_s * f32(at(r, i, h, t, 0));
        }
        OUT(t) = sum;
    }
}

KERNEL gated_linear_attn(Tensor dst, Tensor k, Tensor v, Tensor q, Tensor g, Tensor state, float scale) {
    LINEAR(k)                                               // s [k][v]
    for (int t = seq * n; t < seq * n + n; t++) {
        const float vj = f32(at(v, j, h, t, 0));
        float sum = 0.0f;
        for (int i = 0; i < d; i++) {
            const float decay = f32(at(g, g.ne[0] > 1 ? i : 0, h, g.ne[2] > 1 ? t : 0, 0));
            const float new_s = s[i * d + j] * decay + f32(at(k, i, h, t, 0)) * vj;
            s[i * d + j] = new_s;
            sum += new_s * f32(at(q, i, h, t, 0)) * scale;
        }
        OUT(t) = sum;
    }
}
