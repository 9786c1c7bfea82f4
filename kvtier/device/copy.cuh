// Copies runs of bytes between an engine's blocks and slots. One source for nvcc, for NVRTC, and
// for a C++ compiler, which runs it on a CPU (kvtier/testing/on_cpu.h).
//
// Runs lie alike on several planes, and are copied on each of them: an address is where the plane
// begins, plus where the run lies on a plane. begins: of each plane at the target, and, `all` numbers
// after it, at the source. table: of each run where it lies at the target, at the source, and its
// bytes; three rows, each of which begins `row` numbers after the one before it. So of planes and
// runs that are in a table, some that follow each other can be copied.
// Addresses are of the device, or of host memory that is mapped into it.
// Plane by plane, a block of threads takes every gridDim.x-th run, so the grid is the share of SMs
// that a copy has.
// There is no shared memory and no barrier: no thread waits for another.

typedef unsigned long long kvtier_u64;

struct alignas(16) kvtier_vector {
  unsigned int x, y, z, w;
};

#ifndef KVTIER_ON_CPU
// What is copied is not read again here, so it should not push out what kernels beside it use.
static __device__ __forceinline__ kvtier_vector kvtier_read(const kvtier_vector* from) {
  kvtier_vector v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

static __device__ __forceinline__ void kvtier_write(kvtier_vector* to, kvtier_vector v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <typename Unit>
static __device__ __forceinline__ Unit kvtier_read(const Unit* from) {
  return *from;
}

template <typename Unit>
static __device__ __forceinline__ void kvtier_write(Unit* to, Unit unit) {
  *to = unit;
}
#endif

// Copies as many whole units as a run has, if both of its ends are aligned; returns their bytes.
template <typename Unit>
static __device__ __forceinline__ kvtier_u64 kvtier_units(kvtier_u64 to, kvtier_u64 from,
                                                          kvtier_u64 nbytes) {
  if ((to | from) % sizeof(Unit) != 0) return 0;
  const kvtier_u64 count = nbytes / sizeof(Unit), step = blockDim.x;
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  kvtier_u64 at = threadIdx.x;
  // Four reads under way in each thread: few SMs then keep a link of long latency full.
  for (; at + 3 * step < count; at += 4 * step) {
    const Unit a = kvtier_read(source + at), b = kvtier_read(source + at + step),
               c = kvtier_read(source + at + 2 * step), d = kvtier_read(source + at + 3 * step);
    kvtier_write(target + at, a);
    kvtier_write(target + at + step, b);
    kvtier_write(target + at + 2 * step, c);
    kvtier_write(target + at + 3 * step, d);
  }
  for (; at < count; at += step) kvtier_write(target + at, kvtier_read(source + at));
  return count * sizeof(Unit);
}

extern "C" __global__ void kvtier_copy(const kvtier_u64* begins, const kvtier_u64* table,
                                       unsigned int planes, unsigned int runs, unsigned int all,
                                       unsigned int row) {
  for (unsigned int work = blockIdx.x; work < planes * runs; work += gridDim.x) {
    const unsigned int plane = work / runs, run = work % runs;
    const kvtier_u64 to = begins[plane] + table[run], nbytes = table[2 * row + run],
                     from = begins[all + plane] + table[row + run];
    kvtier_u64 done = kvtier_units<kvtier_vector>(to, from, nbytes);
    if (done == 0) done = kvtier_units<unsigned int>(to, from, nbytes);
    kvtier_units<unsigned char>(to + done, from + done, nbytes - done);
  }
}
