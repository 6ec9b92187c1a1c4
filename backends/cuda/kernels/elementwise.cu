// Ops that work element by element. One thread per element of the result, blocks of 256; the op's number is an argument.
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x))); }
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f)); }
__device__ __forceinline__ float gelu_quick(float x) { return x / (1.0f + expf(-1.702f * x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float hardsigmoid(float x) { return fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f)); }

// The numbers are those of UNARY in ggraph/ops.py; then scale and clamp with their two parameters.
__device__ __forceinline__ float apply(int op, float x, float a, float b) {
    switch (op) {
        case 0: return fabsf(x);
        case 1: return -x;
        case 2: return expf(x);
        case 3: return expm1f(x);
        case 4: return logf(x);
        case 5: return x * x;
        case 6: return sqrtf(x);
        case 7: return sinf(x);
        case 8: return cosf(x);
        case 9: return x > 0.0f || x != x ? x : 0.0f;
        case 10: return gelu(x);
        case 11: return gelu_erf(x);
        case 12: return gelu_quick(x);
        case 13: return silu(x);
        case 14: return sigmoid(x);
        case 15: return tanhf(x);
        case 16: return x > 20.0f ? x : log1pf(expf(x));
        case 17: return x > 0.0f ? x : expm1f(x);
        case 18: return x > 0.0f ? 1.0f : 0.0f;
        case 19: return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;
        case 20: return hardsigmoid(x);
        case 21: return x * hardsigmoid(x);
        case 100: return __fadd_rn(__fmul_rn(x, a), b);
        default: return fminf(fmaxf(x, a), b);
    }
}

// grid: elements / 256
KERNEL unary(Tensor dst, Tensor x, int op, float a, float b) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index at_i = unravel(dst, i);
    *(float *) at(dst, at_i) = apply(op, *(const float *) at(x, at_i), a, b);
}

__device__ __forceinline__ float combine(int op, float a, float b) {
    switch (op) {
        case 0: return a + b;
        case 1: return a - b;
        case 2: return a * b;
        default: return a / b;
    }
}

// b repeats over a, and may be of any plain type. grid: elements / 256
KERNEL binary(Tensor dst, Tensor a, Tensor b, int a_type, int b_type, int op) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index at_i = unravel(dst, i);
    *(float *) at(dst, at_i) = combine(op, load(a_type, at(a, at_i)), load(b_type, at_repeated(b, at_i)));
}

// a [n, n_used, n_tokens] + the row of b [n, n_expert] that ids [n_used, n_tokens] name. grid: elements / 256
KERNEL add_id(Tensor dst, Tensor a, Tensor b, Tensor ids) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    const int expert = *(const int *) at(ids, k.i1, k.i2, 0, 0);
    *(float *) at(dst, k) = *(const float *) at(a, k) + *(const float *) at(b, k.i0, expert, 0, 0);
}

// The numbers are those of GLU in ggraph/ops.py; then the forms with limits.
__device__ __forceinline__ float gated(int op, float g, float u, float alpha, float limit) {
    switch (op) {
        case 0: return silu(g) * u;
        case 1: return gelu(g) * u;
        case 2: return fmaxf(g, 0.0f) * u;
        case 3: return gelu_erf(g) * u;
        case 4: return gelu_quick(g) * u;
        case 5: g = fminf(g, limit); return g / (1.0f + expf(-alpha * g)) * (fminf(fmaxf(u, -limit), limit) + 1.0f);
        default: return silu(fminf(g, limit)) * fminf(fmaxf(u, -limit), limit);
    }
}

// grid: elements / 256
KERNEL glu(Tensor dst, Tensor gate, Tensor up, int op, float alpha, float limit) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    *(float *) at(dst, k) = gated(op, *(const float *) at(gate, k), *(const float *) at(up, k), alpha, limit);
}
