// Quantized weights times 8-bit activations, with an expert for each column: for few tokens. Gates (or the only matrix) are of TYPE_0, ups
// of TYPE_1. q and s are the activations of b [k, b_used, n_tokens], b_used being n_used or 1; ids [n_used, n_tokens].
#include "glu.cuh"
#include "matvec.cuh"

#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
__device__ __forceinline__ int expert_of(const Tensor & ids, int slot, int t) { return *(const int *) at(ids, slot, t, 0, 0); }

// What row `row` of an expert's matrix gives for an element of b; every lane gets it.
template <class T> __device__ __forceinline__ float times(const Tensor & a, int expert, int row, int64_t column, const char * q, const Scale * s) {
    const int k = (int) a.ne[0];
    float sum[1];
    row_times<T, 1>(at(a, 0, row, expert, 0), q + column * k, s + column * (k / 32), k, 1, sum);
    return sum[0];
}
// Plus the expert's bias [n, n_expert], where there is one.
__device__ __forceinline__ float with_bias(float sum, const Tensor & bias, int row, int expert) {
    return bias.data ? __fadd_rn(sum, *(const float *) at(bias, row, expert, 0, 0)) : sum;
}

// a [k, n, n_expert]. A warp has a row. grid: (n / 4, n_used, n_tokens); block: 128
KERNEL matvec_id(Tensor dst, Tensor a, Tensor bias, Tensor ids, const char * q, const Scale * s, int64_t b_used) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, slot = blockIdx.y, t = blockIdx.z;
    if (row >= a.ne[1]) return;
    const int expert = expert_of(ids, slot, t);
    const float sum = with_bias(times<TYPE_0>(a, expert, row, t * b_used + slot % b_used, q, s), bias, row, expert);
    if (threadIdx.x % 32 == 0) *(float *) at(dst, row, slot, t, 0) = sum;
}

// Gate and up [k, n, n_expert] with their activation: to dst [n, n_used, n_tokens] as floats if `write`, as bytes where q2 and s2 have a
// place. A block has 32 rows. grid: (n / 32, n_used, n_tokens); block: 512
KERNEL __launch_bounds__(512) gated_id(Tensor dst, Tensor gate, Tensor up, Tensor gate_bias, Tensor up_bias, Glu p, Tensor ids, const char * q, const Scale * s,
                int64_t b_used, int write, char * q2, Scale * s2) {
    __shared__ float value[32];
    const int slot = blockIdx.y, t = blockIdx.z, expert = expert_of(ids, slot, t), lane = threadIdx.x % 32, row0 = blockIdx.x * 32, n = (int) gate.ne[1];
    const int64_t column = t * b_used + slot % b_used;
    for (int r = threadIdx.x / 32; r < 32 && row0 + r < n; r += blockDim.x / 32) {
        const float g = with_bias(times<TYPE_0>(gate, expert, row0 + r, column, q, s), gate_bias, row0 + r, expert);
        const float u = with_bias(times<TYPE_1>(up, expert, row0 + r, column, q, s), up_bias, row0 + r, expert);
        if (lane == 0) value[r] = activated(p, g, u);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    if (write && row0 + lane < n) *(float *) at(dst, row0 + lane, slot, t, 0) = value[lane];
    const int64_t first = ((int64_t) t * ids.ne[0] + slot) * n + row0;
    if (q2) quantize32(value[lane], q2 + first, s2 + first / 32);
}

// How the weights of the chosen experts come from what the router gave them: softmax over the chosen, or divided by their sum, which is
// clamped first; times a factor.
struct Weights { int64_t softmax, divide; float low, pad0, high, pad1; int64_t scaled; float factor, pad2; };

// Each lane its expert's weight: lane u that of slot u.
__device__ __forceinline__ float weight(const Tensor & probs, const Tensor & ids, const Weights & p, int t) {
    const int lane = threadIdx.x % 32, n_used = (int) ids.ne[0];
    const bool mine = lane < n_used;
    float w = mine ? *(const float *) at(probs, 0, expert_of(ids, mine ? lane : 0, t), t, 0) : 0.0f;
    if (p.softmax) {
        const float top = warp_max(mine ? w : -INFINITY), e = mine ? expf(w - top) : 0.0f, sum = warp_sum(e);
        w = e * (sum > 0.0f ? 1.0f / sum : 0.0f);
    }
    if (p.divide) w = w / fminf(fmaxf(warp_sum(w), p.low), p.high);
    return p.scaled ? __fadd_rn(__fmul_rn(w, p.factor), 0.0f) : w;
}

// The weighted sum of the experts' results, in the order of choice, and the residual: a [k, n, n_expert], activations of
// [k, n_used, n_tokens], probs [1, n_expert, n_tokens] -> dst [n, n_tokens]. A warp has a row. grid: (n / 4, n_tokens); block: 128
KERNEL weighted_id(Tensor dst, Tensor a, Tensor bias, Tensor ids, Tensor probs, Weights p, Tensor residual, const char * q, const Scale * s) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, t = blockIdx.y, n_used = (int) ids.ne[0];
    const float w = weight(probs, ids, p, t);
    if (row >= a.ne[1]) return;
    float total = 0.0f;
    for (int u = 0; u < n_used; u++) {
        const int expert = expert_of(ids, u, t);
        const float y = with_bias(times<TYPE_0>(a, expert, row, (int64_t) t * n_used + u, q, s), bias, row, expert);
        const float part = __fmul_rn(y, __shfl_sync(0xffffffffu, w, u));
        total = u == 0 ? part : __fadd_rn(total, part);
    }
    if (residual.data) total = __fadd_rn(total, *(const float *) at(residual, row, t, 0, 0));
    if (threadIdx.x % 32 == 0) *(float *) at(dst, row, t, 0, 0) = total;
}
