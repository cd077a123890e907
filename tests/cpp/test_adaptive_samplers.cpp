// LSH, sphere, RFF and MIDX samplers as C++ modules: agreement with the operators on one seed,
// state names of the Python modules, errors.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/adaptive_samplers.h>
#include <xsoftmax/static_samplers.h>
#include <xsoftmax/sampler.h>

#include <cmath>
#include <sstream>

namespace {

using torch::Tensor;
using namespace xsoftmax::samplers;
using Draws = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kClasses = 300, kWidth = 7, kQueries = 4, kHead = 5;

at::Generator generator(uint64_t seed) {
  at::Generator made = at::detail::createCPUGenerator();
  made.set_current_seed(seed);
  return made;
}

template <typename Signature>
auto op(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("xsoftmax::" + name).c_str(), "")
      .typed<Signature>();
}

struct Kind { const char *name, *family, *options, *tables; };

// The options that Python passes to the operators, and the names in its state.
const Kind kKinds[] = {
    {"midx", "midx", "kind=rq",
     "codewords1 codewords2 cell order start mass log_weight prefix heaviest touched recent step"},
    {"midx_exact", "midx", "form=exact",
     "codewords1 codewords2 cell order start mass log_weight prefix heaviest touched table "
     "table_bias recent step"},
    {"midx_spread", "midx", "form=spread",
     "codewords1 codewords2 cell order start mass log_weight prefix heaviest touched spread "
     "query_square recent step"},
    {"midx_learnable", "midx", "form=learnable",
     "codewords1 codewords2 cell order start mass log_weight prefix heaviest touched recent step"},
    {"lsh", "lsh", "tables=16", "planes code order start recent step"},
    {"sphere", "kernel", "kernel=sphere", "directions rows sums order place recent step"},
    {"rff", "kernel", "kernel=rff", "directions rows sums order place recent step"}};

class Adaptive : public testing::TestWithParam<std::tuple<Kind, bool>> {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  Kind kind() const { return std::get<0>(GetParam()); }
  bool has_bias() const { return std::get<1>(GetParam()); }
  MaybeTensor maybe_bias() const { return has_bias() ? MaybeTensor(bias) : std::nullopt; }

  std::shared_ptr<AdaptiveSamplerImpl> make() const {
    torch::manual_seed(3); // directions of LSH and RFF
    return std::dynamic_pointer_cast<AdaptiveSamplerImpl>(
        make_sampler(kind().name,
                     SamplerRequest{.num_classes = kClasses,
                                    .dim = kWidth,
                                    .bias = has_bias(),
                                    .exclude = torch::arange(kHead)}));
  }

  static std::stringstream saved(const SamplerImpl& sampler) {
    std::stringstream stream;
    torch::serialize::OutputArchive out;
    sampler.save(out);
    out.save_to(stream);
    return stream;
  }
  static void load(SamplerImpl& sampler, std::stringstream stream) {
    torch::serialize::InputArchive in;
    in.load_from(stream);
    sampler.load(in);
  }

  Tensor weight = torch::randn({kClasses, kWidth}), bias = torch::randn({kClasses}),
         queries = torch::randn({kQueries, kWidth});
  Tensor target = torch::randint(kHead, kClasses, {kQueries}, torch::kLong),
         all = torch::arange(kClasses);
};

INSTANTIATE_TEST_SUITE_P(Every, Adaptive,
                         testing::Combine(testing::ValuesIn(kKinds), testing::Bool()));

TEST_P(Adaptive, DrawsAreThoseOfTheOperators) {
  const auto sampler = make();
  const std::string options = std::string(kind().options) + (has_bias() ? ",bias=true" : ""),
                    family = kind().family;
  torch::manual_seed(3);
  std::vector<Tensor> index =
      op<std::vector<Tensor>(std::string_view, int64_t, int64_t, const Tensor&, std::string_view)>(
          family + "_index")
          .call("Sampler", kClasses, kWidth, torch::arange(kHead), options);
  const std::vector<Tensor> tables(index.begin(), index.end() - 1);
  sampler->prepare(weight, maybe_bias(), generator(5));
  op<void(const Tensor&, const MaybeTensor&, const Tensor&, at::TensorList, std::string_view,
          std::optional<at::Generator>)>(family + "_step_")
      .call(weight, maybe_bias(), index.back(), tables, options, generator(5));
  const auto sets = sampler->sample(queries, target, generator(7));
  const Tensor seed =
      torch::randint(0, std::numeric_limits<int64_t>::max(), {}, generator(7), torch::kLong);
  const auto [ids, log_count, target_log_count] =
      op<Draws(const Tensor&, const Tensor&, const MaybeTensor&, at::TensorList, std::string_view)>(
          family + "_sample")
          .call(seed, queries, target, index, options);
  ASSERT_EQ(sets.size(), 1u);
  EXPECT_TRUE(torch::equal(sets[0].ids, ids) && torch::equal(sets[0].log_count, log_count));
  EXPECT_TRUE(torch::equal(sets[0].target_log_count, target_log_count));
  const Tensor counts = sampler->log_count(queries, all);
  EXPECT_TRUE(torch::allclose(counts.gather(1, ids), log_count, 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(counts.exp().sum(1), torch::full({kQueries}, 20.0), 1e-4));
  EXPECT_TRUE(counts.narrow(1, 0, kHead).isneginf().all().item<bool>());
  EXPECT_EQ(sampler->table("step").item<int64_t>(), 1);
  EXPECT_TRUE(sampler->follows_table());
  EXPECT_EQ(sampler->default_estimator(), "ranking");
}

TEST_P(Adaptive, StateHasTheNamesOfPython) {
  const auto sampler = make();
  std::set<std::string> names;
  for (const auto& item : sampler->named_buffers()) {
    names.insert(item.key());
  }
  for (const auto& item : sampler->named_parameters()) {
    names.insert(item.key());
  }
  std::istringstream text(kind().tables);
  EXPECT_EQ(names, std::set<std::string>(std::istream_iterator<std::string>(text), {}));
  EXPECT_EQ(sampler->parameters().size(), std::string(kind().name) == "midx_learnable" ? 2u : 0u);
}

TEST_P(Adaptive, SavedWithItsIndex) {
  const auto sampler = make(), other = make();
  sampler->refresh(weight, maybe_bias());
  load(*other, saved(*sampler));
  other->to(torch::kHalf);
  EXPECT_TRUE(torch::equal(other->log_count(queries, all), sampler->log_count(queries, all)));
  EXPECT_EQ(other->table("step").item<int64_t>(), 1);
  // An index of another head is rebuilt.
  const auto less = std::dynamic_pointer_cast<AdaptiveSamplerImpl>(
      make()->excluding(torch::tensor({kHead, kClasses - 1})));
  EXPECT_EQ(less->excluded().size(0), kHead + 2);
  load(*less, saved(*sampler));
  EXPECT_EQ(less->table("step").item<int64_t>(), 0);
  EXPECT_EQ(less->excluded().size(0), kHead + 2);
  // Tables move to the device; `step` stays on the CPU, because every training step reads it.
  if (torch::cuda::is_available()) {
    other->to(torch::kCUDA);
    EXPECT_TRUE(other->table("step").is_cpu());
    EXPECT_EQ(other->table("step").item<int64_t>(), 1);
  }
}

TEST_P(Adaptive, ATableThatIsRefusedChangesNothing) {
  const auto sampler = make();
  Tensor broken = weight.clone();
  broken[211][2] = std::nan("");
  std::vector<Tensor> before;
  for (const Tensor& table : sampler->buffers()) {
    before.push_back(table.clone());
  }
  at::Generator source = generator(5);
  const Tensor state = source.get_state();
  EXPECT_THROW(sampler->prepare(broken, maybe_bias(), source), c10::ValueError);
  EXPECT_THROW(sampler->refresh(broken, maybe_bias()), c10::ValueError);
  EXPECT_THROW(sampler->prepare(weight, has_bias() ? std::nullopt : MaybeTensor(bias), source),
               c10::ValueError);
  EXPECT_THROW(sampler->prepare(weight.narrow(1, 0, kWidth - 1), maybe_bias(), source),
               c10::ValueError);
  EXPECT_TRUE(torch::equal(source.get_state(), state));
  const auto after = sampler->buffers();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(before[i], after[i]));
  }
}

TEST(AdaptiveSamplers, BadArgumentsThrow) {
  EXPECT_THROW(LshSampler(kClasses, kWidth, LshOptions{.tables = 0}), c10::ValueError);
  EXPECT_THROW(LshSampler(kClasses, kWidth, LshOptions{.bits = 21}), c10::ValueError);
  EXPECT_THROW(LshSampler(kClasses, kWidth, LshOptions{.uniform = 2}), c10::ValueError);
  EXPECT_THROW(LshSampler(kClasses, kWidth, LshOptions{.shared = true}), c10::ValueError);
  EXPECT_THROW(SphereSampler(kClasses, 0), c10::ValueError);
  EXPECT_THROW(SphereSampler(kClasses, kWidth, KernelOptions{.alpha = 0}), c10::ValueError);
  EXPECT_THROW(RffSampler(kClasses, kWidth, KernelOptions{.features = 0}), c10::ValueError);
  EXPECT_THROW(RffSampler(kClasses, kWidth, KernelOptions{.floor = -1}), c10::ValueError);
  EXPECT_THROW(LshSampler(kClasses, kWidth)->sample(torch::randn({2, kWidth + 1})),
               c10::ValueError);
}

TEST(AdaptiveSamplers, AUnionFollowsTheTableWhereAPartDoes) {
  const auto unigram = [] { return UnigramSampler(torch::arange(1, kClasses + 1), 4).ptr(); };
  EXPECT_FALSE(UnionSampler(std::vector<std::shared_ptr<SamplerImpl>>{unigram(), unigram()})
                   ->follows_table());
  EXPECT_TRUE(UnionSampler(std::vector<std::shared_ptr<SamplerImpl>>{
                               unigram(), LshSampler(kClasses, kWidth).ptr()})
                  ->follows_table());
}

} // namespace
