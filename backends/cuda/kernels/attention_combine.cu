// Joins the runs of cells that blocks of attention.cu had: each is scaled to the common maximum.
#include "activation.cuh"

// part [run][stream][token][head][dv + 2] -> dst [dv, n_head, n_tokens, n_stream] as floats if `write`, as 8-bit activations where q and s
// have a place. grid: (n_head, n_tokens, n_stream); block: 128
KERNEL combine(Tensor dst, Tensor sinks, const float * part, int64_t n_kv, int64_t cells_each, int write, char * q, Scale * s) {
    const int dv = (int) dst.ne[0], head = blockIdx.x, token = blockIdx.y, stream = blockIdx.z, n_runs = (int) ((n_kv + cells_each - 1) / cells_each);
    const int64_t step = dst.ne[3] * dst.ne[2] * dst.ne[1] * (dv + 2);
    const int64_t row = (stream * dst.ne[2] + token) * dst.ne[1] + head;
    part += row * (dv + 2);
    const float sink = sinks.data ? *(const float *) (sinks.data + head * sinks.nb[0]) : -INFINITY;
    float top = sink;
    for (int r = threadIdx.x; r < n_runs; r += blockDim.x) top = fmaxf(top, part[r * step + dv]);
    top = block_max(top);
    if (top == -INFINITY) top = 0.0f;
    float total = expf(sink - top);
    for (int r = 0; r < n_runs; r++) total += part[r * step + dv + 1] * expf(part[r * step + dv] - top);
    for (int i = threadIdx.x; i < dv; i += blockDim.x) {
        float sum = 0.0f;
        for (int r = 0; r < n_runs; r++) sum += part[r * step + i] * expf(part[r * step + dv] - top);
        const float v = total > 0.0f ? sum / total : 0.0f;
        if (write) *(float *) at(dst, i, head, token, stream) = v;
        if (q) quantize32(v, q + row * dv + i / 32 * 32, s + (row * dv + i) / 32);
    }
}
