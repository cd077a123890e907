#pragma once

#include "core/optional.h"

#include <xsoftmax/candidates.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

// The protocol of samplers. An operator takes a sampler as a text that describes it, and the list of all its tensors:
//
//     description := kind ":" number of tensors ":" options [ "[" description { ";" description } "]" ]
//
// such as "union:0:[static:7:law=uniform,...;midx:12:num_samples=20,...]". A kind is a class that derives from SamplerKind and
// registers itself by name; each file that defines one lists its tensors, options and parts.
//
//     sampler_sample(queries, target, state!, sampler, generator, training, first_query) -> (ids, log_count, target_log_count, distinct)
//     sampler_log_count(queries, ids, state, sampler) -> log_count
//     sampler_step_(weight, bias, state!, sampler, generator) -> ()
//     sampler_sample_outside(queries, candidates, target, state!, sampler, generator, training, first_query) -> (ids, log_count, target_log_count)
//
// are the methods sample, log_count, prepare and sample_outside of xsoftmax/sampler.h. sampler_sample gives an entry for each set;
// target_log_count has size 0 where a set has none.

namespace xsoftmax {

/// What a draw is made for.
struct DrawRequest {
  const at::Tensor& queries;
  OptionalTensor target = std::nullopt; ///< as of SamplerImpl::sample; none: all queries count, and no counts of targets are wanted
  std::optional<at::Generator> generator = std::nullopt;
  bool training = false;   ///< a sampler that counts the targets of a stream does so
  int64_t first_query = 0; ///< the number of the first query in the batch of which `queries` is a part
  bool wants_distinct_target_counts = true; ///< counts of targets are wanted of distinct sets as well

  /// The same draw with the counts of other classes, of distinct sets only where they are wanted.
  DrawRequest with_target(const OptionalTensor& other, bool of_distinct = true) const {
    return {queries, other, generator, training, first_query, of_distinct};
  }
};

class SamplerKind;

/// A description that has been read, and fits its kind.
struct SamplerDescription {
  const SamplerKind* kind = nullptr;
  std::string name, options;
  int64_t first = 0, count = 0; ///< its own tensors in the list
  std::vector<SamplerDescription> parts;
};

/// A described sampler and its tensors, or one of its parts. The list `state` must outlive it and its parts.
class SamplerView {
 public:
  /// Reads `description` and checks that `state` holds its tensors. Errors name `op`.
  SamplerView(const char* op, std::string_view description, at::TensorList state);

  const std::string& name() const { return description_->name; }
  const std::string& options() const { return description_->options; }
  at::TensorList tensors() const { return state_.slice(size_t(description_->first), size_t(description_->count)); }
  std::vector<SamplerView> parts() const;

  bool shared() const;
  bool distinct() const;
  bool reads_queries() const;
  Proposal sample(const DrawRequest& request) const;
  at::Tensor log_count(const at::Tensor& queries, const at::Tensor& ids) const;
  void step(const at::Tensor& weight, const OptionalTensor& bias, const std::optional<at::Generator>& generator) const;

 private:
  SamplerView(const SamplerView& whole, const SamplerDescription& part) : root_(whole.root_), description_(&part), state_(whole.state_) {}

  std::shared_ptr<const SamplerDescription> root_;
  const SamplerDescription* description_;
  at::TensorList state_; // of the root
};

/// What samplers of one kind do. Objects have no state of their own: it is in the view.
class SamplerKind {
 public:
  virtual ~SamplerKind() = default;
  /// Whether a description has the tensors and the parts that samplers of this kind have.
  virtual bool fits(const SamplerDescription& description) const = 0;
  /// Whether the sets are shared by the batch, and whether no class stands twice in a set.
  virtual bool shared(const SamplerView& sampler) const = 0;
  virtual bool distinct(const SamplerView& sampler) const = 0;
  /// Whether draws depend on the query vectors, not only on which targets are ignored. Default: those of a part do.
  virtual bool reads_queries(const SamplerView& sampler) const;
  virtual Proposal sample(const SamplerView& sampler, const DrawRequest& request) const = 0;
  virtual at::Tensor log_count(const SamplerView& sampler, const at::Tensor& queries, const at::Tensor& ids) const = 0;
  /// Brings the sampler up to date before a training step draws. Default: step of each part.
  virtual void step(const SamplerView& sampler, const at::Tensor& weight, const OptionalTensor& bias, const std::optional<at::Generator>& generator) const;
};

/// Makes a kind known by its name, while the library is loaded. Returns true, so that a static variable can register it; a name that is taken ends the program.
bool register_sampler_kind(const char* name, std::unique_ptr<SamplerKind> kind);

/// The seed of a draw, as operators that draw take it: one int64 from the request's generator; and the number of the first
/// query, for private draws of a part of a batch.
at::Tensor seed_of(const DrawRequest& request, bool shared);

/// What an operator that draws returned (ids, log_count, target_log_count) as a set.
CandidateSet set_of(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& drawn, const OptionalTensor& target, bool distinct);

/// The draws of a sampler of kind "complement" outside int64 `candidates` [C] or [Q, C], -1 for none.
CandidateSet sample_outside(const SamplerView& complement, const DrawRequest& request, const at::Tensor& candidates);

} // namespace xsoftmax
