// The angle by which a pair is turned: all of ggml's modes, with YaRN.
#pragma once
#include "common.cuh"

enum Mode { NORMAL = 0, NEOX = 2, MROPE = 8, VISION = 24, IMROPE = 40 };
struct Rope {
    int64_t n_dims, mode, offset, sections[4];
    float step, pad0, freq_scale, pad1, ext_factor, pad2, magnitude, pad3, low, pad4, high, pad5;     // a word each
};

// Which position axis turns pair i, and its power of the base.
__device__ __forceinline__ void section(const Rope & r, int i, int & axis, int & power) {
    axis = 0; power = i;
    if (!(r.mode & MROPE)) return;
    const int s0 = (int) r.sections[0], s1 = (int) r.sections[1], s2 = (int) r.sections[2], s3 = (int) r.sections[3];
    const int sector = i % (s0 + s1 + s2 + s3);
    if (r.mode == IMROPE) {
        axis = sector % 3;
        if (sector >= 3 * (int) r.sections[axis]) axis = 3;
        return;
    }
    axis = sector < s0 ? 0 : sector < s0 + s1 ? 1 : sector < s0 + s1 + s2 ? 2 : 3;
    if (r.mode == VISION) power = sector - (axis > 0 ? s0 : 0) - (axis > 1 ? s1 : 0) - (axis > 2 ? s2 : 0);
}

// cos and sin of pair i of token t, times the magnitude. Powers are made by repeated multiplication, as ggml makes them: at long positions
// their rounding shows.
__device__ __forceinline__ void turn(const Rope & r, const Tensor & pos, const Tensor & factors, int64_t n_tokens, int t, int i,
                                     float & c, float & s) {
    int axis, power;
    section(r, i, axis, power);
    float theta = (float) *(const int *) (pos.data + (axis * n_tokens + t) * pos.nb[0]);
    for (int k = 0; k < power; k++) theta = __fmul_rn(theta, r.step);
    if (factors.data) theta = __fdiv_rn(theta, *(const float *) (factors.data + i * factors.nb[0]));
    float turned = __fmul_rn(r.freq_scale, theta);
    if (r.ext_factor != 0.0f) {
        const float ramp = fminf(1.0f, fmaxf(0.0f, (i - r.low) / fmaxf(0.001f, r.high - r.low)));
        const float keep = (1.0f - ramp) * r.ext_factor;
        turned = turned * (1.0f - keep) + theta * keep;
    }
    c = cosf(turned) * r.magnitude; s = sinf(turned) * r.magnitude;
}
