// Functions of one element, and of two.
#pragma once
#include "glu.cuh"

__device__ __forceinline__ float hardsigmoid(float x) { return fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f)); }

// The numbers are those of UNARY in ggraph/ops.py; then scale and clamp with their two parameters, and nothing at all.
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
        case 101: return fminf(fmaxf(x, a), b);
        default: return x;
    }
}

const int BINARY = 200;                                                   // then add, sub, mul, div
__device__ __forceinline__ float combine(int op, float a, float b) {
    switch (op - BINARY) {
        case 0: return __fadd_rn(a, b);
        case 1: return a - b;
        case 2: return __fmul_rn(a, b);
        default: return a / b;
    }
}
