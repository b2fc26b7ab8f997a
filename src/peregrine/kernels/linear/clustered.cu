// Linears of up to 64 rows whose inputs are in parts, for Hopper: the arithmetic of `hopper.py`, bit for bit. There the
// programs that share a tile meet in global memory, and the last one finishes it; here they are a cluster, add up each
// other's sums from shared memory, and finish some rows each.
//
// A tile is COLS rows of the weight by all rows of the inputs, WIDTH or fewer. The SPLIT programs of a cluster have a
// part of its inputs each. One warp of a program copies steps of DEPTH inputs by TMA into a ring of STAGES places:
// first weights, while the previous kernel may still be running. Four others multiply them and finish.
//
// Set when it is compiled (`linear_source`): WIDTH, STAGES, SPLIT, ADD (to the residual stream), the units of
// squares, the function `product`, and what the headers need.

constexpr int COLS = 64, DEPTH = 128, HALF = DEPTH / 2, MULTIPLIERS = 128, SUMS = WIDTH / 2;
constexpr u32 HALF_WEIGHTS = COLS * HALF * 2, HALF_ROWS = WIDTH * HALF * 2;
constexpr u32 PLACE_BYTES = 2 * (HALF_WEIGHTS + HALF_ROWS);
constexpr int PITCH = COLS + 4;  // numbers from one row's sums to the next, so that a warp's stores hit all banks
constexpr int AT_ONCE = MULTIPLIERS / (COLS / 4);  // rows that are finished at a time: a thread has four outputs
constexpr int TURNS = (WIDTH + AT_ONCE * SPLIT - 1) / (AT_ONCE * SPLIT);

__device__ __forceinline__ u32 weights_at(const Ring& ring, int half) {
  return ring.memory(PLACE_BYTES) + half * HALF_WEIGHTS;
}

__device__ __forceinline__ u32 rows_at(const Ring& ring, int half) {
  return weights_at(ring, 2) + half * HALF_ROWS;
}

// The copying warp: all steps of a program.
__device__ __forceinline__ void copy_part(
    const TensorMap& weights, const TensorMap& inputs, Ring ring, int rows, int col, int depth, int steps) {
  const auto request_weights = [&](int step) {
    expect(ring.ready + 8 * ring.place, 2 * HALF_WEIGHTS + rows * DEPTH * 2);
    for (int half = 0; half < 2; ++half)
      copy_rows(weights_at(ring, half), &weights, depth + step * DEPTH + half * HALF, col, ring.ready + 8 * ring.place);
  };
  const auto request_rows = [&](int step) {
    for (int half = 0; half < 2; ++half)
      copy_rows(rows_at(ring, half), &inputs, depth + step * DEPTH + half * HALF, 0, ring.ready + 8 * ring.place);
  };
  copy_steps(ring, steps, request_weights, request_rows);
}

// This program's part of the tile's sums: a thread has two of its columns, and in every eight rows two.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], Ring ring, int steps, int lane) {
  multiply_steps(sums, ring, steps, lane, [&] {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u64 left = matrix_at(weights_at(ring, half)), right = matrix_at(rows_at(ring, half));
#pragma unroll
      for (int k = 0; k < HALF / 16; ++k) product(sums, left + 2 * k, right + 2 * k);
    }
  });
}

// Four outputs of a row, added up over the programs of the cluster, in order.
__device__ __forceinline__ float4 cluster_sum(u32 place) {
  float4 parts[SPLIT];
#pragma unroll
  for (int p = 0; p < SPLIT; ++p) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(p));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(parts[p].x), "=f"(parts[p].y), "=f"(parts[p].z), "=f"(parts[p].w) : "r"(there) : "memory");
  }
#pragma unroll
  for (int p = 1; p < SPLIT; ++p) {
    parts[0].x = __fadd_rn(parts[0].x, parts[p].x), parts[0].y = __fadd_rn(parts[0].y, parts[p].y);
    parts[0].z = __fadd_rn(parts[0].z, parts[p].z), parts[0].w = __fadd_rn(parts[0].w, parts[p].w);
  }
  return parts[0];
}

// Over the sixteen lanes that have a row's columns.
__device__ __forceinline__ i64 over_row(i64 sum) {
#pragma unroll
  for (int lane = 8; lane; lane /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, lane);
  return sum;
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32) linear(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const uint2* bias, uint2* out,
    const i64* squares, const uint2* residual, const uint2* norm, uint2* scaled, u64* next_squares, i64* stale_squares,
    const Sizes sizes) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 places_begin = address_of(memory), barriers = places_begin + STAGES * PLACE_BYTES;
  const Ring ring{places_begin, barriers, barriers + 8 * STAGES, 0, 0};
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform, for the compiler
  if (threadIdx.x == 0) {
    for (int place = 0; place < STAGES; ++place) {
      new_barrier(ring.ready + 8 * place, 1);
      new_barrier(ring.empty + 8 * place, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int part = blockIdx.x % SPLIT, tile_col = blockIdx.x / SPLIT * COLS, steps = sizes.inputs / SPLIT / DEPTH;
  if (warp == 4) {
    if (elected()) copy_part(weights, inputs, ring, sizes.rows, tile_col, part * steps * DEPTH, steps);
    __syncwarp();
    meet_in_cluster();
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
  const int col = tile_col + threadIdx.x % 16 * 4, first_row = part + threadIdx.x / 16 * SPLIT;
  const bool inside = col < sizes.outputs;
  const uint2 nothing{0, 0};
  const uint2 added = bias && inside ? bias[col / 4] : nothing, weight = ADD && inside ? norm[col / 4] : nothing;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  uint2 before[ADD ? TURNS : 1];
  float factors[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int row = first_row + turn * AT_ONCE * SPLIT;
    const bool live = row < sizes.rows && inside;
    if (ADD) before[turn] = live ? residual[(static_cast<i64>(row) * sizes.outputs + col) / 4] : nothing;
    factors[turn] = !ADD && squares && live ? row_factor(squares + 2 * row, sizes) : 1.0f;
  }
  float sums[SUMS];
  multiply(sums, ring, steps, lane);
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");  // the ring is not read any more
  float* const own = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
    own[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + warp * 16 + lane / 4 + i / 2 % 2 * 8] = sums[i];
  meet_in_cluster();
  float4 totals[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    totals[turn] = cluster_sum(
        places_begin + (min(first_row + turn * AT_ONCE * SPLIT, WIDTH - 1) * PITCH + threadIdx.x % 16 * 4) * 4);
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // other programs' memory is not read any more

#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int row = first_row + turn * AT_ONCE * SPLIT;
    const bool live = row < sizes.rows && inside;
    if (part + turn * AT_ONCE * SPLIT >= sizes.rows) break;  // for all threads
    const float4 sum = totals[turn];
    const float2 low = unpacked(added.x), high = unpacked(added.y);
    const bool scales = squares && !ADD;
    float first = scaled_sum(sum.x, factors[turn], scales, low.x, bias);
    float second = scaled_sum(sum.y, factors[turn], scales, low.y, bias);
    float third = scaled_sum(sum.z, factors[turn], scales, high.x, bias);
    float fourth = scaled_sum(sum.w, factors[turn], scales, high.y, bias);
    const i64 place = (static_cast<i64>(row) * sizes.outputs + col) / 4;
    if (ADD) {
      const float2 one = unpacked(before[turn].x), two = unpacked(before[turn].y);
      first = __fadd_rn(first, one.x), second = __fadd_rn(second, one.y);
      third = __fadd_rn(third, two.x), fourth = __fadd_rn(fourth, two.y);
    }
    const uint2 result{rounded(first, second), rounded(third, fourth)};
    if (live) out[place] = result;
    if (ADD) {
      const float2 values[2] = {unpacked(result.x), unpacked(result.y)};
      const float2 norms[2] = {unpacked(weight.x), unpacked(weight.y)};
      if (live)
        scaled[place] = uint2{rounded(weighted(values[0].x, norms[0].x), weighted(values[0].y, norms[0].y)),
                              rounded(weighted(values[1].x, norms[1].x), weighted(values[1].y, norms[1].y))};
      i64 coarse = 0, fine = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        coarse += counted(values[i].x, MAX_SQUARE, SQUARE_UNIT) + counted(values[i].y, MAX_SQUARE, SQUARE_UNIT);
        fine += counted(values[i].x, BELOW_ONE, FINE_UNIT) + counted(values[i].y, BELOW_ONE, FINE_UNIT);
      }
      coarse = over_row(live ? coarse : 0);
      const bool is_small = coarse < static_cast<i64>(sizes.outputs) * SMALL_UNITS, counts = live && lane % 16 == 0;
      if (__any_sync(0xFFFFFFFF, is_small && live)) {  // seldom
        fine = over_row(live ? fine : 0);
        if (counts && is_small) atomicAdd(next_squares + 2 * row + 1, static_cast<u64>(fine));
      }
      if (counts) atomicAdd(next_squares + 2 * row, static_cast<u64>(coarse));
      if (counts && tile_col == 0) stale_squares[2 * row] = stale_squares[2 * row + 1] = 0;
    }
  }
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // until then they may read this one's
}
