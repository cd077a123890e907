// Trains losses described by Python (tests/python/shared/combinations.py) and writes the results.
//
//     loss_exchange IN OUT
//
// IN: a list of dicts, saved by torch.save, with "loss", "sampler", "candidates" (descriptions of
// samplers, or None), "options" and "optimizer_options" (as operators take them), "tensors",
// "optimizer", "state" (by name), "input" and "target" (one per step). OUT: a dict of tensors. Each
// key begins with the index of the dict in IN, followed by "state.NAME" (at the start),
// "loss.STEP", "gradient.STEP.NAME", or "end.NAME" (after flush()). Step i draws from a generator
// with seed i.
//
// For "HierarchicalMatcher" the dict also has "prototypes": whether each layer is initialised from
// prototypes. All layers are trained on all batches; "topk.scores", "topk.labels" and "predicted"
// are for the first batch, without its targets.
//
// For "TwoTowerLoss" the dict has "options", "counts" (options or None), "learned" (whether the
// temperature is learned), "state" and "steps". Each step is a list: query, item, item_id, vectors
// and ids of negatives, and weight. Gradients are those of query, item, negatives and temperature,
// which SGD trains.

#include "op/options.h"

#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <fstream>
#include <iterator>

namespace {

using torch::Tensor;
using Dict = c10::impl::GenericDict;
using Results = c10::Dict<std::string, Tensor>;
namespace nn = xsoftmax::nn;
namespace optim = xsoftmax::optim;
namespace samplers = xsoftmax::samplers;
using Sampler = std::shared_ptr<samplers::SamplerImpl>;

Tensor tensor_of(const Dict& dict, const char* name) {
  return dict.contains(name) ? dict.at(name).toTensor() : Tensor();
}

struct Static {
  int64_t num_samples = 0;
  std::optional<bool> shared, distinct;
  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_samples", num_samples);
    v("shared", shared);
    v("distinct", distinct);
  }
};

template <typename Options>
Options parse(const Dict& dict, const char* key = "options") {
  return xsoftmax::parse_options<Options>("loss_exchange", dict.at(key).toStringRef());
}

template <typename Adaptive, typename Options>
Sampler adaptive(const Dict& spec, int64_t num_classes, int64_t dim, bool bias) {
  auto options = parse<Options>(spec);
  options.bias = bias;
  options.exclude = tensor_of(spec, "exclude");
  return std::make_shared<Adaptive>(num_classes, dim, options);
}

// Streaming counts, if a sampler has any, and how it follows them. Ids are open if buckets are
// named.
struct Stream {
  samplers::StreamingCounts counts = nullptr;
  samplers::FollowOptions follow;
};

struct StreamText : samplers::StreamingOptions {
  int64_t refresh_every = 0;
  template <typename Visitor>
  void visit(Visitor& v) {
    StreamingOptions::visit(v);
    v("refresh_every", refresh_every);
  }
};

Stream stream_of(const Dict& spec, int64_t num_classes) {
  if (!spec.contains("stream")) {
    return {};
  }
  auto options = parse<StreamText>(spec, "stream");
  if (spec.at("stream").toStringRef().find("buckets") == std::string::npos) {
    options.num_ids = num_classes;
  }
  return {samplers::StreamingCounts(static_cast<const samplers::StreamingOptions&>(options)),
          {.refresh_every = options.refresh_every}};
}

Sampler make_sampler(const Dict& spec, int64_t n, int64_t dim, bool bias) {
  const std::string name = spec.at("name").toStringRef();
  if (name == "union") {
    std::vector<Sampler> parts;
    const c10::IValue list = spec.at("parts");
    for (const c10::IValue& part : list.toListRef()) {
      parts.push_back(make_sampler(part.toGenericDict(), n, dim, bias));
    }
    return std::make_shared<samplers::UnionSamplerImpl>(parts);
  }
  if (name == "in_batch") {
    return std::make_shared<samplers::InBatchSamplerImpl>(n, stream_of(spec, n).counts);
  }
  if (name == "midx") {
    return adaptive<samplers::MidxSamplerImpl, samplers::MidxOptions>(spec, n, dim, bias);
  }
  if (name == "exact_midx") {
    return adaptive<samplers::ExactMidxSamplerImpl, samplers::MidxOptions>(spec, n, dim, bias);
  }
  if (name == "spread_midx") {
    return adaptive<samplers::SpreadMidxSamplerImpl, samplers::MidxOptions>(spec, n, dim, bias);
  }
  if (name == "learnable_midx") {
    return adaptive<samplers::LearnableMidxSamplerImpl, samplers::MidxOptions>(spec, n, dim, bias);
  }
  if (name == "lsh") {
    return adaptive<samplers::LshSamplerImpl, samplers::LshOptions>(spec, n, dim, bias);
  }
  if (name == "sphere") {
    return adaptive<samplers::SphereSamplerImpl, samplers::KernelOptions>(spec, n, dim, bias);
  }
  if (name == "rff") {
    return adaptive<samplers::RffSamplerImpl, samplers::KernelOptions>(spec, n, dim, bias);
  }
  const auto options = parse<Static>(spec);
  if (name == "complement") {
    return spec.contains("sampler")
        ? std::make_shared<samplers::ComplementSamplerImpl>(
              make_sampler(spec.at("sampler").toGenericDict(), n, dim, bias), options.num_samples)
        : std::make_shared<samplers::ComplementSamplerImpl>(n, options.num_samples);
  }
  const samplers::DrawOptions draws{options.shared, options.distinct, tensor_of(spec, "exclude")};
  if (name == "unigram" && spec.contains("stream")) {
    const Stream stream = stream_of(spec, n);
    return std::make_shared<samplers::UnigramSamplerImpl>(stream.counts, options.num_samples,
                                                          stream.follow, draws);
  }
  if (name == "unigram") {
    return std::make_shared<samplers::UnigramSamplerImpl>(spec.at("counts").toTensor(),
                                                          options.num_samples, 0.75, draws);
  }
  if (name == "log_uniform") {
    return std::make_shared<samplers::LogUniformSamplerImpl>(n, options.num_samples, draws);
  }
  TORCH_CHECK(name == "uniform", "loss_exchange: expected the name of a sampler, got ", name);
  return std::make_shared<samplers::UniformSamplerImpl>(n, options.num_samples, draws);
}

// Arguments of Python constructors other than modules and tensors.
struct Options : nn::SamplingOptions, nn::LossOptions {
  int64_t num_noises = 1, num_candidates = 1, balance_every = 0;
  std::optional<int64_t> beam;
  bool routed = false;
  std::string noise_reduction = "mean_of_logs";
  template <typename Visitor>
  void visit(Visitor& v) {
    v("bias", bias);
    v("reduction", reduction);
    v("ignore_index", ignore_index);
    v("label_smoothing", label_smoothing);
    v("logit_scale", logit_scale);
    v("softcap", softcap);
    v("z_loss", z_loss);
    v("estimator", estimator);
    v("remove_accidental_hits", remove_accidental_hits);
    v("log_z", log_z);
    v("learn_log_z", learn_log_z);
    v("sparse_grad", sparse_grad);
    v("num_noises", num_noises);
    v("noise_reduction", noise_reduction);
    v("num_candidates", num_candidates);
    v("balance_every", balance_every);
    v("beam", beam);
    v("routed", routed);
  }
};

struct Loss {
  std::shared_ptr<nn::TableLossImpl> module;
  std::function<Tensor(const Tensor&, const Tensor&, at::Generator)> call;
};

Loss make_loss(const Dict& in) {
  auto options = parse<Options>(in);
  const Dict tensors = in.at("tensors").toGenericDict();
  const int64_t n = in.at("num_classes").toInt(), dim = in.at("dim").toInt();
  const auto sampler = [&](const char* key) {
    return in.at(key).isNone() ? nullptr
                               : make_sampler(in.at(key).toGenericDict(), n, dim, options.bias);
  };
  options.weight = tensor_of(tensors, "weight");
  const std::string name = in.at("loss").toStringRef();
  if (name == "HierarchicalSoftmaxLoss") {
    const xsoftmax::LabelTree tree(tensors.at("parents").toTensor(),
                                   tensors.at("classes").toTensor());
    const auto loss =
        std::make_shared<nn::HierarchicalSoftmaxLossImpl>(dim, tree, options, options.sparse_grad);
    return {loss, [loss](const Tensor& input, const Tensor& target, at::Generator) {
              return loss->forward(input, target);
            }};
  }
  if (name == "BeamTreeLoss") {
    const xsoftmax::LabelTree tree(tensors.at("parents").toTensor(),
                                   tensors.at("classes").toTensor());
    const nn::BeamTreeOptions beam{.num_candidates = options.num_candidates,
                                   .num_noises = options.num_noises,
                                   .beam = options.beam,
                                   .noise_sampler = sampler("sampler"),
                                   .noise_reduction = options.noise_reduction,
                                   .routed = options.routed,
                                   .balance_every = options.balance_every,
                                   .sparse_grad = options.sparse_grad};
    const auto loss = std::make_shared<nn::BeamTreeLossImpl>(dim, tree, beam, options);
    return {loss, [loss](const Tensor& input, const Tensor& target, at::Generator generator) {
              return loss->forward(input, target, generator);
            }};
  }
  if (name == "SampledSoftmaxLoss") {
    options.head = tensor_of(tensors, "head");
    const auto loss =
        std::make_shared<nn::SampledSoftmaxLossImpl>(dim, n, sampler("sampler"), options, options);
    return {loss, [loss](const Tensor& input, const Tensor& target, at::Generator generator) {
              return loss->forward(input, target, generator);
            }};
  }
  const nn::CaneOptions cane{.candidates = tensor_of(tensors, "candidates"),
                             .candidate_sampler = sampler("candidates"),
                             .num_noises = options.num_noises,
                             .noise_sampler = sampler("sampler"),
                             .noise_reduction = options.noise_reduction,
                             .sparse_grad = options.sparse_grad};
  const auto loss = std::make_shared<nn::CaneLossImpl>(dim, n, cane, options);
  return {loss, [loss](const Tensor& input, const Tensor& target, at::Generator generator) {
            return loss->forward(input, target, std::nullopt, generator);
          }};
}

std::unique_ptr<optim::RowOptimizer> make_optimizer(const Dict& in,
                                                    const std::vector<Tensor>& parameters) {
  const std::string name = in.at("optimizer").toStringRef();
  if (name == "RowSGD") {
    return std::make_unique<optim::RowSGD>(parameters,
                                           parse<optim::RowSGDOptions>(in, "optimizer_options"));
  }
  if (name == "RowAdam") {
    return std::make_unique<optim::RowAdam>(parameters,
                                            parse<optim::RowAdamOptions>(in, "optimizer_options"));
  }
  return std::make_unique<optim::RowAdagrad>(
      parameters, parse<optim::RowAdagradOptions>(in, "optimizer_options"));
}

void write_state(const torch::nn::Module& module, const std::string& prefix, Results& out) {
  for (const auto& item : module.named_parameters()) {
    out.insert(prefix + item.key(), item.value().detach().clone());
  }
  for (const auto& item : module.named_buffers()) {
    out.insert(prefix + item.key(), item.value().clone());
  }
}

void read_state(torch::nn::Module& module, const Dict& state) {
  torch::NoGradGuard guard;
  for (auto& tensors : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : tensors) {
      if (state.contains(item.key())) { // Python compares the names of the rest
        Tensor(item.value()).copy_(state.at(item.key()).toTensor());
      }
    }
  }
}

// Takes one training step of a loss and records the loss and its gradients.
void take_step(const torch::nn::Module& module, optim::RowOptimizer& optimizer, const Tensor& value,
               int64_t step, Results& out) {
  value.sum().backward();
  out.insert("loss." + std::to_string(step), value.detach());
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) {
      const Tensor grad = item.value().grad();
      out.insert("gradient." + std::to_string(step) + "." + item.key(),
                 (grad.is_sparse() ? grad.to_dense() : grad).clone());
    }
  }
  optimizer.step();
}

Results run(const Dict& in) {
  Results out;
  Loss loss = make_loss(in);
  write_state(*loss.module, "state.", out);
  read_state(*loss.module, in.at("state").toGenericDict());
  const auto optimizer = make_optimizer(in, loss.module->parameters());
  const Tensor inputs = in.at("input").toTensor(), targets = in.at("target").toTensor();
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    at::Generator generator = at::detail::createCPUGenerator();
    generator.set_current_seed(step);
    optimizer->zero_grad();
    // A slice would have another alignment, which changes how products are rounded.
    const Tensor input = inputs[step].clone();
    const Tensor value = loss.call(input, targets[step], generator);
    take_step(*loss.module, *optimizer, value, step, out);
  }
  optimizer->flush();
  write_state(*loss.module, "end.", out);
  return out;
}

struct MatcherOptions : xsoftmax::HierarchicalMatcherOptions {
  template <typename Visitor>
  void visit(Visitor& v) {
    HierarchicalMatcherOptions::visit(v);
    v("bias", bias);
  }
};

Results run_matcher(const Dict& in) {
  Results out;
  const auto tensors = in.at("tensors").toGenericDict();
  const xsoftmax::LabelTree tree(tensor_of(tensors, "parent"), tensor_of(tensors, "node_class"));
  nn::HierarchicalMatcher matcher(in.at("dim").toInt(), tree, parse<MatcherOptions>(in));
  write_state(*matcher, "state.", out);
  read_state(*matcher, in.at("state").toGenericDict());
  const Tensor inputs = in.at("input").toTensor(), targets = in.at("target").toTensor();
  int64_t count = 0;
  do {
    if (in.at("prototypes").toBool()) {
      matcher->init_from_prototypes(inputs[0].clone(), targets[0]);
    }
    const auto optimizer = make_optimizer(in, matcher->parameters());
    for (int64_t step = 0; step < inputs.size(0); ++step) {
      optimizer->zero_grad();
      take_step(*matcher, *optimizer, matcher(inputs[step].clone(), targets[step]), count++, out);
    }
    optimizer->flush();
  } while (matcher->next_layer());
  const auto [scores, labels] = matcher->topk(inputs[0].clone(), 5, std::nullopt, targets[0]);
  out.insert("topk.scores", scores);
  out.insert("topk.labels", labels);
  out.insert("predicted", matcher->predict(inputs[0].clone()));
  write_state(*matcher, "end.", out);
  return out;
}

Results run_towers(const Dict& in) {
  Results out;
  samplers::StreamingCounts counts{nullptr};
  if (!in.at("counts").isNone()) {
    counts = samplers::StreamingCounts(parse<samplers::StreamingOptions>(in, "counts"));
  }
  nn::TwoTowerLoss loss(parse<xsoftmax::TwoTowerOptions>(in), counts, in.at("learned").toBool());
  write_state(*loss, "state.", out);
  read_state(*loss, in.at("state").toGenericDict());
  const c10::IValue steps = in.at("steps");
  for (size_t i = 0; i < steps.toListRef().size(); ++i) {
    std::vector<Tensor> given;
    for (const c10::IValue& part : steps.toListRef()[i].toListRef()) {
      given.push_back(part.toTensor());
    }
    std::vector<std::pair<std::string, Tensor>> trained{
        {"query", given[0].clone()}, {"item", given[1].clone()}, {"negatives", given[3].clone()}};
    for (auto& [name, vectors] : trained) {
      vectors.requires_grad_();
    }
    loss->zero_grad();
    const Tensor value = loss(trained[0].second, trained[1].second, given[2],
                              std::make_tuple(trained[2].second, given[4]), given[5]);
    value.sum().backward();
    if (in.at("learned").toBool()) {
      trained.emplace_back("temperature", loss->temperature);
      torch::NoGradGuard guard;
      loss->temperature.sub_(loss->temperature.grad(), 0.01);
    }
    out.insert("loss." + std::to_string(i), value.detach());
    for (const auto& [name, tensor] : trained) {
      out.insert("gradient." + std::to_string(i) + "." + name, tensor.grad().clone());
    }
  }
  write_state(*loss, "end.", out);
  return out;
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 3, "usage: loss_exchange IN OUT");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  Results out;
  int64_t number = 0;
  const c10::IValue tasks = torch::pickle_load(bytes);
  for (const c10::IValue& in : tasks.toListRef()) {
    const Dict task = in.toGenericDict();
    const std::string& loss = task.at("loss").toStringRef();
    const auto train = loss == "TwoTowerLoss" ? run_towers
        : loss == "HierarchicalMatcher"       ? run_matcher
                                              : run;
    for (const auto& result : train(task)) {
      out.insert(std::to_string(number) + "." + result.key(), result.value());
    }
    ++number;
  }
  const std::vector<char> saved = torch::pickle_save(out);
  std::ofstream(argv[2], std::ios::binary).write(saved.data(), std::streamsize(saved.size()));
}
