// Which pages are resident, and who has to go: the rule of the Rust `HeadTable`, decision for decision.
//
// A page that needs a way takes the free way with the lowest index; if none is free, that of the page with the smallest
// (stamp, logical page) among those that may go. Both are the smallest of one kind of key: a free way is (0, way), an occupied one
// (stamp, page), and steps are numbered from 1.
//
// One block per head in every kernel; blocks are 1 to 8 warps. Bytes moved: per demanded page 4 of the demand, 4 of the page table
// and 8 of the stamp; per way 12, and only in steps that miss. That is the least for tables that are searched rather than kept in
// order; a step without misses does not look at the ways at all.
#include "page.cuh"

// The launch bounds ask for one block per multiprocessor at least: without that the compiler makes room for eight, and spills.
constexpr u32 MAX_THREADS = 256;

// Pages have 20 bits (8 million tokens of 8-token pages), steps 44.
constexpr u32 PAGE_BITS = 20;
constexpr u64 NO_KEY = ~0ull;
__device__ __forceinline__ u64 key_of(u64 stamp, u32 page) { return stamp << PAGE_BITS | page; }
__device__ __forceinline__ bool is_free_way(u64 key) { return key >> PAGE_BITS == 0; }
__device__ __forceinline__ u32 low_bits(u64 key) { return u32(key) & ((1u << PAGE_BITS) - 1); }

struct Pins {
  u32 sinks;
  u32 recent;
};

// What a lane's demand came to. `evictions` counts those of the step's opens as well.
struct Tally {
  u32 hits;
  u32 compulsory;
  u32 capacity;
  u32 overflow;
  u32 evictions;
};

__device__ __forceinline__ bool is_resident(u32 page_entry) { return (page_entry & NO_WAY) != NO_WAY; }

// The first decode step after a prefill: prompt pages that are not resident now are cold. All threads.
__device__ void settle_prompt(const Lane& lane) {
  const u32 from = lane.state->prompt_from, pages = lane.state->pages;
  if (!lane.entry.decode || from == 0) return;
  for (u32 page = from - 1 + threadIdx.x; page < pages; page += blockDim.x) {
    if (!is_resident(lane.way_of_page[page])) lane.way_of_page[page] |= COLD;
  }
  __syncthreads();
  if (threadIdx.x == 0) lane.state->prompt_from = 0;
  __syncthreads();
}

// Takes the way that a key stands for away from its page, if it has one.
__device__ __forceinline__ u32 vacate(const Lane& lane, u64 key) {
  if (is_free_way(key)) return low_bits(key);
  u32* entry = &lane.way_of_page[low_bits(key)];
  const u32 way = *entry & NO_WAY;
  *entry |= NO_WAY;  // cold or not, it stays
  return way;
}

// Opens the pages that the step's new tokens begin, one after the other, so that a long chunk can push out its own first pages.
//
// The page that was open when the step began keeps its way, for undoing the step; so do pages that are pinned while the new one is
// the last. Shared memory: 8 bytes per warp.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
wakekv_open(Tables tables, Shape shape, const Entry* entries, const u64* step_number, Pins pins, Tally* tallies, Fault* fault) {
  SHARED_MEMORY(shared);
  u64* scratch = reinterpret_cast<u64*>(shared);
  const Lane lane = lane_of(tables, shape, entries, blockIdx.y, blockIdx.x);
  const u64 step = *step_number;
  const u32 before = lane.state->pages, ways = lane.state->ways;
  const u32 after = pages_of(shape, lane.entry.start + lane.entry.tokens);
  const u32 keep = lane.entry.start % shape.page_tokens ? before - 1 : NONE;
  u32 evictions = 0;

  if (before < after) settle_prompt(lane);
  for (u32 page = before; page < after; page++) {
    u64 best = NO_KEY;
    for (u32 way = threadIdx.x; way < ways; way += blockDim.x) {
      const u32 old = lane.page_of_way[way];
      const bool pinned = old < pins.sinks || u64(old) + pins.recent >= page || old == keep;
      const u64 key = old == NONE ? key_of(0, way) : pinned ? NO_KEY : key_of(lane.stamp_of_way[way], old);
      best = key < best ? key : best;
    }
    best = block_min(best, scratch);
    if (best == NO_KEY) {
      if (threadIdx.x == 0) raise_fault(fault, FAULT_NO_WAY, lane.entry.sequence, lane.head, page);
      break;
    }
    evictions += !is_free_way(best);
    if (threadIdx.x == 0) {
      const u32 way = vacate(lane, best);
      lane.page_of_way[way] = page;
      lane.stamp_of_way[way] = step;
      lane.way_of_page[page] = way;
      Head* state = lane.state;
      if (!lane.entry.decode && state->prompt_from == 0) state->prompt_from = page + 1;
      if (state->opened_step != step) {
        state->opened_step = step;
        state->opened_from = page;
      }
      state->pages = page + 1;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    tallies[lane.index] = {0, 0, 0, 0, evictions};
    if (lane.entry.reselect) lane.state->selection_due = 1;
  }
}
EXPORT_KERNEL(wakekv_open)

// Sorts `count` keys, a power of two, ascending. All threads.
__device__ void sort(u64* keys, u32 count) {
  for (u32 run = 2; run <= count; run *= 2) {
    for (u32 distance = run / 2; distance > 0; distance /= 2) {
      for (u32 low = threadIdx.x; low < count; low += blockDim.x) {
        const u32 high = low ^ distance;
        if (high <= low) continue;
        const u64 a = keys[low], b = keys[high];
        if ((a > b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
      __syncthreads();
    }
  }
}

// Writes the keys of all ways that may take a page, sorted, and returns how many there are. What this step uses carries its stamp
// already and stays. `counter` is 0 before, and the result after.
__device__ u32 collect_keys(const Lane& lane, u64 step, u64* keys, u32* counter) {
  const u32 ways = lane.state->ways;
  for (u32 way = threadIdx.x; way < ways; way += blockDim.x) {
    const u32 page = lane.page_of_way[way];
    const u64 stamp = lane.stamp_of_way[way];
    if (page != NONE && stamp == step) continue;
    keys[atomicAdd(counter, 1)] = page == NONE ? key_of(0, way) : key_of(stamp, page);
  }
  __syncthreads();
  const u32 count = *counter;
  u32 padded = 1;
  while (padded < count) padded *= 2;
  for (u32 i = count + threadIdx.x; i < padded; i += blockDim.x) keys[i] = NO_KEY;
  __syncthreads();
  sort(keys, padded);
  return count;
}

// Finds each demanded page, gives ways to the missing ones, and lists what has to be fetched.
//
// Misses are served in ascending order of page. Those that find no way are streamed: `staging.ring` of them per wave, so that the
// same staging slots serve all waves. The demand is ascending and holds every pinned page and every page that the step opened.
//
// Shared memory, in this order: keys [ways rounded up to a power of two] u64, scratch [8] u32, counters [4] u32, bases [waves] u32.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
wakekv_demand(Tables tables, Shape shape, const Entry* entries, const u64* step_number, Demand demand, CopyList fetches,
              Staging staging, u32 waves, Tally* tallies, Fault* fault) {
  SHARED_MEMORY(shared);
  const Lane lane = lane_of(tables, shape, entries, blockIdx.y, blockIdx.x);
  const u32 ways = lane.state->ways, head_pages = lane.state->pages;
  u32 padded = 1;
  while (padded < ways) padded *= 2;
  u64* keys = reinterpret_cast<u64*>(shared);
  u32* scratch = reinterpret_cast<u32*>(keys + padded);
  u32* counters = scratch + MAX_THREADS / 32;
  enum { HITS, ELIGIBLE, COMPULSORY, EVICTIONS, COUNTERS };
  u32* bases = counters + COUNTERS;
  const u64 step = *step_number;
  const bool decode = lane.entry.decode;
  const u32 count = demand.counts[lane.index];
  const u64 first = u64(lane.index) * demand.room;
  const u32* pages = demand.pages + first;
  Place* places = demand.places + first;

  // A demand of the engine's own has not been looked at by anyone yet.
  bool bad = false;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    bad |= pages[i] >= head_pages || (i > 0 && pages[i - 1] >= pages[i]);
  }
  if (threadIdx.x < COUNTERS) counters[threadIdx.x] = 0;
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0) {
      raise_fault(fault, FAULT_BAD_DEMAND, lane.entry.sequence, lane.head, NONE);
      demand.counts[lane.index] = 0;
    }
    return;
  }
  settle_prompt(lane);

  // Hits.
  u32 my_hits = 0;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    const u32 entry = lane.way_of_page[pages[i]];
    if (!is_resident(entry)) continue;
    const u32 way = entry & NO_WAY;
    lane.stamp_of_way[way] = step;
    if (decode) lane.way_of_page[pages[i]] = way;
    places[i] = {lane.slot_of_way[way], 0};
    my_hits++;
  }
  if (my_hits) atomicAdd(&counters[HITS], my_hits);
  __syncthreads();
  const u32 hits = counters[HITS], misses = count - hits;
  if (threadIdx.x == 0) tallies[lane.index].hits = hits;
  if (misses == 0) return;

  // Ways for the misses, and room in the lists of copies.
  const u32 eligible = collect_keys(lane, step, keys, &counters[ELIGIBLE]);
  const u32 admitted = misses < eligible ? misses : eligible, overflow = misses - admitted;
  const u32 last_wave = overflow == 0 ? 1 : 1 + (overflow + staging.ring - 1) / staging.ring;
  if (last_wave >= waves) {
    if (threadIdx.x == 0) {
      raise_fault(fault, FAULT_TOO_MANY, lane.entry.sequence, lane.head, NONE);
      demand.counts[lane.index] = 0;
    }
    return;
  }
  for (u32 wave = 1 + threadIdx.x; wave <= last_wave; wave += blockDim.x) {
    const u32 left = wave == 1 ? admitted : overflow - (wave - 2) * staging.ring;
    const u32 mine = wave == 1 || left < staging.ring ? left : staging.ring;
    bases[wave] = atomicAdd(&fetches.counts[wave], mine);
  }
  __syncthreads();

  // Misses, in ascending order.
  u32 served = 0, my_compulsory = 0, my_evictions = 0;
  for (u32 from = 0; from < count; from += blockDim.x) {
    const u32 i = from + threadIdx.x;
    const u32 page = i < count ? pages[i] : NONE;
    // A page that got its way in an earlier turn is behind us; hits were marked above.
    const u32 entry = i < count ? lane.way_of_page[page] : 0;
    const bool miss = i < count && !is_resident(entry);
    u32 total;
    const u32 rank = served + block_rank(miss, scratch, &total);
    served += total;
    if (!miss) continue;
    const bool cold = decode && (entry & COLD);
    my_compulsory += cold;
    Place place;
    u32 nth;  // within the wave's copies of this lane
    if (rank < admitted) {
      const u64 key = keys[rank];
      const u32 way = vacate(lane, key);
      my_evictions += !is_free_way(key);
      lane.page_of_way[way] = page;
      lane.stamp_of_way[way] = step;
      lane.way_of_page[page] = way | (cold ? 0 : entry & COLD);
      place = {lane.slot_of_way[way], 1};
      nth = rank;
    } else {
      if (cold) lane.way_of_page[page] = entry & ~COLD;
      nth = (rank - admitted) % staging.ring;
      place = {staging.first + lane.index * staging.ring + nth, 2 + (rank - admitted) / staging.ring};
    }
    const u32 host = lane.groups[page] * shape.heads + lane.head;
    fetches.copies[first_of_wave(fetches, place.wave) + bases[place.wave] + nth] = {host, place.slot, u32(first + i)};
    places[i] = {place.slot, place.wave | PENDING};
  }
  if (my_compulsory) atomicAdd(&counters[COMPULSORY], my_compulsory);
  if (my_evictions) atomicAdd(&counters[EVICTIONS], my_evictions);
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 compulsory = counters[COMPULSORY];
    Tally* tally = &tallies[lane.index];
    tally->compulsory = compulsory;
    tally->capacity = misses - compulsory;
    tally->overflow = overflow;
    tally->evictions += counters[EVICTIONS];
  }
}
EXPORT_KERNEL(wakekv_demand)

// One way more for a head.
struct WayGrant {
  u64 way;   // element in the tables of ways
  u32 head;  // element in Tables::heads
  u32 slot;
  u32 ways;  // that the head has with this one
  u32 last;  // whether the list's next grant is another head's
};

// Gives ways to heads. One thread per grant; grants of one head are next to each other.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) wakekv_grant(Tables tables, const WayGrant* grants, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const WayGrant grant = grants[i];
  tables.slot_of_way[grant.way] = grant.slot;
  tables.page_of_way[grant.way] = NONE;
  tables.stamp_of_way[grant.way] = 0;
  if (grant.last) tables.heads[grant.head].ways = grant.ways;
}
EXPORT_KERNEL(wakekv_grant)

// Where the tables of a sequence move when it outgrows them: first elements and rooms, as in Sequence.
struct Move {
  u64 ways_from, ways_to;
  u64 pages_from, pages_to;
  u32 ways_room_from, ways_room_to;
  u32 pages_room_from, pages_room_to;
};

// Moves the tables of a sequence's heads to where there is more room. Both places lie in the same arrays and do not overlap. One block
// per head: grid (heads). No shared memory.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) wakekv_move(Tables tables, const Head* heads, Move move) {
  const Head head = heads[blockIdx.x];
  const u64 ways_from = move.ways_from + u64(blockIdx.x) * move.ways_room_from, ways_to = move.ways_to + u64(blockIdx.x) * move.ways_room_to;
  const u64 pages_from = move.pages_from + u64(blockIdx.x) * move.pages_room_from, pages_to = move.pages_to + u64(blockIdx.x) * move.pages_room_to;
  for (u32 i = threadIdx.x; i < head.ways; i += blockDim.x) {
    tables.slot_of_way[ways_to + i] = tables.slot_of_way[ways_from + i];
    tables.page_of_way[ways_to + i] = tables.page_of_way[ways_from + i];
    tables.stamp_of_way[ways_to + i] = tables.stamp_of_way[ways_from + i];
  }
  for (u32 i = threadIdx.x; i < head.pages; i += blockDim.x) tables.way_of_page[pages_to + i] = tables.way_of_page[pages_from + i];
#pragma unroll
  for (u32 list = 0; list < 2; list++) {
    const u32 count = list == head.list ? head.selected : head.kept;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) tables.selected[list][pages_to + i] = tables.selected[list][pages_from + i];
  }
}
EXPORT_KERNEL(wakekv_move)

// Undoes a step: the pages it opened are gone, its fetches count for nothing, what it chose is not to stay chosen, and of the ways only
// `ways[entry * heads + head]` are left. A sealed page that the step used may lose its way, for nobody can tell whether its bytes had arrived; it is reserved, so
// nothing is lost. One block per head of each entry, all layers: grid (heads, entries). No shared memory.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
wakekv_undo(Tables tables, Shape shape, const Entry* entries, const u64* step_number, const u32* ways) {
  Shape all_layers = shape;
  all_layers.first_head = 0;
  const Lane lane = lane_of(tables, all_layers, entries, blockIdx.y, blockIdx.x);
  const u64 step = *step_number;
  const u32 pages = pages_of(shape, lane.entry.start), sealed = lane.entry.start / shape.page_tokens;
  for (u32 way = threadIdx.x; way < lane.state->ways; way += blockDim.x) {
    const u32 page = lane.page_of_way[way];
    if (page == NONE) continue;
    const bool used = lane.stamp_of_way[way] == step && page < sealed;
    if (page < pages && !used) continue;
    lane.page_of_way[way] = NONE;
    lane.way_of_page[page] |= NO_WAY;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    lane.state->pages = pages;
    lane.state->ways = ways[u64(blockIdx.y) * shape.heads + lane.head];
    if (lane.state->prompt_from > pages) lane.state->prompt_from = 0;
    if (lane.state->selected_step == step) lane.state->selected_step = 0, lane.state->selection_due = 1;
  }
}
EXPORT_KERNEL(wakekv_undo)
