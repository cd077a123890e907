#pragma once

// How often ids stand in a stream of batches.

#include <xsoftmax/sampler.h>
#include <xsoftmax/streaming_options.h>

namespace xsoftmax::samplers {

/// The probability of ids in a stream of batches, as the stream has it lately: exact decayed counts of dense ids, or, of open ids, smoothed gaps in hashed
/// buckets. See xsoftmax.samplers.StreamingCounts, whose names of state are the same. Counts while training alone.
class StreamingCountsImpl : public KeepsTables {
 public:
  explicit StreamingCountsImpl(const StreamingOptions& options);
  explicit StreamingCountsImpl(int64_t num_ids) : StreamingCountsImpl(StreamingOptions{.num_ids = num_ids}) {}

  /// Counts a batch: int64 of any shape, dense ids in [0, N) or -1 for what does not count; mask bool, the shape of ids: which of them count.
  void update(const torch::Tensor& ids, const std::optional<torch::Tensor>& mask = std::nullopt);
  /// Dense ids as if they had never been seen: of an id that stands for something else from now on.
  void forget(const torch::Tensor& ids);
  /// The decayed counts, float64; of open ids total q.
  torch::Tensor counts(const torch::Tensor& ids) const;
  /// log q, float32; -inf for what was never seen.
  torch::Tensor log_prob(const torch::Tensor& ids) const;
  /// log_prob after update.
  torch::Tensor forward(const torch::Tensor& ids);

  /// Counts of num_ids dense ids from now on; new ones were never seen. Open ids have no number: nothing happens.
  void resize(int64_t num_ids);

  using KeepsTables::to;
  void to(torch::Device device, bool non_blocking = false) override;

  std::optional<int64_t> num_ids() const { return num_ids_; }
  /// As operators take them.
  const std::string& options() const { return options_; }

  torch::Tensor count, total, last, seen;

 private:
  std::optional<int64_t> num_ids_;
  std::string options_;
};
class StreamingCounts : public Holder<StreamingCountsImpl> {
 public:
  using Holder::Holder;
  explicit StreamingCounts(const StreamingOptions& options) : Holder(std::make_shared<Impl>(options)) {}
  explicit StreamingCounts(int64_t num_ids) : Holder(std::make_shared<Impl>(num_ids)) {}
  explicit StreamingCounts(...) = delete; // expected: StreamingOptions or num_ids
};

} // namespace xsoftmax::samplers
