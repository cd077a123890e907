#pragma once

#include "cpu/cpu_dispatch.h"
#include "table/score_transform.h"

#include <cstdint>

namespace xsoftmax {

// How a child's score is combined with its parent's (Yu et al., 2022, section 2.3).

/// LogAdd: the log of the sum of two exponentials.
enum class ScoreCombiner : int { Multiply = 0, Add = 1, Last = 2, LogAdd = 3 };

struct ScoreRowTable {
  /// Computes z[i] = combiner(parent, transform(z[i])).
  void (*combine)(float* z, int64_t n, float parent, ScoreTransform transform, int power,
                  ScoreCombiner combiner);
};

XS_DECLARE_ISA_TABLE(ScoreRowTable, score_rows)

} // namespace xsoftmax
