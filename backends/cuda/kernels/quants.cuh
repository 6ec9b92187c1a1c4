// Quantized types: how 32 neighbours of a row are unpacked into signed bytes and scales. One struct per type; all kernels that read
// quantized tensors are templates over these. Layouts are GGUF's; `ggraph/quants` defines what the values are.
#pragma once
#include "common.cuh"
#include "grids.cuh"                                          // written when compiling, from ggraph/quants/grids.py

// 32 values: element i is d[i / 16] * (byte i of q) + m[i / 16].
struct Group { int q[8]; float d[2], m[2]; };

__device__ __forceinline__ void scaled(Group & g, float d) { g.d[0] = g.d[1] = d; g.m[0] = g.m[1] = 0.0f; }

// Blocks of many types are aligned to two bytes only.
__device__ __forceinline__ uint32_t u8(const char * p) { return *(const uint8_t *) p; }
__device__ __forceinline__ uint32_t u16(const char * p) { return *(const uint16_t *) p; }
__device__ __forceinline__ uint32_t u32(const char * p) { return u16(p) | u16(p + 2) << 16; }
__device__ __forceinline__ float half_at(const char * p) { return half_to_float(*(const uint16_t *) p); }

// Eight words; blocks of Q4_K and Q5_K, and what stands in them, are aligned to 16 bytes.
__device__ __forceinline__ void words(const char * p, int * q) {
    const int4 a = ((const int4 *) p)[0], b = ((const int4 *) p)[1];
    q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w; q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
}

// Four bytes at once: those of v less c each (v below 128, c up to 128), bits of a nibble as bytes 0 or 1.
__device__ __forceinline__ int sub4(uint32_t v, uint32_t c) { return (int) (((v | 0x80808080u) - c * 0x01010101u) ^ 0x80808080u); }
__device__ __forceinline__ uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }
// Four positive bytes, negative where the nibble has a set bit.
__device__ __forceinline__ int with_signs(uint32_t v, uint32_t bits) { const uint32_t s = spread(bits); return (int) ((v ^ s * 255) + s); }

#ifdef GGRAPH_EMULATOR
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t s) {
    const uint64_t both = (uint64_t) y << 32 | x; uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (uint32_t) (both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
#endif
// Eight nibbles looked up in a table of 16 bytes (four words): the low nibbles of the four bytes, and the high ones.
__device__ __forceinline__ void lookup(uint32_t q, const uint32_t (&t)[4], int & low, int & high) {
    uint32_t r[2];
    for (int i = 0; i < 2; i++, q >>= 16) {
        const uint32_t s = q & 0x7777;
        r[i] = __byte_perm(__byte_perm(t[0], t[1], s), __byte_perm(t[2], t[3], s), 0x3210 | (q & 0x8888) >> 1);
    }
    low = (int) __byte_perm(r[0], r[1], 0x6420); high = (int) __byte_perm(r[0], r[1], 0x7531);
}
__device__ __forceinline__ void lookup_iq4(uint32_t q, int & low, int & high) {      // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    const uint32_t t[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    lookup(q, t, low, high);
}
__device__ __forceinline__ void lookup_fp4(uint32_t q, int & low, int & high) {      // twice 0 .5 1 1.5 2 3 4 6, and negative
    const uint32_t t[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
    lookup(q, t, low, high);
}

struct Q1_0 {
    static const int BLOCK = 128, BYTES = 18;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        const uint32_t bits = u32(b + 2 + 4 * sub);
        for (int j = 0; j < 8; j++) g.q[j] = sub4(spread(bits >> 4 * j) << 1, 1);
        scaled(g, half_at(b));
    }
};
struct Q2_0 {
    static const int BLOCK = 64, BYTES = 18;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) {
            const uint32_t v = u8(b + 2 + 8 * sub + j);
            g.q[j] = sub4((v | v << 6 | v << 12 | v << 18) & 0x03030303u, 1);
        }
        scaled(g, half_at(b));
    }
};
struct Q4_0 {
    static const int BLOCK = 32, BYTES = 18;
    __device__ static void unpack(const char * b, int, Group & g) {
        for (int j = 0; j < 4; j++) {
            const uint32_t v = u32(b + 2 + 4 * j);
            g.q[j] = sub4(v & 0x0f0f0f0fu, 8); g.q[j + 4] = sub4(v >> 4 & 0x0f0f0f0fu, 8);
        }
        scaled(g, half_at(b));
    }
    __device__ static float element(const char * b, int i) { return half_at(b) * ((int) (u8(b + 2 + i % 16) >> i / 16 * 4 & 15) - 8); }
};
struct Q4_1 {
    static const int BLOCK = 32, BYTES = 20;
    __device__ static void unpack(const char * b, int, Group & g) {
        for (int j = 0; j < 4; j++) {
            const uint32_t v = u32(b + 4 + 4 * j);
            g.q[j] = v & 0x0f0f0f0fu; g.q[j + 4] = v >> 4 & 0x0f0f0f0fu;
        }
        scaled(g, half_at(b)); g.m[0] = g.m[1] = half_at(b + 2);
    }
    __device__ static float element(const char * b, int i) {
        return half_at(b) * (int) (u8(b + 4 + i % 16) >> i / 16 * 4 & 15) + half_at(b + 2);
    }
};
__device__ __forceinline__ int fifth_bit(const char * b, int start, int i) {          // of Q5_0 and Q5_1: qh and qs from `start` on
    return (int) ((u8(b + start + 4 + i % 16) >> i / 16 * 4 & 15) | (u32(b + start) >> i & 1) << 4);
}
struct Q5_0 {
    static const int BLOCK = 32, BYTES = 22;
    __device__ static void unpack(const char * b, int, Group & g) {
        const uint32_t h = u32(b + 2);
        for (int j = 0; j < 4; j++) {
            const uint32_t v = u32(b + 6 + 4 * j);
            g.q[j] = sub4((v & 0x0f0f0f0fu) | spread(h >> 4 * j) << 4, 16);
            g.q[j + 4] = sub4((v >> 4 & 0x0f0f0f0fu) | spread(h >> (4 * j + 16)) << 4, 16);
        }
        scaled(g, half_at(b));
    }
    __device__ static float element(const char * b, int i) { return half_at(b) * (fifth_bit(b, 2, i) - 16); }
};
struct Q5_1 {
    static const int BLOCK = 32, BYTES = 24;
    __device__ static void unpack(const char * b, int, Group & g) {
        const uint32_t h = u32(b + 4);
        for (int j = 0; j < 4; j++) {
            const uint32_t v = u32(b + 8 + 4 * j);
            g.q[j] = (v & 0x0f0f0f0fu) | spread(h >> 4 * j) << 4;
            g.q[j + 4] = (v >> 4 & 0x0f0f0f0fu) | spread(h >> (4 * j + 16)) << 4;
        }
        scaled(g, half_at(b)); g.m[0] = g.m[1] = half_at(b + 2);
    }
    __device__ static float element(const char * b, int i) { return half_at(b) * fifth_bit(b, 4, i) + half_at(b + 2); }
};
struct Q8_0 {
    static const int BLOCK = 32, BYTES = 34;
    __device__ static void unpack(const char * b, int, Group & g) {
        for (int j = 0; j < 8; j++) g.q[j] = (int) u32(b + 2 + 4 * j);
        scaled(g, half_at(b));
    }
    __device__ static float element(const char * b, int i) { return half_at(b) * *(const int8_t *) (b + 2 + i); }
};
struct IQ4_NL {
    static const int BLOCK = 32, BYTES = 18;
    __device__ static void unpack(const char * b, int, Group & g) {
        for (int j = 0; j < 4; j++) lookup_iq4(u32(b + 2 + 4 * j), g.q[j], g.q[j + 4]);
        scaled(g, half_at(b));
    }
    __device__ static float element(const char * b, int i) {
        int low, high;
        lookup_iq4(u8(b + 2 + i % 16), low, high);
        return half_at(b) * (int8_t) (i < 16 ? low : high);
    }
};
struct MXFP4 {
    static const int BLOCK = 32, BYTES = 17;
    __device__ static void unpack(const char * b, int, Group & g) {
        for (int j = 0; j < 4; j++) {
            const char * p = b + 1 + 4 * j;
            lookup_fp4(u8(p) | u8(p + 1) << 8 | u8(p + 2) << 16 | u8(p + 3) << 24, g.q[j], g.q[j + 4]);
        }
        const int e = (int) u8(b);
        scaled(g, __int_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23));           // 2^(e - 128): the table has doubled values
    }
};
struct NVFP4 {
    static const int BLOCK = 64, BYTES = 36;
    __device__ static float scale(int c) {                                            // UE4M3, halved
        const int e = c >> 3 & 15, m = c & 7;
        if (c == 0x7f) return 0.0f;
        return e == 0 ? m * 0.0009765625f : (8 + m) * __int_as_float((e + 127 - 11) << 23);
    }
    __device__ static void unpack(const char * b, int sub, Group & g) {
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) {
            const int s = 2 * sub + h;
            for (int j = 0; j < 2; j++) lookup_fp4(u32(b + 4 + 8 * s + 4 * j), g.q[4 * h + j], g.q[4 * h + j + 2]);
            g.d[h] = scale((int) u8(b + s));
        }
    }
};
struct Q2_K {
    static const int BLOCK = 256, BYTES = 84;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) g.q[j] = u32(b + 16 + 32 * (sub / 4) + 4 * j) >> 2 * (sub % 4) & 0x03030303u;
        for (int h = 0; h < 2; h++) {
            const uint32_t s = u8(b + 2 * sub + h);
            g.d[h] = half_at(b + 80) * (s & 15); g.m[h] = -half_at(b + 82) * (s >> 4);
        }
    }
};
struct Q3_K {
    static const int BLOCK = 256, BYTES = 110;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) {
            const uint32_t low = u32(b + 32 + 32 * (sub / 4) + 4 * j) >> 2 * (sub % 4) & 0x03030303u;
            g.q[j] = sub4(low | (u32(b + 4 * j) >> sub & 0x01010101u) << 2, 4);
        }
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) {
            const int i = 2 * sub + h;
            const uint32_t low = u8(b + 96 + i % 8) >> i / 8 * 4 & 15, high = u8(b + 104 + i % 4) >> 2 * (i / 4) & 3;
            g.d[h] = half_at(b + 108) * ((int) (low | high << 4) - 32);
        }
    }
};
// Six-bit scale and min of group `sub` of Q4_K and Q5_K.
__device__ __forceinline__ void scale_min(const char * b, int sub, Group & g) {
    const char * s = b + 4;
    uint32_t sc, m;
    if (sub < 4) {
        sc = u8(s + sub) & 63; m = u8(s + sub + 4) & 63;
    } else {
        sc = (u8(s + sub + 4) & 15) | u8(s + sub - 4) >> 6 << 4; m = u8(s + sub + 4) >> 4 | u8(s + sub) >> 6 << 4;
    }
    g.d[0] = g.d[1] = half_at(b) * sc; g.m[0] = g.m[1] = -half_at(b + 2) * m;
}
struct Q4_K {
    static const int BLOCK = 256, BYTES = 144;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        words(b + 16 + 32 * (sub / 2), g.q);
        for (int j = 0; j < 8; j++) g.q[j] = g.q[j] >> 4 * (sub % 2) & 0x0f0f0f0f;
        scale_min(b, sub, g);
    }
};
struct Q5_K {
    static const int BLOCK = 256, BYTES = 176;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        int fifth[8];
        words(b + 48 + 32 * (sub / 2), g.q);
        words(b + 16, fifth);
        for (int j = 0; j < 8; j++) g.q[j] = (g.q[j] >> 4 * (sub % 2) & 0x0f0f0f0f) | (fifth[j] >> sub & 0x01010101) << 4;
        scale_min(b, sub, g);
    }
};
struct Q6_K {
    static const int BLOCK = 256, BYTES = 210;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        const int half = sub / 4, r = sub % 4;
        for (int j = 0; j < 8; j++) {
            const uint32_t low = u32(b + 64 * half + 32 * (r & 1) + 4 * j) >> r / 2 * 4 & 0x0f0f0f0fu;
            g.q[j] = sub4(low | (u32(b + 128 + 32 * half + 4 * j) >> 2 * r & 0x03030303u) << 4, 32);
        }
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) g.d[h] = half_at(b + 208) * *(const int8_t *) (b + 192 + 2 * sub + h);
    }
};
struct IQ4_XS {
    static const int BLOCK = 256, BYTES = 136;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 4; j++) lookup_iq4(u32(b + 8 + 16 * sub + 4 * j), g.q[j], g.q[j + 4]);
        const uint32_t s = (u8(b + 4 + sub / 2) >> sub % 2 * 4 & 15) | (u16(b + 2) >> 2 * sub & 3) << 4;
        scaled(g, half_at(b) * ((int) s - 32));
    }
};
struct TQ1_0 {
    static const int BLOCK = 256, BYTES = 54;
    __device__ static uint32_t trit(uint32_t byte, int n) {
        for (int i = 0; i < n; i++) byte *= 3;
        return (byte & 255) * 3 >> 8;
    }
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) {
            uint32_t v = 0;
            for (int k = 0; k < 4; k++) {
                const int e = 32 * sub + 4 * j + k;
                const uint32_t t = e < 160 ? trit(u8(b + e % 32), e / 32)
                                 : e < 240 ? trit(u8(b + 32 + e % 16), (e - 160) / 16) : trit(u8(b + 48 + e % 4), (e - 240) / 4);
                v |= t << 8 * k;
            }
            g.q[j] = sub4(v, 1);
        }
        scaled(g, half_at(b + 52));
    }
};
struct TQ2_0 {
    static const int BLOCK = 256, BYTES = 66;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) g.q[j] = sub4(u32(b + 32 * (sub / 4) + 4 * j) >> 2 * (sub % 4) & 0x03030303u, 1);
        scaled(g, half_at(b + 64));
    }
};

// Types with grids: 8 (or 4) neighbours are one row of a table, signs are stored beside its number.
__device__ __forceinline__ uint32_t even_signs(uint32_t i) { i &= 127; return i | (uint32_t) (__popc(i) & 1) << 7; }
__device__ __forceinline__ void eight(uint64_t point, uint32_t signs, int * q) {
    q[0] = with_signs((uint32_t) point, signs); q[1] = with_signs((uint32_t) (point >> 32), signs >> 4);
}
struct IQ2_XXS {
    static const int BLOCK = 256, BYTES = 66;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        const char * p = b + 2 + 8 * sub;
        const uint32_t aux = u32(p + 4);
        for (int k = 0; k < 4; k++) eight(GRID_IQ2_XXS[u8(p + k)], even_signs(aux >> 7 * k), g.q + 2 * k);
        scaled(g, half_at(b) * (0.5f + (aux >> 28)) * 0.25f);
    }
};
struct IQ2_XS {
    static const int BLOCK = 256, BYTES = 74;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int k = 0; k < 4; k++) {
            const uint32_t w = u16(b + 2 + 8 * sub + 2 * k);
            eight(GRID_IQ2_XS[w & 511], even_signs(w >> 9), g.q + 2 * k);
        }
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) g.d[h] = half_at(b) * (0.5f + (u8(b + 66 + sub) >> 4 * h & 15)) * 0.25f;
    }
};
struct IQ2_S {
    static const int BLOCK = 256, BYTES = 82;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int k = 0; k < 4; k++) {
            const uint32_t i = u8(b + 2 + 4 * sub + k) | (u8(b + 66 + sub) >> 2 * k & 3) << 8;
            eight(GRID_IQ2_S[i], u8(b + 34 + 4 * sub + k), g.q + 2 * k);
        }
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) g.d[h] = half_at(b) * (0.5f + (u8(b + 74 + sub) >> 4 * h & 15)) * 0.25f;
    }
};
struct IQ3_XXS {
    static const int BLOCK = 256, BYTES = 98;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        const uint32_t aux = u32(b + 66 + 4 * sub);
        for (int j = 0; j < 8; j++)
            g.q[j] = with_signs(GRID_IQ3_XXS[u8(b + 2 + 8 * sub + j)], even_signs(aux >> 7 * (j / 2)) >> j % 2 * 4);
        scaled(g, half_at(b) * (0.5f + (aux >> 28)) * 0.5f);
    }
};
struct IQ3_S {
    static const int BLOCK = 256, BYTES = 110;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int j = 0; j < 8; j++) {
            const uint32_t i = u8(b + 2 + 8 * sub + j) | (u8(b + 66 + sub) >> j & 1) << 8;
            g.q[j] = with_signs(GRID_IQ3_S[i], u8(b + 74 + 4 * sub + j / 2) >> j % 2 * 4);
        }
        scaled(g, half_at(b) * (int) (1 + 2 * (u8(b + 106 + sub / 2) >> sub % 2 * 4 & 15)));
    }
};
// IQ1: points of -1, 0, 1 plus or minus an eighth. The table holds 8 * point + 8, so that all becomes whole.
__device__ __forceinline__ void eighths(uint64_t point, bool minus, int * q) {
    q[0] = sub4((uint32_t) point, minus ? 9 : 7); q[1] = sub4((uint32_t) (point >> 32), minus ? 9 : 7);
}
struct IQ1_S {
    static const int BLOCK = 256, BYTES = 50;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        const uint32_t h = u16(b + 34 + 2 * sub);
        for (int k = 0; k < 4; k++) eighths(GRID_IQ1_S[u8(b + 2 + 4 * sub + k) | (h >> 3 * k & 7) << 8], h >> 15, g.q + 2 * k);
        scaled(g, half_at(b) * (int) (2 * (h >> 12 & 7) + 1) * 0.125f);
    }
};
struct IQ1_M {
    static const int BLOCK = 256, BYTES = 56;
    __device__ static void unpack(const char * b, int sub, Group & g) {
        for (int k = 0; k < 4; k++) {
            const uint32_t h = u8(b + 32 + 2 * sub + k / 2) >> k % 2 * 4 & 15;
            eighths(GRID_IQ1_S[u8(b + 4 * sub + k) | (h & 7) << 8], h >> 3, g.q + 2 * k);
        }
        uint32_t d = 0;
        for (int i = 0; i < 4; i++) d |= u16(b + 48 + 2 * i) >> 12 << 4 * i;
        scaled(g, 0.0f);
        for (int h = 0; h < 2; h++) {
            const int i = 2 * sub + h;
            g.d[h] = half_to_float((uint16_t) d) * (int) (2 * (u16(b + 48 + 2 * (i / 4)) >> 3 * (i % 4) & 7) + 1) * 0.125f;
        }
    }
};

// Group number `i` of a row.
template <class T> __device__ __forceinline__ void unpack_group(const char * row, int i, Group & g) {
    const int groups = T::BLOCK / 32;
    T::unpack(row + (int64_t) (i / groups) * T::BYTES, i % groups, g);
}
__device__ __forceinline__ float value(const Group & g, int i) { return g.d[i / 16] * (int8_t) (g.q[i / 4] >> i % 4 * 8) + g.m[i / 16]; }
