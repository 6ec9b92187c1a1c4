// Ops that work element by element. One thread per element of the result, blocks of 256; the op's number is an argument.
#include "activation.cuh"
#include "glu.cuh"

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

// As floats if `write`, as 8-bit activations where q and s have a place. grid: elements / 256; a row is a multiple of 32 where q is given
KERNEL glu(Tensor dst, Tensor gate, Tensor up, Glu p, int write, char * q, Scale * s) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    const float v = activated(p, *(const float *) at(gate, k), *(const float *) at(up, k));
    if (write) *(float *) at(dst, k) = v;
    if (q) quantize32(v, q + i / 32 * 32, s + i / 32);
}
