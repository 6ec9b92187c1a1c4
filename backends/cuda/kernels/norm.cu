// Norms of rows with what the graph does to them next: times a weight, times a gate, plus another tensor, and the norm of that. The last result is written
// as floats, as 8-bit activations of the products that read it, or both. One block per row; a thread reads and writes its own elements.
#include "activation.cuh"
#include "unary.cuh"

enum Kind { MEAN_VARIANCE, RMS, L2, AS_IT_IS };
struct Norm { int64_t kind; float eps, pad; };

// The mean that is taken off the row, and the factor.
__device__ __forceinline__ void measure(const Norm & p, const char * x, int64_t step, int n, float & mean, float & scale) {
    mean = 0.0f; scale = 1.0f;
    if (p.kind == AS_IT_IS) return;
    if (p.kind == MEAN_VARIANCE) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) mean += *(const float *) (x + i * step);
        mean = block_sum(mean) / n;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) { const float v = *(const float *) (x + i * step) - mean; sum += v * v; }
    sum = block_sum(sum);
    scale = p.kind == L2 ? 1.0f / fmaxf(sqrtf(sum), p.eps) : 1.0f / sqrtf(sum / n + p.eps);
}

struct Gate { int64_t op; Tensor x; };                                    // op(x)

// dst = norm(x) * w * gate + b in dst's row r; w and b repeat. `write`: as floats; q and s: as bytes, where they have a place.
__device__ __forceinline__ void norm_row(const Tensor & dst, const Tensor & x, const Tensor & w, const Gate & gate, const Tensor & b, const Norm & p,
                                         int64_t r, bool write, char * q, Scale * s) {
    const Index row = row_index(dst, r);
    const char * from = at(x, row), * by = w.data ? at_repeated(w, row) : nullptr, * plus = b.data ? at_repeated(b, row) : nullptr;
    const char * by_gate = gate.x.data ? at(gate.x, row) : nullptr;
    char * to = at(dst, row);
    const int n = (int) x.ne[0];
    float mean, scale;
    measure(p, from, x.nb[0], n, mean, scale);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float v = *(const float *) (from + i * x.nb[0]);
        if (p.kind != AS_IT_IS) v = __fmul_rn(v - mean, scale);
        if (by) v = __fmul_rn(v, *(const float *) (by + i * w.nb[0]));
        if (by_gate) v = __fmul_rn(v, apply((int) gate.op, *(const float *) (by_gate + i * gate.x.nb[0]), 0.0f, 0.0f));
        if (plus) v = __fadd_rn(v, *(const float *) (plus + i * b.nb[0]));
        if (write) *(float *) (to + i * dst.nb[0]) = v;
        if (q) quantize32(v, q + r * n + i / 32 * 32, s + (r * n + i) / 32);
    }
}

// grid: rows; block: a multiple of 32
KERNEL __launch_bounds__(1024) normalize(Tensor dst, Tensor x, Tensor w, Gate gate, Tensor b, Norm p, Tensor next, Tensor next_w, Norm next_p, int write, char * q, Scale * s) {
    if (!next.data) { norm_row(dst, x, w, gate, b, p, blockIdx.x, write, q, s); return; }
    const Gate no_gate = {}; const Tensor nothing = {};
    norm_row(dst, x, w, gate, b, p, blockIdx.x, true, nullptr, nullptr);
    norm_row(next, dst, next_w, no_gate, nothing, next_p, blockIdx.x, write, q, s);
}
