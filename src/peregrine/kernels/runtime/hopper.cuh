// What our kernels in CUDA C++ share: barriers in shared memory, copies by TMA, products of single warps, conversions.
// It is put before each of them when it is compiled. NUMBER is the element type's name in PTX.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 address_of(const void* place) {
  return static_cast<u32>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void new_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void await(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
      ::"r"(barrier), "r"(phase) : "memory");
}

// A box of a matrix, from this column and row on.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// True in one lane of a warp, which the compiler knows.
__device__ __forceinline__ bool elected() {
  u32 yes;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xFFFFFFFF; selp.u32 %0, 1, 0, one; }" : "=r"(yes));
  return yes;
}

// Adds a product of 16 x 16 and 16 x 8 elements to a warp's sums.
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&left)[4], u32 first, u32 second) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NUMBER "." NUMBER
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}

// Four matrices of 8 x 8 elements, as `multiply` takes them; each lane says where one of their rows is.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ float2 unpacked(u32 both) {
  float2 values;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32." NUMBER " %0, low; cvt.f32." NUMBER " %1, high; }"
      : "=f"(values.x), "=f"(values.y) : "r"(both));
  return values;
}

__device__ __forceinline__ u32 rounded(float first, float second) {
  u32 both;
  asm("cvt.rn." NUMBER "x2.f32 %0, %2, %1;" : "=r"(both) : "f"(first), "f"(second));
  return both;
}

__device__ __forceinline__ float divided(float value, float divisor) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(divisor));
  return result;
}
