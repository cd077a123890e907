#pragma once

#include "op/optional.h"

#include <xsoftmax/ops.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

// The sampler protocol. An operator takes a sampler as a text description and the list of all its
// tensors:
//
//     description := kind ":" number of tensors ":" options
//                    [ "[" description { ";" description } "]" ]
//
// such as "union:0:[static:7:distribution=uniform,...;midx:12:num_samples=20,...]". A kind is a
// class that derives from SamplerKind and registers itself by name. Each file that defines a kind
// documents its tensors, options and parts.
//
//     sampler_sample(queries, target, state!, sampler, generator, training, first_query)
//         -> (ids, log_count, target_log_count, distinct)
//     sampler_log_count(queries, ids, state, sampler) -> log_count
//     sampler_step_(weight, bias, state!, sampler, generator) -> ()
//     sampler_sample_outside(queries, candidates, target, state!, sampler, generator, training,
//                            first_query) -> (ids, log_count, target_log_count)
//
// implement the methods sample, log_count, prepare and sample_outside of xsoftmax/sampler.h.
// sampler_sample returns one entry per set; target_log_count has size 0 for a set without target
// counts.

namespace xsoftmax {

/// Arguments of a draw.
struct DrawRequest {
  const at::Tensor& queries;
  /// As in SamplerImpl::sample. None: all queries count, and no target counts are returned.
  OptionalTensor target = std::nullopt;
  std::optional<at::Generator> generator = std::nullopt;
  bool training = false; ///< whether a sampler that counts a stream of targets counts these
  /// Position of the first query in the batch, if `queries` is a part of it.
  int64_t first_query = 0;
  /// Whether to return target counts of distinct sets as well.
  bool wants_distinct_target_counts = true;

  /// Returns the same request with another target; `of_distinct` sets wants_distinct_target_counts.
  DrawRequest with_target(const OptionalTensor& other, bool of_distinct = true) const {
    return {queries, other, generator, training, first_query, of_distinct};
  }
};

class SamplerKind;

/// A parsed description that fits its kind.
struct SamplerDescription {
  const SamplerKind* kind = nullptr;
  std::string name, options;
  int64_t first = 0, count = 0; ///< range of its own tensors in the list
  std::vector<SamplerDescription> parts;
};

/// A described sampler together with its tensors, or one of its parts. The list `state` must
/// outlive it and its parts.
class SamplerView {
 public:
  /// Parses `description` and checks that `state` holds its tensors. Errors name `op`.
  SamplerView(const char* op, std::string_view description, at::TensorList state);

  const std::string& name() const { return description_->name; }
  const std::string& options() const { return description_->options; }
  at::TensorList tensors() const {
    return state_.slice(size_t(description_->first), size_t(description_->count));
  }
  std::vector<SamplerView> parts() const;

  bool shared() const;
  bool distinct() const;
  bool reads_queries() const;
  Proposal sample(const DrawRequest& request) const;
  at::Tensor log_count(const at::Tensor& queries, const at::Tensor& ids) const;
  void step(const at::Tensor& weight, const OptionalTensor& bias,
            const std::optional<at::Generator>& generator) const;

 private:
  SamplerView(const SamplerView& whole, const SamplerDescription& part)
      : root_(whole.root_), description_(&part), state_(whole.state_) {}

  std::shared_ptr<const SamplerDescription> root_;
  const SamplerDescription* description_;
  at::TensorList state_; // all tensors of the root description
};

/// The behaviour of samplers of one kind. Objects are stateless; the state is in the view.
class SamplerKind {
 public:
  virtual ~SamplerKind() = default;
  /// Returns whether a description has the tensors and parts that this kind requires.
  virtual bool fits(const SamplerDescription& description) const = 0;
  /// Return whether sets are shared by the batch, and whether they are drawn without replacement.
  virtual bool shared(const SamplerView& sampler) const = 0;
  virtual bool distinct(const SamplerView& sampler) const = 0;
  /// Returns whether draws depend on the query vectors, not only on which targets are ignored.
  /// Default: true if those of any part do.
  virtual bool reads_queries(const SamplerView& sampler) const;
  virtual Proposal sample(const SamplerView& sampler, const DrawRequest& request) const = 0;
  virtual at::Tensor log_count(const SamplerView& sampler, const at::Tensor& queries,
                               const at::Tensor& ids) const = 0;
  /// Updates the sampler before a training step draws. Default: calls step of each part.
  virtual void step(const SamplerView& sampler, const at::Tensor& weight,
                    const OptionalTensor& bias,
                    const std::optional<at::Generator>& generator) const;
};

/// Registers a kind by name while the library is loaded. Returns true, so that a static variable
/// can be initialised with it. Terminates the program if the name is taken.
bool register_sampler_kind(const char* name, std::unique_ptr<SamplerKind> kind);

/// Returns the seed for an operator that draws: one int64 from the request's generator and, for
/// private draws of a part of a batch, the number of the first query.
at::Tensor seed_of(const DrawRequest& request, bool shared);

/// Converts the (ids, log_count, target_log_count) of an operator that draws to a set.
CandidateSet set_of(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& drawn,
                    const OptionalTensor& target, bool distinct);

/// Draws by a sampler of kind "complement" outside int64 `candidates` [C] or [Q, C] (-1: no class).
CandidateSet sample_outside(const SamplerView& complement, const DrawRequest& request,
                            const at::Tensor& candidates);

} // namespace xsoftmax
