// What a compiled kernel and the runtime share.
#pragma once

namespace emulator {

constexpr int lanes_per_simdgroup = 32;
constexpr int largest_value = 32;  // bytes that a lane can hand to its simdgroup

// A place in the kernel's text, and what is called there.
struct Site {
  const char* operation;
  const char* file;
  unsigned line, column;
};

struct Triple {
  unsigned x, y, z;
};

// The thread attributes, under Metal's names.
struct Thread {
  Triple thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Triple threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup;
};

enum class State { ready, at_simdgroup_operation, at_threadgroup_barrier, done };

// One GPU thread, run as a fiber.
struct Lane {
  Thread thread;
  State state;
  Site site;           // where it waits
  void* stack_pointer;
  int turn;            // which of the two values is the current one
  alignas(16) unsigned char value[2][largest_value];
};

struct Runtime {
  Lane* lane;  // the one that runs now
  void (*wait)(State, Site);
  void (*fail)(const char* what, Site);  // does not return
  void* (*threadgroup_array)(const char* name, unsigned long bytes, unsigned line);
};

}  // namespace emulator
