// Ops that work element by element. One thread per element of the result, blocks of 256; the op's number is an argument.
#include "activation.cuh"
#include "glu.cuh"
#include "unary.cuh"

// A chain of ops, each on the result of the one before: unary ones, scale and clamp with two parameters, and those of two operands, of which
// `other` repeats, or is the first operand and has the whole shape (`swapped`). grid: elements / 256
const int STEPS = 6;
struct Step { int64_t op; float a, pad0, b, pad1; int64_t type, swapped; Tensor other; };
struct Chain { int64_t n; Step step[STEPS]; };

KERNEL chain(Tensor dst, Tensor x, int x_type, Chain c, int write, char * q, Scale * s) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    float v = load(x_type, at(x, unravel(x, i)));                         // the first may have another shape: elements in its order
    for (int j = 0; j < c.n; j++) {
        const Step & p = c.step[j];
        if (p.op < BINARY) { v = apply((int) p.op, v, p.a, p.b); continue; }
        const float w = load((int) p.type, at_repeated(p.other, k));
        v = p.swapped ? combine((int) p.op, w, v) : combine((int) p.op, v, w);
    }
    if (write) *(float *) at(dst, k) = v;
    if (q) quantize32(v, q + i / 32 * 32, s + i / 32);
}

// a [n, n_used, n_tokens] + the row of b [n, n_expert] that ids [n_used, n_tokens] name. grid: elements / 256
KERNEL add_id(Tensor dst, Tensor a, Tensor b, Tensor ids) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    const int expert = *(const int *) at(ids, k.i1, k.i2, 0, 0);
    *(float *) at(dst, k) = *(const float *) at(a, k) + *(const float *) at(b, k.i0, expert, 0, 0);
}

// As floats if `write`, as 8-bit activations where q and s have a place. grid: elements / 256; a row is a multiple of 32 where q is given
KERNEL glu(Tensor dst, Tensor gate, Tensor up, Glu p, int write, char * q, Scale * s) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel(dst)) return;
    const Index k = unravel(dst, i);
    const float v = activated(p, *(const float *) at(gate, k), *(const float *) at(up, k));
    if (write) *(float *) at(dst, k) = v;
    if (q) quantize32(v, q + i / 32 * 32, s + i / 32);
}
