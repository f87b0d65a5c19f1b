// body
// One threadgroup for WIDTH / THREADS entries of a side of a layer of a row. Parts lie [2, rows, WIDTH] each, the
// output [rows, parts, 2, WIDTH]. Rows and parts are read off the grid, so that one compiled kernel serves all.
const uint at = threadgroup_position_in_grid.x * THREADS + thread_index_in_threadgroup;
const uint row = threadgroup_position_in_grid.y, rows = threadgroups_per_grid.y;
const uint side = threadgroup_position_in_grid.z & 1;
const uint layer = threadgroup_position_in_grid.z >> 1, parts = threadgroups_per_grid.z >> 1;
if (at < WIDTH) {
  const uint from = (side * rows + row) * WIDTH + at;
  T value;
  switch (layer) {
    case 0: value = part0[from]; break;
    case 1: value = part1[from]; break;
    case 2: value = part2[from]; break;
    case 3: value = part3[from]; break;
    case 4: value = part4[from]; break;
    case 5: value = part5[from]; break;
    case 6: value = part6[from]; break;
    case 7: value = part7[from]; break;
    case 8: value = part8[from]; break;
    case 9: value = part9[from]; break;
    case 10: value = part10[from]; break;
    case 11: value = part11[from]; break;
    case 12: value = part12[from]; break;
    case 13: value = part13[from]; break;
    case 14: value = part14[from]; break;
    case 15: value = part15[from]; break;
    case 16: value = part16[from]; break;
    case 17: value = part17[from]; break;
    case 18: value = part18[from]; break;
    default: value = part19[from]; break;
  }
  out[((row * parts + layer) * 2 + side) * WIDTH + at] = value;
}
