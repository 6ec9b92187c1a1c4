// What both forms of attention share: elements of a cache, who is seen, how a result is written.
#pragma once
#include "activation.cuh"
#include "quants.cuh"

template <int T> struct Plain {
    static const int BLOCK = 1, BYTES = T == F32 ? 4 : 2;
    __device__ static float element(const char * b, int) { return load(T, b); }
};
template <class T> __device__ __forceinline__ float element(const char * row, int i) {
    return T::element(row + i / T::BLOCK * T::BYTES, i % T::BLOCK);
}

struct Attention { float scale, pad0, max_bias, pad1, softcap, pad2; int64_t cells_each; };
struct Out { int64_t floats; char * q; Scale * s; };                      // to dst as floats, and as 8-bit activations where these have a place

// Factor of the mask of head h: 1 without ALiBi.
__device__ __forceinline__ float slope(int h, int n_head, float max_bias) {
    if (max_bias <= 0.0f) return 1.0f;
    int n = 1;
    while (2 * n <= n_head) n *= 2;
    return h < n ? powf(2.0f, -max_bias / n * (h + 1)) : powf(2.0f, -max_bias / 2 / n * (2 * (h - n) + 1));
}
__device__ __forceinline__ float score(float product, const Attention & p, float bias) {
    float s = product * (p.softcap != 0.0f ? p.scale / p.softcap : p.scale);
    if (p.softcap != 0.0f) s = p.softcap * tanhf(s);
    return s + bias;
}
