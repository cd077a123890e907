#pragma once

// Raw ids to rows of a table, where ids come and go.

#include <xsoftmax/id_table_options.h>
#include <xsoftmax/streaming_counts.h>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax::nn {

/// Raw ids, any int64, to rows [0, capacity) of a class table or an embedding; row 0 is shared by the ids that have none. See xsoftmax.IdTable, whose names of
/// state and laws are the same. While training a call counts its ids and gives rows to new ones, else it looks up alone. Its tensors stay on the CPU.
/// Threads may share it.
///
///     xsoftmax::nn::IdTable ids(1'000'000);
///     xsoftmax::nn::SampledSoftmaxLoss loss(64, 1'000'000, sampler);
///     ids->attach(loss->linear);
///     loss(hidden, ids(raw_target)).backward();
class IdTableImpl : public torch::nn::Module {
 public:
  explicit IdTableImpl(int64_t capacity, const IdTableOptions& options = {});

  /// The rows of ids [*].
  torch::Tensor forward(const torch::Tensor& ids);
  /// A batch that is counted: rows [*], and the rows [E] that went from an id to another, which have been reset in all that is attached. Where that throws, the
  /// ids have their rows already; the next call resets and returns these rows, too.
  std::tuple<torch::Tensor, torch::Tensor> insert(const torch::Tensor& ids);
  torch::Tensor find(const torch::Tensor& ids) const;
  /// Takes their rows from ids; returns those they had, 0 for an id without.
  torch::Tensor remove(const torch::Tensor& ids);
  /// The raw ids of rows, `missing` for a row that no id has.
  torch::Tensor ids_of(const torch::Tensor& rows, int64_t missing = -1) const;
  /// How many ids have a row.
  int64_t size() const;
  int64_t capacity() const { return row_ids.size(0); }

  /// What starts anew in a row that goes from an id to another: a parameter [capacity, ...] and what row optimizers keep for its rows. `init` fills a tensor
  /// [E, ...] as functions of torch::nn::init do, and is tried with one row here; a Linear (that of a loss, say) and an Embedding begin as theirs do.
  void attach(const torch::Tensor& table, std::function<void(torch::Tensor)> init);
  void attach(const torch::nn::Linear& linear);
  void attach(const torch::nn::Embedding& embedding);
  /// Counts of dense ids, which are forgotten.
  void attach(samplers::StreamingCounts counts);

  /// A state that no table of this capacity and these options comes to is refused, and changes nothing.
  void load(torch::serialize::InputArchive& archive) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor slots, row_ids, seen, victims, counters;

 private:
  std::vector<torch::Tensor> state() const { return {slots, row_ids, seen, victims, counters}; }

  std::string options_;
  std::recursive_mutex mutex_; ///< of a batch and the resets that belong to it
  std::vector<std::function<void(const torch::Tensor&)>> attached_; ///< called with the rows that start anew
  torch::Tensor pending_ = torch::empty({0}, torch::kLong);         ///< rows that an error kept from it
};
class IdTable : public Holder<IdTableImpl> {
 public:
  using Holder::Holder;
  explicit IdTable(int64_t capacity, const IdTableOptions& options = {}) : Holder(std::make_shared<Impl>(capacity, options)) {}
  explicit IdTable(...) = delete; // expected: capacity[, IdTableOptions]
};

} // namespace xsoftmax::nn
