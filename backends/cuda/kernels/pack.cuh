// Rounding 32 floats to a block of the types that a cache can hold. `ggraph/quants` defines the rounding.
#pragma once
#include "quants.cuh"

__device__ __forceinline__ void put_half(char * b, float x) { *(uint16_t *) b = float_to_half(x); }
__device__ __forceinline__ float inverse(float d) { return d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d); }
__device__ __forceinline__ int code(float x, int top) {                   // truncated; what is not finite becomes 0
    if (!(fabsf(x) < 3.0e38f)) return 0;
    return min((int) x & 255, top);
}
__device__ __forceinline__ float extreme(const float * x) {               // the first of largest magnitude, with its sign
    float best = x[0];
    for (int i = 1; i < 32; i++) if (fabsf(x[i]) > fabsf(best)) best = x[i];
    return best + 0.0f;
}
__device__ __forceinline__ void put_halves(char * b, const int * q) {
    for (int i = 0; i < 16; i++) b[i] = (char) ((q[i] & 15) | q[i + 16] << 4);
}
__device__ __forceinline__ void put_fifth(char * b, const int * q) {
    uint32_t h = 0;
    for (int i = 0; i < 32; i++) h |= (uint32_t) (q[i] >> 4 & 1) << i;
    *(uint16_t *) b = (uint16_t) h; *(uint16_t *) (b + 2) = (uint16_t) (h >> 16);
}
__device__ __forceinline__ float symmetric(const float * x, int half, int * q) {
    const float d = __fdiv_rn(extreme(x), (float) -half), id = inverse(d);
    for (int i = 0; i < 32; i++) q[i] = code(__fadd_rn(__fmul_rn(x[i], id), half + 0.5f), 2 * half - 1);
    return d;
}
__device__ __forceinline__ float affine(const float * x, int top, int * q, float & low) {
    float high = x[0];
    low = x[0];
    for (int i = 1; i < 32; i++) { if (x[i] < low) low = x[i]; if (x[i] > high) high = x[i]; }
    const float d = __fdiv_rn(high - low, (float) top), id = inverse(d);
    for (int i = 0; i < 32; i++) q[i] = code(__fadd_rn(__fmul_rn(x[i] - low, id), 0.5f), top);
    return d;
}

template <class T> struct Pack;
template <> struct Pack<Q8_0> {
    __device__ static void pack(const float * x, char * b) {
        float top = 0.0f;
        for (int i = 0; i < 32; i++) top = fmaxf(top, fabsf(x[i]));
        const float d = __fdiv_rn(top, 127.0f), id = inverse(d);
        for (int i = 0; i < 32; i++) { const float q = roundf(__fmul_rn(x[i], id)); b[2 + i] = fabsf(q) < 3.0e38f ? (char) (int) q : 0; }
        put_half(b, d);
    }
};
template <> struct Pack<Q4_0> {
    __device__ static void pack(const float * x, char * b) { int q[32]; put_half(b, symmetric(x, 8, q)); put_halves(b + 2, q); }
};
template <> struct Pack<Q5_0> {
    __device__ static void pack(const float * x, char * b) {
        int q[32];
        put_half(b, symmetric(x, 16, q)); put_fifth(b + 2, q); put_halves(b + 6, q);
    }
};
template <> struct Pack<Q4_1> {
    __device__ static void pack(const float * x, char * b) {
        int q[32]; float low;
        put_half(b, affine(x, 15, q, low)); put_half(b + 2, low); put_halves(b + 4, q);
    }
};
template <> struct Pack<Q5_1> {
    __device__ static void pack(const float * x, char * b) {
        int q[32]; float low;
        put_half(b, affine(x, 31, q, low)); put_half(b + 2, low); put_fifth(b + 4, q); put_halves(b + 8, q);
    }
};
DEVICE_TABLE float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
template <> struct Pack<IQ4_NL> {
    __device__ static int nearest(float x) {                              // the upper one where both are as near
        if (x <= IQ4_VALUES[0]) return 0;
        for (int i = 1; i < 16; i++) if (x < IQ4_VALUES[i]) return x - IQ4_VALUES[i - 1] < IQ4_VALUES[i] - x ? i - 1 : i;
        return 15;
    }
    __device__ static void pack(const float * x, char * b) {
        const float most = extreme(x);
        const float id = fabsf(most) < 1e-15f ? 0.0f : __fdiv_rn(1.0f, __fdiv_rn(most, IQ4_VALUES[0]));
        float qx = 0.0f, qq = 0.0f; int q[32];
        for (int i = 0; i < 32; i++) {
            q[i] = nearest(__fmul_rn(x[i], id));
            const float w = __fmul_rn(x[i], x[i]), wq = __fmul_rn(w, IQ4_VALUES[q[i]]);
            qx = __fadd_rn(qx, __fmul_rn(wq, x[i])); qq = __fadd_rn(qq, __fmul_rn(wq, IQ4_VALUES[q[i]]));
        }
        put_half(b, qq > 0.0f && fabsf(most) >= 1e-15f ? __fdiv_rn(qx, qq) : 0.0f); put_halves(b + 2, q);
    }
};
