// Lets a C++ compiler take a CUDA kernel, and runs its threads one after another, in an order that
// a seed chooses. For kernels without shared memory and barriers: those do not compile.
#pragma once
#define KVTIER_ON_CPU 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ no_shared_memory_on_a_cpu
#define __syncthreads() no_barriers_on_a_cpu

struct kvtier_index {
  unsigned int x;
};
static thread_local kvtier_index threadIdx, blockIdx, blockDim, gridDim;
// So that no byte is written twice, and none apart that could be written with others.
static thread_local unsigned long long kvtier_written, kvtier_writes;
static const unsigned long long kvtier_enough = 1ULL << 24;

template <typename Unit>
static inline Unit kvtier_read(const Unit* from) {
  return *from;
}

template <typename Unit>
static inline void kvtier_write(Unit* to, Unit unit) {
  if (kvtier_written > kvtier_enough) __builtin_trap();  // a loop without an end
  *to = unit;
  kvtier_written += sizeof(Unit);
  ++kvtier_writes;
}

static inline unsigned long long kvtier_divisor(unsigned long long a, unsigned long long b) {
  return b == 0 ? a : kvtier_divisor(b, a % b);
}

// wrote: how many bytes were written, and in how many writes.
template <typename Kernel>
static void kvtier_run(unsigned int grid, unsigned int block, unsigned long long seed,
                       unsigned long long* wrote, Kernel kernel) {
  const unsigned long long threads = 1ULL * grid * block;
  unsigned long long step = seed % threads + 1;
  while (kvtier_divisor(step, threads) != 1) ++step;  // or some thread would have two turns
  kvtier_written = kvtier_writes = 0;
  gridDim.x = grid;
  blockDim.x = block;
  for (unsigned long long turn = 0; turn < threads; ++turn) {
    const unsigned long long thread = (turn * step + seed) % threads;
    blockIdx.x = static_cast<unsigned int>(thread / block);
    threadIdx.x = static_cast<unsigned int>(thread % block);
    kernel();
  }
  wrote[0] = kvtier_written;
  wrote[1] = kvtier_writes;
}
