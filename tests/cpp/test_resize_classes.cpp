// loss->resize_classes: a resized loss continues like one that was built at the new size and given
// its state.

#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
using xsoftmax::nn::CaneLoss;
using xsoftmax::nn::CaneOptions;
using xsoftmax::nn::LossOptions;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;
namespace samplers = xsoftmax::samplers;
namespace optim = xsoftmax::optim;

constexpr int64_t kWidth = 5, kClasses = 23;
// 25: two more classes are sampled next to tables that are not rebuilt.
constexpr int64_t kSizes[] = {29, 17, 25};

at::Generator generator(uint64_t seed) {
  at::Generator made = at::detail::createCPUGenerator();
  made.set_current_seed(seed);
  return made;
}

using Sampler = std::shared_ptr<samplers::SamplerImpl>;
using MakeSampler = std::function<Sampler(int64_t)>;

Sampler midx(int64_t classes, int64_t num_samples = 4) {
  return samplers::MidxSampler(
             classes, kWidth,
             samplers::MidxOptions{
                 .num_samples = num_samples, .codewords = 4, .bias = true, .refresh_every = 2})
      .ptr();
}

const std::vector<std::pair<const char*, MakeSampler>> kSamplers = {
    {"uniform", [](int64_t n) { return samplers::UniformSampler(n, 8).ptr(); }},
    {"log_uniform", [](int64_t n) { return samplers::LogUniformSampler(n, 8).ptr(); }},
    {"unigram, streamed",
     [](int64_t n) {
       return samplers::UnigramSampler(samplers::StreamingCounts(samplers::StreamingOptions{
                                           .num_ids = n, .half_life = 30.0}),
                                       8, samplers::FollowOptions{.refresh_every = 2})
           .ptr();
     }},
    {"in_batch", [](int64_t n) { return samplers::InBatchSampler(n).ptr(); }},
    {"outside", [](int64_t n) { return samplers::ComplementSampler(n, 4).ptr(); }},
    {"midx", [](int64_t n) { return midx(n); }},
    {"lsh",
     [](int64_t n) {
       return samplers::LshSampler(n, kWidth, samplers::LshOptions{.num_samples = 4, .bias = true})
           .ptr();
     }},
    {"sphere",
     [](int64_t n) {
       return samplers::SphereSampler(n, kWidth,
                                      samplers::KernelOptions{.num_samples = 4, .bias = true})
           .ptr();
     }},
    {"union",
     [](int64_t n) {
       return samplers::UnionSampler(
                  std::vector<Sampler>{samplers::UniformSampler(n, 3).ptr(), midx(n, 3)})
           .ptr();
     }},
};

using MakeOptimizer = std::function<std::unique_ptr<optim::RowOptimizer>(std::vector<Tensor>)>;
const std::vector<std::pair<const char*, MakeOptimizer>> kOptimizers = {
    {"sgd",
     [](auto params) {
       return std::make_unique<optim::RowSGD>(
           std::move(params), optim::RowSGDOptions(0.1).momentum(0.9).weight_decay(0.1));
     }},
    {"adam",
     [](auto params) {
       return std::make_unique<optim::RowAdam>(std::move(params), optim::RowAdamOptions(0.05));
     }},
    {"adagrad",
     [](auto params) {
       return std::make_unique<optim::RowAdagrad>(
           std::move(params), optim::RowAdagradOptions(0.1).initial_accumulator_value(0.5));
     }},
};

template <typename Loss>
std::vector<Tensor> train(Loss& loss, optim::RowOptimizer& optimizer, int64_t classes, int steps,
                          uint64_t seed) {
  std::vector<Tensor> values;
  for (int step = 0; step < steps; ++step) {
    const Tensor input = torch::randn({7, kWidth}, generator(seed + step)),
                 target = torch::randint(classes, {7}, generator(seed + step), torch::kLong);
    optimizer.zero_grad();
    const Tensor value = loss->forward(input, target, generator(seed + 100 + step));
    value.backward();
    optimizer.step();
    values.push_back(value.detach());
  }
  return values;
}

template <typename Module>
void copy_state(Module& from, Module& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

void expect_equal(const std::vector<Tensor>& one, const std::vector<Tensor>& other,
                  const std::string& what) {
  ASSERT_EQ(one.size(), other.size()) << what;
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_TRUE(torch::equal(one[i], other[i])) << what << ", " << i;
  }
}

TEST(ResizeClasses, GoesOnAsALossThatWasBuiltAtThatSize) {
  for (const auto& [name, make_sampler] : kSamplers) {
    for (const auto& [rule, make_optimizer] : kOptimizers) {
      for (const int64_t size : kSizes) {
        if (size == 25 && name == std::string("log_uniform")) {
          // Its tables are not part of the state, so one built at that size draws other samples
          // from the same distribution.
          continue;
        }
        torch::manual_seed(0);
        const std::string what = std::string(name) + ", " + rule + ", " + std::to_string(size);
        const LossOptions options{.bias = true};
        SampledSoftmaxLoss loss(kWidth, kClasses, make_sampler(kClasses), SamplingOptions{},
                                options);
        const auto optimizer = make_optimizer(loss->parameters());
        train(loss, *optimizer, kClasses, 2, 1);
        const Tensor weight = loss->linear->weight;
        loss->catch_up();
        const int64_t kept = std::min(size, kClasses);
        const Tensor before = weight.detach().slice(0, 0, kept).clone();
        loss->resize_classes(size);
        EXPECT_TRUE(weight.is_same(loss->linear->weight) && weight.size(0) == size &&
                    loss->linear->bias.size(0) == size)
            << what;
        EXPECT_TRUE(torch::equal(weight.detach().slice(0, 0, kept), before)) << what;
        EXPECT_FALSE(weight.grad().defined()) << what;

        SampledSoftmaxLoss other(kWidth, size, make_sampler(size), SamplingOptions{}, options);
        const auto other_optimizer = make_optimizer(other->parameters());
        copy_state(loss, other);
        std::stringstream stream;
        torch::save(*optimizer, stream);
        torch::load(*other_optimizer, stream);
        expect_equal(train(loss, *optimizer, size, 3, 7),
                     train(other, *other_optimizer, size, 3, 7), what);
        optimizer->flush();
        other_optimizer->flush();
        expect_equal(loss->parameters(), other->parameters(), what);
        const Tensor input = torch::randn({3, kWidth});
        EXPECT_TRUE(torch::equal(std::get<1>(loss->topk(input, size)),
                                 std::get<1>(other->topk(input, size))))
            << what;
      }
    }
  }
}

TEST(ResizeClasses, FindsStateThatWasLoaded) {
  for (const auto& [rule, make_optimizer] : kOptimizers) {
    torch::manual_seed(0);
    SampledSoftmaxLoss loss(kWidth, kClasses, samplers::UniformSampler(kClasses, 8).ptr(),
                            SamplingOptions{});
    SampledSoftmaxLoss other(kWidth, kClasses, samplers::UniformSampler(kClasses, 8).ptr(),
                             SamplingOptions{});
    const auto optimizer = make_optimizer(loss->parameters()),
               other_optimizer = make_optimizer(other->parameters());
    train(loss, *optimizer, kClasses, 2, 1);
    copy_state(loss, other);
    std::stringstream stream;
    torch::save(*optimizer, stream);
    torch::load(*other_optimizer, stream);
    for (SampledSoftmaxLoss& each : {std::ref(loss), std::ref(other)}) {
      torch::manual_seed(1);
      each->resize_classes(29);
    }
    expect_equal(train(loss, *optimizer, 29, 2, 7), train(other, *other_optimizer, 29, 2, 7), rule);
    optimizer->flush();
    other_optimizer->flush();
    expect_equal(loss->parameters(), other->parameters(), rule);
  }
}

TEST(ResizeClasses, StateOfAnotherNumberOfRowsIsRefused) {
  for (const auto& [rule, make_optimizer] : kOptimizers) {
    torch::manual_seed(0);
    SampledSoftmaxLoss loss(kWidth, kClasses, samplers::UniformSampler(kClasses, 8).ptr(),
                            SamplingOptions{});
    const auto optimizer = make_optimizer(loss->parameters());
    train(loss, *optimizer, kClasses, 2, 1);
    std::stringstream before, now;
    torch::save(*optimizer, before);
    loss->resize_classes(29);
    train(loss, *optimizer, 29, 1, 5);
    torch::save(*optimizer, now);
    EXPECT_THROW(torch::load(*optimizer, before), c10::ValueError) << rule;
    std::stringstream after;
    torch::save(*optimizer, after);
    EXPECT_EQ(now.str(), after.str()) << rule;
    train(loss, *optimizer, 29, 1, 9);
  }
}

TEST(ResizeClasses, ClassesThatComeOneAtATimeAreLaidOutSeldom) {
  for (const auto& [name, make_sampler] : kSamplers) {
    torch::manual_seed(0);
    SampledSoftmaxLoss loss(kWidth, kClasses, make_sampler(kClasses), SamplingOptions{},
                            LossOptions{.bias = true});
    const auto optimizer = kOptimizers[1].second(loss->parameters());
    for (int64_t classes = kClasses; classes < 3 * kClasses; ++classes) {
      loss->resize_classes(classes);
      train(loss, *optimizer, classes, 1, uint64_t(classes));
      const Tensor ids = loss->sampler->num_samples() > 0 && std::string(name) != "outside"
          ? loss->sampler->sample(torch::randn({3, kWidth}), torch::zeros({3}, torch::kLong))[0].ids
          : torch::zeros({1}, torch::kLong);
      ASSERT_TRUE(ids.ge(0).all().item<bool>() && ids.lt(classes).all().item<bool>()) << name;
    }
    if (const auto adaptive =
            std::dynamic_pointer_cast<samplers::AdaptiveSamplerImpl>(loss->sampler)) {
      adaptive->refresh(loss->linear->weight, loss->linear->bias);
      loss->resize_classes(3 * kClasses);
      EXPECT_EQ(adaptive->table("recent").item<int64_t>(), 1) << name;
      adaptive->refresh(loss->linear->weight, loss->linear->bias);
      EXPECT_EQ(adaptive->table("recent").item<int64_t>(), 0) << name;
    }
  }
}

TEST(ResizeClasses, OfCandidatesAndClassWeights) {
  torch::manual_seed(0);
  CaneLoss loss(
      kWidth, kClasses,
      CaneOptions{
          .candidates = torch::tensor({2, 16}),
          .noise_sampler =
              samplers::UniformSampler(kClasses, 2, samplers::DrawOptions{.shared = false}).ptr()},
      LossOptions{.weight = torch::ones({kClasses})});
  loss->resize_classes(29, torch::full({6}, 2.0));
  EXPECT_EQ(loss->weight.size(0), 29);
  EXPECT_EQ(loss->weight[28].item<float>(), 2);
  loss->forward(torch::randn({2, kWidth}), torch::tensor({28, 1}), std::nullopt, generator(1))
      .backward();
  EXPECT_THROW(loss->resize_classes(16), c10::ValueError);
  EXPECT_THROW(loss->resize_classes(30, torch::ones({2})), c10::ValueError);
  EXPECT_EQ(loss->linear->weight.size(0), 29);
  loss->resize_classes(17);
  EXPECT_EQ(loss->weight.size(0), 17);
}

/// A CPU allocator that refuses one allocation.
class Refusing : public c10::Allocator {
 public:
  Refusing() : inner_(*c10::GetAllocator(c10::kCPU)) {
    c10::SetAllocator(c10::kCPU, this, kPriority);
  }
  ~Refusing() override { c10::SetAllocator(c10::kCPU, &inner_, kPriority); }
  at::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(--left != 0, "no memory");
    return inner_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_.copy_data(to, from, bytes);
  }

  int64_t left = -1; ///< allocations until the refused one

 private:
  static constexpr uint8_t kPriority = 100;
  c10::Allocator& inner_;
};

// Tables of different sizes could not be trained, saved or resized again.
TEST(ResizeClasses, WithoutMemoryTablesAndStateChangeTogetherOrNotAtAllAndAnotherCallGoesOn) {
  // With more classes, rows may have more pending updates at once.
  constexpr int64_t kBefore = 5000, kAfter = 7000;
  for (const auto& [name, make_sampler] : kSamplers) {
    std::vector<Tensor> expected;
    bool all_there = false;
    // First without a refusal, then refusing later and later allocations.
    for (int64_t refused = 0; !all_there;
         refused += expected.empty() || name == kSamplers[0].first ? 1 : 7) {
      torch::manual_seed(0);
      const std::string what = std::string(name) + ", allocation " + std::to_string(refused);
      SampledSoftmaxLoss loss(kWidth, kBefore, make_sampler(kBefore), SamplingOptions{},
                              LossOptions{.bias = true, .weight = torch::ones({kBefore})});
      optim::RowAdam optimizer(loss->parameters(), optim::RowAdamOptions(0.05));
      train(loss, optimizer, kBefore, 2, 1);
      const auto sizes = [&] {
        std::vector<int64_t> found{loss->linear->weight.size(0), loss->linear->bias.size(0),
                                   loss->weight.size(0)};
        for (const Tensor& table : {loss->linear->weight, loss->linear->bias}) {
          const auto& state = static_cast<const optim::RowParamState&>(
                                  *optimizer.state().at(table.unsafeGetTensorImpl()))
                                  .tensors;
          for (const char* each : {"exp_avg", "exp_avg_sq", "last_step"}) {
            found.push_back(state.at(each).size(0));
          }
          found.push_back(state.at("pending").numel() > 3000 ? kAfter : kBefore);
        }
        return found;
      };
      all_there = refused > 0;
      {
        Refusing memory;
        memory.left = refused;
        torch::manual_seed(5);
        try {
          loss->resize_classes(kAfter);
        } catch (const c10::Error&) {
          all_there = false;
        }
      }
      if (refused > 0 && !all_there) {
        const std::vector<int64_t> found = sizes();
        EXPECT_EQ(found, std::vector<int64_t>(found.size(), found[0])) << what;
        EXPECT_EQ(loss->linear->options.out_features(), kBefore) << what;
        torch::manual_seed(5);
        loss->resize_classes(kAfter);
      }
      EXPECT_EQ(sizes(), std::vector<int64_t>(sizes().size(), kAfter)) << what;
      const std::vector<Tensor> values = train(loss, optimizer, kAfter, 2, 7);
      if (refused == 0) {
        expected = values;
      }
      expect_equal(values, expected, what);
    }
  }
}

class FixedDistribution : public samplers::SamplerImpl {
 public:
  FixedDistribution() : SamplerImpl("FixedDistribution", kClasses, 2, true) {}
  xsoftmax::Proposal sample(const Tensor&, const Tensor&, std::optional<at::Generator>) override {
    return {};
  }
  Tensor log_count(const Tensor&, const Tensor&) override { return {}; }
};

TEST(ResizeClasses, ErrorsChangeNothing) {
  const auto in_batch = samplers::InBatchSampler(kClasses);
  const Sampler both =
      samplers::UnionSampler(
          std::vector<Sampler>{in_batch.ptr(), std::make_shared<FixedDistribution>()})
          .ptr();
  SampledSoftmaxLoss loss(kWidth, kClasses, both, SamplingOptions{});
  EXPECT_THROW(loss->resize_classes(29), c10::TypeError);
  EXPECT_EQ(in_batch->num_classes(), kClasses);
  EXPECT_EQ(loss->linear->weight.size(0), kClasses);
  SampledSoftmaxLoss few(kWidth, kClasses, samplers::UniformSampler(kClasses, 20).ptr(),
                         SamplingOptions{});
  EXPECT_THROW(few->resize_classes(19), c10::ValueError);
  EXPECT_THROW(few->resize_classes(0), c10::ValueError);
  EXPECT_EQ(few->linear->weight.size(0), kClasses);
}

} // namespace
