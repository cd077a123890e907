#include <xsoftmax/sampler.h>

#include "op/shape_checks.h"
#include "proposal/modules.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/randint.h>

#include <torch/serialize/input-archive.h>

#include <algorithm>
#include <limits>
#include <mutex>

namespace xsoftmax::samplers {

using at::Tensor;

Tensor draw_seed(const Tensor& queries, const std::optional<at::Generator>& generator) {
  TORCH_CHECK_VALUE(!generator.has_value() || !generator->defined() ||
                        generator->device().type() == queries.device().type(),
                    "sample: expected generator on the queries' device ", queries.device(),
                    ", got one on ", generator->device());
  constexpr int64_t limit = std::numeric_limits<int64_t>::max();
  if (!check::can_read(queries)) {
    const auto options = at::TensorOptions(at::kLong).device(queries.device());
    if (check::is_plain(queries)) {
      return at::randint(0, limit, {}, generator, options);
    }
    // AOTInductor does not accept an empty list of sizes.
    return at::randint(0, limit, {1}, generator, options).squeeze(0);
  }
  // Draws the same number as at::randint, without its three ATen calls.
  auto* const source = at::get_generator_or_default<at::CPUGeneratorImpl>(
      generator, at::detail::getDefaultCPUGenerator());
  const Tensor seed = at::detail::empty_cpu({}, at::kLong);
  const std::lock_guard<std::mutex> lock(source->mutex_);
  *seed.mutable_data_ptr<int64_t>() = int64_t(source->random64() % uint64_t(limit));
  return seed;
}

Proposal one_set(const std::tuple<Tensor, Tensor, Tensor>& drawn, const Tensor& target,
                 bool distinct) {
  const auto& [ids, log_count, target_log_count] = drawn;
  return {{ids, log_count, target.defined() ? target_log_count : Tensor(), distinct}};
}

UnionPart part_of(const std::shared_ptr<SamplerImpl>& sampler) {
  return {sampler->shared(), sampler->distinct(),
          [sampler](const DrawRequest& request) {
            return sampler->sample(request.queries, request.target.value_or(Tensor()),
                                   request.generator);
          },
          [sampler](const Tensor& queries, const Tensor& ids) {
            return sampler->log_count(queries, ids);
          }};
}

bool reads_queries(const SamplerImpl& sampler) {
  const auto* const described = dynamic_cast<const DescribedSamplerImpl*>(&sampler);
  if (described == nullptr) {
    return true;
  }
  const std::vector<Tensor> state = described->state_tensors();
  return SamplerView("sample", described->describe(), state).reads_queries();
}

SamplerImpl::SamplerImpl(std::string name, int64_t num_classes, int64_t num_samples, bool shared,
                         bool distinct)
    : TableBuffers(std::move(name)), num_classes_(num_classes), num_samples_(num_samples),
      shared_(shared), distinct_(distinct) {
  TORCH_CHECK_VALUE(num_classes >= 1, this->name(), ": expected num_classes of at least 1, got ",
                    num_classes);
  TORCH_CHECK_VALUE(num_samples >= kOfBatch, this->name(),
                    ": expected num_samples of at least 0, got ", num_samples);
}

void SamplerImpl::prepare(const Tensor&, const std::optional<Tensor>&,
                          std::optional<at::Generator>) {}
std::map<std::string, double> SamplerImpl::refresh(const Tensor&, const std::optional<Tensor>&) {
  return {};
}
std::shared_ptr<SamplerImpl> SamplerImpl::excluding(const Tensor&) const { return nullptr; }

Proposal DescribedSamplerImpl::sample(const Tensor& queries, const Tensor& target,
                                      std::optional<at::Generator> generator) {
  const std::vector<Tensor> state = state_tensors();
  return SamplerView("sample", describe(), state)
      .sample({queries, optional(target), std::move(generator), is_training()});
}

Tensor DescribedSamplerImpl::log_count(const Tensor& queries, const Tensor& ids) {
  const std::vector<Tensor> state = state_tensors();
  return SamplerView("log_count", describe(), state).log_count(queries, ids);
}

void DescribedSamplerImpl::prepare(const Tensor& weight, const std::optional<Tensor>& bias,
                                   std::optional<at::Generator> generator) {
  const std::vector<Tensor> state = state_tensors();
  SamplerView("prepare", describe(), state).step(weight, bias, generator);
}

void SamplerImpl::resize(int64_t num_classes, const Tensor& rows,
                         const std::optional<Tensor>& bias) {
  const std::function<void()> grow = plan_growth(num_classes, rows, bias);
  (grow ? grow : plan_resize(num_classes, rows, bias))();
}

std::function<void()> SamplerImpl::plan_growth(int64_t num_classes, const Tensor& rows,
                                               const std::optional<Tensor>& bias) {
  return follows_table() ? std::function<void()>() : plan_resize(num_classes, rows, bias);
}

std::function<void()> SamplerImpl::plan_resize(int64_t, const Tensor&,
                                               const std::optional<Tensor>&) {
  TORCH_CHECK_TYPE(
      false, name(),
      ": expected a sampler that defines plan_resize, got one whose number of classes is fixed");
}

void SamplerImpl::claim(const std::string& owner) {
  TORCH_CHECK_VALUE(owner_.empty(), owner, ": expected a sampler that no other module uses, got a ",
                    name(), " that belongs to a ", owner_, ": make a second one");
  owner_ = owner;
}

namespace {

void load_children(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
  for (auto& child : module.named_children()) {
    torch::serialize::InputArchive state;
    if (archive.try_read(child.key(), state)) {
      const bool keeps = dynamic_cast<TableBuffers*>(child.value().get()) != nullptr;
      keeps ? child.value()->load(state) : load_children(*child.value(), state);
    }
  }
}

} // namespace

void TableBuffers::load(torch::serialize::InputArchive& archive) {
  const auto keys = archive.keys();
  auto buffers = named_buffers(/*recurse=*/false);
  if (std::any_of(buffers.begin(), buffers.end(), [&](const auto& buffer) {
        return std::count(keys.begin(), keys.end(), buffer.key()) > 0;
      })) {
    std::vector<Tensor> saved(buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      archive.read(buffers[i].key(), saved[i], /*is_buffer=*/true);
      TORCH_CHECK_VALUE(saved[i].sizes() == buffers[i].value().sizes(), name(),
                        ": expected a checkpoint with ", buffers[i].key(), " of shape ",
                        buffers[i].value().sizes(), ", got ", saved[i].sizes());
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].value().set_data(saved[i].to(buffers[i].value().device()));
    }
  }
  load_children(*this, archive);
}

// Module::to(dtype) would also cast integer buffers.
void TableBuffers::to(torch::Device device, torch::Dtype, bool non_blocking) {
  to(device, non_blocking);
}
void TableBuffers::to(torch::Dtype, bool) {}
void TableBuffers::to(torch::Device device, bool non_blocking) { Module::to(device, non_blocking); }

namespace {

using Factory = std::function<std::shared_ptr<SamplerImpl>(const SamplerRequest&)>;

// Names are registered while the library is loaded; the order of files is unspecified.
std::map<std::string, Factory>& registry() {
  static std::map<std::string, Factory> factories;
  return factories;
}

} // namespace

void register_sampler(const std::string& name, Factory factory) {
  TORCH_CHECK_VALUE(registry().emplace(name, std::move(factory)).second,
                    "register_sampler: expected a name that is not taken, got \"", name, "\"");
}

std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, const SamplerRequest& request) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    std::string names;
    for (const auto& [known, factory] : registry()) {
      names += (names.empty() ? "\"" : ", \"") + known + "\"";
    }
    TORCH_CHECK_VALUE(false, "make_sampler: expected one of ", names, ", got \"", name, "\"");
  }
  return found->second(request);
}

} // namespace xsoftmax::samplers
