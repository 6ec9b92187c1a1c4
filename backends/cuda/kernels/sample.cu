// A token of each row of logits: that row's chain of cuts, then the best or a draw. One block per row; the order of threads changes nothing,
// since weights are integers: exp(x - best) in units of 2^-36.
//
// What is kept is always a start of the row sorted by logit, equal logits by number: all keys above `floor`, and those equal to it
// that stand before `end`. So no cut sorts: `descend` finds where a start ends, digit by digit of the key, from histograms.
#include "common.cuh"

enum Word { END, TOP_K, TOP_P, MIN_P, TEMP, DIST };
constexpr int MAX_STEPS = 16, MAX_BLOCK = 1024;

struct Row {
    const char * data; int64_t stride; int n;
    float divisors[MAX_STEPS]; int n_divisors;
    float best;                                         // the highest logit, divided
    uint32_t floor; int end;
};

__device__ __forceinline__ float logit(const Row & r, int i) { return *(const float *) (r.data + i * r.stride) + 0.0f; }
__device__ __forceinline__ uint32_t key(float x) {
    const uint32_t u = (uint32_t) __float_as_int(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t k) { return __int_as_float((int) (k & 0x80000000u ? k & 0x7fffffffu : ~k)); }
__device__ __forceinline__ float divided(const Row & r, float x) {
    for (int i = 0; i < r.n_divisors; i++) x = __fdiv_rn(x, r.divisors[i]);
    return x;
}
__device__ __forceinline__ uint64_t weight(const Row & r, float x) { return (uint64_t) (expf(divided(r, x) - r.best) * 68719476736.0f + 0.5f); }
__device__ __forceinline__ bool kept(const Row & r, uint32_t k, int i) { return k > r.floor || (k == r.floor && i < r.end); }
__device__ __forceinline__ uint64_t high(uint64_t a, uint64_t b) {                     // of the product of 128 bits
    const uint64_t a0 = (uint32_t) a, a1 = a >> 32, b0 = (uint32_t) b, b1 = b >> 32;
    const uint64_t mid = a1 * b0 + (a0 * b0 >> 32), mid2 = a0 * b1 + (uint32_t) mid;
    return a1 * b1 + (mid >> 32) + (mid2 >> 32);
}

// The sum over the threads before this one; `total` gets that of all.
__device__ uint64_t sum_before(uint64_t x, uint64_t & total) {
    __shared__ uint64_t ends[MAX_BLOCK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    uint64_t sum = x;
    for (int d = 1; d < 32; d *= 2) { const uint64_t y = __shfl_up_sync(0xffffffffu, sum, d); if (lane >= d) sum += y; }
    __syncthreads();
    if (lane == 31) ends[warp] = sum;
    __syncthreads();
    uint64_t before = 0;
    total = 0;
    for (int w = 0; w < n_warps; w++) { if (w < warp) before += ends[w]; total += ends[w]; }
    return before + sum - x;
}

// By number: the first i at which the sum of f(0) .. f(i) exceeds `target`, which must be below the sum of all.
template <class F> __device__ int locate(const Row & r, uint64_t target, F f) {
    __shared__ int found;
    const int each = (r.n + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each, last = min(first + each, r.n);
    uint64_t sum = 0, total;
    for (int i = first; i < last; i++) sum += f(i);
    uint64_t before = sum_before(sum, total);
    if (before <= target && target < before + sum) {
        int i = first;
        while ((before += f(i)) <= target) i++;
        found = i;
    }
    __syncthreads();
    const int i = found;
    __syncthreads();
    return i;
}

// From the highest logit down: the key at which the sum of w over all kept exceeds `target`, and what of `target` is left there.
template <class W> __device__ uint32_t descend(const Row & r, uint64_t & target, W w) {
    __shared__ uint64_t sums[256], rest;
    __shared__ uint32_t digits;
    uint32_t known = 0;                                 // the digits found so far
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) sums[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < r.n; i += blockDim.x) {
            const float x = logit(r, i);
            const uint32_t k = key(x);
            if (kept(r, k, i) && (shift == 24 || k >> (shift + 8) == known)) atomicAdd(&sums[k >> shift & 255], w(x));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint64_t left = target; int d = 255;
            while (d > 0 && left >= sums[d]) left -= sums[d--];
            rest = left; digits = known << 8 | d;
        }
        __syncthreads();
        known = digits; target = rest;
        __syncthreads();
    }
    return known;
}

__device__ __forceinline__ uint64_t one(float) { return 1; }

// The candidate in place `target` of the weights or numbers w, from the highest down.
template <class W> __device__ int place(const Row & r, uint64_t target, uint32_t & k, W w) {
    k = descend(r, target, w);
    const uint64_t nth = target / w(value_of(k));
    const uint32_t wanted = k;
    return locate(r, nth, [&](int i) { return (uint64_t) (key(logit(r, i)) == wanted); });
}

template <class F> __device__ uint64_t sum_of(const Row & r, F f) {
    uint64_t sum = 0, total;
    for (int i = threadIdx.x; i < r.n; i += blockDim.x) { const float x = logit(r, i); if (kept(r, key(x), i)) sum += f(x); }
    sum_before(sum, total);
    return total;
}

// The keys' maximum, or the minimum of those kept whose logit is at least `least`.
__device__ uint32_t extreme(const Row & r, bool highest, float least) {
    __shared__ uint32_t found;
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    uint32_t top = 0;                                   // of the keys, or of their complements
    for (int i = threadIdx.x; i < r.n; i += blockDim.x) {
        const float x = logit(r, i); const uint32_t k = key(x);
        if (highest) top = max(top, x != x ? 0xffffffffu : k);
        else if (kept(r, k, i) && divided(r, x) >= least) top = max(top, ~k);
    }
    atomicMax(&found, top);
    __syncthreads();
    return highest ? found : ~found;
}

KERNEL __launch_bounds__(512) sample(Tensor dst, Tensor logits, Tensor steps, Tensor uniform) {
    Row r;
    r.data = at(logits, 0, blockIdx.x, 0, 0); r.stride = logits.nb[0]; r.n = (int) logits.ne[0];
    r.n_divisors = 0; r.floor = 0; r.end = r.n;
    const uint32_t highest = extreme(r, true, 0.0f);
    int token = -1;
    if (highest < 0xff800000u && highest > 0x007fffffu) {                              // neither NaN nor infinite
        r.best = value_of(highest);
        const int best = locate(r, 0, [&](int i) { return (uint64_t) (key(logit(r, i)) == highest); });
        bool sorted = false;
        token = best;
        for (int s = 0; s < (int) steps.ne[1]; s++) {
            const int word = (int) *(const float *) at(steps, 0, s, blockIdx.x, 0);
            const float value = *(const float *) at(steps, 1, s, blockIdx.x, 0);
            if (word == END) break;
            uint32_t k;
            if (word == TOP_K) {
                const uint64_t n = sum_of(r, one), wanted = (uint64_t) value;
                if (wanted < n) { const int i = place(r, wanted - 1, k, one); r.floor = k; r.end = i + 1; }
                sorted = true;
            } else if (word == TOP_P) {
                auto w = [&](float x) { return weight(r, x); };
                const uint64_t wanted = (uint64_t) ceil((double) value * (double) sum_of(r, w));
                if (wanted == 0) { r.floor = highest; r.end = best + 1; }
                else { const int i = place(r, wanted - 1, k, w); r.floor = k; r.end = i + 1; }
                sorted = true;
            } else if (word == MIN_P) {
                k = extreme(r, false, r.best + logf(value));
                if (k > highest) { r.floor = highest; r.end = best + 1; }               // a value above 1 leaves the best
                else if (k > r.floor) { r.floor = k; r.end = r.n; }
            } else if (word == TEMP && value > 0.0f && r.n_divisors < MAX_STEPS) {
                r.divisors[r.n_divisors++] = value;
                r.best = __fdiv_rn(r.best, value);
            } else if (word == TEMP) {
                r.floor = highest; r.end = best + 1;
            } else {
                auto w = [&](float x) { return weight(r, x); };
                const uint64_t u = *(const uint32_t *) at(uniform, 0, blockIdx.x, 0, 0)
                                   | (uint64_t) *(const uint32_t *) at(uniform, 1, blockIdx.x, 0, 0) << 32;
                const uint64_t target = high(u, sum_of(r, w));
                token = sorted ? place(r, target, k, w) : locate(r, target, [&](int i) {
                    const float x = logit(r, i); return kept(r, key(x), i) ? weight(r, x) : (uint64_t) 0; });
                break;
            }
        }
    }
    if (threadIdx.x == 0) *(int *) at(dst, blockIdx.x, 0, 0, 0) = token;
}
