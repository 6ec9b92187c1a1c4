// Ops over rows (axis 0). One block per row, 256 threads unless it says otherwise; grid: rows of the result.
#include "common.cuh"

#define FOR_ROW(i, n) for (int i = threadIdx.x; i < (int) (n); i += blockDim.x)
__device__ __forceinline__ float f32(const char * p) { return *(const float *) p; }

// Groups of `step` channels (axis 2), with axes 0 and 1. grid: (groups, axis 3)
KERNEL group_norm(Tensor dst, Tensor x, int step, float eps) {
    const int first = blockIdx.x * step, last = min(first + step, (int) x.ne[2]), i3 = blockIdx.y;
    const int plane = (int) (x.ne[0] * x.ne[1]), n0 = (int) x.ne[0], n = plane * (last - first);
    float mean = 0.0f, sum = 0.0f;
    FOR_ROW(i, n) mean += f32(at(x, i % n0, i % plane / n0, first + i / plane, i3));
    mean = block_sum(mean) / n;
    FOR_ROW(i, n) { const float v = f32(at(x, i % n0, i % plane / n0, first + i / plane, i3)) - mean; sum += v * v; }
    const float scale = 1.0f / sqrtf(block_sum(sum) / n + eps);
    FOR_ROW(i, n) *(float *) at(dst, i % n0, i % plane / n0, first + i / plane, i3) =
        (f32(at(x, i % n0, i % plane / n0, first + i / plane, i3)) - mean) * scale;
}

// The sum of each row times `scale`, or with 0 the mean.
KERNEL sum_rows(Tensor dst, Tensor x, int is_mean) {
    const Index r = row_index(dst, blockIdx.x);
    const char * from = at(x, r);
    float sum = 0.0f;
    FOR_ROW(i, x.ne[0]) sum += f32(from + i * x.nb[0]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) *(float *) at(dst, r) = is_mean ? sum / x.ne[0] : sum;
}

// Running sums: each thread has a run of neighbours, the threads' sums are added up in between.
KERNEL cumsum(Tensor dst, Tensor x) {
    __shared__ float ends[256];
    const Index r = row_index(dst, blockIdx.x);
    const char * from = at(x, r); char * to = at(dst, r);
    const int n = (int) x.ne[0], each = (n + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each, last = min(first + each, n);
    float sum = 0.0f;
    for (int i = first; i < last; i++) sum += f32(from + i * x.nb[0]);
    ends[threadIdx.x] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int t = 0; t < (int) threadIdx.x; t++) sum += ends[t];
    for (int i = first; i < last; i++) { sum += f32(from + i * x.nb[0]); *(float *) (to + i * dst.nb[0]) = sum; }
}

// Factor of the mask of head h: 1 without ALiBi.
__device__ __forceinline__ float slope(int h, int n_head, float max_bias) {
    if (max_bias <= 0.0f) return 1.0f;
    int n = 1;
    while (2 * n <= n_head) n *= 2;
    return h < n ? powf(2.0f, -max_bias / n * (h + 1)) : powf(2.0f, -max_bias / 2 / n * (2 * (h - n) + 1));
}

// softmax over axis 0 of x * scale + slope * mask; `sinks` of each head take part in the sum. Absent tensors have no address.
KERNEL __launch_bounds__(1024) soft_max(Tensor dst, Tensor x, Tensor mask, Tensor sinks, int mask_type, float scale, float max_bias) {
    const Index r = row_index(dst, blockIdx.x);
    const char * from = at(x, r); char * to = at(dst, r);
    const char * bias = mask.data ? at_repeated(mask, r) : nullptr;
    const float factor = slope(r.i2, (int) x.ne[2], max_bias), sink = sinks.data ? f32(sinks.data + r.i2 * sinks.nb[0]) : -INFINITY;
    float top = sink, sum = 0.0f;
    FOR_ROW(i, x.ne[0]) {
        const float v = f32(from + i * x.nb[0]) * scale + (bias ? factor * load(mask_type, bias + i * mask.nb[0]) : 0.0f);
        top = fmaxf(top, v);
    }
    top = block_max(top);
    if (top == -INFINITY) top = 0.0f;
    FOR_ROW(i, x.ne[0]) {
        const float v = f32(from + i * x.nb[0]) * scale + (bias ? factor * load(mask_type, bias + i * mask.nb[0]) : 0.0f);
        const float e = expf(v - top);
        *(float *) (to + i * dst.nb[0]) = e;
        sum += e;
    }
    sum = block_sum(sum);
    if (sinks.data) sum += expf(sink - top);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    FOR_ROW(i, x.ne[0]) *(float *) (to + i * dst.nb[0]) *= inverse;
}

// The maximum of each k neighbours. grid: elements / 256
KERNEL pool_1d(Tensor dst, Tensor x, int k) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index o = unravel(dst, i);
    float top = -INFINITY;
    for (int j = 0; j < k; j++) top = fmaxf(top, f32(at(x, o.i0 * k + j, o.i1, o.i2, o.i3)));
    *(float *) at(dst, o) = top;
}

// The order of each row, equal values by index; the first ne[0] of the result. Bitonic, in shared memory: `padded` is a power of two of
// at least the row's length. `up` is -1 for descending.
KERNEL sort(Tensor dst, Tensor x, int padded, float up) {
    DYNAMIC_SHARED(float, value);
    int * index = (int *) (value + padded);
    const Index r = row_index(dst, blockIdx.x);
    const char * from = at(x, r);
    const int n = (int) x.ne[0];
    FOR_ROW(i, padded) {
        const float v = i < n ? up * f32(from + i * x.nb[0]) : INFINITY;
        value[i] = v == v ? v : INFINITY; index[i] = i;                   // NaN comes last, and before what pads
    }
    for (int size = 2; size <= padded; size *= 2) for (int step = size / 2; step > 0; step /= 2) {
        __syncthreads();
        FOR_ROW(i, padded) {
            const int j = i ^ step;
            if (j <= i) continue;
            const bool after = value[i] > value[j] || (value[i] == value[j] && index[i] > index[j]);
            if (after == ((i & size) == 0)) {
                const float v = value[i]; value[i] = value[j]; value[j] = v;
                const int k = index[i]; index[i] = index[j]; index[j] = k;
            }
        }
    }
    __syncthreads();
    FOR_ROW(i, dst.ne[0]) *(int *) at(dst, i, r.i1, r.i2, r.i3) = index[i];
}

// Runs of n elements times the orthonormal Walsh-Hadamard matrix. grid: (runs of a row, rows); block: n / 2 threads, up to 256
KERNEL hadamard(Tensor dst, Tensor x, int n, float scale) {
    DYNAMIC_SHARED(float, v);
    const Index r = row_index(dst, blockIdx.y);
    const int start = blockIdx.x * n;
    FOR_ROW(i, n) v[i] = f32(at(x, start + i, r.i1, r.i2, r.i3));
    for (int h = 1; h < n; h *= 2) {
        __syncthreads();
        FOR_ROW(t, n / 2) {
            const int i = t / h * 2 * h + t % h;
            const float a = v[i], b = v[i + h];
            v[i] = a + b; v[i + h] = a - b;
        }
    }
    __syncthreads();
    FOR_ROW(i, n) *(float *) at(dst, start + i, r.i1, r.i2, r.i3) = v[i] * scale;
}
