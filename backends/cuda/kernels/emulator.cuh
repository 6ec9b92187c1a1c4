// Runs CUDA C++ kernels on the host, one block at a time: every thread of a block is a fiber; barriers and warp operations switch fibers.
// Test equipment: it checks a kernel's arithmetic and indexing without a GPU. It says nothing about speed, nor about races that need
// true parallelism.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static               // one block runs at a time, so a static is the block's own
#define __align__(n) __attribute__((aligned(n)))

struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct alignas(16) int4 { int x, y, z, w; };

namespace emulator {

#ifdef __x86_64__
// Save what the ABI says a call keeps, change stacks, put the same back.
extern "C" void ggraph_switch(void ** from, void * to);
asm(".text\n.weak ggraph_switch\n.type ggraph_switch,@function\nggraph_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
struct Stack { void * sp = nullptr; };
inline void switch_to(Stack & from, Stack & to) { ggraph_switch(&from.sp, to.sp); }
inline void prepare(Stack & s, char * memory, size_t size, void (*entry)()) {
    void ** top = (void **) ((uintptr_t) (memory + size) & ~uintptr_t(15)) - 1;
    *top = nullptr;                                                       // where entry would return to; also aligns the stack for it
    *--top = (void *) entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    s.sp = top;
}
#else
struct Stack { ucontext_t context; };
inline void switch_to(Stack & from, Stack & to) { swapcontext(&from.context, &to.context); }
inline void prepare(Stack & s, char * memory, size_t size, void (*entry)()) {
    getcontext(&s.context);
    s.context.uc_stack.ss_sp = memory; s.context.uc_stack.ss_size = size; s.context.uc_link = nullptr;
    makecontext(&s.context, entry, 0);
}
#endif

constexpr size_t STACK = 32768;
struct Fiber { Stack stack; bool done; dim3 tid; unsigned id, n_exchanged; };
struct Barrier { unsigned arrived, generation; };
inline Stack scheduler; inline std::vector<Fiber> fibers; inline std::vector<char> stacks, dynamic_shared; inline Fiber * self;
inline dim3 grid_dim, block_dim, block_idx; inline unsigned n_threads, n_running, n_waits; inline Barrier block_barrier;
struct Warp { Barrier barrier; unsigned n_running; uint64_t slots[2][32]; };
inline std::vector<Warp> warps;

inline void yield() { switch_to(self->stack, scheduler); }
inline void wait(Barrier & b, const unsigned & n) {                       // n shrinks when threads return
    const unsigned g = b.generation;
    n_waits++;
    if (++b.arrived >= n) { b.arrived = 0; b.generation++; return; }
    while (b.generation == g) {
        yield();
        if (b.generation == g && b.arrived >= n) { b.arrived = 0; b.generation++; }
    }
}
inline Warp & warp() { return warps[self->id / 32]; }
template <class T> T exchange(T v, unsigned from) {
    static_assert(sizeof(T) <= 8, "a warp exchanges values of up to 8 bytes");
    Warp & w = warp(); const unsigned lane = self->id % 32, n = n_threads - (self->id & ~31u);
    uint64_t * slots = w.slots[self->n_exchanged++ & 1];
    std::memcpy(&slots[lane], &v, sizeof(T));
    wait(w.barrier, w.n_running);
    T r; std::memcpy(&r, &slots[from < 32 && from < n ? from : lane], sizeof(T)); return r;
}
struct Job { void (*run)(void *); void * data; }; inline Job job;
inline void entry() {
    job.run(job.data);
    self->done = true; n_running--; warp().n_running--;
    for (;;) yield();
}
inline void run_block() {
    n_running = n_threads; block_barrier = {};
    for (unsigned w = 0; w < warps.size(); w++) warps[w].barrier = {}, warps[w].n_running = n_threads - w * 32 < 32 ? n_threads - w * 32 : 32;
    for (unsigned t = 0; t < n_threads; t++) {
        Fiber & f = fibers[t];
        f.done = false; f.id = t; f.n_exchanged = 0; f.tid = dim3(t % block_dim.x, t / block_dim.x % block_dim.y, t / (block_dim.x * block_dim.y));
        prepare(f.stack, &stacks[t * STACK], STACK, entry);
    }
    while (n_running) {
        const unsigned running = n_running, waits = n_waits;
        for (unsigned t = 0; t < n_threads; t++) if (!fibers[t].done) { self = &fibers[t]; switch_to(scheduler, self->stack); }
        if (running == n_running && waits == n_waits) { std::fprintf(stderr, "emulator: threads wait for each other\n"); std::abort(); }
    }
}
template <class... A, size_t... I> void call(void (*k)(A...), void ** args, std::index_sequence<I...>) { k(*(A *) args[I]...); }
template <class... A> void launch(void (*k)(A...), const unsigned * grid, const unsigned * block, size_t shared, void ** args) {
    grid_dim = dim3(grid[0], grid[1], grid[2]); block_dim = dim3(block[0], block[1], block[2]);
    n_threads = block_dim.x * block_dim.y * block_dim.z;
    if (fibers.size() < n_threads) { fibers.resize(n_threads); stacks.resize(n_threads * STACK); }
    warps.resize((n_threads + 31) / 32);
    dynamic_shared.assign(shared + 64, (char) 0xA5);
    auto data = std::make_pair(k, args);
    job = { [](void * d) { auto * p = (decltype(data) *) d; call(p->first, p->second, std::index_sequence_for<A...>{}); }, &data };
    for (unsigned z = 0; z < grid_dim.z; z++) for (unsigned y = 0; y < grid_dim.y; y++) for (unsigned x = 0; x < grid_dim.x; x++) {
        block_idx = dim3(x, y, z);
        run_block();
    }
}
template <class... A> constexpr unsigned arity(void (*)(A...)) { return sizeof...(A); }
}

#define threadIdx (emulator::self->tid)
#define blockIdx (emulator::block_idx)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)
#define DYNAMIC_SHARED(type, name) type * name = (type *) (((uintptr_t) emulator::dynamic_shared.data() + 63) & ~uintptr_t(63))
#define DEVICE_TABLE static const
inline void __syncthreads() { emulator::wait(emulator::block_barrier, emulator::n_running); }
inline unsigned lane_of(unsigned lane, unsigned width) { return (emulator::self->id % 32 & ~(width - 1)) | lane; }
template <class T> T __shfl_xor_sync(unsigned, T v, int m, int = 32) { return emulator::exchange(v, (emulator::self->id % 32) ^ m); }
template <class T> T __shfl_up_sync(unsigned, T v, int d, int = 32) { return emulator::exchange(v, emulator::self->id % 32 - d); }
template <class T> T __shfl_sync(unsigned, T v, int l, int width = 32) { return emulator::exchange(v, lane_of(l, width)); }
inline void __threadfence() {}
inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int8_t) (a >> 8 * i) * (int8_t) (b >> 8 * i); return c; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __int_as_float(int x) { float f; std::memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T> T atomicAdd(T * p, T v) { T o = *p; *p = o + v; return o; }
template <class T> T atomicMax(T * p, T v) { T o = *p; *p = o > v ? o : v; return o; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

inline float half_to_float(uint16_t h) { _Float16 x; std::memcpy(&x, &h, 2); return (float) x; }
inline uint16_t float_to_half(float f) { _Float16 x = (_Float16) f; uint16_t h; std::memcpy(&h, &x, 2); return h; }
