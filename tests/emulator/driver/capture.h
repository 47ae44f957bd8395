// Stream capture: what several streams do, with the events between them, as a list that can be run again.
#pragma once
#include <memory>
#include <vector>

#include "stream.h"

namespace driver {

struct Capture {
  enum class Kind { Run, Record, Wait };
  struct Item {
    unsigned branch;
    Kind kind;
    Operation operation;  // of Run
    size_t point;         // of Record and Wait
  };

  std::vector<Item> items;
  size_t points = 0;
  unsigned branches = 1;  // branch 0 is the stream that began the capture
  std::vector<Stream*> members;
  bool ended = false;

  void run(unsigned branch, Operation operation) { items.push_back({branch, Kind::Run, std::move(operation), 0}); }
  size_t record(unsigned branch);
  void wait(unsigned branch, size_t point) { items.push_back({branch, Kind::Wait, {}, point}); }

  // Whether everything that the other branches do is waited for by branch 0.
  bool joined() const;
};

}  // namespace driver
