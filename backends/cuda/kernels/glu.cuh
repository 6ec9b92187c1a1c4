// Gated activations. The numbers are those of GLU in ggraph/ops.py; then the forms with limits.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x))); }
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f)); }
__device__ __forceinline__ float gelu_quick(float x) { return x / (1.0f + expf(-1.702f * x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

struct Glu { int64_t op; float alpha, pad0, limit, pad1; };               // a word each
__device__ __forceinline__ float activated(const Glu & p, float g, float u) {
    switch (p.op) {
        case 0: return silu(g) * u;
        case 1: return gelu(g) * u;
        case 2: return fmaxf(g, 0.0f) * u;
        case 3: return gelu_erf(g) * u;
        case 4: return gelu_quick(g) * u;
        case 5: g = fminf(g, p.limit); return g / (1.0f + expf(-p.alpha * g)) * (fminf(fmaxf(u, -p.limit), p.limit) + 1.0f);
        default: return silu(fminf(g, p.limit)) * fminf(fmaxf(u, -p.limit), p.limit);
    }
}
