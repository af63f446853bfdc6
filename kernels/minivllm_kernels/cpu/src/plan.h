// What the rows of a step are: tokens of which sequence, at which position, and the pieces in which threads attend.
#pragma once
#include <vector>
#include "abi.h"

struct Plan {
  struct Task {  // of a decoding row: one KV head and chunk of keys
    int row, head, chunk;
  };
  struct Tile {  // queries of a prompt
    int sequence, head, first, last;
  };
  std::vector<int> sequence, position;  // of each row
  std::vector<int> start;               // first row of each sequence
  std::vector<int> single;              // rows of decoding sequences
  std::vector<Task> tasks;
  std::vector<int> first_task;          // where the tasks of (single row, head) begin, and their end
  std::vector<Tile> tiles;

  void make(const Batch &b, const Geometry &g) {
    sequence.resize(b.tokens), position.resize(b.tokens);
    start.clear(), single.clear(), tasks.clear(), first_task.clear(), tiles.clear();
    int row = 0;
    for (int s = 0; s < b.sequences; s++) {
      const int length = b.seq_lens[s], fresh = b.query_lens[s];
      start.push_back(row);
      for (int i = 0; i < fresh; i++) sequence[row + i] = s, position[row + i] = length - fresh + i;
      if (fresh == 1) {
        single.push_back(row);
        for (int h = 0; h < g.kv_heads; h++) {
          first_task.push_back((int)tasks.size());
          for (int c = 0; c * CHUNK < length; c++) tasks.push_back({row, h, c});
        }
      } else {
        const int step = queries_per_tile(g);
        for (int i = (fresh - 1) / step * step; i >= 0; i -= step)  // the long ones first
          for (int h = 0; h < g.kv_heads; h++) tiles.push_back({s, h, i, std::min(fresh, i + step)});
      }
      row += fresh;
    }
    first_task.push_back((int)tasks.size());
  }
};
