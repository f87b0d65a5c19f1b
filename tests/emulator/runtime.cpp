// Runs a grid on one CPU thread. Every GPU thread is a fiber; fibers switch only at simdgroup operations and barriers.
#include "interface.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

using namespace emulator;

namespace {

constexpr int most_threads = 1024;
constexpr unsigned long most_threadgroup_memory = 32768;
constexpr unsigned long page = 16384;  // a multiple of the machine's
enum Order { forward, reverse, shuffled };

}  // namespace

extern "C" {

// Memory that the kernel may touch: `bytes` at `data`, inside a mapping whose other pages are out of bounds.
struct Region {
  const char* name;
  char *begin, *end, *data;
  unsigned long bytes;
};

struct Launch {
  void (*body)(void**);
  void** buffers;
  unsigned grid[3], threadgroup[3];
  int order;
  unsigned seed;
  int poison;      // fills threadgroup memory
  int against_end; // whether threadgroup arrays end, or begin, at an unmapped page
  char* stacks;    // one for each of 1024 threads; the lowest page of each is unmapped
  unsigned long stack_bytes;
  const Region* regions;
  int region_count;
  char* message;
  unsigned long message_bytes;
};
}

namespace {

struct ThreadgroupArray {
  const char* name;
  unsigned line;
  Region region;
  unsigned long threadgroup;  // the last one that used it
};

Runtime runtime;
Launch launch;
Lane lanes[most_threads];
int lane_count;
void* scheduler_stack_pointer;
bool failed;
std::mt19937 numbers;
std::vector<ThreadgroupArray> arrays;
unsigned long threadgroup_number, threadgroup_memory;
sigjmp_buf escape;

// ---- fibers

extern "C" void switch_stack(void** save, void* to) __asm__("emulator_switch_stack");

#if defined(__x86_64__)
__asm__(R"(
.text
.p2align 4
emulator_switch_stack:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

void* new_stack(char* top, void (*entry)()) {
  void** at = (void**)top;
  *--at = nullptr;  // the stack is 8 bytes off a multiple of 16 when a function begins
  *--at = (void*)entry;
  for (int i = 0; i < 6; i++) *--at = nullptr;
  return at;
}
#elif defined(__aarch64__)
__asm__(R"(
.text
.p2align 4
emulator_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");

void* new_stack(char* top, void (*entry)()) {
  void** at = (void**)(top - 160);
  memset(at, 0, 160);
  at[11] = (void*)entry;
  return at;
}
#else
#error "the emulator switches fibers on x86-64 and arm64 only"
#endif

void wait(State state, Site site) {
  Lane* lane = runtime.lane;
  lane->state = state;
  lane->site = site;
  switch_stack(&lane->stack_pointer, scheduler_stack_pointer);
}

void fiber() {
  launch.body(launch.buffers);
  for (;;) wait(State::done, {});
}

__attribute__((format(printf, 1, 2))) void report(const char* format, ...) {
  if (failed) return;
  failed = true;
  va_list values;
  va_start(values, format);
  vsnprintf(launch.message, launch.message_bytes, format, values);
  va_end(values);
}

#define POSITION(triple) triple.x, triple.y, triple.z

[[noreturn]] void fail(const char* what, Site site) {
  const Thread& thread = runtime.lane->thread;
  report("%s at %s:%u: %s, thread (%u, %u, %u) of threadgroup (%u, %u, %u)", site.operation, site.file, site.line, what,
         POSITION(thread.thread_position_in_threadgroup), POSITION(thread.threadgroup_position_in_grid));
  for (;;) wait(State::done, {});  // the scheduler sees the failure and resumes nobody
}

// ---- threadgroup memory

void* threadgroup_array(const char* name, unsigned long bytes, unsigned line) {
  auto found = std::find_if(arrays.begin(), arrays.end(),
                            [&](const ThreadgroupArray& a) { return a.name == name && a.line == line; });
  if (found == arrays.end()) {
    unsigned long inside = (bytes + page - 1) / page * page;
    char* begin = (char*)mmap(nullptr, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
    mprotect(begin + page, inside, PROT_READ | PROT_WRITE);
    char* data = begin + page + (launch.against_end ? inside - (bytes + 15) / 16 * 16 : 0);
    arrays.push_back({name, line, {name, begin, begin + inside + 2 * page, data, bytes}, 0});
    found = arrays.end() - 1;
  }
  if (found->threadgroup != threadgroup_number) {
    found->threadgroup = threadgroup_number;
    memset(found->region.data, launch.poison, bytes);
    threadgroup_memory += bytes;
    if (threadgroup_memory > most_threadgroup_memory) {
      report("%lu bytes of threadgroup memory, Metal has %lu", threadgroup_memory, most_threadgroup_memory);
      for (;;) wait(State::done, {});
    }
  }
  return found->region.data;
}

void free_arrays() {
  for (auto& array : arrays) munmap(array.region.begin, array.region.end - array.region.begin);
  arrays.clear();
}

// ---- scheduler

void arrange(unsigned* items, unsigned count) {
  std::iota(items, items + count, 0u);
  if (launch.order == reverse) std::reverse(items, items + count);
  if (launch.order == shuffled) std::shuffle(items, items + count, numbers);
}

bool same(const Site& a, const Site& b) {
  return a.operation == b.operation && a.file == b.file && a.line == b.line && a.column == b.column;
}

const char* describe(const Lane& lane, char (&text)[200]) {
  if (lane.state == State::done)
    snprintf(text, sizeof text, "thread %u has returned", lane.thread.thread_index_in_threadgroup);
  else
    snprintf(text, sizeof text, "thread %u waits at %s, %s:%u", lane.thread.thread_index_in_threadgroup,
             lane.site.operation, lane.site.file, lane.site.line);
  return text;
}

// Reports that two threads do not wait at the same place.
void report_divergence(const char* what, const Lane& a, const Lane& b) {
  char first[200], second[200];
  report("divergent %s: %s, %s, threadgroup (%u, %u, %u)", what, describe(a, first), describe(b, second),
         POSITION(a.thread.threadgroup_position_in_grid));
}

// Runs the lanes of a simdgroup until each is done or at a threadgroup barrier.
void run_simdgroup(Lane* first, unsigned count) {
  unsigned order[lanes_per_simdgroup];
  arrange(order, count);
  for (;;) {
    for (unsigned i = 0; i < count; i++) {
      runtime.lane = first + order[i];
      if (runtime.lane->state == State::ready) switch_stack(&scheduler_stack_pointer, runtime.lane->stack_pointer);
      if (failed) return;
    }
    Lane* at = std::find_if(first, first + count,
                            [](const Lane& lane) { return lane.state == State::at_simdgroup_operation; });
    if (at == first + count) return;
    if (count < lanes_per_simdgroup)
      return report("%s at %s:%u: a simdgroup of %u threads; simdgroup operations need all 32 (on NVIDIA GPUs)",
                    at->site.operation, at->site.file, at->site.line, count);
    for (unsigned i = 0; i < count; i++)
      if (first[i].state != State::at_simdgroup_operation || !same(first[i].site, at->site))
        return report_divergence("simdgroup operation", *at, first[i]);
    for (unsigned i = 0; i < count; i++) first[i].state = State::ready;
  }
}

void run_threadgroup() {
  unsigned simdgroups = (lane_count + lanes_per_simdgroup - 1) / lanes_per_simdgroup;
  unsigned order[most_threads / lanes_per_simdgroup];
  threadgroup_number++;
  threadgroup_memory = 0;
  for (;;) {
    arrange(order, simdgroups);
    for (unsigned i = 0; i < simdgroups; i++) {
      int begin = order[i] * lanes_per_simdgroup;
      run_simdgroup(lanes + begin, std::min(lanes_per_simdgroup, lane_count - begin));
      if (failed) return;
    }
    Lane* at = std::find_if(lanes, lanes + lane_count, [](const Lane& lane) { return lane.state != State::done; });
    if (at == lanes + lane_count) return;
    for (int i = 0; i < lane_count; i++)
      if (lanes[i].state == State::done || !same(lanes[i].site, at->site))
        return report_divergence("threadgroup_barrier", *at, lanes[i]);
    for (int i = 0; i < lane_count; i++) lanes[i].state = State::ready;
  }
}

// Places threadgroup `number` of the grid; threadgroups at the grid's edge may be smaller.
void place_threadgroup(unsigned number, const unsigned (&groups)[3]) {
  unsigned at[3] = {number % groups[0], number / groups[0] % groups[1], number / groups[0] / groups[1]};
  unsigned size[3];
  for (int i = 0; i < 3; i++)
    size[i] = std::min(launch.threadgroup[i], launch.grid[i] - at[i] * launch.threadgroup[i]);
  lane_count = size[0] * size[1] * size[2];
  for (unsigned i = 0; i < (unsigned)lane_count; i++) {
    unsigned x = i % size[0], y = i / size[0] % size[1], z = i / size[0] / size[1];
    Thread& thread = lanes[i].thread;
    thread.thread_position_in_threadgroup = {x, y, z};
    thread.thread_position_in_grid = {at[0] * launch.threadgroup[0] + x, at[1] * launch.threadgroup[1] + y,
                                      at[2] * launch.threadgroup[2] + z};
    thread.threadgroup_position_in_grid = {at[0], at[1], at[2]};
    thread.threads_per_threadgroup = {size[0], size[1], size[2]};
    thread.threadgroups_per_grid = {groups[0], groups[1], groups[2]};
    thread.threads_per_grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    thread.thread_index_in_threadgroup = i;
    thread.thread_index_in_simdgroup = i % lanes_per_simdgroup;
    thread.simdgroup_index_in_threadgroup = i / lanes_per_simdgroup;
    thread.simdgroups_per_threadgroup = (lane_count + lanes_per_simdgroup - 1) / lanes_per_simdgroup;
    lanes[i].state = State::ready;
    lanes[i].turn = 0;
    // Tops of stacks at different places of a page do not push each other out of the cache.
    char* top = launch.stacks + (i + 1) * launch.stack_bytes - i % 32 * 320;
    lanes[i].stack_pointer = new_stack(top, fiber);
  }
}

void run_grid() {
  unsigned groups[3];
  for (int i = 0; i < 3; i++) groups[i] = (launch.grid[i] + launch.threadgroup[i] - 1) / launch.threadgroup[i];
  std::vector<unsigned> order(groups[0] * groups[1] * groups[2]);
  arrange(order.data(), order.size());
  for (unsigned number : order) {
    place_threadgroup(number, groups);
    run_threadgroup();
    if (failed) return;
  }
}

// ---- faults

bool report_region(const Region& region, const char* address) {
  if (address < region.begin || address >= region.end) return false;
  const Thread& thread = runtime.lane->thread;
  long offset = address - region.data;
  bool inside = offset >= 0 && offset < (long)region.bytes;
  report("%s '%s': byte offset %ld of %lu, thread (%u, %u, %u) of threadgroup (%u, %u, %u)",
         inside ? "write to input" : "out-of-bounds access to", region.name, offset, region.bytes,
         POSITION(thread.thread_position_in_threadgroup), POSITION(thread.threadgroup_position_in_grid));
  return true;
}

void on_fault(int, siginfo_t* info, void*) {
  const char* address = (const char*)info->si_addr;
  bool named = false;
  for (int i = 0; i < launch.region_count && !named; i++) named = report_region(launch.regions[i], address);
  for (auto& array : arrays) named = named || report_region(array.region, address);
  if (!named) {
    bool stack = address >= launch.stacks && address < launch.stacks + most_threads * launch.stack_bytes;
    const Thread& thread = runtime.lane->thread;
    report("%s (address %p), thread (%u, %u, %u) of threadgroup (%u, %u, %u)",
           stack ? "a thread's local variables take too much memory" : "access to memory that is in no buffer", address,
           POSITION(thread.thread_position_in_threadgroup), POSITION(thread.threadgroup_position_in_grid));
  }
  siglongjmp(escape, 1);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Runtime* emulator_interface() {
  runtime.wait = wait;
  runtime.fail = fail;
  runtime.threadgroup_array = threadgroup_array;
  return &runtime;
}

// Returns 0, or 1 with the reason in the launch's message.
extern "C" __attribute__((visibility("default"))) int emulator_run(const Launch* wanted) {
  launch = *wanted;
  failed = false;
  numbers.seed(launch.seed);
  static char signal_stack[65536];
  stack_t stack{}, old_stack;
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action{}, old_segv, old_bus;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  if (sigsetjmp(escape, 1) == 0) run_grid();
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  free_arrays();
  return failed;
}
