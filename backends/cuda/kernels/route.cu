// The router of a mixture of experts: what the gating makes of its logits, and the experts that are chosen by it. A block has a token, a
// thread up to four experts.
#include "common.cuh"

enum Gating { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
#define TAKEN __int_as_float(0x7fffffff)                                   // NaN: neither above anything nor equal to it

// The best of all threads' bests; of equal values the first. Every thread gets its index.
__device__ __forceinline__ int best_of(float v, int i) {
    __shared__ float values[32];
    __shared__ int indices[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    for (int step = 0; step < 2; step++) {
        for (int m = 16; m > 0; m /= 2) {
            const float w = __shfl_xor_sync(0xffffffffu, v, m);
            const int j = __shfl_xor_sync(0xffffffffu, i, m);
            if (w > v || (w == v && j < i)) { v = w; i = j; }
        }
        if (n_warps == 1 || step == 1) break;
        __syncthreads();
        if (lane == 0) { values[warp] = v; indices[warp] = i; }
        __syncthreads();
        v = lane < n_warps ? values[lane] : -INFINITY; i = lane < n_warps ? indices[lane] : 0x7fffffff;
    }
    return i;
}

// logits [n_expert, n_tokens] -> probs, the same shape, and chosen [n_used, n_tokens], the best by probs + bias.
// grid: n_tokens; block: a thread for each four experts; shared: n_expert floats
KERNEL __launch_bounds__(1024) route(Tensor probs, Tensor chosen, Tensor logits, Tensor bias, int gating) {
    DYNAMIC_SHARED(float, by);
    const int n = (int) logits.ne[0], t = blockIdx.x;
    const float * x = (const float *) at(logits, 0, t, 0, 0);
    float * y = (float *) at(probs, 0, t, 0, 0);
    float top = 0.0f, inverse = 1.0f;
    if (gating == SOFTMAX) {
        top = -INFINITY;
        for (int i = threadIdx.x; i < n; i += blockDim.x) top = fmaxf(top, x[i]);
        top = block_max(top);
        float sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[i] - top);
        sum = block_sum(sum);
        inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float v = x[i], soft = v > 20.0f ? v : log1pf(expf(v));
        const float p = gating == SOFTMAX ? expf(v - top) * inverse : gating == SIGMOID ? 1.0f / (1.0f + expf(-v)) : sqrtf(soft);
        y[i] = p;
        const float score = bias.data ? __fadd_rn(p, *(const float *) (bias.data + i * bias.nb[0])) : p;
        by[i] = score == score ? score : -INFINITY;                       // one of n experts is chosen, whatever they score
    }
    for (int u = 0; u < chosen.ne[0]; u++) {
        float v = -INFINITY;
        int best = 0x7fffffff;
        for (int i = threadIdx.x; i < n; i += blockDim.x) if (by[i] > v || (by[i] == v && i < best)) { v = by[i]; best = i; }
        best = best_of(v, best);
        if (best % (int) blockDim.x == (int) threadIdx.x) { by[best] = TAKEN; *(int *) at(chosen, u, t, 0, 0) = best; }
    }
}
