// Linears of 65 to 384 rows for Hopper, in tiles whose width fits the device: the arithmetic of `hopper.py`, bit for
// bit. A tile is 64 rows for each of GROUPS groups of four warps by COLS rows of the weight, any multiple of 16, so
// that there are about as many tiles as multiprocessors. With widths that are powers of two a quarter of the device
// would be idle, or a tile would read more than it must.
//
// A program has one tile. One of its warps copies steps of DEPTH inputs by TMA into a ring of STAGES places; the others
// multiply them and finish their outputs in registers. A matrix instruction adds the products of 16 inputs to a sum, in
// ascending order, so an output is the same chain as in all other kernels. Where inputs are in two parts (SPLIT is 2),
// two programs of a cluster have a part each. Both have sums for all columns, finish half of them, and read the other's
// sums of that half from its shared memory.
//
// Set when it is compiled (`linear_source`): GROUPS, COLS, STAGES, SPLIT, ADD (to the residual stream), GATE (COLS are
// 8 gates, 8 ups and so on), NUMBER (the element type's name in PTX), the units of squares, and the function `product`.

constexpr int HEIGHT = 64, DEPTH = 64, MULTIPLIERS = 128 * GROUPS;  // threads that multiply
constexpr int SUMS = COLS / 2, OCTETS = COLS / 8 / SPLIT;  // of a thread: sums; groups of 8 columns that it finishes
constexpr int REGISTERS = 65536 / (128 * (GROUPS + 1)) / 8 * 8;  // warps are dealt to four parts of a multiprocessor
constexpr int OUT_COLS = GATE ? COLS / 2 : COLS;
constexpr u32 ROW_BYTES = HEIGHT * DEPTH * 2, WEIGHT_BYTES = COLS * DEPTH * 2;
constexpr u32 PLACE_BYTES = GROUPS * ROW_BYTES + WEIGHT_BYTES;

__device__ __forceinline__ void copy_pairs(u32 to, const TensorMap* map, int depth, int octet, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
      ::"r"(to), "l"(map), "r"(depth), "r"(0), "r"(octet), "r"(barrier) : "memory");
}

// silu(gate) * up, as `gated` in epilogue.py.
__device__ __forceinline__ float gated(float gate, float up) {
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950408889634f)));
  return __fmul_rn(divided(gate, __fadd_rn(1.0f, power)), up);
}

// Over the four lanes that have a row's columns.
__device__ __forceinline__ i64 over_quad(i64 sum) {
  sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
  return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 2);
}

__device__ __forceinline__ u32 rows_at(const Ring& ring, int group) {
  return ring.memory(PLACE_BYTES) + group * ROW_BYTES;
}

__device__ __forceinline__ u32 weights_at(const Ring& ring) {
  return rows_at(ring, GROUPS);
}

// The copying warp: all steps of a program.
__device__ __forceinline__ void copy_part(
    const TensorMap& weights, const TensorMap& inputs, Ring ring, int row, int rows, int col, int depth, int steps) {
  const auto request_weights = [&](int step) {
    expect(ring.ready + 8 * ring.place, PLACE_BYTES);
    if (GATE) copy_pairs(weights_at(ring), &weights, depth + step * DEPTH, col / 8, ring.ready + 8 * ring.place);
    else copy_rows(weights_at(ring), &weights, depth + step * DEPTH, col, ring.ready + 8 * ring.place);
  };
  const auto request_rows = [&](int step) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      copy_rows(rows_at(ring, g), &inputs, depth + step * DEPTH, min(row + g * HEIGHT, rows - HEIGHT),
                ring.ready + 8 * ring.place);
  };
  copy_steps(ring, steps, request_weights, request_rows);
}

// The sums of a group's 64 rows by all columns of the tile. A thread has two rows, and in every octet two columns.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], Ring ring, int steps, int group, int lane) {
  multiply_steps(sums, ring, steps, lane, [&] {
    const u64 left = matrix_at(rows_at(ring, group)), right = matrix_at(weights_at(ring));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) product(sums, left + 2 * k, right + 2 * k);
  });
}

// Adds the other program's sums to those of this one's half of the columns, which move to the front.
__device__ __forceinline__ void exchange(float (&sums)[SUMS], void* memory, int part) {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");  // the ring is not read any more
  float4* const sent = static_cast<float4*>(memory) + threadIdx.x;
  constexpr int HALF = SUMS / 2;
#pragma unroll
  for (int i = 0; i < HALF; i += 4)
    sent[i / 4 * MULTIPLIERS] =
        part ? make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
             : make_float4(sums[HALF + i], sums[HALF + i + 1], sums[HALF + i + 2], sums[HALF + i + 3]);
  meet_in_cluster();
  u32 theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address_of(sent)), "r"(part ^ 1));
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float other[4];
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(other[0]), "=f"(other[1]), "=f"(other[2]), "=f"(other[3])
                 : "r"(theirs + i / 4 * MULTIPLIERS * 16) : "memory");
#pragma unroll
    for (int n = 0; n < 4; ++n) sums[i + n] = __fadd_rn(part ? sums[HALF + i + n] : sums[i + n], other[n]);
  }
}

extern "C" __global__ void __maxnreg__(REGISTERS) linear(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const u32* bias, u32* out,
    const i64* squares, const u32* residual, const u32* norm, u32* scaled, u64* next_squares, i64* stale_squares,
    const Sizes sizes) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 places_begin = address_of(memory), barriers = places_begin + STAGES * PLACE_BYTES;
  const Ring ring{places_begin, barriers, barriers + 8 * STAGES, 0, 0};
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), group = warp / 4;  // the compiler takes it as uniform
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int place = 0; place < STAGES; ++place) {
      new_barrier(ring.ready + 8 * place, 1);
      new_barrier(ring.empty + 8 * place, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Tiles of rows that share weights come one after the other. The last columns begin so early that they are whole;
  // those before own_col are another tile's, too.
  const int part = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT;
  const int heights = (sizes.rows + GROUPS * HEIGHT - 1) / (GROUPS * HEIGHT);
  const int tile_row = tile % heights * GROUPS * HEIGHT, own_col = tile / heights * OUT_COLS;
  const int tile_col = min(own_col, sizes.outputs - OUT_COLS);
  const int steps = sizes.inputs / SPLIT / DEPTH;

  if (group == GROUPS) {
    if (elected()) copy_part(weights, inputs, ring, tile_row, sizes.rows, tile_col, part * steps * DEPTH, steps);
    __syncwarp();
    if (SPLIT == 2) meet_in_cluster(), meet_in_cluster();
    return;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // A group's last rows begin so early that they are whole; those before `own` are another group's, too.
  const int own = tile_row + group * HEIGHT, row = min(own, sizes.rows - HEIGHT) + warp % 4 * 16 + lane / 4;
  const int col = tile_col + lane % 4 * 2 + part * (COLS / 2);
  const i64 places[2] = {(static_cast<i64>(row) * sizes.outputs + col) / 2,  // each of two outputs
                         (static_cast<i64>(row + 8) * sizes.outputs + col) / 2};
  float factors[2] = {1.0f, 1.0f};
  u32 before[2][ADD ? OCTETS : 1];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!ADD && squares) factors[h] = row_factor(squares + 2 * (row + 8 * h), sizes);
#pragma unroll
    for (int j = 0; j < OCTETS && ADD; ++j) before[h][j] = residual[places[h] + 4 * j];
  }
  float sums[SUMS];
  multiply(sums, ring, steps, group, lane);
  if (SPLIT == 2) exchange(sums, memory, part);

  i64 coarse[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < OCTETS; j += GATE ? 2 : 1) {
    const int offset = GATE ? 4 * j : 8 * j;  // outputs
    const float2 added = bias ? unpacked(bias[(col + offset) / 2]) : float2{0.0f, 0.0f};
    const float2 up_added = GATE && bias ? unpacked(bias[(sizes.outputs + col + offset) / 2]) : float2{0.0f, 0.0f};
    const float2 weight = ADD ? unpacked(norm[(col + offset) / 2]) : float2{0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 4 * j + 2 * h;
      float first = scaled_sum(sums[i], factors[h], squares && !ADD, added.x, bias);
      float second = scaled_sum(sums[i + 1], factors[h], squares && !ADD, added.y, bias);
      if (GATE) {
        first = gated(first, scaled_sum(sums[i + 4], factors[h], squares, up_added.x, bias));
        second = gated(second, scaled_sum(sums[i + 5], factors[h], squares, up_added.y, bias));
      }
      if (ADD) {
        const float2 stream = unpacked(before[h][j]);
        first = __fadd_rn(first, stream.x), second = __fadd_rn(second, stream.y);
      }
      const u32 result = rounded(first, second);
      out[places[h] + offset / 2] = result;
      if (ADD) {
        const float2 value = unpacked(result);
        before[h][j] = result;
        scaled[places[h] + 4 * j] = rounded(weighted(value.x, weight.x), weighted(value.y, weight.y));
        if (col + offset >= own_col)
          coarse[h] += counted(value.x, MAX_SQUARE, SQUARE_UNIT) + counted(value.y, MAX_SQUARE, SQUARE_UNIT);
      }
    }
  }
  if (ADD) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 sum = over_quad(coarse[h]);
      const bool is_small = sum < static_cast<i64>(sizes.outputs) * SMALL_UNITS;
      u64* const sums_of_row = next_squares + 2 * (row + 8 * h);
      const bool counts = lane % 4 == 0 && row + 8 * h >= own;
      if (__any_sync(0xFFFFFFFF, is_small)) {  // seldom
        i64 fine = 0;
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
          const float2 value = unpacked(before[h][j]);
          if (col + 8 * j >= own_col)
            fine += counted(value.x, BELOW_ONE, FINE_UNIT) + counted(value.y, BELOW_ONE, FINE_UNIT);
        }
        fine = over_quad(fine);
        if (counts && is_small) atomicAdd(sums_of_row + 1, static_cast<u64>(fine));
      }
      if (counts) atomicAdd(sums_of_row, static_cast<u64>(sum));
      if (counts && own_col == 0 && part == 0)
        stale_squares[2 * (row + 8 * h)] = stale_squares[2 * (row + 8 * h) + 1] = 0;
    }
  }
  if (SPLIT == 2) meet_in_cluster();  // until then the other program may read this one's memory
}
