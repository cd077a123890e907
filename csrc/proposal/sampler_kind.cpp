#include "proposal/sampler_kind.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/modules.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

#include <charconv>
#include <map>
#include <utility>

namespace xsoftmax {

using at::Tensor;

namespace {

// Kinds are registered while the library is loaded; the order of files is unspecified.
std::map<std::string, std::unique_ptr<SamplerKind>, std::less<>>& kinds() {
  // Never destroyed, because cached descriptions point into it.
  static auto* const known = new std::map<std::string, std::unique_ptr<SamplerKind>, std::less<>>;
  return *known;
}

// Parses the grammar of sampler_kind.h.
class DescriptionReader {
 public:
  DescriptionReader(const char* op, std::string_view text) : op_(op), whole_(text), rest_(text) {}

  SamplerDescription read_all() {
    SamplerDescription description = read();
    check(rest_.empty());
    return description;
  }
  int64_t tensors() const { return tensors_; }

 private:
  SamplerDescription read() {
    check(++depth_ <= 64);
    SamplerDescription description;
    description.name = field();
    const auto kind = kinds().find(description.name);
    TORCH_CHECK_VALUE(kind != kinds().end(), op_,
                      ": expected a kind of sampler that is registered, got \"", description.name,
                      "\"");
    description.kind = kind->second.get();
    const std::string_view count = field();
    check(std::from_chars(count.data(), count.data() + count.size(), description.count).ptr ==
          count.data() + count.size());
    check(!count.empty() && description.count >= 0 && description.count < 1024);
    description.first = std::exchange(tensors_, tensors_ + description.count);
    const size_t end = std::min(rest_.find_first_of("[];"), rest_.size());
    description.options = rest_.substr(0, end);
    rest_.remove_prefix(end);
    if (!rest_.empty() && rest_[0] == '[') {
      do {
        rest_.remove_prefix(1);
        description.parts.push_back(read());
      } while (!rest_.empty() && rest_[0] == ';');
      check(!rest_.empty() && rest_[0] == ']');
      rest_.remove_prefix(1);
    }
    TORCH_CHECK_VALUE(description.kind->fits(description), op_,
                      ": expected the tensors and parts of a sampler of kind ", description.name,
                      ", got ", description.count, " tensors and ", description.parts.size(),
                      " parts");
    --depth_;
    return description;
  }

  std::string_view field() {
    const size_t colon = rest_.find(':');
    check(colon != std::string_view::npos);
    const std::string_view value = rest_.substr(0, colon);
    rest_.remove_prefix(colon + 1);
    return value;
  }

  void check(bool holds) const {
    TORCH_CHECK_VALUE(holds, op_,
                      ": expected sampler as kind:number of tensors:options[parts], got '", whole_,
                      "'");
  }

  const char* op_;
  std::string_view whole_, rest_;
  int64_t tensors_ = 0;
  int depth_ = 0;
};

struct ParsedDescription {
  std::shared_ptr<const SamplerDescription> root;
  int64_t tensors;
};

ParsedDescription read_description(const char* op, std::string_view text) {
  static thread_local detail::TextCache<ParsedDescription> cache;
  return cache.of(text, [&] {
    DescriptionReader reader(op, text);
    const auto root = std::make_shared<const SamplerDescription>(reader.read_all());
    return ParsedDescription{root, reader.tensors()};
  });
}

} // namespace

bool register_sampler_kind(const char* name, std::unique_ptr<SamplerKind> kind) {
  TORCH_INTERNAL_ASSERT(kinds().emplace(name, std::move(kind)).second,
                        "two kinds of samplers with the name ", name);
  return true;
}

SamplerView::SamplerView(const char* op, std::string_view description, at::TensorList state)
    : state_(state) {
  const ParsedDescription parsed = read_description(op, description);
  TORCH_CHECK_VALUE(int64_t(state.size()) == parsed.tensors, op, ": expected state with the ",
                    parsed.tensors, " tensors of the sampler, got ", state.size());
  root_ = parsed.root;
  description_ = root_.get();
}

std::vector<SamplerView> SamplerView::parts() const {
  std::vector<SamplerView> parts;
  for (const SamplerDescription& part : description_->parts) {
    parts.push_back(SamplerView(*this, part));
  }
  return parts;
}

bool SamplerView::shared() const { return description_->kind->shared(*this); }
bool SamplerView::distinct() const { return description_->kind->distinct(*this); }
bool SamplerView::reads_queries() const { return description_->kind->reads_queries(*this); }
Proposal SamplerView::sample(const DrawRequest& request) const {
  return description_->kind->sample(*this, request);
}
Tensor SamplerView::log_count(const Tensor& queries, const Tensor& ids) const {
  return description_->kind->log_count(*this, queries, ids);
}
void SamplerView::step(const Tensor& weight, const OptionalTensor& bias,
                       const std::optional<at::Generator>& generator) const {
  description_->kind->step(*this, weight, bias, generator);
}

bool SamplerKind::reads_queries(const SamplerView& sampler) const {
  const auto parts = sampler.parts();
  return std::any_of(parts.begin(), parts.end(),
                     [](const SamplerView& part) { return part.reads_queries(); });
}

void SamplerKind::step(const SamplerView& sampler, const Tensor& weight, const OptionalTensor& bias,
                       const std::optional<at::Generator>& generator) const {
  for (const SamplerView& part : sampler.parts()) {
    part.step(weight, bias, generator);
  }
}

Tensor seed_of(const DrawRequest& request, bool shared) {
  const Tensor seed = samplers::draw_seed(request.queries, request.generator);
  return shared || request.first_query == 0
      ? seed
      : at::stack({seed, at::full_like(seed, request.first_query)});
}

CandidateSet set_of(const std::tuple<Tensor, Tensor, Tensor>& drawn, const OptionalTensor& target,
                    bool distinct) {
  const auto& [ids, log_count, target_log_count] = drawn;
  return {ids, log_count, is_defined(target) ? target_log_count : Tensor(), distinct};
}

namespace {

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, c10::List<bool>>
sampler_sample(const Tensor& queries, const OptionalTensor& target, at::TensorList state,
               std::string_view description, std::optional<at::Generator> generator, bool training,
               int64_t first_query) {
  check::dim("sampler_sample", "queries", queries, 2);
  const SamplerView sampler("sampler_sample", description, state);
  std::vector<Tensor> ids, log_count, target_log_count;
  c10::List<bool> distinct;
  for (const CandidateSet& set :
       sampler.sample({queries, target, std::move(generator), training, first_query})) {
    ids.push_back(set.ids);
    log_count.push_back(set.log_count);
    target_log_count.push_back(set.target_log_count.defined()
                                   ? set.target_log_count
                                   : at::empty({0}, set.log_count.options()));
    distinct.push_back(set.distinct);
  }
  return {ids, log_count, target_log_count, distinct};
}

Tensor sampler_log_count(const Tensor& queries, const Tensor& ids, at::TensorList state,
                         std::string_view description) {
  check::strided_tensors("sampler_log_count", {{"queries", &queries}, {"ids", &ids}});
  return SamplerView("sampler_log_count", description, state).log_count(queries, ids);
}

void sampler_step_(const Tensor& weight, const OptionalTensor& bias, at::TensorList state,
                   std::string_view description, std::optional<at::Generator> generator) {
  SamplerView("sampler_step_", description, state).step(weight, bias, generator);
}

std::tuple<Tensor, Tensor, Tensor> sampler_sample_outside(
    const Tensor& queries, const Tensor& candidates, const OptionalTensor& target,
    at::TensorList state, std::string_view description, std::optional<at::Generator> generator,
    bool training, int64_t first_query) {
  check::strided_tensors("sampler_sample_outside",
                         {{"queries", &queries}, {"candidates", &candidates}});
  const SamplerView sampler("sampler_sample_outside", description, state);
  const CandidateSet set = sample_outside(
      sampler, {queries, target, std::move(generator), training, first_query}, candidates);
  return {set.ids, set.log_count,
          set.target_log_count.defined() ? set.target_log_count
                                         : at::empty({0}, set.log_count.options())};
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "sampler_sample(Tensor queries, Tensor? target, Tensor(a!)[] state, str sampler, Generator? "
      "generator=None, bool training=False, "
      "int first_query=0) -> (Tensor[] ids, Tensor[] log_count, Tensor[] target_log_count, bool[] "
      "distinct)",
      sampler_sample);
  m.def(
      "sampler_sample_outside(Tensor queries, Tensor candidates, Tensor? target, Tensor(a!)[] "
      "state, str sampler, Generator? generator=None, "
      "bool training=False, int first_query=0) -> (Tensor ids, Tensor log_count, Tensor "
      "target_log_count)",
      sampler_sample_outside);
  m.def("sampler_log_count(Tensor queries, Tensor ids, Tensor[] state, str sampler) -> Tensor",
        sampler_log_count);
  m.def(
      "sampler_step_(Tensor weight, Tensor? bias, Tensor(a!)[] state, str sampler, Generator? "
      "generator=None) -> ()",
      sampler_step_);
}

} // namespace xsoftmax
